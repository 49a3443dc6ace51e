"""Rules over ranks that use CPU and get nowhere: which loop they spin in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.findings import Evidence, Finding
from hangdoctor.frames import place
from hangdoctor.rules.case import evidence, quiet, stands

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hangdoctor.busy import Loop
    from hangdoctor.facts import RankFacts
    from hangdoctor.rules.case import Case

_PEEK = "the system calls of the busy thread: --peek (stops it for some 20 us)"
LASTS_S = 3.0
"""A loop that is younger may be a burst."""


def eventfd_runaway(case: Case) -> Iterator[Finding]:
    """A rank spins on an eventfd and does nothing else.

    What it sees: a thread with writes of exactly 8 bytes (or refused ones, of 0) at more than
    50,000 a second that does not sleep in between, lasting, without progress of any other kind.
    It may also read its own eventfd each time. Healthy pollers make hundreds to thousands.
    Why it matters: the process looks busy, 100 % CPU and megabytes a second in /proc/PID/io, and
    gets nowhere.
    What to do: the innermost Python frame is the loop.
    """
    for rank in case.facts.ranks:
        if rank.runaway_s is None or rank.runaway_s < LASTS_S or rank.moving or rank.loop is None:
            continue
        if rank.loop.kind not in ("eventfd", "eventfd-own") or polls(case, rank):
            continue
        lasting = rank.runaway_s >= case.stall_after_s / 2
        yield Finding(
            rule="eventfd-runaway",
            verdict="found",
            title=f"{rank.name} {loop_words(rank)} and does nothing else",
            ranks=(rank.name,),
            culprits=(rank.name,) if lasting else (),
            phase=rank.phase,
            confidence="high" if lasting else "medium",
            because=evidence(_counters(case, rank, rank.loop), quiet(case, rank)),
            advice=(f"read the loop: py-spy dump --nonblocking --pid {rank.pid}",),
        )


def pipe_chatter(case: Case) -> Iterator[Finding]:
    """A rank makes small reads or writes without end, on a pipe or between two of its threads.

    What it sees: more than 50,000 write() or read() calls a second of one thread that are not
    those of an eventfd loop, or of two threads that answer each other, without other progress.
    Why it matters: like a loop on an eventfd it looks like work. Two threads that answer each
    other may be at work on something, so that it is not decided.
    What to do: see which descriptors these are and who holds their other end.
    """
    for rank in case.facts.ranks:
        if not _stuck(case, rank) or rank.loop is None or rank.wait is not None:
            continue
        if rank.loop.kind not in ("pipe", "chatter"):
            continue
        yield Finding(
            rule="pipe-chatter",
            verdict="undecided",
            title=f"{rank.name} {loop_words(rank)}, without visible progress",
            ranks=(rank.name,),
            phase=rank.phase,
            confidence="medium",
            because=evidence(_counters(case, rank, rank.loop), quiet(case, rank)),
            needs=("what is written: does it tell of progress?",),
            advice=(f"see the descriptors and their other ends: ls -l /proc/{rank.pid}/fd",),
        )


def busy_without_progress(case: Case) -> Iterator[Finding]:
    """A rank uses a whole core and shows no progress.

    What it sees: at least half a core, the same functions in every dump, no bytes, no memory;
    whether the busy thread holds the GIL (it spins in Python, or in native code that keeps it), or
    not (native code), or spends its time in system calls that no counter shows.
    Why it matters: it may spin, or compile inside the process; from outside these look alike.
    What to do: wait for the phase's normal time, or look closer with consent: --peek tells the
    system calls of a loop (stops its thread for some 20 us), --native the native frames (stops the
    process for some milliseconds).
    """
    for rank in case.facts.ranks:
        busy = rank.cpu_pct is not None and rank.cpu_pct >= 50
        if not busy or rank.wait or not _stuck(case, rank):
            continue
        if rank.loop is not None and rank.loop.kind not in ("calls", "python", "native"):
            continue  # other rules say so
        words = loop_words(rank)
        yield Finding(
            rule="busy-without-progress",
            verdict="undecided",
            title=f"{rank.name} {words}, without visible progress"
            if words
            else f"{rank.name} uses {rank.cpu_pct:.0f} % CPU without visible progress",
            ranks=(rank.name,),
            phase=rank.phase,
            confidence="low",
            because=evidence(
                _counters(case, rank, rank.loop) if rank.loop else None,
                stands(case, rank),
                quiet(case, rank),
            ),
            needs=(
                *(() if rank.caught_in else (_PEEK,)),
                "native frames: --native (stops the process for some milliseconds)",
            ),
        )


def polls(case: Case, rank: RankFacts) -> bool:
    """Tell whether a rank waits for requests, which spins and is healthy, or has just done so."""
    if case.facts.launch_log_phase == "ready" or (rank.wait and rank.wait.kind == "idle"):
        return True
    return rank.not_idle_s is not None and rank.not_idle_s < case.stall_after_s


def loop_words(rank: RankFacts) -> str:
    """Say which loop a rank spins in, with its place; "" where none is known."""
    loop = rank.loop
    if loop is None:
        return ""
    thread = loop.thread
    writes, reads = thread.write_calls_per_s or 0.0, thread.read_calls_per_s or 0.0
    on = f" ({loop.files[0].split(',')[0]})" if len(loop.files) == 1 else ""
    words = {
        "eventfd": f"writes to an eventfd{on} {writes:,.0f} times a second",
        "eventfd-own": f"writes to and reads from an eventfd{on} {writes:,.0f} times a second",
        "chatter": f"has threads that answer each other {max(writes, reads):,.0f} times a second",
        "pipe": f"makes {max(writes, reads):,.0f} small writes or reads a second on a pipe or "
        "socket pair",
        "calls": f"spends {thread.cpu_pct:.0f} % CPU in system calls that no counter shows "
        f"({', '.join(loop.caught_in) or 'send, recv, poll'})",
        "python": f"spins in Python and holds the GIL ({thread.cpu_pct:.0f} % CPU)",
        "native": f"spins in native code without the GIL ({thread.cpu_pct:.0f} % CPU)",
    }[loop.kind]
    return words + _where(rank, loop)


def _stuck(case: Case, rank: RankFacts) -> bool:
    """Tell whether a rank has been still for long enough to ask what it spins in."""
    if rank.moving is not False or rank.reading == "spinning" or polls(case, rank):
        return False
    return (rank.still_s or 0.0) >= case.stall_after_s / 2


def _where(rank: RankFacts, loop: Loop) -> str:
    if loop.thread.tid == rank.pid:
        return f", in {rank.place}" if rank.place else ""
    thread = f"thread {loop.thread.name} ({loop.thread.tid})"
    if loop.stack.frames:
        return f", in {thread}, at {place(loop.stack.frames[0])}"
    if loop.stack.dumps:
        return f", in {thread}, which runs no Python"
    return f", in {thread}"


def _counters(case: Case, rank: RankFacts, loop: Loop) -> Evidence:
    """Return the counters of the thread that spins, as evidence."""
    thread = loop.thread
    parts = []
    if thread.write_calls_per_s is not None:
        parts.append(
            f"{thread.write_calls_per_s:,.0f} writes/s of {thread.bytes_per_write or 0:.2f} bytes, "
            f"{thread.read_calls_per_s or 0:,.0f} reads/s of {thread.bytes_per_read or 0:.2f}"
        )
    parts.append(f"CPU {thread.cpu_pct:.0f} %")
    if thread.system_pct:
        parts[-1] += f" ({thread.system_pct:.0f} % in the kernel)"
    if thread.sleeps_per_s is not None:
        parts.append(f"{thread.sleeps_per_s:,.0f} sleeps/s")
    if thread.queue_pct:
        parts.append(f"without a CPU {thread.queue_pct:.0f} % of the time")
    if loop.stack.dumps:
        parts.append(f"GIL in {loop.stack.with_gil} of {loop.stack.dumps} dumps")
    if rank.caught_in and loop.caught_in:
        parts.append(f"by its registers in {rank.caught_in}")
    if rank.runaway_s is not None:
        parts.append(f"for {rank.runaway_s:.0f} s")
    on = ""
    if loop.files and not (loop.caught_in and loop.kind not in ("eventfd", "eventfd-own")):
        on = f"; {'that is' if loop.caught_in else 'may be on'} {'; '.join(loop.files)}"
    return Evidence(
        text=f"{rank.name}, thread {thread.name} ({thread.tid}): {', '.join(parts)}{on}",
        pid=rank.pid,
        rank=rank.name,
        at_s=case.facts.at_s,
    )
