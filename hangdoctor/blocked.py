"""What a blocked thread waits for, in words, and for whom: from what the collector recorded.

Whom a thread waits for is said only where one process alone can end the wait: a read or write of
one connection, whose other end nobody serves. A server thread that has the other end in its epoll
set (a TCPStore, ZMQ, gloo) waits for us as much as we wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.calls import CHILDREN, EPOLLS, LOCKS, OPENS, POLLS, READS, SLEEPS, WRITES
from hangdoctor.frames import place
from hangdoctor.model import Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hangdoctor.model import Peek, ThreadWait, WaitObject
    from hangdoctor.tracks import Track

_LINKED = frozenset({"unix", "tcp", "pipe", "fifo"})
_WORDS = {
    "recvfrom": "recv", "recvmsg": "recv", "recvmmsg": "recv", "readv": "read", "pread64": "read",
    "sendto": "send", "sendmsg": "send", "sendmmsg": "send", "writev": "write",
    "pwrite64": "write", "ppoll": "poll", "pselect6": "select", "accept4": "accept",
    "openat": "open", "openat2": "open", "fcntl": "fcntl lock", "epoll_pwait": "epoll_wait",
    "epoll_pwait2": "epoll_wait",
}  # fmt: skip
_IDLE_IN = (
    "/threading.py", "/queue.py", "/concurrent/futures/thread.py", "/concurrent/futures/process.py",
    "/concurrent/futures/_base.py", "/multiprocessing/queues.py", "/multiprocessing/pool.py",
    "/multiprocessing/synchronize.py", "/asyncio/base_events.py",
)  # fmt: skip
"""Modules of Python in which threads wait that have nothing to do."""
_UNANSWERED = ("syn-sent", "not accepted")
MOST_RETRANSMITS = 4
"""What TCP has sent so often again has had no answer for 3 s at least: 0.2, 0.4, 0.8, 1.6 s."""
_KINDS = {"unix": "unix socket", "tcp": "TCP", "socket": "socket", "fifo": "FIFO"}


class Blocked(Struct, frozen=True):
    """A thread that is blocked now.

    Attributes:
        tid, thread: its id and its name.
        call: the system call, in the words of `text`.
        text: call and object, for people.
        for_s: how long it was seen in this same wait.
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
    if track.waits is None or not track.present:
        return ()
    now = {thread.tid: thread for thread in track.process.threads}
    found = []
    for wait in track.waits.threads:
        thread = now.get(wait.tid)
        if thread is None or (wait.tid != track.process.pid and _is_dull(wait)):
            continue
        if thread.syscall is not None and not _same_line(wait, thread.syscall):
            continue  # it is elsewhere by now
        since_s = track.blocked_since.get(wait.tid)
        target = only_target(wait)
        names = {tid: each.name for tid, each in now.items()}
        found.append(
            Blocked(
                tid=wait.tid,
                thread=thread.name,
                call=_WORDS.get(wait.call, wait.call),
                text=describe(wait, name_of, names) + _gil_holder(track, wait, names),
                for_s=at_s - since_s if since_s is not None else 0.0,
                waits_for=target,
                may_wait_for=_sharer(wait) if target is None else None,
                mutual=target is not None and any(target in each.mutual for each in wait.objects),
                native=wait.tid not in track.python_tids if track.python_tids else None,
                unanswered=any(map(_is_unanswered, wait.objects)),
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


def waits_for_gil_holder(track: Track, tid: int) -> bool:
    """Tell whether a thread that waits for Python's lock can get it from its holder alone.

    The holder was in its wait before the dump showed it as the holder, and still is; and the thread
    was seen to wait for the lock after that wait had begun: before, it may have got it and have let
    go of it again.
    """
    since_s = track.blocked_since.get(track.gil_tid) if track.gil_tid is not None else None
    if since_s is None or track.stack_at_s is None or since_s >= track.stack_at_s:
        return False
    return track.gil_wait_at_s.get(tid, since_s) > since_s


def lock_waits(track: Track, at_s: float) -> tuple[LockWait, ...]:
    """Return the threads of a process that wait for a lock of Python's without end, main first.

    The kernel shows that they sleep on a semaphore, of which Python makes its locks. Threads that
    have nothing to do sleep on one as well, but below Python's own modules (a condition, a queue).
    """
    if track.waits is None or not track.present:
        return ()
    now = {thread.tid: thread.syscall for thread in track.process.threads}
    found = []
    for wait in track.waits.threads:
        name, frames = track.stands.get(wait.tid, ("", ()))
        if wait.futex != "semaphore" or wait.timed or not frames or wait.tid not in now:
            continue
        line = now[wait.tid]
        gone_on = line is not None and not _same_line(wait, line)
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


def same_wait(before: ThreadWait, now: ThreadWait) -> bool:
    """Tell whether a thread has been in one and the same wait between two looks.

    A wait without a time-out that has slept again in between has come back from it once. So has a
    sleep: who polls sleeps again and again.
    """
    slept = (
        (now.call in SLEEPS or not now.timed)
        and now.call not in POLLS | EPOLLS
        and None not in (before.switches, now.switches)
        and before.switches != now.switches
    )
    targets = [each.target for each in before.objects] == [each.target for each in now.objects]
    return _same_line(before, now.line) and targets and not slept


def _same_line(wait: ThreadWait, syscall: str) -> bool:
    """Tell whether a line of /proc/PID/syscall is of the same call on the same object.

    A condition of glibc has two words for those who wait, beside each other in 8 bytes, and uses
    them in turn: who waits for the GIL does so anew every 5 ms, and runs for a moment in between.
    """
    if wait.futex == "gil" and syscall == "running":
        return True
    words = syscall.split()[:2]
    if wait.call != "futex" or len(words) < 2:
        return " ".join(words) == wait.line
    number, address = wait.line.split()[:2]
    return words[0] == number and int(words[1], 16) // 8 == int(address, 16) // 8


def only_target(wait: ThreadWait) -> int | None:
    """Return the pid of the process that alone can end a wait; None where that is not sure."""
    if wait.call in CHILDREN:
        return wait.waits_for_pid
    if wait.call in LOCKS:
        pids = [holder.pid for each in wait.objects for holder in each.others or ()]
        return pids[0] if len(pids) == 1 else None
    if wait.call not in READS | WRITES | POLLS | {"connect"} or wait.count != len(wait.objects):
        return None
    linked = [each for each in wait.objects if each.kind in _LINKED]
    if not linked or (len(linked) > 1 and wait.call not in POLLS):
        return None
    targets = set()
    for each in linked:
        holders = each.others or ()
        if len(holders) != 1:
            return None
        (holder,) = holders
        if each.received_bytes and wait.call in READS | POLLS:
            return None  # its bytes are there already
        if each.served is not False and holder.pid not in each.mutual:
            return None
        targets.add(holder.pid)
    return targets.pop() if len(targets) == 1 else None


def _sharer(wait: ThreadWait) -> int | None:
    """Return the pid of the one other process that shares the eventfds of a wait."""
    if wait.call not in READS | POLLS | EPOLLS or wait.count != len(wait.objects):
        return None
    pids = {holder.pid for each in wait.objects for holder in each.others or ()}
    eventfds = all(each.kind == "eventfd" for each in wait.objects)
    return pids.pop() if eventfds and len(pids) == 1 else None


def describe(wait: ThreadWait, name_of: Callable[[int, str], str], threads: dict[int, str]) -> str:
    """Say in which call a thread is and what that waits for.

    >>> from hangdoctor.model import Holder, ThreadWait, WaitObject
    >>> pair = WaitObject(kind="unix", fd=3, state="established", others=(Holder(8, "python"),))
    >>> describe(ThreadWait(7, "recvfrom", objects=(pair,), count=1), lambda pid, _: "TP1", {})
    'recv from TP1 (unix socket)'
    >>> fifo = WaitObject(kind="fifo", target="/tmp/shard", others=())
    >>> describe(ThreadWait(7, "openat", objects=(fifo,), count=1), lambda pid, _: "", {})
    'open of FIFO /tmp/shard, which nobody else has open'
    >>> describe(ThreadWait(7, "futex", futex="mutex", owner_tid=9), lambda pid, _: "", {9: "io"})
    'futex: mutex, owned by thread io (9)'
    """
    call = _WORDS.get(wait.call, wait.call)
    if wait.call == "futex":
        return _futex(wait, threads)
    if wait.call in SLEEPS or (wait.call in POLLS and not wait.count and wait.timed):
        return "sleep"
    if wait.call in CHILDREN:
        pid = wait.waits_for_pid
        return f"wait for child {name_of(pid, '')}" if pid else "wait for any child"
    if wait.call in POLLS | EPOLLS:
        named = [each for each in wait.objects if each.kind in _LINKED or each.kind == "eventfd"]
        names = dict.fromkeys(_name(each, name_of) for each in named)
        names.pop("", None)
        listed = f" ({', '.join(list(names)[:4])})" if names else ""
        many = f"{wait.count} descriptor{'s' if wait.count != 1 else ''}"
        return f"{call} of {many}{listed}" if wait.count else call
    if not wait.objects:
        return f"{call} ({wait.kernel})" if wait.kernel else call
    return f"{call} {_object(wait, wait.objects[0], name_of)}"


def describe_peek(peek: Peek, name_of: Callable[[int, str], str]) -> str:
    """Say in which calls a running thread was caught by its registers.

    >>> from hangdoctor.model import Peek, PeekedCall, WaitObject
    >>> one = WaitObject(kind="eventfd", fd=3, identity=41, others=())
    >>> write = PeekedCall(call="write", times=14, fd=3, objects=(one,))
    >>> describe_peek(Peek(tid=7, peeks=16, calls=(write,)), lambda pid, _: "TP1")
    'write on descriptor 3 (eventfd number 41) in 14 of 16 peeks'
    >>> describe_peek(Peek(tid=7, peeks=16), lambda pid, _: "TP1")
    'no system call in 16 of 16 peeks'
    """
    parts = []
    for each in peek.calls:
        on = f" on descriptor {each.fd}" if each.fd is not None else ""
        if each.call in EPOLLS:
            watched = describe_watched(each.objects, name_of)
            on = f" on epoll set {each.fd}" + (f", which watches {watched}" if watched else "")
        elif each.objects and (what := describe_object(each.objects[0], name_of)):
            on += f" ({what})"
        parts.append(f"{each.call}{on} in {each.times} of {peek.peeks} peeks")
    return "; ".join(parts) or f"no system call in {peek.peeks} of {peek.peeks} peeks"


def describe_watched(objects: Sequence[WaitObject], name_of: Callable[[int, str], str]) -> str:
    """Say what an epoll set watches; "" where nothing is known of it."""
    shown = [
        f"descriptor {each.fd} ({what})"
        for each in objects
        if (what := describe_object(each, name_of))
    ]
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return ", ".join(shown[:3]) + more


def describe_object(each: WaitObject, name_of: Callable[[int, str], str]) -> str:
    """Say what a descriptor leads to, and who has its other end or shares it.

    >>> from hangdoctor.model import Holder, WaitObject
    >>> shared = WaitObject(kind="eventfd", identity=41, others=(Holder(8, "python"),))
    >>> describe_object(shared, lambda pid, _: "TP1")
    'eventfd number 41, shared with TP1'
    """
    kind = _KINDS.get(each.kind, each.kind)
    others = _name(each, name_of)
    if each.kind == "eventfd":
        number = f" number {each.identity}" if each.identity is not None else ""
        return f"eventfd{number}" + (
            f", shared with {others.replace(' or ', ', ')}" if others else ""
        )
    if each.kind == "other":
        return each.target
    target = f" {each.target}" if each.target and each.kind in ("file", "fifo", "tcp") else ""
    return f"{kind}{target}" + (f", other end at {others}" if others else "")


def describe_traffic(each: WaitObject) -> str:
    """Say how silent a connection is, and what is on its way; "" where nothing of it is known.

    >>> from hangdoctor.model import WaitObject
    >>> describe_traffic(
    ...     WaitObject(kind="tcp", unsent_bytes=4096, since_received_ms=61_000, retransmits=5)
    ... )
    'nothing received for 61 s, 4,096 bytes not taken by the other end, sent 5 times again'
    >>> describe_traffic(WaitObject(kind="pipe"))
    ''
    """
    if each.kind not in ("unix", "tcp", "socket") or each.state == "listen":
        return ""
    parts = []
    if each.since_received_ms is not None and each.since_received_ms >= 1000:
        parts.append(f"nothing received for {each.since_received_ms / 1000:.0f} s")
    if each.since_sent_ms is not None and each.since_sent_ms >= 1000:
        parts.append(f"nothing sent for {each.since_sent_ms / 1000:.0f} s")
    if each.received_bytes:
        parts.append(f"{each.received_bytes:,} bytes not read yet")
    if each.unsent_bytes:
        parts.append(f"{each.unsent_bytes:,} bytes not taken by the other end")
    if each.retransmits:
        parts.append(f"sent {each.retransmits} times again")
    return ", ".join(parts)


def _is_unanswered(each: WaitObject) -> bool:
    return each.state in _UNANSWERED or each.retransmits >= MOST_RETRANSMITS


def _gil_holder(track: Track, wait: ThreadWait, threads: dict[int, str]) -> str:
    """Say who held Python's lock at the last dump, for a thread that waits for it."""
    if wait.futex != "gil" or track.gil_tid in (None, wait.tid):
        return ""
    name = threads.get(track.gil_tid or 0, "")
    return f", which thread {name} ({track.gil_tid}) held at the last dump"


def _futex(wait: ThreadWait, threads: dict[int, str]) -> str:
    if wait.futex == "gil":
        return "futex: the GIL"
    if wait.futex == "mutex" and wait.owner_tid is not None:
        name = threads.get(wait.owner_tid, "")
        return f"futex: mutex, owned by thread {name} ({wait.owner_tid})"
    what = "a lock" if wait.futex == "semaphore" else "a lock or condition"
    return f"futex: {what}" + (", with a time-out" if wait.timed else "")


def _object(wait: ThreadWait, each: WaitObject, name_of: Callable[[int, str], str]) -> str:
    kind = _KINDS.get(each.kind, each.kind)
    if each.kind == "file":
        if wait.call in LOCKS:
            holder = f", held by {_name(each, name_of)}" if each.others else ""
            return f"of {each.target}{holder}"
        kernel = f" ({wait.kernel})" if wait.kernel and wait.call not in OPENS else ""
        return f"of {each.target}{kernel}"
    if wait.call in OPENS:
        return f"of {kind} {each.target}, which nobody else has open"
    if wait.call in ("accept", "accept4"):
        return f"on {kind} {each.target}: nobody connects".replace("  ", " ")
    if each.state == "syn-sent":
        return f"to {each.target.rpartition(' -> ')[2]} (TCP): no answer yet"
    preposition = "to" if wait.call in WRITES or wait.call == "connect" else "from"
    if each.kind == "eventfd":
        return f"on {describe_object(each, name_of)}"
    if each.others:
        state = ", which has not accepted the connection" if each.state == "not accepted" else ""
        detail = f"{kind} {each.target}".strip() if each.kind in ("tcp", "fifo") else kind
        return f"{preposition} {_name(each, name_of)} ({detail}){state}"
    if each.kind == "tcp" and " -> " in each.target:
        return f"{preposition} {each.target.rpartition(' -> ')[2]} (TCP)"
    return f"on {kind} {each.target}".rstrip()


def _name(each: WaitObject, name_of: Callable[[int, str], str]) -> str:
    names = [name_of(holder.pid, holder.comm) for holder in each.others or ()]
    return " or ".join(names[:3]) + (" or others" if len(names) > 3 else "")


def _is_dull(wait: ThreadWait) -> bool:
    if wait.call == "futex":
        return wait.futex in ("semaphore", "other")
    return wait.call in SLEEPS | EPOLLS | POLLS
