"""The threads of a process that are blocked now: where, for how long, and in which circles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.calls import EPOLLS, POLLS, SLEEPS
from hangdoctor.frames import place
from hangdoctor.model import Struct
from hangdoctor.sleeps import left_s, wakes_at_s, wakes_in
from hangdoctor.tracks import lives, waits_for_gil_holder
from hangdoctor.waits import (
    call_name,
    describe,
    describe_traffic,
    is_sleep,
    is_unanswered,
    only_sharer,
    only_target,
    same_call,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hangdoctor.model import ThreadWait
    from hangdoctor.tracks import Track

_IDLE_IN = (
    "/threading.py", "/queue.py", "/concurrent/futures/thread.py", "/concurrent/futures/process.py",
    "/concurrent/futures/_base.py", "/multiprocessing/queues.py", "/multiprocessing/pool.py",
    "/multiprocessing/synchronize.py", "/asyncio/base_events.py",
)  # fmt: skip
"""Modules of Python in which threads wait that have nothing to do."""


class Blocked(Struct, frozen=True):
    """A thread that is blocked now.

    Attributes:
        tid, thread: its id and its name.
        call: the system call, in the words of `text`.
        text: call and object, for people.
        for_s: how long it was seen in this same wait.
        asleep: it waits for time alone.
        wakes_at_s: recording times between which its sleep ends by itself; None where it is in
            none, or that is not known.
        waits_for: pid of the one process that can end it; None where none or several can.
        may_wait_for: pid of the one other process that shares the eventfd it waits for, which
            threads of its own may write as well.
        mutual: that process's main thread is blocked in reading the same connection.
        native: no dump of Python's threads lists it; None where there was none.
        unanswered: its connection is not accepted, or not answered at all.
        path: of the file or FIFO that it opens.
        owner_tid: thread of the same process that owns the mutex it waits for.
        futex: as in ThreadWait.
        libraries: as in ThreadWait.
        traffic: of the one connection that it waits for, as `describe_traffic` says it.
    """

    tid: int
    thread: str
    call: str
    text: str
    for_s: float = 0.0
    asleep: bool = False
    wakes_at_s: tuple[float, float] | None = None
    waits_for: int | None = None
    may_wait_for: int | None = None
    mutual: bool = False
    native: bool | None = None
    unanswered: bool = False
    path: str = ""
    owner_tid: int | None = None
    futex: str = ""
    libraries: tuple[str, ...] = ()
    traffic: str = ""


class LockWait(Struct, frozen=True):
    """A thread that waits for a lock of Python's, which tells no owner.

    Attributes:
        tid, thread: its id, and the name that Python gives it.
        place: where it stands.
        for_s: how long it was seen in this same wait.
        address: where it sleeps: up to Python 3.12 equal ones are the same lock.
    """

    tid: int
    thread: str
    place: str
    for_s: float
    address: int = 0


def blocked_threads(
    track: Track, at_s: float, name_of: Callable[[int, str], str]
) -> tuple[Blocked, ...]:
    """Return the threads of a process that are blocked now as they were when last looked at.

    The main thread comes first. Of the others those are left out that wait as threads do that have
    nothing to do: for a condition, a timer, in an event loop.

    Args:
        track: of the process.
        at_s: now.
        name_of: gives a process's name for people, from its pid and comm.
    """
    if track.waits is None or not lives(track):
        return ()
    now = {thread.tid: thread for thread in track.process.threads}
    found = []
    for wait in track.waits.threads:
        thread = now.get(wait.tid)
        if thread is None or (wait.tid != track.process.pid and _is_dull(wait)):
            continue
        if thread.syscall is not None and not same_call(wait, thread.syscall):
            continue  # it is elsewhere by now
        since_s = track.blocked_since.get(wait.tid)
        age_s = track.process.age_s
        wakes = wakes_at_s(
            wait,
            since_s if since_s is not None else at_s,
            track.seen_at_s - age_s if age_s is not None else None,
        )
        target = only_target(wait)
        names = {tid: each.name for tid, each in now.items()}
        found.append(
            Blocked(
                tid=wait.tid,
                thread=thread.name,
                call=call_name(wait),
                text=describe(wait, name_of, names)
                + _gil_holder(track, wait, names)
                + _ends(left_s(wakes, at_s)),
                for_s=at_s - since_s if since_s is not None else 0.0,
                asleep=is_sleep(wait),
                wakes_at_s=wakes,
                waits_for=target,
                may_wait_for=only_sharer(wait) if target is None else None,
                mutual=target is not None and any(target in each.mutual for each in wait.objects),
                native=wait.tid not in track.python_tids if track.python_tids else None,
                unanswered=any(map(is_unanswered, wait.objects)),
                path=next((each.target for each in wait.objects if each.fd is None), ""),
                owner_tid=wait.owner_tid,
                futex=wait.futex,
                libraries=wait.libraries,
                traffic=describe_traffic(wait.objects[0]) if wait.count == 1 else "",
            )
        )
    return tuple(found)


def lock_circle(threads: Sequence[Blocked], track: Track) -> tuple[Blocked, ...]:
    """Return the threads of a process that wait for each other's locks; empty where none do.

    A thread waits for the owner of its mutex, or for who holds Python's lock. Only what two looks
    have found asleep in one and the same wait counts: else a thread may have let go of its lock
    between the moments at which each was looked at.
    """
    by_tid = {each.tid: each for each in threads}
    waits = {wait.tid: wait for wait in track.waits.threads} if track.waits else {}

    def owner_of(one: Blocked) -> int | None:
        if one.futex == "gil":
            return track.gil_tid if waits_for_gil_holder(track, one.tid) else None
        wait, since_s = waits.get(one.tid), track.blocked_since.get(one.tid, track.waits_at_s)
        unbroken = wait is not None and wait.switches is not None and since_s < track.waits_at_s
        return one.owner_tid if unbroken else None

    for first in threads:
        passed = [first]
        while (owner := owner_of(passed[-1])) is not None and owner in by_tid:
            following = by_tid[owner]
            if following in passed:
                return tuple(passed[passed.index(following) :])
            passed.append(following)
    return ()


def lock_waits(track: Track, at_s: float) -> tuple[LockWait, ...]:
    """Return the threads of a process that wait for a lock of Python's without end, main first.

    The kernel shows that they sleep on a semaphore, of which Python makes its locks. Threads that
    have nothing to do sleep on one as well, but below Python's own modules (a condition, a queue).
    """
    if track.waits is None or not lives(track):
        return ()
    now = {thread.tid: thread.syscall for thread in track.process.threads}
    found = []
    for wait in track.waits.threads:
        name, frames = track.stands.get(wait.tid, ("", ()))
        if wait.futex != "semaphore" or wait.timed or not frames or wait.tid not in now:
            continue
        line = now[wait.tid]
        gone_on = line is not None and not same_call(wait, line)
        if gone_on or f"/{frames[0].path}".endswith(_IDLE_IN):
            continue
        found.append(
            LockWait(
                tid=wait.tid,
                thread=name,
                place=place(frames[0]),
                for_s=at_s - track.blocked_since.get(wait.tid, at_s),
                address=wait.address,
            )
        )
    return tuple(found)


def _gil_holder(track: Track, wait: ThreadWait, threads: dict[int, str]) -> str:
    """Say who held Python's lock at the last dump, for a thread that waits for it."""
    if wait.futex != "gil" or track.gil_tid in (None, wait.tid):
        return ""
    name = threads.get(track.gil_tid or 0, "")
    return f", which thread {name} ({track.gil_tid}) held at the last dump"


def _ends(left: tuple[float, float] | None) -> str:
    """Say when a sleep ends by itself; "" where that is not known, or in moments: who polls."""
    return f", which ends by itself {wakes_in(left)}" if left and left[1] >= 1 else ""


def _is_dull(wait: ThreadWait) -> bool:
    if wait.call == "futex":
        return wait.futex in ("semaphore", "other")
    return wait.call in SLEEPS | EPOLLS | POLLS
