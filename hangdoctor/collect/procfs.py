"""Reads and parses /proc: each file has a parser that takes bytes, and the root is an argument.

Nothing here takes the target's memory map lock except `read_title` and `read_environ`, see there.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import time
from typing import TYPE_CHECKING, NamedTuple

from hangdoctor.model import Io

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
"""Unit of the times in stat; 100 on every Linux that is in use."""

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

TITLE_LIMIT = 8192
"""Longer command lines (a linker's) are cut; a launcher's options must fit."""

HOLDER_WITHIN_S = 0.7
"""Some thousand processes with some hundred descriptors each."""

MOST_KEPT = 8192
"""Files kept open: three of each thread of eight processes of 340."""

FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO of the kernel's proc_ns.h."""

_BLOCK = 1 << 16
_PAGE = 4096
_DESCRIPTORS_LEFT = 256  # for all else that a collector opens
_STATUS_LINE = re.compile(rb"^(\w+):\s*(.*)$", re.MULTILINE)


class Stat(NamedTuple):
    """The fields of /proc/PID/stat that are used, see proc_pid_stat(5).

    Attributes:
        cpu_s: fields 14 and 15, user and system time; system_s: field 15 alone.
        children_cpu_s: fields 16 and 17, of the children it has waited for.
        start_ticks: field 22, since boot.
        rss_pages: field 24.
        exit_code: field 52, as wait() encodes it; 0 where the kernel hides it.
    """

    pid: int
    comm: str
    state: str
    ppid: int
    group: int
    session: int
    cpu_s: float
    system_s: float
    children_cpu_s: float
    start_ticks: int
    rss_pages: int
    exit_code: int


def parse_stat(raw: bytes) -> Stat:
    r"""Parse a line of /proc/PID/stat or /proc/TID/stat.

    The name may hold spaces and parentheses: it ends at the last one.

    >>> stat = parse_stat(
    ...     b"4748 (a) b (c) D 4511 4511 4490 0 -1 4194304 8 0 0 0 250 50 100 0 20 0 1 0 94612"
    ...     b" 8765440 1106 18446744073709551615 1 1 0 0 0 0 0 0 0 0 0 0 17 1 0 0 0 0 0 0 0 0 0 0"
    ...     b" 0 0 9\n"
    ... )
    >>> stat.comm, stat.state, stat.ppid, stat.cpu_s, stat.start_ticks, stat.exit_code
    ('a) b (c', 'D', 4511, 3.0, 94612, 9)
    """
    left, right = raw.index(b"("), raw.rindex(b")")
    field = raw[right + 2 :].split()
    return Stat(
        pid=int(raw[:left]),
        comm=raw[left + 1 : right].decode(errors="replace"),
        state=field[0].decode(),
        ppid=int(field[1]),
        group=int(field[2]),
        session=int(field[3]),
        cpu_s=(int(field[11]) + int(field[12])) / TICKS_PER_S,
        system_s=int(field[12]) / TICKS_PER_S,
        children_cpu_s=(int(field[13]) + int(field[14])) / TICKS_PER_S,
        start_ticks=int(field[19]),
        rss_pages=int(field[21]),
        exit_code=int(field[49]) if len(field) > 49 else 0,
    )


class ThreadStat(NamedTuple):
    """The fields of /proc/PID/task/TID/stat that are read of every thread in every look."""

    tid: int
    comm: str
    state: str
    cpu_s: float
    system_s: float


def parse_thread_stat(raw: bytes) -> ThreadStat:
    r"""Parse the first fields of /proc/PID/task/TID/stat, see `parse_stat`.

    >>> parse_thread_stat(b"4751 (zmq) io) R 4511 4511 4490 0 -1 64 8 0 0 0 250 50 0 0 20 0 9\n")
    ThreadStat(tid=4751, comm='zmq) io', state='R', cpu_s=3.0, system_s=0.5)
    """
    left, right = raw.index(b"("), raw.rindex(b")")
    field = raw[right + 2 :].split(b" ", 13)
    system = int(field[12])
    return ThreadStat(
        tid=int(raw[:left]),
        comm=raw[left + 1 : right].decode(errors="replace"),
        state=field[0].decode(),
        cpu_s=(int(field[11]) + system) / TICKS_PER_S,
        system_s=system / TICKS_PER_S,
    )


def parse_status(raw: bytes) -> dict[str, str]:
    r"""Parse /proc/PID/status into its fields.

    >>> parse_status(b"Name:\tpt_main_thread\nTracerPid:\t0\nVmRSS:\t    1508 kB\nNSpid:\t71\t3\n")
    {'Name': 'pt_main_thread', 'TracerPid': '0', 'VmRSS': '1508 kB', 'NSpid': '71\t3'}
    """
    return {
        name.decode(): value.decode(errors="replace") for name, value in _STATUS_LINE.findall(raw)
    }


def parse_io(raw: bytes) -> Io:
    r"""Parse /proc/PID/io.

    >>> parse_io(
    ...     b"rchar: 16294\nwchar: 8\nsyscr: 52\nsyscw: 1\nread_bytes: 4096\nwrite_bytes: 0\n"
    ...     b"cancelled_write_bytes: 0\n"
    ... )
    Io(rchar=16294, wchar=8, syscr=52, syscw=1, read_bytes=4096, write_bytes=0)
    """
    values = dict(line.split(b": ") for line in raw.splitlines())
    return Io(
        rchar=int(values[b"rchar"]),
        wchar=int(values[b"wchar"]),
        syscr=int(values[b"syscr"]),
        syscw=int(values[b"syscw"]),
        read_bytes=int(values[b"read_bytes"]),
        write_bytes=int(values[b"write_bytes"]),
    )


def parse_title(raw: bytes) -> str:
    r"""Parse /proc/PID/cmdline; setproctitle leaves it padded with blanks or zero bytes.

    >>> parse_title(b"python\0-m\0sglang.launch_server\0--tp\0002\0")
    'python -m sglang.launch_server --tp 2'
    >>> parse_title(b"sglang::scheduler_TP0\0\0\0\0")
    'sglang::scheduler_TP0'
    """
    return raw[:TITLE_LIMIT].rstrip(b"\0 ").replace(b"\0", b" ").decode(errors="replace")


def parse_kib(value: str | None) -> int | None:
    """Return the bytes of a "1508 kB" of /proc/PID/status or /proc/meminfo.

    >>> parse_kib("1508 kB")
    1544192
    """
    return int(value.split()[0]) * 1024 if value else None


def parse_listeners(raw: bytes, port: int) -> frozenset[int]:
    r"""Parse /proc/net/tcp or tcp6: inodes of the sockets that listen on a port.

    >>> parse_listeners(
    ...     b"  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt\n"
    ...     b"   0: 0100007F:6D7C 00000000:0000 0A 00000000:00000000 00:00000000 00000000"
    ...     b"     0        0 50123 1 0000000000000000 100 0 0 10 0\n", 28028)
    frozenset({50123})
    """
    found = set()
    for line in raw.decode(errors="replace").splitlines()[1:]:
        words = line.split()
        if len(words) > 9 and words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
            found.add(int(words[9]))
    return frozenset(found)


def read(path: str) -> bytes:
    """Read a whole file with as few system calls as can be.

    Raises:
        OSError: ENOENT or ESRCH where the process has ended, EACCES or EPERM where refused.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(fd, _BLOCK)
        if len(data) < 4096:  # files of /proc give at most one page a read, so that was all
            return data
        blocks = [data]
        while block := os.read(fd, _BLOCK):
            blocks.append(block)
        return b"".join(blocks)
    finally:
        os.close(fd)


class KeptOpen:
    """Short files of /proc that are read in every look, kept open: to open costs more than to read.

    A file stays that of its process or thread: when that has ended it gives ESRCH, whoever has its
    number by then. Of a tree that only looks like /proc nothing is kept.
    """

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}
        self._used: set[str] = set()
        self._dropped: list[int] = []
        self._most: int | None = None

    def read(self, path: str) -> bytes:
        """Read a file of one page at most.

        Raises:
            OSError: as `read`.
        """
        fd = self._fds.get(path)
        if fd is not None:
            self._used.add(path)
            try:
                return os.pread(fd, _PAGE, 0)
            except ProcessLookupError:  # another may have its number
                if self._fds.pop(path, None) is not None:
                    os.close(fd)
        if self._most is None:
            self._most = _room_for_descriptors()
        if len(self._fds) >= self._most or not path.startswith("/proc/"):
            return read(path)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._fds[path] = fd
        self._used.add(path)
        return os.pread(fd, _PAGE, 0)

    def close_unused(self) -> None:
        """Drop what has not been read since this was called last, and close what was dropped then.

        Not at once: a look that was left behind may just have taken a number to read from.
        """
        for fd in self._dropped:
            os.close(fd)
        unused = self._fds.keys() - self._used
        self._dropped = [self._fds.pop(path) for path in unused]
        self._used.clear()


def _room_for_descriptors() -> int:
    """Return how many files may be kept open, where as many are allowed as can be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_KEPT + _DESCRIPTORS_LEFT
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    allowed = wanted if soft == resource.RLIM_INFINITY else soft
    return max(0, min(MOST_KEPT, allowed - _DESCRIPTORS_LEFT))


def read_table(path: str) -> bytes:
    """Read a file that the kernel makes line by line, and that may be long: maps, locks, net/tcp.

    Each read gives as many lines as fit into a page, so that a short one is not the last.

    Raises:
        OSError: as `read`.
    """
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def read_stat(proc: str, pid: int, read: Callable[[str], bytes] = read) -> Stat | None:
    """Read /proc/PID/stat; None where there is no such process."""
    try:
        return parse_stat(read(f"{proc}/{pid}/stat"))
    except (FileNotFoundError, ProcessLookupError):
        return None


def read_title(proc: str, pid: int) -> str:
    """Read the command line as it stands now.

    It takes the target's memory map lock: with a target that hangs while it holds the lock (a
    stalled mmap, a page fault on dead storage) this may not come back before that ends.

    Raises:
        OSError: as `read`.
    """
    return parse_title(read(f"{proc}/{pid}/cmdline"))


def read_environ(proc: str, pid: int) -> dict[str, str]:
    """Read the environment that a process was started with; empty where it cannot be read.

    What setproctitle has written over is gone. Takes the same lock as `read_title`.
    """
    try:
        raw = read(f"{proc}/{pid}/environ").decode(errors="replace")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in raw.split("\0") if "=" in pair)


def read_listeners(proc: str, pid: int, port: int) -> frozenset[int]:
    """Read the inodes of the TCP sockets that listen on a port where a process lives.

    Raises:
        OSError: as `read`; without IPv6 there is one table only.
    """
    found = parse_listeners(read_table(f"{proc}/{pid}/net/tcp"), port)
    with contextlib.suppress(FileNotFoundError):
        found |= parse_listeners(read_table(f"{proc}/{pid}/net/tcp6"), port)
    return found


def find_holder(proc: str, first: Iterable[int], inodes: frozenset[int]) -> int | None:
    """Return a process that has one of these sockets; None where none is seen to have it.

    All processes are asked, those that are named first, for `HOLDER_WITHIN_S` at most.
    """
    names = {f"socket:[{inode}]" for inode in inodes}
    until_s = time.monotonic() + HOLDER_WITHIN_S
    for pid in dict.fromkeys((*first, *scan(proc))):
        if time.monotonic() > until_s:
            break
        directory = f"{proc}/{pid}/fd"
        try:
            if any(os.readlink(f"{directory}/{fd}") in names for fd in os.listdir(directory)):
                return pid
        except OSError:
            continue
    return None


def scan(proc: str, read: Callable[[str], bytes] = read) -> dict[int, Stat]:
    """Read the stat of every process there is, by pid."""
    found = {}
    for pid in _pids(proc):
        stat = read_stat(proc, pid, read)
        if stat and stat.state != "X":
            found[pid] = stat
    return found


def age_s(start_ticks: int) -> float:
    """Return the seconds since a process started.

    The kernel counts its start in CLOCK_BOOTTIME; /proc/uptime may be a container's own.
    """
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / TICKS_PER_S)


def children(stats: dict[int, Stat]) -> dict[int, list[int]]:
    """Return the children of each process, the oldest first."""
    found: dict[int, list[int]] = {}
    for stat in sorted(stats.values(), key=lambda stat: (stat.start_ticks, stat.pid)):
        found.setdefault(stat.ppid, []).append(stat.pid)
    return found


def descendants(
    stats: dict[int, Stat], roots: list[int], without: frozenset[int] = frozenset()
) -> list[int]:
    """Return the roots and everything below them, level by level, not going through `without`."""
    below = children(stats)
    order, seen = list(roots), {*roots, *without}
    for pid in order:
        new = [child for child in below.get(pid, ()) if child not in seen]
        order += new
        seen.update(new)
    return order


def own_pids(proc: str, stats: dict[int, Stat]) -> frozenset[int]:
    """Return the observer as this /proc numbers it: ourselves, and our parent where we work for it.

    Read from /proc/self, since the numbers of another PID namespace's /proc are not ours.
    """
    try:
        own = int(os.readlink(f"{proc}/self"))
    except (OSError, ValueError):
        return frozenset()
    return frozenset({own, stats[own].ppid} if own in stats else {own})


def sees_all_pids(proc: str) -> bool:
    """Tell whether we are in the first PID namespace, which has all processes of the machine."""
    try:
        return os.readlink(f"{proc}/self/ns/pid") == FIRST_PID_NAMESPACE
    except OSError:
        return False


def _pids(proc: str) -> Iterator[int]:
    return (int(name) for name in os.listdir(proc) if name.isdecimal())
