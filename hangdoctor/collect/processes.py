"""Reads the processes of a launch: the tree, and of each process what /proc tells without harm.

First comes what cannot block (stat of everything there is), then what is under a lock of the
process itself, then the command line, which needs the memory map lock, then descriptors, whose
files may lie on dead storage. A process that blocks one of these loses only that.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat as stat_bits
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from hangdoctor.collect import procfs
from hangdoctor.collect.bounded import Bounded
from hangdoctor.collect.permissions import refused
from hangdoctor.model import HotThread, Missing, OpenFile, Process, Processes, Thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hangdoctor.collect.look import Look
    from hangdoctor.collect.procfs import Stat, ThreadStat

MOST_FILES = 256
"""Regular files kept of one process, and as many other descriptors."""

_Key = tuple[int, int]  # pid and start_ticks name a process for ever
_Outcome = Process | Missing | None

_WITHIN_S = {"process": 1.2, "title": 0.8, "files": 1.6}
_kept = procfs.KeptOpen()
_processes: Bounded[_Key, Process | None] = Bounded()
_titles: Bounded[_Key, str | Missing | None] = Bounded()
_files: Bounded[_Key, tuple[tuple[OpenFile, ...], int] | Missing | None] = Bounded()

_DULL_FILE = re.compile(r"^/(?:dev|proc|sys)/|\.(?:so(?:\.[\d.]+)?|pyc?|pth)$| \(deleted\)$")
HOT_S = 0.02
"""CPU since the last look, two ticks: of a thread that has used less, no more is read."""
MOST_REMEMBERED = 50_000
"""Threads whose CPU time is remembered; a compilation passes through many thousands."""
STIRS = 8
"""An eventfd of a process that is at work is read so often, to see whether its counter changes."""
_thread_cpu_s: dict[tuple[int, int], float] = {}  # at the last look: says what to look at, no more

_FLAGS = re.compile(rb"^flags:\s*([0-7]+)", re.MULTILINE)
_POSITION = re.compile(rb"^pos:\s*(\d+)", re.MULTILINE)
_EVENTFD = "anon_inode:[eventfd]"
_EVENTFD_ID = re.compile(rb"^eventfd-id:\s*(\d+)", re.MULTILINE)
_EVENTFD_COUNT = re.compile(rb"^eventfd-count:\s*([0-9a-f]+)", re.MULTILINE)


def read(look: Look) -> Processes:
    """Read the processes of the tree. A process that ends in between is left out."""
    stats = procfs.scan(look.proc, _kept.read)
    keys = {(pid, stats[pid].start_ticks): stats[pid] for pid in tree(stats, look)}
    if len(_thread_cpu_s) > MOST_REMEMBERED:
        _thread_cpu_s.clear()
    found = _processes.run(
        {key: partial(_read_process, look.proc, stat) for key, stat in keys.items()},
        within_s=_WITHIN_S["process"],
    )
    titles = _titles.run(
        {key: partial(_or_missing, procfs.read_title, look.proc, key[0]) for key in keys},
        within_s=_WITHIN_S["title"],
    )
    files = {}
    if look.files:
        files = _files.run(
            {key: partial(_or_missing, read_files, look.proc, key[0]) for key in keys},
            within_s=_WITHIN_S["files"],
        )
    processes = []
    for key, stat in keys.items():
        process = found.get(key, _LOCKED)
        if process is _LOCKED:
            process = _outline(stat, _blocked("a lock of the process is held"))
        if process is None:
            continue
        process = _with_title(process, titles.get(key, _NO_TITLE))
        if look.files:
            process = _with_files(process, files.get(key, _NO_FILES))
        processes.append(process)
    _kept.close_unused()
    return Processes(
        processes=tuple(processes),
        roots=tuple(look.roots),
        parents=_parents(look.proc, stats, processes),
    )


def tree(stats: dict[int, Stat], look: Look) -> list[int]:
    """Return the pids that belong to the observation, roots first, then level by level.

    These are the roots, all that was seen below them before even if it has another parent now,
    what is below those, and orphans of a root's session and group with a title to adopt. The
    observer never is, nor what it is between them and a root.
    """
    ours = procfs.own_pids(look.proc, stats)
    first = [
        pid
        for pid, start in (look.roots | look.known).items()
        if pid in stats and stats[pid].start_ticks == start and pid not in ours
    ]
    first += _orphans(stats, look, set(first))
    # What descends from another of them is found below it; only the topmost come first.
    heads = [pid for pid in first if stats[pid].ppid not in first or pid in look.roots]
    return procfs.descendants(stats, heads, without=ours)


def read_files(proc: str, pid: int) -> tuple[tuple[OpenFile, ...], int]:
    """Read the descriptors worth keeping: files open for reading, FIFOs, pipes, eventfds.

    Returns:
        MOST_FILES regular files and as many others at most; and how many were left out.

    Raises:
        OSError: EACCES where refused.
    """
    found: list[OpenFile] = []
    room = {True: MOST_FILES, False: MOST_FILES}
    left_out = 0
    stat = procfs.read_stat(proc, pid)
    reads = STIRS if stat and stat.state == "R" else 1
    for name in sorted(os.listdir(f"{proc}/{pid}/fd"), key=int):
        try:
            # A file's name may be any bytes; it is only shown.
            link = os.readlink(f"{proc}/{pid}/fd/{name}".encode())
            target = link.decode(errors="replace")
            if not _is_worth_keeping(target):
                continue
            if not room[target.startswith("/")]:
                left_out += 1
                continue
            one = _open_file(proc, pid, int(name), target, reads=reads)
        except (FileNotFoundError, ProcessLookupError):  # closed in between
            continue
        if one:
            found.append(one)
            room[target.startswith("/")] -= 1
    return tuple(found), left_out


def titles_of(proc: str, stats: Iterable[Stat]) -> dict[int, str]:
    """Return titles by pid; the name where the title is empty, cannot be read, or blocks."""
    stats = list(stats)
    found = _titles.run(
        {
            (stat.pid, stat.start_ticks): partial(_or_missing, procfs.read_title, proc, stat.pid)
            for stat in stats
        },
        within_s=_WITHIN_S["title"],
    )
    titles = {}
    for stat in stats:
        title = found.get((stat.pid, stat.start_ticks))
        titles[stat.pid] = title if isinstance(title, str) and title else stat.comm
    return titles


def eventfd_count(fdinfo: bytes) -> int | None:
    r"""Parse the counter of an eventfd out of its fdinfo; the kernel prints it in base 16.

    >>> eventfd_count(b"pos:\t0\nflags:\t02004002\neventfd-count:        1f\neventfd-id: 4\n")
    31
    """
    match = _EVENTFD_COUNT.search(fdinfo)
    return int(match[1], 16) if match else None


def eventfd_identity(fdinfo: bytes) -> int | None:
    r"""Parse the number of an eventfd, the same in all processes; None before Linux 5.2.

    >>> eventfd_identity(b"pos:\t0\nflags:\t02004002\neventfd-count:        1f\neventfd-id: 4\n")
    4
    """
    match = _EVENTFD_ID.search(fdinfo)
    return int(match[1]) if match else None


def position(fdinfo: bytes) -> int | None:
    r"""Parse the offset out of a fdinfo; None for a file that is only open for writing.

    >>> position(b"pos:\t1048576\nflags:\t0100000\nmnt_id:\t29\nino:\t7\n")
    1048576
    >>> position(b"pos:\t88\nflags:\t0102001\nmnt_id:\t29\nino:\t8\n")
    """
    flags, offset = _FLAGS.search(fdinfo), _POSITION.search(fdinfo)
    if not flags or not offset or int(flags[1], 8) & os.O_ACCMODE == os.O_WRONLY:
        return None
    return int(offset[1])


def _parents(proc: str, stats: dict[int, Stat], processes: Iterable[Process]) -> dict[int, str]:
    """Return the titles of what stands above the tree."""
    inside = {process.pid for process in processes}
    above = {process.ppid for process in processes} - inside
    return titles_of(proc, [stats[pid] for pid in sorted(above) if pid in stats])


def _orphans(stats: dict[int, Stat], look: Look, tree: set[int]) -> list[int]:
    """Return processes that lost their parent before they were seen, by session, group, title."""
    if not look.adopt:
        return []
    groups = {(stats[pid].session, stats[pid].group) for pid in tree}
    oldest = min(look.roots.values(), default=0)
    lost = [
        stat
        for stat in stats.values()
        if (stat.session, stat.group) in groups
        and stat.pid not in tree
        and stat.start_ticks >= oldest
        and (stat.ppid not in stats or stats[stat.ppid].session != stat.session)
    ]
    titles = titles_of(look.proc, lost) if lost else {}
    return [
        pid
        for pid, title in titles.items()
        if any(re.search(pattern, title) for pattern in look.adopt)
    ]


def _read_process(proc: str, stat: Stat) -> Process | None:
    """Read all that needs neither the memory map nor a file system; None where it has ended."""
    pid = stat.pid
    unreadable: dict[str, Missing] = {}
    try:
        status = procfs.parse_status(procfs.read(f"{proc}/{pid}/status"))
    except OSError as error:
        if _ended(proc, stat):
            return None
        status = {}
        unreadable["status"] = _missing(error, None)
    user = int(status["Uid"].split()[1]) if "Uid" in status else None
    try:
        io = procfs.parse_io(procfs.read(f"{proc}/{pid}/io"))
    except (OSError, KeyError) as error:
        if _ended(proc, stat):
            return None
        io = None
        unreadable["io"] = _missing(error, user)
    # The kernel answers "0" for the wchan of a process whose io it refuses to show.
    denied = unreadable.get("io")
    if denied and denied.reason == "permission":
        unreadable["wchan"] = denied
    threads = _read_threads(proc, pid, unreadable, user)
    if not threads and _ended(proc, stat):
        return None
    inner_pid = int(status["NSpid"].split()[-1]) if status.get("NSpid") else pid
    return Process(
        pid=pid,
        ppid=stat.ppid,
        inner_pid=inner_pid if inner_pid != pid else None,
        start_ticks=stat.start_ticks,
        age_s=round(procfs.age_s(stat.start_ticks), 2),
        title=stat.comm,
        comm=stat.comm,
        # Of the same moment as the threads; the scan of the tree is a little older.
        state=threads[0].state if threads else stat.state,
        user=user,
        cpu_s=stat.cpu_s,
        children_cpu_s=stat.children_cpu_s,
        exit_code=None if stat.state != "Z" or (denied and not stat.exit_code) else stat.exit_code,
        sleeps=int(status["voluntary_ctxt_switches"])
        if "voluntary_ctxt_switches" in status
        else None,
        rss_bytes=procfs.parse_kib(status.get("VmRSS")) or stat.rss_pages * procfs.PAGE_BYTES,
        rss_file_bytes=procfs.parse_kib(status.get("RssFile")),
        tracer_pid=int(status["TracerPid"]) if "TracerPid" in status else None,
        io=io,
        threads=threads,
        unreadable=unreadable,
    )


def _read_threads(
    proc: str, pid: int, unreadable: dict[str, Missing], user: int | None
) -> tuple[Thread, ...]:
    try:
        tids = sorted(map(int, os.listdir(f"{proc}/{pid}/task")), key=lambda tid: (tid != pid, tid))
    except (FileNotFoundError, ProcessLookupError):
        return ()
    threads = []
    for tid in tids:
        at = f"{proc}/{pid}/task/{tid}/"
        try:
            stat = procfs.parse_thread_stat(_kept.read(at + "stat"))
        except (FileNotFoundError, ProcessLookupError):
            continue
        words: dict[str, str | None] = {}
        for name in ("wchan", "syscall"):
            words[name] = None
            if name in unreadable or stat.state == "Z":
                continue
            try:
                words[name] = _kept.read(at + name).decode().strip()
            except ProcessLookupError:
                continue
            except OSError as error:
                if os.path.exists(at + "stat"):
                    unreadable[name] = _missing(error, user)
        threads.append(
            Thread(
                tid=tid,
                name=stat.comm,
                state=stat.state,
                cpu_s=stat.cpu_s,
                wchan=words["wchan"],
                syscall=words["syscall"],
                hot=_hot(at, stat, unreadable) if _is_hot(pid, stat) else None,
            )
        )
    return tuple(threads)


def _is_hot(pid: int, stat: ThreadStat) -> bool:
    """Tell whether a thread has used CPU since the last look, or runs where there was none."""
    key = (pid, stat.tid)
    before_s = _thread_cpu_s.get(key)
    _thread_cpu_s[key] = stat.cpu_s
    return stat.state == "R" if before_s is None else stat.cpu_s - before_s >= HOT_S


def _hot(at: str, stat: ThreadStat, unreadable: dict[str, Missing]) -> HotThread:
    """Read more of a thread; what cannot be read stays None."""
    io = queue_s = sleeps = preempted = None
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        queue_s = int(procfs.read(at + "schedstat").split()[1]) / 1e9
        status = procfs.parse_status(procfs.read(at + "status"))
        sleeps = int(status["voluntary_ctxt_switches"])
        preempted = int(status["nonvoluntary_ctxt_switches"])
    if "io" not in unreadable:
        with contextlib.suppress(OSError, KeyError):
            io = procfs.parse_io(procfs.read(at + "io"))
    return HotThread(
        system_s=stat.system_s, queue_s=queue_s, sleeps=sleeps, preempted=preempted, io=io
    )


def _eventfd(fd: int, target: str, infos: list[bytes]) -> OpenFile:
    counts = [eventfd_count(info) for info in infos]
    return OpenFile(
        fd=fd,
        kind="eventfd",
        target=target,
        position=counts[0],
        identity=eventfd_identity(infos[0]),
        stirs=len(set(counts)) > 1 if len(counts) > 1 else None,
    )


def _is_worth_keeping(target: str) -> bool:
    """Tell whether a descriptor may be worth it by where its link leads."""
    if target.startswith("/"):
        return not _DULL_FILE.search(target)
    return target.startswith("pipe:") or target == _EVENTFD


def _open_file(proc: str, pid: int, fd: int, target: str, *, reads: int) -> OpenFile | None:
    def fdinfo() -> bytes:
        return procfs.read(f"{proc}/{pid}/fdinfo/{fd}")

    if target.startswith("pipe:"):
        return OpenFile(fd=fd, kind="pipe", target=target)
    if target == _EVENTFD:
        return _eventfd(fd, target, [fdinfo() for _ in range(reads)])
    # Through the link, so that it is the right file in whatever mount namespace.
    info = os.stat(f"{proc}/{pid}/fd/{fd}")
    if stat_bits.S_ISFIFO(info.st_mode):
        return OpenFile(fd=fd, kind="fifo", target=target)
    offset = position(fdinfo()) if stat_bits.S_ISREG(info.st_mode) else None
    if offset is None:
        return None
    return OpenFile(fd=fd, kind="file", target=target, position=offset, size_bytes=info.st_size)


def _outline(stat: Stat, why: Missing) -> Process:
    """Return what stat alone tells of a process whose other files block."""
    return Process(
        pid=stat.pid,
        ppid=stat.ppid,
        start_ticks=stat.start_ticks,
        age_s=round(procfs.age_s(stat.start_ticks), 2),
        title=stat.comm,
        comm=stat.comm,
        state=stat.state,
        cpu_s=stat.cpu_s,
        children_cpu_s=stat.children_cpu_s,
        rss_bytes=stat.rss_pages * procfs.PAGE_BYTES,
        unreadable=dict.fromkeys(("status", "io", "threads", "wchan", "syscall"), why),
    )


def _with_title(process: Process, title: str | Missing | None) -> Process:
    if isinstance(title, Missing):
        unreadable = process.unreadable | {"title": _for_user(title, process.user)}
        return msgspec.structs.replace(process, unreadable=unreadable)
    return msgspec.structs.replace(process, title=title) if title else process


def _with_files(
    process: Process, found: tuple[tuple[OpenFile, ...], int] | Missing | None
) -> Process:
    if isinstance(found, Missing):
        unreadable = process.unreadable | {"fd": _for_user(found, process.user)}
        return msgspec.structs.replace(process, unreadable=unreadable)
    if found is None:
        return process
    files, left_out = found
    if left_out:
        detail = f"{left_out} of its open files were not looked at, beyond {MOST_FILES}"
        missing = Missing(reason="not-tried", detail=detail)
        process = msgspec.structs.replace(process, unreadable=process.unreadable | {"fd": missing})
    return msgspec.structs.replace(process, files=files)


def _or_missing(function: Callable[[str, int], Any], proc: str, pid: int) -> Any:
    try:
        return function(proc, pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError as error:
        return _missing(error, None)


def _missing(error: OSError | KeyError, user: int | None) -> Missing:
    if isinstance(error, PermissionError):
        return refused(f"{error.strerror} ({error.filename})", user)
    if isinstance(error, FileNotFoundError | KeyError):
        return Missing(reason="unsupported", detail="this kernel does not show it")
    return Missing(reason="failed", detail=str(error))


def _for_user(missing: Missing, user: int | None) -> Missing:
    return refused(missing.detail, user) if missing.reason == "permission" else missing


def _blocked(why: str) -> Missing:
    return Missing(reason="timeout", detail=f"reading it blocks: {why}")


_LOCKED = Process(pid=0, ppid=0, start_ticks=0, title="", comm="", state="", cpu_s=0.0)
_NO_TITLE = _blocked("the lock of its memory map is held, or its pages are on stalled storage")
_NO_FILES = _blocked("a file that it has open is on stalled storage")


def _ended(proc: str, stat: Stat) -> bool:
    now = procfs.read_stat(proc, stat.pid)
    return now is None or now.start_ticks != stat.start_ticks
