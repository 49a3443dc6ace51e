"""Finds out what each blocked thread of the launch waits for, and who is at the other end.

Of each thread it reads the system call that it is blocked in; of that call's arguments the list of
a poll, the path of an open, the owner of a mutex; and of the descriptors the sockets, pipes and
epoll sets behind them. Nothing is stopped, but with consent (`Look.peek`) a thread that runs, for
microseconds. A process that blocks one of these reads loses only its own part.
"""

from __future__ import annotations

import os
import platform
import re
import struct
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from hangdoctor import calls
from hangdoctor.calls import Call, parse_syscall
from hangdoctor.collect import locks, procfs, sockets
from hangdoctor.collect.bounded import Bounded
from hangdoctor.collect.deadlines import is_sleep, read_end
from hangdoctor.collect.memory import STACK_BYTES, Maps, read_memory
from hangdoctor.collect.peek import peek
from hangdoctor.collect.permissions import refused
from hangdoctor.collect.processes import eventfd_identity, tree
from hangdoctor.model import (
    EpollSet,
    FileLock,
    Holder,
    Missing,
    Peek,
    ProcessWaits,
    ThreadWait,
    WaitObject,
    Waits,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hangdoctor.collect.look import Look
    from hangdoctor.collect.procfs import Stat

MOST_OBJECTS = 8
"""Objects kept of one wait: an event loop may have hundreds."""
MOST_EPOLLS = 4
"""Epoll sets kept of a process that runs."""
MOST_DESCRIPTORS = 4096
"""Descriptors followed of one process: a server with as many clients needs no more to be judged."""
MOST_THREADS = 2048
"""Threads looked at of one process."""
MOST_PEEKED = 16
"""Processes of which a thread is peeked at, those nearest to the root: launcher and ranks."""
PEEK_PCT = 50.0
"""Of a core: a thread that uses less since the last look is not peeked at."""

_MOST_POLLED = 1024
_PATH_BYTES = 4096
_MOST_REMEMBERED = 4096
_WITHIN_S = {"process": 1.5, "sockets": 0.6, "locks": 1.5}
_OUTSIDE_S = 0.3
_SETTLED_S = 2.0
"""Maps of a younger process still change, and of a compiler's are not worth it."""
_MAPS_AGAIN_S = 10.0

_MACHINE = platform.machine()
_TFD = re.compile(rb"^tfd:\s*(\d+)", re.MULTILINE)
_FLAGS = re.compile(rb"^flags:\s*([0-7]+)", re.MULTILINE)
_SWITCHES = re.compile(rb"^voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)
_ORDINARY = calls.POLLS | calls.EPOLLS | calls.SLEEPS | {"futex"}
_FIFO_OPEN = frozenset({"wait_for_partner", "fifo_open"})
_FUTEX_COMMAND = 0x7F
_FUTEX_WAIT, _FUTEX_WAIT_BITSET, _CONTENDED = 0, 9, 2
_DULL_FUTEX = ("gil", "semaphore", "other")
_MOST_USERS = 1 << 16

_Key = tuple[int, int]  # pid and start_ticks name a process for ever
_Futex = Literal["", "gil", "mutex", "semaphore", "other"]


class _Thread(NamedTuple):
    """A blocked thread, before its descriptors are followed.

    Attributes:
        ends_s: the monotonic clock when its sleep ends.
    """

    tid: int
    call: Call
    line: str
    fds: tuple[int, ...] = ()
    path: str = ""
    timed: bool = False
    ends_s: float | None = None
    lasts_s: float | None = None
    kernel: str = ""
    switches: int | None = None
    futex: _Futex = ""
    address: int = 0
    owner_tid: int | None = None
    waits_for_pid: int | None = None
    libraries: tuple[str, ...] = ()


class _Seen(NamedTuple):
    """What is known of one process before the processes are put together."""

    pid: int
    comm: str
    threads: tuple[_Thread, ...]
    links: dict[int, str]
    epolls: dict[int, tuple[int, ...]]
    eventfds: dict[int, int]
    namespace: str
    runs: bool
    unreadable: dict[str, Missing]
    peek: Peek | None = None


class _Refused(NamedTuple):
    """A process whose threads may not be looked at, and its descriptors as far as they may."""

    why: Missing
    links: dict[int, str]


class _Descriptors(NamedTuple):
    """Of one process: where each leads, the members of epoll sets, the numbers of eventfds.

    Attributes:
        unseen: how many were left out.
    """

    links: dict[int, str]
    epolls: dict[int, tuple[int, ...]]
    eventfds: dict[int, int]
    unseen: int = 0


_kept = procfs.KeptOpen()
_processes: Bounded[_Key, _Seen | _Refused | None] = Bounded()
_tables: Bounded[str, sockets.Table | Missing] = Bounded()
_locks: Bounded[str, tuple[FileLock, ...] | Missing] = Bounded()


class _Known:
    """What of a process is known from the last look: its maps, where threads stand, what they used.

    Attributes:
        maps, maps_at_s: when they were read.
        libraries: by thread and place.
        dull: threads in a lock without an owner, with the line that shows it.
        used: CPU of the threads that ran, in seconds, and when.
        waited_for_gil: threads that waited for Python's lock.
    """

    def __init__(self) -> None:
        self.maps: Maps | None = None
        self.maps_at_s = -1e9
        self.libraries: dict[tuple[int, str], tuple[str, ...]] = {}
        self.dull: dict[int, tuple[str, _Thread]] = {}
        self.used: dict[int, tuple[float, float]] = {}
        self.waited_for_gil: set[int] = set()


_known: dict[_Key, _Known] = {}


def read(look: Look) -> Waits:
    """Read what all blocked threads of the tree wait for."""
    stats = procfs.scan(look.proc, _kept.read)
    keys = {(pid, stats[pid].start_ticks): stats[pid] for pid in tree(stats, look)}
    for gone in _known.keys() - keys.keys():
        del _known[gone]
    answers = _processes.run(
        {
            key: partial(
                _read_process,
                look.proc,
                stat,
                _known.setdefault(key, _Known()),
                peeks=look.peek and number < MOST_PEEKED,
            )
            for number, (key, stat) in enumerate(keys.items())
            if stat.state not in "ZX"
        },
        within_s=_WITHIN_S["process"],
    )
    by_pid: dict[int, ProcessWaits | Missing] = {}
    seen: list[_Seen] = []
    descriptors: dict[int, dict[int, str]] = {}
    for key, stat in keys.items():
        answer = answers.get(key, _BLOCKS) if stat.state not in "ZX" else None
        if answer is None:
            continue
        descriptors[stat.pid] = answer.links
        if isinstance(answer, _Refused):
            by_pid[stat.pid] = answer.why
        else:
            seen.append(answer)
            if look.peek and answer.runs and len(descriptors) > MOST_PEEKED:
                answer.unreadable["registers"] = _NOT_PEEKED
    _kept.close_unused()
    file_locks: tuple[FileLock, ...] | Missing = ()
    # The kernel keeps all locks of the machine waiting while it lists them, for milliseconds.
    if look.locks or len(seen) < len(descriptors) or any(map(_waits_for_lock, seen)):
        read_locks = partial(_read_locks, look.proc, stats, descriptors, search=look.locks)
        found = _locks.run({look.proc: read_locks}, within_s=_WITHIN_S["locks"])
        file_locks = found.get(look.proc, _LOCKS_BLOCK)
    world = _World(look.proc, stats, seen, file_locks, look.began_s)
    for one in seen:
        by_pid[one.pid] = world.waits_of(one)
    return Waits(
        by_pid={pid: by_pid[pid] for pid in sorted(by_pid)},
        locks=file_locks,
        locks_searched=look.locks,
    )


def _read_process(proc: str, stat: Stat, known: _Known, *, peeks: bool) -> _Seen | _Refused | None:
    """Read a process's blocked threads and its descriptors; None where it has ended."""
    pid = stat.pid
    user: int | None = None
    try:
        user = os.stat(f"{proc}/{pid}").st_uid
        lines, unseen = _syscall_lines(proc, pid, known)
        unreadable: dict[str, Missing] = {}
        if unseen:
            unreadable["threads"] = _left_out(unseen, "threads", MOST_THREADS)
        try:
            descriptors = _read_descriptors(proc, pid)
            namespace = os.readlink(f"{proc}/{pid}/ns/net")
        except PermissionError as error:
            descriptors, namespace = _Descriptors({}, {}, {}), ""
            unreadable["fd"] = refused(f"{error.strerror} ({error.filename})", user)
        if descriptors.unseen:
            unreadable["fd"] = _left_out(descriptors.unseen, "descriptors", MOST_DESCRIPTORS)
        reader = _Reader(proc, pid, known, unreadable, user)
        if procfs.age_s(stat.start_ticks) >= _SETTLED_S:
            reader.map_once(lines)
        threads = tuple(
            thread for tid, line in lines.items() if (thread := reader.thread(tid, line))
        )
    except (FileNotFoundError, ProcessLookupError):
        return None
    except PermissionError as error:
        why = refused(f"{error.strerror} ({error.filename})", user)
        return _Refused(why, _readable_links(proc, pid))
    known.waited_for_gil = {thread.tid for thread in threads if thread.futex == "gil"}
    running = [tid for tid, line in lines.items() if line == "running"]
    peeked = _peek_at_busiest(proc, pid, running, known) if peeks else None
    if isinstance(peeked, Missing):
        unreadable["registers"] = peeked
        peeked = None
    return _Seen(
        pid=pid,
        comm=stat.comm,
        threads=threads,
        links=descriptors.links,
        epolls=descriptors.epolls,
        eventfds=descriptors.eventfds,
        namespace=namespace,
        runs=bool(running),
        unreadable=unreadable,
        peek=peeked,
    )


def _peek_at_busiest(
    proc: str, pid: int, running: list[int], known: _Known
) -> Peek | Missing | None:
    """Peek at the thread that used most CPU since the last look; None where none used much."""
    now_s = time.monotonic()
    used: dict[int, tuple[float, float]] = {}
    shares: list[tuple[float, int]] = []
    for tid in running:
        try:
            cpu_s = procfs.parse_stat(procfs.read(f"{proc}/{pid}/task/{tid}/stat")).cpu_s
        except OSError:
            continue
        used[tid] = cpu_s, now_s
        if tid in known.used:
            before_s, at_s = known.used[tid]
            shares.append((100 * (cpu_s - before_s) / max(now_s - at_s, 1e-3), tid))
    known.used = used
    share, tid = max(shares, default=(0.0, 0))
    return peek(proc, pid, tid) if share >= PEEK_PCT else None


_TRIES = 4
"""Further reads of threads that run: of those, most are really at work."""
_PAUSE_S = 0.001
"""Before each further read of a thread that waited for Python's lock: it runs for moments only."""


def _syscall_lines(proc: str, pid: int, known: _Known) -> tuple[dict[int, str], int]:
    """Return the line of each thread, the main thread first, and how many were left out.

    Raises:
        OSError: refused; a thread that has ended is left out.
    """
    lines: dict[int, str] = {}
    task = f"{proc}/{pid}/task"
    tids = sorted(map(int, os.listdir(task)), key=lambda tid: (tid != pid, tid))
    for tid in tids[:MOST_THREADS]:
        line = _syscall_line(task, tid)
        if line is not None:
            lines[tid] = line
    # Who waits for the GIL wakes every 5 ms, and may just have done so.
    for _ in range(_TRIES):
        running = [tid for tid, line in lines.items() if line == "running"]
        if known.waited_for_gil.intersection(running):
            time.sleep(_PAUSE_S)
        for tid in running:
            lines[tid] = _syscall_line(task, tid) or "running"
    return lines, max(0, len(tids) - MOST_THREADS)


def _syscall_line(task: str, tid: int) -> str | None:
    """Read the line of a thread; None where it has ended."""
    try:
        return _kept.read(f"{task}/{tid}/syscall").decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _read_descriptors(proc: str, pid: int) -> _Descriptors:
    """Read the descriptors of a process."""
    links: dict[int, str] = {}
    epolls: dict[int, tuple[int, ...]] = {}
    eventfds: dict[int, int] = {}
    directory = os.open(f"{proc}/{pid}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        names = os.listdir(directory)
        for name in names[:MOST_DESCRIPTORS]:
            try:
                link = os.readlink(name.encode(), dir_fd=directory).decode(errors="replace")
                if link == "anon_inode:[eventpoll]":
                    info = procfs.read_table(f"{proc}/{pid}/fdinfo/{name}")
                    epolls[int(name)] = tuple(map(int, _TFD.findall(info)))
                elif link == "anon_inode:[eventfd]":
                    number = eventfd_identity(procfs.read(f"{proc}/{pid}/fdinfo/{name}"))
                    if number is not None:
                        eventfds[int(name)] = number
            except (FileNotFoundError, ProcessLookupError):  # closed in between
                continue
            links[int(name)] = link
    finally:
        os.close(directory)
    return _Descriptors(links, epolls, eventfds, max(0, len(names) - MOST_DESCRIPTORS))


def _left_out(count: int, what: str, most: int) -> Missing:
    return Missing(
        reason="not-tried", detail=f"{count} of its {what} were not looked at, beyond {most}"
    )


def _readable_links(proc: str, pid: int) -> dict[int, str]:
    """Return where the descriptors of a process lead that may not be looked at any closer."""
    try:
        return _read_descriptors(proc, pid).links
    except OSError:
        return {}


class _Reader:
    """Reads what the arguments of a process's calls point to."""

    def __init__(
        self, proc: str, pid: int, known: _Known, unreadable: dict[str, Missing], user: int | None
    ) -> None:
        self.proc = proc
        self.pid = pid
        self.known = known
        self.unreadable = unreadable
        self.user = user

    def map_once(self, lines: dict[int, str]) -> None:
        """Read the maps if there are none yet, or a thread stands where none of them is."""
        known, now_s = self.known, time.monotonic()
        if now_s - known.maps_at_s < _MAPS_AGAIN_S:
            return
        counters = (line.rpartition(" ")[2] for line in lines.values() if line != "running")
        if known.maps and all(known.maps.library(int(counter, 16)) for counter in counters):
            return
        known.maps_at_s = now_s
        try:
            known.maps = Maps(self.proc, self.pid)
        except PermissionError as error:
            self.unreadable["memory"] = refused(f"{error.strerror} ({error.filename})", self.user)

    def thread(self, tid: int, line: str) -> _Thread | None:
        """Return a thread that is blocked; None for one that runs."""
        before = self.known.dull.get(tid)
        if before and before[0] == line:
            return before[1]
        call = parse_syscall(line, _MACHINE)
        if call is None:
            return None
        if call.name == "restart_syscall":
            wchan = _first_word(f"{self.proc}/{self.pid}/task/{tid}/wchan")
            call = calls.resumed(call, wchan)
        thread = self._blocked(tid, call, line)
        # A lock without an owner tells nothing new as long as the line is the same.
        if len(self.known.dull) > _MOST_REMEMBERED:
            self.known.dull.clear()
        if tid != self.pid and thread.futex in _DULL_FUTEX and self.known.maps:
            self.known.dull[tid] = line, thread
        return thread

    def _blocked(self, tid: int, call: Call, line: str) -> _Thread:
        name, arguments = call.name, call.arguments
        at = f"{self.proc}/{self.pid}/task/{tid}"
        fds: tuple[int, ...] = ()
        path, kernel = "", ""
        futex: _Futex = ""
        owner: int | None = None
        if name in calls.ON_ONE | calls.EPOLLS:
            fds = (call.fd,)
        elif name in calls.POLLS:
            fds = self._polled(call)
        elif name == "futex":
            futex, owner = self._futex(call, tid)
        if name not in _ORDINARY:
            kernel = _first_word(f"{at}/wchan")
        if name in calls.OPENS:
            path = self._path(call)
        waits_for = arguments[0] if name == "wait4" else arguments[1] if name == "waitid" else None
        if name == "waitid" and arguments[0] != os.P_PID:
            waits_for = None
        ends_s = lasts_s = None
        if tid == self.pid and is_sleep(call):
            ends_s, lasts_s = read_end(call, self._memory, proc=self.proc, pid=self.pid)
        close = tid == self.pid or name not in _ORDINARY or futex == "mutex"
        return _Thread(
            tid=tid,
            call=call,
            line=" ".join(line.split()[:2]),
            fds=fds,
            path=path,
            timed=_is_timed(call),
            ends_s=ends_s,
            lasts_s=lasts_s,
            kernel=kernel,
            switches=_switches(at) if close else None,
            futex=futex,
            address=arguments[0] if name == "futex" else 0,
            owner_tid=owner,
            waits_for_pid=waits_for if waits_for and waits_for < 1 << 31 else None,
            libraries=self._libraries(tid, call, line),
        )

    def _memory(self, address: int, count: int) -> bytes:
        """Read memory; b"" where that is not possible."""
        try:
            return read_memory(self.proc, self.pid, address, count) if address else b""
        except PermissionError as error:
            self.unreadable["memory"] = refused(f"{error.strerror} ({error.filename})", self.user)
        except ProcessLookupError:
            raise
        except OSError:
            pass
        return b""

    def _polled(self, call: Call) -> tuple[int, ...]:
        if call.name in ("poll", "ppoll"):
            count = min(call.arguments[1] & 0xFFFF_FFFF, _MOST_POLLED)
            raw = self._memory(call.arguments[0], 8 * count)
            entries = struct.iter_unpack("<ihh", raw[: len(raw) & ~7])
            return tuple(fd for fd, events, _ in entries if fd >= 0 and events)
        count_bytes = ((call.fd if call.fd < 1 << 16 else 0) + 7) // 8
        sets = [self._memory(address, count_bytes) for address in call.arguments[1:4]]
        return tuple(
            fd
            for fd in range(8 * count_bytes)
            if any(fd // 8 < len(bits) and bits[fd // 8] >> fd % 8 & 1 for bits in sets)
        )

    def _path(self, call: Call) -> str:
        """Return the path that an open was given, whole where it is relative."""
        relative_to, address = (None, call.arguments[0])
        if call.name != "open":
            relative_to, address = call.fd, call.arguments[1]
        raw = self._memory(address, min(_PATH_BYTES, 4096 - address % 4096))
        if b"\0" not in raw:
            raw += self._memory(address + len(raw), _PATH_BYTES) if raw else b""
        path = raw.split(b"\0")[0].decode(errors="replace")
        if not path or path.startswith("/"):
            return path
        here = relative_to is None or relative_to == 0xFFFF_FF9C  # AT_FDCWD
        try:
            base = os.readlink(f"{self.proc}/{self.pid}/{'cwd' if here else f'fd/{relative_to}'}")
        except OSError:
            return path
        return os.path.normpath(f"{base}/{path}")

    def _futex(self, call: Call, tid: int) -> tuple[_Futex, int | None]:
        """Tell what a thread waits for in a futex, and who owns it.

        glibc waits for a mutex with FUTEX_WAIT and the value 2, and writes the owner 8 bytes behind
        the lock (struct __pthread_mutex_s). A value at that place is an owner only if it is another
        thread of the process; semaphores and conditions have none.

        It waits for a semaphore with FUTEX_WAIT_BITSET and the value 0, and counts who waits in the
        next 4 bytes (struct new_sem of its 64-bit semaphores).
        """
        address, operation, value = call.arguments[:3]
        runtime = self.known.maps.runtime if self.known.maps else None
        if runtime and runtime[0] <= address < runtime[1]:
            return "gil", None
        command, value = operation & _FUTEX_COMMAND, value & 0xFFFF_FFFF
        if command == _FUTEX_WAIT_BITSET and value == 0:
            raw = self._memory(address, 8)
            posted, waiters = struct.unpack("=II", raw) if len(raw) == 8 else (1, 0)
            semaphore = posted == 0 and 0 < waiters < _MOST_USERS
            return ("semaphore" if semaphore else "other"), None
        if command != _FUTEX_WAIT or value != _CONTENDED:
            return "other", None
        raw = self._memory(address, 20)
        if len(raw) < 20:
            return "other", None
        lock, _, inner_owner, users, kind = struct.unpack("=iiiII", raw)
        if lock != _CONTENDED or not users or users > _MOST_USERS or kind & ~0x3FF:
            return "other", None
        owner = self._outer_tid(inner_owner)
        return ("mutex", owner) if owner and owner != tid else ("other", None)

    def _outer_tid(self, inner_tid: int) -> int | None:
        """Return the number that we know a thread by that knows itself by another."""
        task = f"{self.proc}/{self.pid}/task"
        if inner_tid <= 0:
            return None
        status = procfs.parse_status(procfs.read(f"{self.proc}/{self.pid}/status"))
        if len(status.get("NSpid", "").split()) < 2:
            return inner_tid if os.path.exists(f"{task}/{inner_tid}") else None
        for tid in os.listdir(task):
            try:
                status = procfs.parse_status(procfs.read(f"{task}/{tid}/status"))
            except OSError:
                continue
            if status.get("NSpid", "").split()[-1:] == [str(inner_tid)]:
                return int(tid)
        return None

    def _libraries(self, tid: int, call: Call, line: str) -> tuple[str, ...]:
        if self.known.maps is None:
            return ()
        key = tid, " ".join(line.split()[-2:])
        found = self.known.libraries.get(key)
        if found is None:
            stack = self._memory(call.stack_pointer, STACK_BYTES)
            found = self.known.maps.libraries(stack)
            if len(self.known.libraries) > _MOST_REMEMBERED:
                self.known.libraries.clear()
            self.known.libraries[key] = found
        return found


class _World:
    """All processes of the launch together: who holds what, who waits at which end."""

    def __init__(
        self,
        proc: str,
        stats: dict[int, Stat],
        seen: list[_Seen],
        file_locks: tuple[FileLock, ...] | Missing,
        began_s: float,
    ) -> None:
        self.proc = proc
        self.began_s = began_s
        self.lock_holders = {
            (waiter, lock.path): lock.holders
            for lock in (() if isinstance(file_locks, Missing) else file_locks)
            for waiter in lock.waiters
        }
        self.seen = {one.pid: one for one in seen}
        self.holders: dict[str, list[tuple[int, int]]] = {}
        self.sharers: dict[int, dict[int, None]] = {}
        self.served: set[str] = set()
        self.readers: dict[str, list[int]] = {}
        for one in seen:
            for fd, link in one.links.items():
                self.holders.setdefault(link, []).append((one.pid, fd))
            for number in one.eventfds.values():
                self.sharers.setdefault(number, {})[one.pid] = None
            for members in one.epolls.values():
                self.served.update(one.links[fd] for fd in members if fd in one.links)
            for thread in one.threads:
                for fd in thread.fds:
                    if (waited := one.links.get(fd)) and thread.call.name not in calls.EPOLLS:
                        self.served.add(waited)
                        if thread.call.name in calls.READS:
                            self.readers.setdefault(waited, []).append(thread.tid)
        # Of what was not looked at, any may serve any other end.
        self.all_descriptors = not any("fd" in one.unreadable for one in seen)
        self.tables = self._read_tables()
        self.addresses: dict[str, dict[tuple[str, str], int]] = {}
        self.listeners: dict[str, dict[int, int]] = {}
        for namespace, table in self.tables.items():
            if isinstance(table, Missing):
                continue
            self.addresses[namespace] = {
                (each.local, each.remote): inode
                for inode, each in table.by_inode.items()
                if each.family == "tcp"
            }
            self.listeners[namespace] = {
                waiting: inode for inode, each in table.by_inode.items() for waiting in each.waiting
            }
        self.outside = self._look_outside(stats)

    def waits_of(self, one: _Seen) -> ProcessWaits:
        unreadable = dict(one.unreadable)
        table = self.tables.get(one.namespace)
        if isinstance(table, Missing):
            unreadable["sockets"] = table
        elif (
            table
            and not table.whole
            and any(link.startswith("socket:") for link in one.links.values())
        ):
            unreadable["sockets"] = _NOT_WHOLE
        return ProcessWaits(
            threads=tuple(self._wait(one, thread) for thread in one.threads),
            unreadable=unreadable,
            epolls=tuple(self._epolls(one)) if one.runs else (),
            peek=self._peeked(one),
        )

    def _epolls(self, one: _Seen) -> Iterator[EpollSet]:
        for fd, members in sorted(one.epolls.items())[:MOST_EPOLLS]:
            yield EpollSet(fd=fd, objects=self._of_call(one, "epoll_wait", fd), count=len(members))

    def _peeked(self, one: _Seen) -> Peek | None:
        """Return a peek with what the descriptors of its calls lead to."""
        if one.peek is None:
            return None
        peeked_calls = tuple(
            msgspec.structs.replace(each, objects=self._of_call(one, each.call, each.fd))
            if each.fd is not None
            else each
            for each in one.peek.calls
        )
        return msgspec.structs.replace(one.peek, calls=peeked_calls)

    def _of_call(self, one: _Seen, name: str, fd: int) -> tuple[WaitObject, ...]:
        thread = _Thread(tid=0, call=Call(name, (fd,), 0), line="", fds=(fd,))
        fds = self._waited_fds(one, thread)[:MOST_OBJECTS]
        return tuple(self._object(one, each, thread) for each in fds if each in one.links)

    def _wait(self, one: _Seen, thread: _Thread) -> ThreadWait:
        fds = self._waited_fds(one, thread)
        objects = tuple(self._object(one, fd, thread) for fd in fds[:MOST_OBJECTS])
        if thread.path:
            fifo = thread.kernel in _FIFO_OPEN
            objects = (
                WaitObject(
                    kind="fifo" if fifo else "file",
                    target=thread.path,
                    others=() if fifo else None,
                ),
            )
        return ThreadWait(
            tid=thread.tid,
            call=thread.call.name,
            line=thread.line,
            objects=objects,
            count=len(fds) or len(objects),
            timed=thread.timed,
            # Each look shall tell the same, also of a clock that is steered.
            ends_at_s=None if thread.ends_s is None else round(thread.ends_s - self.began_s, 1),
            lasts_s=thread.lasts_s,
            kernel=thread.kernel,
            switches=thread.switches,
            futex=thread.futex,
            address=thread.address,
            owner_tid=thread.owner_tid,
            waits_for_pid=thread.waits_for_pid,
            libraries=thread.libraries,
        )

    @staticmethod
    def _waited_fds(one: _Seen, thread: _Thread) -> tuple[int, ...]:
        if thread.call.name in calls.EPOLLS and thread.fds:
            return one.epolls.get(thread.fds[0], ())
        return thread.fds

    def _object(self, one: _Seen, fd: int, thread: _Thread) -> WaitObject:
        link = one.links.get(fd, "")
        if link.startswith("socket:["):
            return self._socket(one, fd, link)
        if link.startswith("pipe:["):
            return self._pipe(one, fd, link, "pipe", thread)
        if link == "anon_inode:[eventfd]":
            number = one.eventfds.get(fd)
            sharers = self.sharers.get(number, {}) if number is not None else {}
            return WaitObject(
                kind="eventfd",
                fd=fd,
                target=link,
                identity=number,
                others=tuple(Holder(pid, self.seen[pid].comm) for pid in sharers if pid != one.pid)
                if number is not None
                else None,
            )
        if link.startswith("/"):
            # Nothing else with a name lets a read wait like that.
            if thread.kernel.endswith(("pipe_read", "pipe_write", "pipe_wait_readable")):
                return self._pipe(one, fd, link, "fifo", thread)
            holders = self.lock_holders.get((one.pid, link))
            return WaitObject(kind="file", fd=fd, target=link, others=holders or None)
        return WaitObject(kind="other", fd=fd, target=link)

    def _socket(self, one: _Seen, fd: int, link: str) -> WaitObject:
        inode = int(link[8:-1])
        table = self.tables.get(one.namespace)
        if table is None or isinstance(table, Missing) or inode not in table.by_inode:
            return WaitObject(kind="socket", fd=fd, target=link)
        found = table.by_inode[inode]
        state, peer = found.state, found.peer
        if found.family == "unix" and state == "established" and not peer:
            peer = self.listeners[one.namespace].get(inode, 0)
            state = sockets.NOT_ACCEPTED if peer else state
        elif found.family == "tcp" and state == "established":
            peer = self.addresses[one.namespace].get((found.remote, found.local), 0)
            if not peer and (found.local, found.remote) in table.not_accepted:
                state, peer = sockets.NOT_ACCEPTED, _listener(table, found.remote)
        others: tuple[Holder, ...] | None = None
        served: bool | None = None
        mutual: tuple[int, ...] = ()
        if peer:
            others, served, mutual = self._end(one, f"socket:[{peer}]")
        elif state == "syn-sent":
            others = ()
        kind: Any = found.family
        name = found.local or (table.by_inode[peer].local if peer in table.by_inode else "")
        return WaitObject(
            kind=kind,
            fd=fd,
            target=f"{found.local} -> {found.remote}"
            if found.family == "tcp" and state != "listen"
            else name,
            state=state,
            others=others,
            served=served,
            mutual=mutual,
            received_bytes=found.received_bytes,
            unsent_bytes=found.unsent_bytes,
            since_received_ms=found.since_received_ms,
            since_sent_ms=found.since_sent_ms,
            retransmits=found.retransmits,
        )

    def _end(
        self, one: _Seen, link: str
    ) -> tuple[tuple[Holder, ...] | None, bool | None, tuple[int, ...]]:
        """Return who holds the other end, whether it is served, and who reads it alone."""
        inside = [pid for pid, _ in self.holders.get(link, ())]
        # Who inherits both ends of a pair holds its own other end, too.
        pids = [pid for pid in dict.fromkeys(inside) if pid != one.pid] or inside[:1]
        holders = tuple(Holder(pid, self.seen[pid].comm) for pid in pids)
        if holders:
            served = True if link in self.served else self._served_by_nobody(pids)
            alone = self._served_by_nobody(pids) is False
            return holders, served, tuple(self.readers.get(link, ())) if alone else ()
        outside = tuple(self.outside.get(link, ()))
        return outside or None, None, ()

    def _served_by_nobody(self, pids: list[int]) -> bool | None:
        """Return False for an end that nobody was seen to serve; None where not all was looked at.

        It counts what was left out of the launch's descriptors, and of its holders' threads.
        """
        whole = all("threads" not in self.seen[pid].unreadable for pid in pids)
        return False if whole and self.all_descriptors else None

    def _pipe(self, one: _Seen, fd: int, link: str, kind: Any, thread: _Thread) -> WaitObject:
        """Return a pipe with the processes that hold its other end open."""
        wanted = os.O_RDONLY if thread.call.name in calls.WRITES else os.O_WRONLY
        pids = [
            pid
            for pid, other in self.holders.get(link, ())
            if (pid, other) != (one.pid, fd)
            and _access(self.proc, pid, other) in (wanted, os.O_RDWR)
        ]
        pids = [pid for pid in dict.fromkeys(pids) if pid != one.pid] or pids[:1]
        holders = tuple(Holder(pid, self.seen[pid].comm) for pid in pids)
        if not holders and one.namespace:
            holders = tuple(self.outside.get(link, ()))
        return WaitObject(
            kind=kind,
            fd=fd,
            target=link,
            others=holders or None,
            served=self._served_by_nobody(pids) if holders else None,
        )

    def _read_tables(self) -> dict[str, sockets.Table | Missing]:
        """Read the sockets of each network namespace of the launch."""
        try:
            own = os.readlink(f"{self.proc}/self/ns/net")
        except OSError:
            own = ""
        members: dict[str, int | None] = {}
        for one in self.seen.values():
            if one.namespace:
                members.setdefault(one.namespace, None if one.namespace == own else one.pid)
        found = _tables.run(
            {name: partial(_table, self.proc, pid) for name, pid in members.items()},
            within_s=_WITHIN_S["sockets"],
        )
        return {name: found.get(name, _NO_ANSWER) for name in members}

    def _wanted(self) -> set[str]:
        """Return the other ends of blocked reads and writes that nobody of the launch holds."""
        wanted = set()
        for one in self.seen.values():
            for thread in one.threads:
                if thread.call.name not in calls.READS | calls.WRITES:
                    continue
                for fd in thread.fds:
                    link = one.links.get(fd, "")
                    if link.startswith("pipe:["):
                        if len({pid for pid, _ in self.holders[link]}) < 2:
                            wanted.add(link)
                    elif link.startswith("socket:["):
                        wanted.update(self._wanted_peer(one, int(link[8:-1])))
        return wanted

    def _wanted_peer(self, one: _Seen, inode: int) -> Iterator[str]:
        table = self.tables.get(one.namespace)
        if table is None or isinstance(table, Missing) or inode not in table.by_inode:
            return
        found = table.by_inode[inode]
        peer = found.peer or self.addresses[one.namespace].get((found.remote, found.local), 0)
        if peer and f"socket:[{peer}]" not in self.holders:
            yield f"socket:[{peer}]"

    def _look_outside(self, stats: dict[int, Stat]) -> dict[str, list[Holder]]:
        """Look for the holders of other ends among all processes, for a limited time."""
        wanted = self._wanted()
        found: dict[str, list[Holder]] = {}
        until_s = time.monotonic() + _OUTSIDE_S
        for pid in sorted(stats.keys() - self.seen.keys(), reverse=True) if wanted else ():
            if time.monotonic() > until_s:
                break
            try:
                links = {
                    os.readlink(f"{self.proc}/{pid}/fd/{name}")
                    for name in os.listdir(f"{self.proc}/{pid}/fd")
                }
            except OSError:
                continue
            for link in wanted & links:
                found.setdefault(link, []).append(Holder(pid, stats[pid].comm))
        return found


def _waits_for_lock(one: _Seen) -> bool:
    return any(thread.call.name in calls.LOCKS for thread in one.threads)


def _read_locks(
    proc: str, stats: dict[int, Stat], tree: dict[int, dict[int, str]], *, search: bool
) -> tuple[FileLock, ...] | Missing:
    try:
        return locks.read(proc, stats, tree, search=search)
    except FileNotFoundError:
        return Missing(reason="unsupported", detail="this kernel has no /proc/locks")
    except OSError as error:
        return Missing(reason="failed", detail=str(error))


def _table(proc: str, pid: int | None) -> sockets.Table | Missing:
    try:
        return sockets.read(proc, pid)
    except PermissionError as error:
        return refused(f"another network namespace: {error.strerror}", None)
    except OSError as error:
        return Missing(reason="failed", detail=str(error))


def _listener(table: sockets.Table, address: str) -> int:
    """Return the inode of the listener at an address; 0 for none."""
    port = address.rpartition(":")[2]
    return next(
        (
            inode
            for inode, each in table.by_inode.items()
            if each.state == "listen" and each.local.rpartition(":")[2] == port
        ),
        0,
    )


def _is_timed(call: Call) -> bool:
    """Tell whether a call ends by itself after a while."""
    arguments = call.arguments
    if call.name in calls.SLEEPS:
        return True
    if call.name in ("futex", "epoll_pwait2", "semtimedop"):
        return bool(arguments[3])
    if call.name in ("epoll_wait", "epoll_pwait"):
        return not arguments[3] >> 31 & 1
    if call.name == "poll":
        return not arguments[2] >> 31 & 1
    if call.name == "ppoll":
        return bool(arguments[2])
    return call.name in calls.POLLS and bool(arguments[4])


def _access(proc: str, pid: int, fd: int) -> int | None:
    """Return how a descriptor is open: O_RDONLY, O_WRONLY or O_RDWR."""
    try:
        match = _FLAGS.search(procfs.read(f"{proc}/{pid}/fdinfo/{fd}"))
    except OSError:
        return None
    return int(match[1], 8) & os.O_ACCMODE if match else None


def _switches(task: str) -> int | None:
    try:
        match = _SWITCHES.search(procfs.read(f"{task}/status"))
    except OSError:
        return None
    return int(match[1]) if match else None


def _first_word(path: str) -> str:
    try:
        word = procfs.read(path).decode(errors="replace").strip()
    except OSError:
        return ""
    return "" if word == "0" else word


_BLOCKS = _Refused(
    Missing(reason="timeout", detail="reading it blocks: a lock of the process is held"), {}
)
_NOT_PEEKED = Missing(
    reason="not-tried", detail=f"the {MOST_PEEKED} processes nearest to the root are peeked at"
)
_LOCKS_BLOCK = Missing(reason="timeout", detail="a directory of locks is on stalled storage")
_NO_ANSWER = Missing(reason="timeout", detail="the kernel's list of sockets did not come in time")
_NOT_WHOLE = Missing(
    reason="permission",
    detail="its network namespace may not be entered: peers of unix sockets are not seen",
    hint="run hangdoctor as root, or inside the container",
)
