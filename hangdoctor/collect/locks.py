"""Finds the locks on files that the launch waits for, and whether somebody holds them.

The kernel's own locks (flock, fcntl) go with their holder; /proc/locks lists them. A file that
locks by being there (PyTorch's FileBaton) stays when its maker is killed: such files are searched
for where PyTorch builds its extensions, and held by who has them open.
"""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING, Literal, NamedTuple

from hangdoctor.collect import procfs
from hangdoctor.model import FileLock, Holder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hangdoctor.collect.procfs import Stat

MOST_LOCKS = 32
MOST_DIRECTORIES = 2000
"""Directories of a cache that are looked into."""

_Kind = Literal["flock", "posix", "ofd"]
_KINDS: dict[str, _Kind] = {"FLOCK": "flock", "POSIX": "posix", "OFDLCK": "ofd"}
_LOCK_NAME = re.compile(r"(?:\.lock|/lock|/\.locks/.*|/lockfile)$")
_BATON = "lock"
_DEPTH = 4
_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel's proc_ns.h
_OF_ONE_CONTAINER = frozenset({"overlay"})
_NETWORK = re.compile(
    r"^(?:nfs\d?|cifs|smb3|lustre|ceph|9p|gpfs|beegfs|virtiofs|afs|glusterfs|wekafs|fuse\..+)$"
)
_HOLDS = re.compile(
    r"^(?:python|pypy|pt_main_thread|sglang|vllm|ninja|nvcc|cicc|ptxas|c\+\+|g\+\+)"
)
_VARIABLES = (b"TORCH_EXTENSIONS_DIR", b"XDG_CACHE_HOME", b"HOME")


class KernelLock(NamedTuple):
    """A line of /proc/locks; `waits` for one that is not granted yet."""

    kind: _Kind
    pid: int
    file: str
    waits: bool


def read(
    proc: str, stats: Mapping[int, Stat], tree: Mapping[int, Mapping[int, str]], *, search: bool
) -> tuple[FileLock, ...]:
    """Read the locks that processes of the tree wait for; with `search` also what they may poll.

    Args:
        proc: root of the processes.
        stats: of all processes there are.
        tree: descriptors of the launch's processes, by pid.
        search: look for lock files that nobody sleeps for in the kernel.
    """
    by_file: dict[str, list[KernelLock]] = {}
    for lock in parse_locks(procfs.read_table(f"{proc}/locks")):
        by_file.setdefault(lock.file, []).append(lock)
    found = []
    for entries in by_file.values():
        waiters = tuple(dict.fromkeys(each.pid for each in entries if each.waits))
        if not (search or tree.keys() & set(waiters)) or all(each.waits for each in entries):
            continue
        one = _kernel_lock(proc, stats, tree, entries)
        if one and (one.waiters or _LOCK_NAME.search(one.path)):
            found.append(one)
    if search:
        found += _batons(proc, stats, tree)
    return tuple(found[:MOST_LOCKS])


def parse_locks(raw: bytes) -> list[KernelLock]:
    r"""Parse /proc/locks.

    >>> parse_locks(
    ...     b"1: FLOCK  ADVISORY  WRITE 7212 fe:00:2147438 0 EOF\n"
    ...     b"1: -> FLOCK  ADVISORY  WRITE 7826 fe:00:2147438 0 EOF\n"
    ... )[1]
    KernelLock(kind='flock', pid=7826, file='fe:00:2147438', waits=True)
    """
    found = []
    for line in raw.decode(errors="replace").splitlines():
        words = line.split()[1:]
        waits = words[:1] == ["->"]
        words = words[waits:]
        if len(words) >= 5 and words[0] in _KINDS:
            found.append(KernelLock(_KINDS[words[0]], int(words[3]), words[4], waits))
    return found


def _kernel_lock(
    proc: str,
    stats: Mapping[int, Stat],
    tree: Mapping[int, Mapping[int, str]],
    entries: list[KernelLock],
) -> FileLock | None:
    """Return a kernel's lock with its path and holders; None where the path cannot be told."""
    file = entries[0].file
    waiters = tuple(dict.fromkeys(each.pid for each in entries if each.waits))
    held = [each for each in entries if not each.waits]
    pids = [each.pid for each in held if each.pid in stats]
    holders, path = [], ""
    # A flock that was inherited is still told by the pid of who took it, even if that has ended.
    for pid in pids or sorted(stats):
        own = _path_of(proc, pid, file)
        if own:
            holders.append(Holder(pid, stats[pid].comm))
            path = path or own
    if not holders:
        holders = [Holder(pid, stats[pid].comm) for pid in pids]
    waiting = (pid for pid in waiters if pid in tree)
    path = path or next((name for pid in waiting if (name := _by_inode(proc, pid, file))), "")
    if not path:
        return None
    return FileLock(
        path=path,
        kind=held[0].kind,
        owner="alive" if holders else "unknown",
        holders=tuple(holders),
        waiters=waiters,
        age_s=_age_s(f"{proc}/{holders[0].pid}/root{path}") if holders else None,
        why="" if holders else "its holder is not among the processes that can be seen from here",
    )


def _path_of(proc: str, pid: int, file: str) -> str:
    """Return the path of the descriptor through which a process holds a lock; "" if it does not."""
    needle = f" {file} ".encode()
    for fd in _names(f"{proc}/{pid}/fdinfo"):
        info = _read(f"{proc}/{pid}/fdinfo/{fd}")
        if b"lock:" in info and needle in info:
            return _link(f"{proc}/{pid}/fd/{fd}")
    return ""


def _by_inode(proc: str, pid: int, file: str) -> str:
    """Return the path of a process's descriptor of a file that it waits for."""
    inode = int(file.rpartition(":")[2])
    for fd in _names(f"{proc}/{pid}/fd"):
        link = _link(f"{proc}/{pid}/fd/{fd}")
        if link.startswith("/") and _inode(f"{proc}/{pid}/fd/{fd}") == inode:
            return link
    return ""


def _batons(
    proc: str, stats: Mapping[int, Stat], tree: Mapping[int, Mapping[int, str]]
) -> Iterator[FileLock]:
    """Yield the files that lock by being there: below where PyTorch builds, or open for a build."""
    paths: dict[str, int] = {}
    for pid in tree:
        for directory in _extension_directories(proc, pid):
            for path in _files_called(f"{proc}/{pid}/root", directory):
                paths.setdefault(path, pid)
    holders, blind = _who_has_open(proc, stats, set(paths))
    # A build may have a directory of its own: then the owner of its lock shows where that is.
    for path, found in holders.items():
        paths.setdefault(path, found[0].pid)
    for path, pid in paths.items():
        try:
            changed_s = os.stat(f"{proc}/{pid}/root{path}").st_mtime
        except OSError:  # released in between
            continue
        age_s = max(0.0, time.time() - changed_s)
        held = tuple(holders.get(path, ()))
        why = "" if held else (blind or _unseen_holders(proc, pid, path))
        yield FileLock(
            path=path,
            kind="file",
            owner="alive" if held else ("unknown" if why else "dead"),
            holders=held,
            age_s=age_s,
            older_than_all=all(
                procfs.age_s(stat.start_ticks) < age_s
                for other, stat in stats.items()
                if other in tree or _HOLDS.match(stat.comm)
            ),
            why=why,
        )


def _extension_directories(proc: str, pid: int) -> Iterator[str]:
    """Yield where a process builds extensions (torch.utils.cpp_extension), by its environment."""
    try:
        entries = procfs.read_table(f"{proc}/{pid}/environ").split(b"\0")
    except OSError:
        return
    values = dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)
    chosen, cache, home = (values.get(name, b"").decode(errors="replace") for name in _VARIABLES)
    if chosen:
        yield chosen
    elif cache or home:
        yield f"{cache or home + '/.cache'}/torch_extensions"


def _files_called(root: str, directory: str) -> Iterator[str]:
    """Yield the lock files below a directory, as its owner sees them."""
    level, left = [directory], MOST_DIRECTORIES
    for _ in range(_DEPTH):
        below = []
        for each in level[:left]:
            for name, is_directory in _entries(f"{root}{each}"):
                if is_directory:
                    below.append(f"{each}/{name}")
                elif name == _BATON:
                    yield f"{each}/{name}"
        left -= len(level)
        level = below


def _who_has_open(
    proc: str, stats: Mapping[int, Stat], paths: set[str]
) -> tuple[dict[str, list[Holder]], str]:
    """Return who has these files or another build's lock open, and why that may not be all."""
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
        for path in {link for link in links if link in paths or (builds and _is_baton(link))}:
            found.setdefault(path, []).append(Holder(pid, stat.comm))
    return found, blind


def _is_baton(link: str) -> bool:
    return link.startswith("/") and link.rpartition("/")[2] == _BATON


def _unseen_holders(proc: str, pid: int, path: str) -> str:
    """Say who could hold a file without being seen from here; "" if nobody can."""
    kind = _file_system(proc, pid, path)
    if _NETWORK.match(kind):
        return f"it lies on {kind}: another machine may hold it"
    try:
        inside = os.readlink(f"{proc}/self/ns/pid") != _FIRST_PID_NAMESPACE
    except OSError:
        inside = True
    if inside and kind not in _OF_ONE_CONTAINER:
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


def _age_s(path: str) -> float | None:
    try:
        return max(0.0, time.time() - os.stat(path).st_mtime)
    except OSError:
        return None


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _entries(directory: str) -> list[tuple[str, bool]]:
    try:
        with os.scandir(directory) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    except OSError:
        return []


def _read(path: str) -> bytes:
    try:
        return procfs.read(path)
    except OSError:
        return b""


def _link(path: str) -> str:
    try:
        return os.readlink(path.encode()).decode(errors="replace")
    except OSError:
        return ""


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0
