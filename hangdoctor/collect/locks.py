"""Finds the locks on files that the launch waits for, and whether somebody holds them.

The kernel's own locks (flock, fcntl) go with their holder; /proc/locks lists them, for everybody.
Files that lock by being there are in `lock_files`.
"""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from hangdoctor.collect import lock_files, procfs
from hangdoctor.model import FileLock, Holder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hangdoctor.collect.procfs import Stat

MOST_LOCKS = 32
"""Locks kept of the kernel's, and of files that lock by being there."""

_Kind = Literal["flock", "posix", "ofd"]
_KINDS: dict[str, _Kind] = {"FLOCK": "flock", "POSIX": "posix", "OFDLCK": "ofd"}
_LOCK_NAME = re.compile(r"(?:\.lock|/lock|/\.locks/.*|/lockfile)$")
_OF_HUB = re.compile(r"^(.*)/\.locks/([^/]+)/([^/]+)\.lock$")


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
    slept_for, held = [], []
    for entries in by_file.values():
        waits = any(each.waits and each.pid in tree for each in entries)
        if not (search or waits) or all(each.waits for each in entries):
            continue
        one = _kernel_lock(proc, stats, tree, entries)
        if one and waits:
            slept_for.append(one)
        elif one and (one.waiters or _LOCK_NAME.search(one.path)):
            held.append(one)
    found = [*slept_for, *held]
    files: list[FileLock] = []
    if search:
        files += lock_files.read(proc, stats, tree, frozenset(one.path for one in found))
        files.sort(key=lambda one: one.owner == "alive")
    found = [*found[:MOST_LOCKS], *files[:MOST_LOCKS]]
    return tuple(_with_download(proc, one) for one in found)


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
    paths = {pid: _path_of(proc, pid, file) for pid in pids}
    if None not in paths.values() and not any(paths.values()):
        # A flock that was inherited is still told by the pid of who took it, which has ended, and
        # may be another's by now.
        pids = []
        paths = {pid: _path_of(proc, pid, file) for pid in sorted(stats)}
    holders = [Holder(pid, stats[pid].comm) for pid, path in paths.items() if path]
    holders = holders or [Holder(pid, stats[pid].comm) for pid in pids]
    path = next(filter(None, paths.values()), "")
    waiting = [pid for pid in waiters if pid in tree]
    path = path or next((name for pid in waiting if (name := _by_inode(proc, pid, file))), "")
    if not path and waiting:
        device, _, inode = file.rpartition(":")
        path = f"inode {inode} of device {device}"
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


def _with_download(proc: str, lock: FileLock) -> FileLock:
    """Add when the download that a lock of the hub's cache guards was last written to."""
    match = _OF_HUB.search(lock.path)
    if not match or not lock.holders:
        return lock
    cache, repository, blob = match.groups()
    directory = f"{proc}/{lock.holders[0].pid}/root{cache}/{repository}/blobs"
    names = (name for name in _names(directory) if name.startswith(f"{blob}."))
    ages = [_age_s(f"{directory}/{name}") for name in names if name.endswith(".incomplete")]
    return msgspec.structs.replace(
        lock, download_age_s=min((age for age in ages if age is not None), default=None)
    )


def _path_of(proc: str, pid: int, file: str) -> str | None:
    """Return the path of the descriptor through which a process holds a lock.

    "" if it holds none, None where its descriptors may not be read.
    """
    needle = f" {file} ".encode()
    try:
        for fd in os.listdir(f"{proc}/{pid}/fdinfo"):
            info = _read(f"{proc}/{pid}/fdinfo/{fd}")
            if b"lock:" in info and needle in info:
                return _link(f"{proc}/{pid}/fd/{fd}")
    except PermissionError:
        return None
    except OSError:
        pass
    return ""


def _by_inode(proc: str, pid: int, file: str) -> str:
    """Return the path of a process's descriptor of a file that it waits for."""
    inode = int(file.rpartition(":")[2])
    for fd in _names(f"{proc}/{pid}/fd"):
        link = _link(f"{proc}/{pid}/fd/{fd}")
        if link.startswith("/") and _inode(f"{proc}/{pid}/fd/{fd}") == inode:
            return link
    return ""


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


def _read(path: str) -> bytes:
    """Read a file of /proc; b"" where it has gone, which a descriptor does at any time."""
    try:
        return procfs.read(path)
    except PermissionError:
        raise
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
