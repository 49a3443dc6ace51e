"""What a busy thread does, by its counters: which loop it spins in, or that it works.

/proc/TID/io counts read() and write() on everything, and is blind to send(), recv() and poll(). A
thread that writes eight bytes hundreds of thousands of times a second spins on an eventfd; healthy
pollers make hundreds to thousands, and sleep in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hangdoctor.calls import EPOLLS
from hangdoctor.frames import python_frames
from hangdoctor.model import Frame, Process, ProcessStacks, Struct, Thread
from hangdoctor.waits import describe_object, describe_watched

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hangdoctor.model import OpenFile, Peek, ProcessWaits

RUNAWAY_CALLS_PER_S = 50_000
"""Healthy pollers make hundreds to thousands; a runaway eventfd loop 500,000 and more. Measured."""
BUSY_PCT = 5.0
"""A thread below this much of a core does not spin."""
SPINS_PCT = 70.0
"""So much of its time a thread that spins runs, or would if it had a CPU."""
SPINS_SLEEPS_PER_S = 20.0
"""A thread that sleeps more often than this waits for something each time."""
MOST_HINDERED = 10.0
"""A thread that shares its CPU would make at most so many times its calls on one of its own."""
SYSTEM_SHARE = 0.5
"""Of the CPU: above it a loop is made of system calls, whether io counts them or not."""
MOST_BUSY = 4
"""Threads of a process that are kept, the busiest first."""
SLEEPS_PER_CALL = 0.01
"""Two threads that wake each other sleep about once a call; a runaway loop never does. Measured:
0.9 sleeps a call in a ping-pong over ZMQ, none in an eventfd loop."""

Kind = Literal["eventfd", "eventfd-own", "chatter", "pipe", "calls", "python", "native"]


class Busy(Struct, frozen=True):
    """A thread that used CPU, and what of it was counted since the last look.

    Attributes:
        tid, name: of the thread.
        cpu_pct, system_pct: of one core, all and in the kernel; queue_pct: ready to run, without a
            CPU.
        sleeps_per_s: voluntary context switches; preempted_per_s: the others.
        write_calls_per_s, bytes_per_write, read_calls_per_s, bytes_per_read: None where not read.
    """

    tid: int
    name: str
    cpu_pct: float
    system_pct: float
    queue_pct: float | None = None
    sleeps_per_s: float | None = None
    preempted_per_s: float | None = None
    write_calls_per_s: float | None = None
    bytes_per_write: float | None = None
    read_calls_per_s: float | None = None
    bytes_per_read: float | None = None


class BusyStack(Struct, frozen=True):
    """What the dumps showed of a busy thread.

    Attributes:
        frames: its Python frames in the newest dump; empty for a thread that Python never lists.
        dumps: in how many it was looked for; with_gil: in how many it held the GIL.
    """

    frames: tuple[Frame, ...] = ()
    dumps: int = 0
    with_gil: int = 0


class Loop(Struct, frozen=True):
    """A loop that a thread of a process spins in.

    Attributes:
        kind: "eventfd": writes to one without end; "eventfd-own": and reads it again; "chatter":
            two threads write to each other; "pipe": small writes or reads on a pipe or socket pair;
            "calls": system calls that are not counted, such as send or poll; "python": Python that
            holds the GIL; "native": native code, the GIL not held.
        thread: its counters.
        stack: where it stands, as far as the dumps tell.
        files: descriptors that it may spin on.
        caught_in: the calls in which it was caught by its registers, the most frequent first.
    """

    kind: Kind
    thread: Busy
    stack: BusyStack = BusyStack()
    files: tuple[str, ...] = ()
    caught_in: tuple[str, ...] = ()


def busy_threads(
    before: Process, now: Process, seconds: float, stops: Mapping[int, int]
) -> tuple[Busy, ...]:
    """Return the threads that used CPU between two looks, the busiest first.

    Args:
        before: the process at the first look.
        now: at the second.
        seconds: between them.
        stops: by thread, how often we stopped it in between.
    """
    older = {thread.tid: thread for thread in before.threads}
    found = [
        _busy(older[thread.tid], thread, seconds, stops.get(thread.tid, 0))
        for thread in now.threads
        if thread.tid in older
        and 100 * (thread.cpu_s - older[thread.tid].cpu_s) / seconds >= BUSY_PCT
    ]
    found.sort(key=lambda busy: -busy.cpu_pct)
    return tuple(found[:MOST_BUSY])


def is_runaway(busy: Busy) -> bool:
    """Tell whether a thread writes eight bytes, or is refused, at a rate that no event explains."""
    writes = busy.write_calls_per_s or 0.0
    return (
        writes * _hindered(busy) > RUNAWAY_CALLS_PER_S
        and _of_an_eventfd(busy.bytes_per_write or 0.0)
        and not _sleeps(busy, writes)
    )


def see_busy_stacks(
    before: dict[int, BusyStack],
    threads: Sequence[Busy],
    stacks: ProcessStacks,
    process: Process,
) -> dict[int, BusyStack]:
    """Take in what a dump shows of the busy threads.

    Args:
        before: by thread id, as returned for the last dump.
        threads: the busy ones.
        stacks: the dump; it numbers threads as the target does.
        process: in a PID namespace of its own only its main thread's number is known.
    """
    if not any(stack.tid is not None for stack in stacks.threads):
        return {}  # Python 3.10 and older: nothing tells which thread is which
    by_tid = {stack.tid: stack for stack in stacks.threads if stack.tid is not None}
    if process.inner_pid is not None:
        main = by_tid.get(process.inner_pid)
        by_tid = {process.pid: main} if main else {}
        threads = [thread for thread in threads if thread.tid == process.pid]
    found = {}
    for thread in threads:
        old, stack = before.get(thread.tid, BusyStack()), by_tid.get(thread.tid)
        found[thread.tid] = BusyStack(
            frames=python_frames(stack) if stack else (),
            dumps=old.dumps + 1,
            with_gil=old.with_gil + bool(stack and stack.owns_gil),
        )
    return found


def find_loop(
    threads: Sequence[Busy],
    stacks: dict[int, BusyStack],
    files: Sequence[OpenFile] | None,
    waits: ProcessWaits | None = None,
    *,
    name_of: Callable[[int, str], str] = lambda pid, _: f"pid {pid}",
    sharing: Callable[[int], str] = lambda _: "",
) -> Loop | None:
    """Return the loop that the busiest of the threads spins in; None where none spins.

    A reading, and no fault: waiting for a GPU, or for requests, spins as well.

    Args:
        threads: the busy ones.
        stacks: what the dumps showed of them.
        files: descriptors of the process.
        waits: its epoll sets, and what the registers of its busiest thread told.
        name_of: gives a process's name for people, from its pid and comm.
        sharing: says who else has an eventfd open, by its number.
    """
    ordered = sorted(threads, key=lambda busy: (not is_runaway(busy), -busy.cpu_pct))
    for busy in ordered:
        stack = stacks.get(busy.tid, BusyStack())
        kind = _kind(busy, threads, stack, files)
        if kind is not None:
            peek = waits.peek if waits and waits.peek and waits.peek.tid == busy.tid else None
            return Loop(
                kind=kind,
                thread=busy,
                stack=stack,
                files=_eventfds(files, peek, sharing)
                if kind in ("eventfd", "eventfd-own")
                else _suspects(kind, files, peek, waits, name_of),
                caught_in=tuple(dict.fromkeys(each.call for each in peek.calls)) if peek else (),
            )
    return None


def _kind(
    busy: Busy,
    threads: Sequence[Busy],
    stack: BusyStack,
    files: Sequence[OpenFile] | None,
) -> Kind | None:
    writes, reads = busy.write_calls_per_s or 0.0, busy.read_calls_per_s or 0.0
    if max(writes, reads) * _hindered(busy) > RUNAWAY_CALLS_PER_S:
        if _sleeps(busy, max(writes, reads)) or _answered(busy, threads):
            return "chatter"
        if is_runaway(busy) and not _only_pipes(files):
            return "eventfd-own" if reads > writes / 2 else "eventfd"
        return "pipe"
    if busy.cpu_pct * _hindered(busy) < SPINS_PCT:
        return None
    if busy.sleeps_per_s is not None and busy.sleeps_per_s > SPINS_SLEEPS_PER_S:
        return None
    if busy.system_pct >= SYSTEM_SHARE * busy.cpu_pct:
        return "calls"
    if not stack.dumps:
        return None
    return "python" if 2 * stack.with_gil >= stack.dumps else "native"


def _busy(before: Thread, now: Thread, seconds: float, stops: int) -> Busy:
    cpu_pct = 100 * (now.cpu_s - before.cpu_s) / seconds
    old, new = before.hot, now.hot
    if old is None or new is None:
        return Busy(tid=now.tid, name=now.name, cpu_pct=cpu_pct, system_pct=0.0)
    found = Busy(
        tid=now.tid,
        name=now.name,
        cpu_pct=cpu_pct,
        system_pct=100 * (new.system_s - old.system_s) / seconds,
        queue_pct=_per_s(old.queue_s, new.queue_s, seconds / 100),
        sleeps_per_s=_per_s(
            old.sleeps, None if new.sleeps is None else new.sleeps - stops, seconds
        ),
        preempted_per_s=_per_s(old.preempted, new.preempted, seconds),
    )
    if old.io is None or new.io is None:
        return found
    writes, reads = new.io.syscw - old.io.syscw, new.io.syscr - old.io.syscr
    return Busy(
        tid=found.tid,
        name=found.name,
        cpu_pct=found.cpu_pct,
        system_pct=found.system_pct,
        queue_pct=found.queue_pct,
        sleeps_per_s=found.sleeps_per_s,
        preempted_per_s=found.preempted_per_s,
        write_calls_per_s=writes / seconds,
        bytes_per_write=(new.io.wchar - old.io.wchar) / writes if writes else None,
        read_calls_per_s=reads / seconds,
        bytes_per_read=(new.io.rchar - old.io.rchar) / reads if reads else None,
    )


def _of_an_eventfd(bytes_per_write: float) -> bool:
    """Tell whether writes are those of an eventfd: eight bytes, or none where it is full (EAGAIN).

    >>> _of_an_eventfd(8.0), _of_an_eventfd(0.0), _of_an_eventfd(3.47), _of_an_eventfd(1.0)
    (True, True, True, False)
    """
    whole = abs(bytes_per_write - round(bytes_per_write)) < 0.001
    return bytes_per_write <= 8.001 and not (whole and 0 < round(bytes_per_write) < 8)


def _hindered(busy: Busy) -> float:
    """Return how many times as fast a thread would be if it never waited for a CPU."""
    if not busy.queue_pct or busy.cpu_pct <= 0:
        return 1.0
    return min(MOST_HINDERED, (busy.cpu_pct + busy.queue_pct) / busy.cpu_pct)


def _per_s(before: float | None, now: float | None, seconds: float) -> float | None:
    return None if before is None or now is None else (now - before) / seconds


def _sleeps(busy: Busy, calls_per_s: float) -> bool:
    """Tell whether a thread sleeps between its calls, as one that waits for an answer does."""
    return busy.sleeps_per_s is not None and busy.sleeps_per_s > SLEEPS_PER_CALL * calls_per_s


def _answered(busy: Busy, threads: Sequence[Busy]) -> bool:
    """Tell whether another thread reads what this one writes, and writes what this one reads."""

    def near(one: float | None, other: float | None) -> bool:
        return bool(one and other) and 0.8 <= (one or 1) / (other or 1) <= 1.25

    return any(
        other.tid != busy.tid
        and near(busy.write_calls_per_s, other.read_calls_per_s)
        and near(busy.read_calls_per_s, other.write_calls_per_s)
        and (other.write_calls_per_s or 0) > RUNAWAY_CALLS_PER_S / 2
        and not near(busy.write_calls_per_s, busy.read_calls_per_s)
        for other in threads
    )


def _only_pipes(files: Sequence[OpenFile] | None) -> bool:
    """Tell whether a process has pipes open and no eventfd at all."""
    kinds = {file.kind for file in files or ()}
    return "eventfd" not in kinds and bool(kinds & {"pipe", "fifo"})


def _eventfds(
    files: Sequence[OpenFile] | None, peek: Peek | None, sharing: Callable[[int], str]
) -> tuple[str, ...]:
    """Return the eventfds that a loop may be about: in its registers, else those that stir."""
    eventfds = [file for file in files or () if file.kind == "eventfd"]
    caught = {each.fd for each in peek.calls} if peek else set()
    chosen = [file for file in eventfds if file.fd in caught]
    chosen = chosen or [file for file in eventfds if file.stirs]
    chosen = chosen or (eventfds if len(eventfds) == 1 else [])
    return tuple(
        f"descriptor {file.fd}"
        + (
            f", number {file.identity} in all processes{sharing(file.identity)}"
            if file.identity is not None
            else ""
        )
        for file in chosen[:3]
    )


def _suspects(
    kind: Kind,
    files: Sequence[OpenFile] | None,
    peek: Peek | None,
    waits: ProcessWaits | None,
    name_of: Callable[[int, str], str],
) -> tuple[str, ...]:
    """Return the descriptors that another loop may be about: those in its registers, else all."""
    caught = [
        f"epoll set {each.fd}, which watches {what}"
        if each.call in EPOLLS
        else f"descriptor {each.fd}, {describe_object(each.objects[0], name_of)}"
        for each in (peek.calls if peek else ())
        if (what := describe_watched(each.objects, name_of))
    ]
    if caught:
        return tuple(caught)
    if kind == "pipe":
        pipes = [file for file in files or () if file.kind in ("pipe", "fifo") and file.fd > 2]
        return tuple(f"descriptor {file.fd}, {file.target}" for file in pipes[:4])
    if kind == "calls" and waits:
        return tuple(
            f"epoll set {each.fd}, which watches {what}"
            for each in waits.epolls[:3]
            if (what := describe_watched(each.objects, name_of))
        )
    return ()
