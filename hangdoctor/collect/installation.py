"""Finds the copy of the engine that the processes really run, and what was changed in it.

A patch in another copy, or made after the processes had started, has no effect: both are common.
So the copy is found through the processes (the files of their stack frames, else their paths), in
their own mount namespace, and never through our own import path.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import os
import re
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hangdoctor.collect import procfs
from hangdoctor.collect.look import Job
from hangdoctor.collect.permissions import refused
from hangdoctor.collect.worker import ask_once
from hangdoctor.errors import InputError
from hangdoctor.model import Installation, Missing, ProcessStacks, SourceFile, Stacks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

VERSION_FILES = ("_version.py", "version.py")
"""Files of the package that hold its version where no dist-info does, as in a source tree."""

MOST_CHANGED = 100
"""Changed files reported, the newest first; more mean another release, not a patch."""

HASH_BUDGET_S = 12.0
"""Comparing with the release reads every source file; on slow storage the newest must do."""

IMPORTED_WITHIN_S = 60.0
"""A process may still import what changes soon after its start: 4 to 20 s were measured."""

_DEADLINE_S = 20.0
_FIND = (
    "import importlib.util as u, sys; s = u.find_spec(sys.argv[1]); "
    "print(next(iter(s.submodule_search_locations or ()), '') if s else '')"
)
_MOST_LINKS = 40  # as the kernel has it
_VERSION = re.compile(r"""^__version__\s*=\s*(?:version\s*=\s*)?['"]([^'"]+)['"]""", re.MULTILINE)
_METADATA_VERSION = re.compile(r"^Version:\s*(\S+)", re.MULTILINE)
_SITE = re.compile(r"(/[^\n]*?/(?:site|dist)-packages)/")


class InstallationLook(msgspec.Struct, frozen=True, kw_only=True):
    """The request: the package, the processes that may have it, and paths of their frames.

    Attributes:
        variables: of the first process's environment that are wanted.
    """

    package: str
    pids: tuple[int, ...]
    frame_paths: tuple[str, ...] = ()
    version_files: tuple[str, ...] = VERSION_FILES
    variables: tuple[str, ...] = ()
    proc: str = "/proc"


def find_installation(
    package: str,
    pids: Sequence[int],
    stacks: Stacks | None = None,
    *,
    proc: Path = Path("/proc"),
    version_files: Sequence[str] = VERSION_FILES,
    variables: Sequence[str] = (),
) -> Installation | Missing:
    """Return the installation that the processes use, its version, and what was changed in it.

    Args:
        package: name of the engine's package.
        pids: processes of the launch, the launcher first.
        stacks: of these processes, if there are any yet: the best witness.
        proc: root of the processes' world.
        version_files: where the package keeps its version.
        variables: names of variables of the launcher's environment that are wanted.

    Returns:
        `changed_files` are those that differ from the wheel's RECORD or are not in it, and those
        that changed when the youngest of the processes must have imported them; the newest
        first.
    """
    look = InstallationLook(
        package=package,
        pids=tuple(pids),
        frame_paths=tuple(sorted(_frame_paths(package, stacks))) if stacks else (),
        version_files=tuple(version_files),
        variables=tuple(variables),
        proc=str(proc.absolute()),
    )
    answer: Installation | Missing = ask_once("installation", JOB, look)
    return answer


def find_package(package: str, python: Path) -> Path:
    """Return the folder of a package in an environment; nothing of the package is imported.

    Args:
        package: its name.
        python: an interpreter, or the folder of a virtual environment.

    Raises:
        InputError: there is no such interpreter, or no such package in its environment.
    """
    inside = [python / "bin" / name for name in ("python", "python3")] if python.is_dir() else []
    program = next((each for each in inside if each.exists()), python)
    hint = "an environment's python, such as $(which python)"
    try:
        done = subprocess.run(
            [program, "-I", "-c", _FIND, package],
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = getattr(error, "strerror", None) or f"no answer in {_DEADLINE_S:g} s"
        raise InputError(f"{program} cannot be run: {why}", hint=hint) from error
    found = done.stdout.strip()
    if done.returncode or not found:
        raise InputError(f"there is no {package} in the environment of {program}", hint=hint)
    return Path(found)


def read(look: InstallationLook) -> Installation | Missing:
    """Do what `find_installation` says. Runs in a worker: storage may be stalled."""
    pids = [pid for pid in look.pids if procfs.read_stat(look.proc, pid)]
    if not pids:
        return Missing(reason="gone", detail="the processes have ended")
    denied: Missing | None = None
    for pid in pids:
        world = _World(f"{look.proc}/{pid}/root")
        try:
            os.listdir(world.root)
        except PermissionError as error:
            denied = refused(f"{error.strerror}: {world.root}", None)
            continue
        except OSError:
            continue
        package = _package_directory(look, pid, world)
        if package:
            starts = [start for pid in pids if (start := _started_wall_s(look.proc, pid))]
            started_s = max(starts, default=time.time()) + IMPORTED_WITHIN_S
            return _describe(look, world, package, _sites(look.proc, pid, world), started_s)
    return denied or Missing(
        reason="failed",
        detail=f"no directory {look.package} on the import paths of the processes",
        hint="take stacks: the frames name the files that run",
    )


class _World:
    """The file system as a process sees it: its absolute links begin at its root, not at ours."""

    def __init__(self, root: str) -> None:
        self.root = root

    def real(self, path: str) -> str:
        """Follow the links of an absolute path inside this world; the answer is inside as well."""
        parts, done, links = path.split("/")[::-1], "", 0
        while parts:
            part = parts.pop()
            if part in ("", "."):
                continue
            if part == "..":
                done = done.rpartition("/")[0]
                continue
            try:
                target = os.readlink(f"{self.root}{done}/{part}")
            except OSError:  # not a link, or not there: whoever opens it will see
                done = f"{done}/{part}"
                continue
            links += 1
            if links > _MOST_LINKS:
                return path
            parts += target.split("/")[::-1]
            if target.startswith("/"):
                done = ""
        return done or "/"

    def outside(self, path: str) -> str:
        """Return the path by which we can open a path of this world."""
        return self.root + self.real(path)

    def has(self, path: str) -> bool:
        """Tell whether there is such a file or directory."""
        return os.path.lexists(self.outside(path))

    def names(self, path: str) -> list[str]:
        """List a directory; empty where there is none."""
        try:
            return sorted(os.listdir(self.outside(path)))
        except OSError:
            return []

    def text(self, path: str) -> str:
        """Read a file; empty where it cannot be read."""
        try:
            return Path(self.outside(path)).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""


def _frame_paths(package: str, stacks: Stacks) -> set[str]:
    return {
        frame.path
        for stack in stacks.by_pid.values()
        if isinstance(stack, ProcessStacks)
        for thread in stack.threads
        for frame in thread.frames
        if f"/{package}/" in frame.path and frame.path.startswith("/")
    }


def _package_directory(look: InstallationLook, pid: int, world: _World) -> str | None:
    """Return the package's directory: where most frames lie, else the first on the import path.

    Without frames only a Python process is asked, and a shell's environment never guessed from.
    """
    name = look.package
    votes = Counter(path[: path.rindex(f"/{name}/")] for path in look.frame_paths)
    places = [place for place, _ in votes.most_common()]
    if _runs_python(look.proc, pid):
        places += _import_path(look.proc, pid, world)
    for place in places:
        if world.has(f"{place}/{name}/__init__.py"):
            return f"{place.rstrip('/')}/{name}"
        for source in _editable(place, name, world):
            if world.has(f"{source}/{name}/__init__.py"):
                return f"{source}/{name}"
    return None


def _runs_python(proc: str, pid: int) -> bool:
    """Tell whether a process imports at all: a shell around the launch says nothing of it."""
    try:
        program = os.readlink(f"{proc}/{pid}/exe")
    except OSError:
        return False
    return os.path.basename(program).startswith(("python", "pypy"))


def _import_path(proc: str, pid: int, world: _World) -> Iterator[str]:
    """Yield what comes first on the process's import path: directory, PYTHONPATH, site-packages.

    Its environment may be gone (setproctitle writes over it); the launcher's is there.
    """
    environ = procfs.read_environ(proc, pid)
    # "-m" puts the working directory first.
    with contextlib.suppress(OSError):
        if {b"-m", b"-c"}.intersection(procfs.read(f"{proc}/{pid}/cmdline").split(b"\0")):
            yield os.readlink(f"{proc}/{pid}/cwd")
    yield from filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    yield from _sites(proc, pid, world)


def _sites(proc: str, pid: int, world: _World) -> list[str]:
    """Return the site-packages of a process: what it has mapped from there, its environment's."""
    try:
        maps = procfs.read_table(f"{proc}/{pid}/maps").decode(errors="replace")
    except OSError:
        maps = ""
    found = [site for site, _ in Counter(_SITE.findall(maps)).most_common()]
    environ = procfs.read_environ(proc, pid)
    prefixes = [environ.get("VIRTUAL_ENV", ""), environ.get("CONDA_PREFIX", "")]
    try:
        program = procfs.read(f"{proc}/{pid}/cmdline").split(b"\0")[0].decode(errors="replace")
        prefixes += [str(Path(program).parent.parent)] if program.startswith("/") else []
        prefixes.append(str(Path(os.readlink(f"{proc}/{pid}/exe")).parent.parent))
    except OSError:
        pass
    prefixes += ["/usr/local", "/usr", environ.get("HOME", "") + "/.local"]
    for prefix in filter(lambda prefix: prefix.startswith("/"), prefixes):
        for library in ("lib", "lib64"):
            for version in world.names(f"{prefix}/{library}"):
                if version.startswith("python3"):
                    found.append(f"{prefix}/{library}/{version}/site-packages")
                    found.append(f"{prefix}/{library}/{version}/dist-packages")
    return list(dict.fromkeys(found))


def _editable(site: str, package: str, world: _World) -> Iterator[str]:
    """Yield the source directories that an editable installation put into a site-packages."""
    for name in world.names(site) if site.endswith("-packages") else ():
        if name.endswith(".pth"):
            lines = world.text(f"{site}/{name}").splitlines()
            yield from (line.strip() for line in lines if line.startswith("/"))
        elif re.fullmatch(r"__editable___.*_finder\.py", name):
            mapping = re.search(
                rf"""['"]{re.escape(package)}['"]: ['"](/[^'"]+)['"]""",
                world.text(f"{site}/{name}"),
            )
            if mapping:
                yield str(Path(mapping[1]).parent)


def _describe(
    look: InstallationLook, world: _World, package: str, sites: list[str], started_s: float
) -> Installation:
    place = str(Path(package).parent)
    info = _dist_info(look.package, [place, *sites], world)
    record = parse_record(world.text(f"{info}/RECORD")) if info else {}
    if f"{look.package}/__init__.py" not in record or not (info or "").startswith(f"{place}/"):
        record = {}  # of an editable installation, or of another copy
    version = ""
    for name in look.version_files:
        match = _VERSION.search(world.text(f"{package}/{name}"))
        version = version or (match[1] if match else "")
    if info and (record or not version):
        match = _METADATA_VERSION.search(world.text(f"{info}/METADATA"))
        version = match[1] if match else version
    return Installation(
        name=look.package,
        version=version,
        path=package,
        changed_files=_changed(world.outside(package), look.package, record, started_s),
        environment=_environment(look),
    )


def _environment(look: InstallationLook) -> dict[str, str] | None:
    """Return the variables that are wanted, of the launcher; None where it does not show them."""
    environ = procfs.read_environ(look.proc, look.pids[0]) if look.variables else {}
    return {name: environ[name] for name in look.variables if name in environ} if environ else None


def parse_record(text: str) -> dict[str, bytes]:
    r"""Parse a wheel's RECORD into the SHA-256 of each Python source file.

    >>> record = parse_record(
    ...     "sglang/utils.py,sha256=A9-fkWRYFukooLthH_t_Sy4dGqxEFCrcI8955okxmj0,221\n"
    ...     "sglang-0.5.9.dist-info/RECORD,,\n"
    ... )
    >>> {path: digest.hex()[:8] for path, digest in record.items()}
    {'sglang/utils.py': '03df9f91'}
    """
    found = {}
    for row in csv.reader(text.splitlines()):
        if len(row) > 1 and row[0].endswith(".py") and row[1].startswith("sha256="):
            digest = row[1].removeprefix("sha256=")
            found[row[0]] = base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4))
    return found


def _changed(
    directory: str, package: str, record: dict[str, bytes], started_s: float
) -> tuple[SourceFile, ...]:
    """Return what differs from the record or is newer than the launch, the newest first."""
    until_s = time.monotonic() + HASH_BUDGET_S
    changed: list[SourceFile] = []
    for modified_s, path in sorted(_sources(directory), reverse=True):
        if len(changed) == MOST_CHANGED or time.monotonic() > until_s:
            break
        newer = modified_s > started_s
        if not newer and not record:  # so are all that come after it
            break
        try:
            digest = hashlib.sha256(Path(path).read_bytes())
        except OSError:
            continue
        name = f"{package}{path.removeprefix(directory)}"
        differs = record.get(name) != digest.digest() if record else None
        if differs or newer:
            changed.append(
                SourceFile(
                    path=name,
                    modified_wall_s=modified_s,
                    sha256=digest.hexdigest(),
                    differs_from_release=differs,
                    newer_than_launch=newer,
                )
            )
    return tuple(changed)


def _sources(directory: str) -> Iterator[tuple[float, str]]:
    for entry in os.scandir(directory):
        try:
            if entry.is_dir(follow_symlinks=False):
                if entry.name != "__pycache__":
                    yield from _sources(entry.path)
            elif entry.name.endswith(".py"):
                yield entry.stat(follow_symlinks=False).st_mtime, entry.path
        except OSError:  # noqa: PERF203  # one file that is gone must not hide the others
            continue


def _dist_info(package: str, places: Iterable[str], world: _World) -> str | None:
    wanted = re.compile(rf"{re.escape(package)}-[^-]+\.dist-info", re.IGNORECASE)
    for place in places:
        for name in world.names(place):
            if wanted.fullmatch(name):
                return f"{place}/{name}"
    return None


def _started_wall_s(proc: str, pid: int) -> float | None:
    stat = procfs.read_stat(proc, pid)
    return time.time() - procfs.age_s(stat.start_ticks) if stat else None


JOB = Job(
    read=read,
    request=InstallationLook,
    reply=Installation | Missing,
    deadline_s=_DEADLINE_S,
    fills="the installation",
)
"""For `python -m hangdoctor.collect installation`."""
