"""One wait of a thread, as the collector recorded it: in words, compared, and who can end it.

Whom a thread waits for is said only where one process alone can end the wait: a read or write of
one connection, whose other end nobody serves. A server thread that has the other end in its epoll
set (a TCPStore, ZMQ, gloo) waits for us as much as we wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.calls import CHILDREN, EPOLLS, LOCKS, OPENS, POLLS, READS, SLEEPS, WRITES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hangdoctor.model import Peek, ThreadWait, WaitObject

_LINKED = frozenset({"unix", "tcp", "pipe", "fifo"})
_WORDS = {
    "recvfrom": "recv", "recvmsg": "recv", "recvmmsg": "recv", "readv": "read", "pread64": "read",
    "sendto": "send", "sendmsg": "send", "sendmmsg": "send", "writev": "write",
    "pwrite64": "write", "ppoll": "poll", "pselect6": "select", "accept4": "accept",
    "openat": "open", "openat2": "open", "fcntl": "fcntl lock", "epoll_pwait": "epoll_wait",
    "epoll_pwait2": "epoll_wait",
}  # fmt: skip
_UNANSWERED = ("syn-sent", "not accepted")
MOST_RETRANSMITS = 4
"""What TCP has sent so often again has had no answer for 3 s at least: 0.2, 0.4, 0.8, 1.6 s."""
_KINDS = {"unix": "unix socket", "tcp": "TCP", "socket": "socket", "fifo": "FIFO"}


def same_wait(before: ThreadWait, now: ThreadWait) -> bool:
    """Tell whether a thread has been in one and the same wait between two looks.

    A wait without a time-out that has slept again in between has come back from it once. So has a
    sleep: who polls sleeps again and again.
    """
    slept = (
        (is_sleep(now) or (not now.timed and now.call not in POLLS | EPOLLS))
        and None not in (before.switches, now.switches)
        and before.switches != now.switches
    )
    targets = [each.target for each in before.objects] == [each.target for each in now.objects]
    return same_call(before, now.line) and targets and not slept


def is_sleep(wait: ThreadWait) -> bool:
    """Tell whether a thread waits for time alone; Python up to 3.10 sleeps in select()."""
    return wait.call in SLEEPS or (wait.call in POLLS and not wait.count and wait.timed)


def same_call(wait: ThreadWait, syscall: str) -> bool:
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


def only_sharer(wait: ThreadWait) -> int | None:
    """Return the pid of the one other process that shares the eventfds of a wait."""
    if wait.call not in READS | POLLS | EPOLLS or wait.count != len(wait.objects):
        return None
    pids = {holder.pid for each in wait.objects for holder in each.others or ()}
    eventfds = all(each.kind == "eventfd" for each in wait.objects)
    return pids.pop() if eventfds and len(pids) == 1 else None


def call_name(wait: ThreadWait) -> str:
    """Return the system call of a wait, by its family's plain name."""
    return _WORDS.get(wait.call, wait.call)


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
    call = call_name(wait)
    if wait.call == "futex":
        return _futex(wait, threads)
    if is_sleep(wait):
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


def is_unanswered(each: WaitObject) -> bool:
    """Tell whether a connection is not accepted, or what was sent on it again and again unanswered.

    >>> from hangdoctor.model import WaitObject
    >>> is_unanswered(WaitObject(kind="tcp", state="syn-sent"))
    True
    """
    return each.state in _UNANSWERED or each.retransmits >= MOST_RETRANSMITS


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
