"""One rank as it stands now, from its process, its stacks and the log."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from hangdoctor import tracks
from hangdoctor.blocked import blocked_threads, lock_waits
from hangdoctor.busy import Busy, Loop, find_loop
from hangdoctor.engines import PEER_KINDS
from hangdoctor.facts import Facts, RankFacts, phase_index, stamp_age_s
from hangdoctor.facts.file_locks import locks_of, may_poll, polls_per_s
from hangdoctor.facts.lineage import WORK_PCT, busiest, family
from hangdoctor.facts.phases import phase_age_s, phase_by_log, phase_of_rank, read_stack
from hangdoctor.frames import call_path, find_wait, place
from hangdoctor.gpus import cards_of
from hangdoctor.model import Missing
from hangdoctor.sleeps import see_sleep
from hangdoctor.waits import describe_peek

if TYPE_CHECKING:
    from hangdoctor.engines import Engine
    from hangdoctor.gpus import Reading
    from hangdoctor.logs.stacks import Standing
    from hangdoctor.tracks import Track


_NO_GPU = (
    "futex",
    "hrtimer_nanosleep",
    "do_wait",
    "pipe",
    "anon_pipe",
    "wait_for_partner",
    "fifo_open",
    "unix_stream",
    "sk_wait",
    "flock_lock",
    "locks_lock",
    "do_epoll_wait",
    "ep_poll",
)
"""Beginnings of kernel functions in which a thread sleeps that waits for no GPU."""

MOVING_S = 5.0
"""A rank that moved within the last so many seconds is moving."""


def rank_view(
    name: str,
    track: Track | None,
    before: RankFacts | None,
    facts: Facts,
    engine: Engine,
    *,
    stand: Standing | None,
) -> RankFacts:
    """Return what is known of a rank now; `track` is None where it has no process."""
    if track is None:
        return _with_logged_stack(_without_process(name, facts), stand, facts, engine)
    view = _of_process(name, track, before, facts, engine)
    own = track.process.inner_pid or track.process.pid
    if view.stack is not None or stand is None or stand.dump.pid not in (None, own):
        return view  # a dump with another pid is another launch's
    return _with_logged_stack(view, stand, facts, engine)


def _without_process(name: str, facts: Facts) -> RankFacts:
    watched = facts.sections.get("processes", ...) is None
    log_phase = phase_by_log(name, facts)
    return RankFacts(
        name=name,
        present=False if watched else None,
        phase=log_phase,
        log_phase=log_phase,
        phase_sure=log_phase is not None,
    )


def _of_process(
    name: str, track: Track, before: RankFacts | None, facts: Facts, engine: Engine
) -> RankFacts:
    at_s = facts.at_s or 0.0
    dumped_s = track.stack_at_s if track.stack_at_s is not None else at_s
    log_phase = phase_by_log(name, facts)
    phase, phase_sure = phase_of_rank(
        track.stack, track.stack_at_s, log_phase, facts.rank_log_at_s.get(name), engine
    )
    if phase is None and track.role == "spawn_main":
        phase = "start"
    wait = None
    operation: tuple[str, ...] = ()
    if track.wait and track.stack:
        wait = engine.wait(track.wait[0])
        operation = call_path(track.stack[track.wait[1] :])
    moved_at_s = max(
        track.moved_at_s if track.moved_at_s is not None else -1e12,
        facts.rank_log_at_s.get(name, -1e12),
    )
    recently = at_s - moved_at_s <= MOVING_S
    watched_s = at_s - track.first_at_s
    told = watched_s >= MOVING_S or (recently and watched_s >= 1)
    moving = recently if told and tracks.lives(track) else None
    still_s = at_s - max(track.first_at_s, moved_at_s) if moving is False else None
    cards = cards_of(facts.cards, family(facts.tracks, track.process.pid))
    blocked = blocked_threads(track, at_s, facts.name_of)
    main = next((each for each in blocked if each.tid == track.process.pid), None)
    lock_waiting = lock_waits(track, at_s)
    wakes_per_s = polls_per_s(track, facts)
    since_s = before.phase_since_s if before and before.phase == phase else at_s
    in_phase_s = max(at_s - since_s, phase_age_s(name, phase, facts) or 0.0)
    return RankFacts(
        name=name,
        pid=track.process.pid,
        present=tracks.lives(track),
        state=track.process.state,
        phase=phase,
        phase_since_s=since_s,
        in_phase_s=in_phase_s if phase else None,
        wait=wait,
        stack=track.stack,
        place=place(track.stack[0]) if track.stack else "",
        operation=operation,
        moving=moving,
        still_s=still_s,
        moved_by=track.moved_by,
        cpu_pct=track.cpu_pct,
        cards=cards,
        reading=_reading(track, cards, facts, engine),
        shared_work_s=at_s - track.shared_work_at_s if track.shared_work_at_s is not None else None,
        log_phase=log_phase,
        phase_sure=phase_sure,
        settled_s=dumped_s - track.settled_at_s
        if track.settled_at_s is not None and track.settled_dumps > 1
        else None,
        held_s=dumped_s - track.held_since_s if track.held_since_s is not None else None,
        not_idle_s=dumped_s - track.idle_at_s if track.idle_at_s is not None else None,
        stack_age_s=at_s - dumped_s if track.stack_at_s is not None else None,
        stack_missing=track.stack_missing,
        runaway_s=at_s - track.runaway_since_s if track.runaway_since_s is not None else None,
        loop=_loop(track, facts),
        caught_in=describe_peek(track.waits.peek, facts.name_of)
        if track.waits and track.waits.peek and track.present
        else "",
        helped_by=_helper(facts, track),
        # A compiler's runtime that loads a kernel waits for those that run: it compiles nothing.
        compiling=bool(track.stack)
        and not (wait and wait.kind == "device")
        and read_stack(engine.name, track.stack or ()).compiling,
        on_storage=tracks.on_storage(track.process),
        kernel=(track.process.threads[0].wchan or "") if track.process.threads else "",
        blocked=main,
        sleep=see_sleep(
            before.sleep if before else None,
            main.wakes_at_s[1] if main and main.wakes_at_s else None,
            moved_at_s,
            at_s,
        ),
        blocked_besides=tuple(
            sorted(
                (each for each in blocked if each.tid != track.process.pid),
                key=lambda each: -each.for_s,
            )
        ),
        lock_waits=lock_waiting
        if lock_waiting[:1] and lock_waiting[0].tid == track.process.pid
        else (),
        locks=locks_of(track, wait, operation, facts.locks),
        polls_per_s=wakes_per_s,
        may_poll=may_poll(track, facts.locks) if wakes_per_s is not None else (),
    )


def wait_kind(track: Track, engine: Engine) -> str:
    """Return the kind of the wait that a process stands in by its stack; "" for none."""
    return engine.wait(track.wait[0]).kind if track.wait else ""


def may_use_card(track: Track, engine: Engine) -> bool:
    """Tell whether a rank may be behind what a card does that others are on as well.

    Not one that waits for its peers or runs away in tiny writes, and not one that uses no CPU and
    sleeps where no GPU is waited for: CUDA spins, polls the driver's descriptor, or is in it.
    """
    if track.stack is None:
        return True
    kind = wait_kind(track, engine)
    if kind == "device":
        return True
    if kind in PEER_KINDS or track.runaway_since_s is not None:
        return False
    threads = track.process.threads
    kernel = (threads[0].wchan or "") if threads else ""
    return (track.cpu_pct or 0) >= WORK_PCT or not kernel.startswith(_NO_GPU)


def _reading(track: Track, cards: tuple[int, ...], facts: Facts, engine: Engine) -> Reading | None:
    """Return what a rank's card does; "unknown" where that may well be the work of others."""
    if not cards:
        return None
    card = facts.cards[cards[0]]
    return card.reading if not card.shared or may_use_card(track, engine) else "unknown"


def _loop(track: Track, facts: Facts) -> Loop | None:
    """Return the loop that a rank spins in; for an older recording by the process as a whole."""
    found = find_loop(
        track.busy,
        track.busy_stacks,
        track.files,
        track.waits,
        name_of=facts.name_of,
        sharing=partial(_sharing, facts, track),
    )
    counted = any(thread.write_calls_per_s is not None for thread in track.busy)
    if counted or track.runaway_since_s is None:
        return found
    whole = Busy(
        tid=track.process.pid,
        name=track.process.comm,
        cpu_pct=track.cpu_pct or 0.0,
        system_pct=0.0,
        write_calls_per_s=track.write_calls_per_s,
        bytes_per_write=track.bytes_per_write,
        read_calls_per_s=track.read_calls_per_s,
        bytes_per_read=track.bytes_per_read,
    )
    return find_loop((whole,), {}, track.files)


def _sharing(facts: Facts, track: Track, number: int) -> str:
    """Say which other processes have an eventfd open, and whose threads wait for it."""
    parts = []
    for pid, other in facts.tracks.items():
        fds = [file.fd for file in other.files or () if file.identity == number]
        if other is track or not fds or not tracks.lives(other):
            continue
        calls = [
            wait.call
            for wait in (other.waits.threads if other.waits else ())
            if any(each.identity == number for each in wait.objects)
        ]
        waits = f" and waits for in {calls[0]}" if calls else ""
        parts.append(f", which {facts.name_of(pid)} has open too (descriptor {fds[0]}){waits}")
    return "".join(parts[:2])


def _helper(facts: Facts, owner: Track) -> str:
    """Return the name of a process below a rank that uses CPU for it and is no compiler."""
    busy = [
        track
        for track in facts.tracks.values()
        if track.owner == owner.process.pid
        and tracks.lives(track)
        and not (track.compiles or track.observes)
        and (track.cpu_pct or 0) >= WORK_PCT
    ]
    return busiest(busy)


def _with_logged_stack(
    rank: RankFacts, stand: Standing | None, facts: Facts, engine: Engine
) -> RankFacts:
    """Return a rank of which we have no stack with what the stacks in the log show of it.

    They are no older than its last milestone: what came before one is forgotten.
    """
    if stand is None:
        return rank
    dump = stand.dump
    if not dump.frames:
        why = "torn by another's" if dump.torn else "without its main thread's frames"
        missing = Missing(
            reason="failed", detail=f"the dump of it in line {dump.number} of the log is {why}"
        )
        return msgspec.structs.replace(rank, stack_missing=rank.stack_missing or missing)
    found = find_wait(dump.frames, engine.waits)
    phase, sure = phase_of_rank(dump.frames, 0.0, rank.log_phase, None, engine)
    serves = phase_index(phase) >= phase_index("server")
    counted = stand.after_s is not None and (stand.final or serves)
    counted_s = (stand.after_s or 0.0) + (stand.held_s or 0.0) if counted else None
    return msgspec.structs.replace(
        rank,
        phase=phase,
        phase_sure=sure,
        stack=dump.frames,
        stack_line=dump.number,
        stack_native=dump.native,
        stack_age_s=stamp_age_s(facts, dump.time_s),
        place=place(dump.frames[0]),
        wait=found[0] if found else None,
        operation=call_path(dump.frames[found[1] :]) if found else (),
        settled_s=stand.held_s,
        held_s=stand.held_s if found else None,
        compiling=read_stack(engine.name, dump.frames).compiling,
        counted_s=counted_s,
        counted_out=counted and stand.final,
        **({} if rank.moving is not None else _moving_by_log(stand, counted_s)),
    )


def _moving_by_log(stand: Standing, counted_s: float | None) -> dict[str, Any]:
    """Return what the dumps in the log tell of whether a rank moves; nothing if there is one."""
    if stand.moved and stand.same_dumps == 1:
        where = stand.dump.frames[0].function
        return {"moving": True, "moved_by": f"its stack changes, now in {where}"}
    still_s = counted_s if counted_s is not None else stand.held_s
    return {} if still_s is None else {"moving": False, "still_s": still_s}
