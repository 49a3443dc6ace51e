"""Finds files that lock by being there, and whether somebody holds them.

PyTorch's FileBaton makes a file called "lock", which stays when its maker is killed; who has it
open holds it. filelock's SoftFileLock, to which the hub's library turns where a file system knows
no flock, writes its owner into the file: since 3.22 pid and host on two lines, since 4 also its
start, or all of it as "key=value". A file called "*.lock" without an owner in it is what a kernel's
lock leaves behind, and locks nothing; or one of an older release, which cannot be told from that.

DeepGEMM and Triton make their files elsewhere and rename them: there nobody waits for a lock.
"""

from __future__ import annotations

import os
import re
import socket
import stat as stat_bits
import time
from typing import TYPE_CHECKING, NamedTuple

from hangdoctor.collect import procfs
from hangdoctor.model import FileLock, Holder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from hangdoctor.collect.procfs import Stat

MOST_DIRECTORIES = 2000
"""Directories of a cache that are looked into."""
MOST_FILES = 2000
"""Lock files that are looked into for their owner."""

_OF_ONE_CONTAINER = frozenset({"overlay"})
_NETWORK = re.compile(
    r"^(?:nfs\d?|cifs|smb3|lustre|ceph|9p|gpfs|beegfs|virtiofs|afs|glusterfs|wekafs|fuse\..+)$"
)
_HOLDS = re.compile(
    r"^(?:python|pypy|pt_main_thread|sglang|vllm|ninja|nvcc|cicc|ptxas|c\+\+|g\+\+)"
)
_OWNER_BYTES = 1024  # filelock takes no longer record for one
_RECORD = "filelock/2"
_NAMESPACE = "?pidns-"


class _Place(NamedTuple):
    """Where a library keeps its lock files.

    Attributes:
        under: variables that name a directory, and what comes below it; the first that is set.
        names: of the files.
        levels: of directories that are looked into.
        marked: they lock only with their owner's record in them.
    """

    under: tuple[tuple[str, str], ...]
    names: re.Pattern[str]
    levels: int
    marked: bool


_BATON = re.compile(r"^lock$")
_ANY = re.compile(r"\.lock$")
_PLACES = (
    # torch/utils/cpp_extension.py:_get_build_directory
    _Place(
        (
            ("TORCH_EXTENSIONS_DIR", ""),
            ("XDG_CACHE_HOME", "torch_extensions"),
            ("HOME", ".cache/torch_extensions"),
        ),
        names=_BATON, levels=4, marked=False,
    ),
    # aiter/jit/core.py:get_user_jit_dir; its FileBaton is PyTorch's
    _Place(
        (("AITER_JIT_DIR", ""), ("HOME", ".aiter")),
        names=re.compile(r"^lock(?:_\w+)?$"), levels=4, marked=False,
    ),
    # huggingface_hub/constants.py, file_download.py:_hf_hub_download_to_cache_dir
    _Place(
        (
            ("HF_HUB_CACHE", ".locks"),
            ("HUGGINGFACE_HUB_CACHE", ".locks"),
            ("HF_HOME", "hub/.locks"),
            ("XDG_CACHE_HOME", "huggingface/hub/.locks"),
            ("HOME", ".cache/huggingface/hub/.locks"),
        ),
        names=_ANY, levels=2, marked=True,
    ),
    # flashinfer/jit/env.py, core.py:get_tmpdir
    _Place(
        (("FLASHINFER_WORKSPACE_BASE", ".cache/flashinfer"), ("HOME", ".cache/flashinfer")),
        names=_ANY, levels=5, marked=True,
    ),
    # torch/_inductor/codecache.py:get_lock_dir
    _Place((("TORCHINDUCTOR_CACHE_DIR", "locks"),), names=_ANY, levels=1, marked=True),
    # get_lock of SGLang's and vLLM's model_loader/weight_utils.py: by the model's hash and name
    _Place(
        (("TMPDIR", ""), ("", "/tmp")),  # noqa: S108  # Python's default
        names=re.compile(r"^[0-9a-f]{64}.*\.lock$"), levels=1, marked=True,
    ),
)  # fmt: skip


class Owner(NamedTuple):
    """Who has taken a lock, as its file says.

    Attributes:
        pid: in its own PID namespace.
        host: its name.
        namespace: inode of that namespace, in base 16; "" for a machine's first, or not told.
        boot: the kernel's number of the boot; None where it is not told.
        start_ticks: as in /proc/PID/stat.
    """

    pid: int
    host: str
    namespace: str = ""
    boot: int | None = None
    start_ticks: int = 0


def read(
    proc: str, stats: Mapping[int, Stat], tree: Iterable[int], taken: frozenset[str]
) -> Iterator[FileLock]:
    """Yield the files that lock by being there where the launch's libraries keep such.

    Args:
        proc: root of the processes.
        stats: of all processes there are.
        tree: pids of the launch's processes.
        taken: paths on which a process holds a lock of the kernel's: they lock in that way.
    """
    launch = frozenset(tree)
    batons: dict[str, int] = {}
    marked: dict[str, int] = {}
    partly: dict[str, str] = {}
    for pid in launch:
        environment = procfs.read_environ(proc, pid)
        for place in _PLACES if environment else ():
            directory = _directory(place, environment)
            paths, whole = _files(f"{proc}/{pid}/root", directory, place)
            for path in paths:
                (marked if place.marked else batons).setdefault(path, pid)
            if not whole:
                partly |= dict.fromkeys(paths, directory)
    if len(marked) > MOST_FILES:
        partly |= {path: os.path.dirname(path) for path in marked}
    owners = {
        path: owner
        for path, pid in list(marked.items())[:MOST_FILES]
        if path not in taken and (owner := _read_owner(f"{proc}/{pid}/root{path}"))
    }
    found = batons | {path: marked[path] for path in owners}
    holders, blind = _who_has_open(proc, stats, found.keys())
    # A build may have a directory of its own: then the owner of its lock shows where that is.
    for path, having in holders.items():
        found.setdefault(path, having[0].pid)
    for path, pid in found.items():
        try:
            changed_s = os.stat(f"{proc}/{pid}/root{path}").st_mtime
        except OSError:  # released in between
            continue
        age_s = max(0.0, time.time() - changed_s)
        held, why = tuple(holders.get(path, ())), ""
        owner = owners.get(path)
        by_record = owner and not held and _by_record(proc, stats, owner)
        if by_record:
            held, why = by_record
        elif not held:
            why = blind or _unseen_holders(proc, pid, path)
        if not held and not why and path in partly:
            why = f"not all of {partly[path]} was looked into: another may be the one"
        yield FileLock(
            path=path,
            kind="soft" if owner else "file",
            owner="alive" if held else ("unknown" if why else "dead"),
            holders=held,
            age_s=age_s,
            older_than_all=all(
                procfs.age_s(stat.start_ticks) < age_s
                for other, stat in stats.items()
                if other in launch or _HOLDS.match(stat.comm)
            ),
            why=why,
        )


def parse_owner(raw: bytes) -> Owner | None:
    r"""Parse what filelock's SoftFileLock writes into its file; None for anything else.

    >>> parse_owner(b"filelock/2\npid=71\nhost=node7?pidns-f0000123\nmode=exclusive\n")
    Owner(pid=71, host='node7', namespace='f0000123', boot=None, start_ticks=0)
    >>> owner = parse_owner(
    ...     b"7174\nnode7\n3899320690099901167576424900078625187017832798945480834675\n"
    ... )
    >>> owner.pid, f"{owner.boot:x}", owner.start_ticks
    (7174, '9f06cebbdc5f472bb1b5d880542a5698', 3702387)
    >>> parse_owner(b""), parse_owner(b"1\nfilelock-strict-v1\0\n0\n")
    (None, None)
    """
    lines = raw.decode(errors="replace").splitlines() if raw.endswith(b"\n") else []
    pid, host = "", ""
    start: str | None = None
    if lines[:1] == [_RECORD]:
        fields = dict(line.split("=", 1) for line in lines[1:] if "=" in line)
        pid, host, start = fields.get("pid", ""), fields.get("host", ""), fields.get("start")
    elif len(lines) in (2, 3):
        pid, host = lines[:2]
        start = lines[2] if len(lines) > 2 else None
    if not pid.isascii() or not pid.isdecimal() or not 0 < int(pid) < 1 << 31:
        return None
    if not host or "\0" in host:
        return None
    name, _, namespace = host.partition(_NAMESPACE)
    told = start is not None and start.isascii() and start.isdecimal()
    boot, ticks = divmod(int(start), 1 << 64) if start is not None and told else (0, 0)
    return Owner(int(pid), name, namespace, boot or None, ticks)


def _by_record(
    proc: str, stats: Mapping[int, Stat], owner: Owner
) -> tuple[tuple[Holder, ...], str] | None:
    """Return the holder that a record names, and what keeps it from being known; None for neither.

    Without both the owner is dead: its number means something only in its own PID namespace, and
    without the boot's a namesake of this machine, or a container's, may have written it.
    """
    elsewhere = (), f"pid {owner.pid} on {owner.host} has taken it"
    try:
        namespace = os.readlink(f"{proc}/self/ns/pid")
        boot = int(procfs.read(f"{proc}/sys/kernel/random/boot_id").replace(b"-", b""), 16)
    except (OSError, ValueError):
        return elsewhere
    ours = "" if namespace == procfs.FIRST_PID_NAMESPACE else f"{int(namespace[5:-1]):x}"
    if owner.host != socket.gethostname() or owner.namespace != ours:
        return elsewhere
    stat = stats.get(owner.pid)
    lives = stat is not None and stat.state not in "ZX"
    if owner.boot == boot:
        same = stat is not None and lives and stat.start_ticks == owner.start_ticks
        return ((Holder(stat.pid, stat.comm),), "") if stat and same else ((), "")
    if stat and lives and owner.boot is None:
        return (), f"pid {owner.pid} ({stat.comm}) has the number that stands in it"
    return None


def _directory(place: _Place, environment: Mapping[str, str]) -> str:
    """Return where a process looks for its locks; "" where its environment does not tell."""
    for variable, below in place.under:
        base = environment.get(variable, "") if variable else below
        if base.startswith("/"):
            return os.path.normpath(f"{base}/{below}") if variable and below else base
    return ""


def _files(root: str, directory: str, place: _Place) -> tuple[list[str], bool]:
    """Return the lock files below a directory, as its owner sees them, and whether these are all.

    Directories deeper than the library makes them are left out.
    """
    found = []
    level, left = [directory] if directory else [], MOST_DIRECTORIES
    for _ in range(place.levels):
        below = []
        for each in level[:left]:
            for name, is_directory in _entries(f"{root}{each}"):
                if is_directory:
                    below.append(f"{each}/{name}")
                elif place.names.search(name):
                    found.append(f"{each}/{name}")
        if len(level) > left:
            return found, False
        left -= len(level)
        level = below
    return found, True


def _read_owner(path: str) -> Owner | None:
    """Read the owner's record out of a lock file; None where there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        info = os.fstat(fd)
        if not stat_bits.S_ISREG(info.st_mode) or not 0 < info.st_size <= _OWNER_BYTES:
            return None
        return parse_owner(os.read(fd, _OWNER_BYTES))
    except OSError:
        return None
    finally:
        os.close(fd)


def _who_has_open(
    proc: str, stats: Mapping[int, Stat], paths: Iterable[str]
) -> tuple[dict[str, list[Holder]], str]:
    """Return who has these files or another build's lock open, and why that may not be all."""
    wanted = frozenset(paths)
    found: dict[str, list[Holder]] = {}
    blind = ""
    for pid, stat in stats.items():
        if stat.state in "ZX" or stat.pid == 2 or stat.ppid == 2:  # kernel threads
            continue
        try:
            names = os.listdir(f"{proc}/{pid}/fd")
        except PermissionError:
            blind = f"the descriptors of pid {pid} ({stat.comm}) may not be read"
            continue
        except OSError:
            continue
        links = {_link(f"{proc}/{pid}/fd/{fd}") for fd in names}
        builds = bool(_HOLDS.match(stat.comm))
        for path in {link for link in links if link in wanted or (builds and _is_baton(link))}:
            found.setdefault(path, []).append(Holder(pid, stat.comm))
    return found, blind


def _is_baton(link: str) -> bool:
    return link.startswith("/") and bool(_BATON.match(link.rpartition("/")[2]))


def _unseen_holders(proc: str, pid: int, path: str) -> str:
    """Say who could hold a file without being seen from here; "" if nobody can."""
    kind = _file_system(proc, pid, path)
    if _NETWORK.match(kind):
        return f"it lies on {kind}: another machine may hold it"
    if not procfs.sees_all_pids(proc) and kind not in _OF_ONE_CONTAINER:
        return "a process of another container may hold it"
    return ""


def _file_system(proc: str, pid: int, path: str) -> str:
    """Return the type of the file system that a path lies on, as its owner sees it."""
    try:
        raw = procfs.read_table(f"{proc}/{pid}/mountinfo").decode(errors="replace")
    except OSError:
        return ""
    best, kind = "", ""
    for line in raw.splitlines():
        left, _, right = line.partition(" - ")
        words = left.split()
        if len(words) < 5:
            continue
        mount = words[4].replace("\\040", " ")
        inside = mount in ("/", path) or path.startswith(mount + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, right.split(" ")[0]
    return kind


def _entries(directory: str) -> list[tuple[str, bool]]:
    try:
        with os.scandir(directory) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    except OSError:
        return []


def _link(path: str) -> str:
    try:
        return os.readlink(path.encode()).decode(errors="replace")
    except OSError:
        return ""
