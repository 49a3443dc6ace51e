"""From snapshots and a log to facts: the only place that compares snapshots or ranks.

A fold: `facts = step(facts, snapshot, log)`, and `derive` is its reduction over a recording. It
reads no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hangdoctor import tracks
from hangdoctor.blocked import blocked_threads
from hangdoctor.caches import runs_code, see_caches
from hangdoctor.collectives import compare
from hangdoctor.engines import Engine, matches_any
from hangdoctor.facts import Facts, log_news
from hangdoctor.facts.lineage import WORK_PCT, family, see_processes
from hangdoctor.facts.rank_view import may_use_card, rank_view, wait_kind
from hangdoctor.gpus import cards_of, moves_data_of, others_only, see_card, work_of
from hangdoctor.host_memory import see_allocations, see_peak
from hangdoctor.launches import expected_count, expected_ranks, rank_order, sizes_of
from hangdoctor.logs.timeline import Timeline, logged_stands
from hangdoctor.model import (
    SECTIONS,
    Caches,
    FlightRecorder,
    Gpu,
    Gpus,
    Header,
    Host,
    Missing,
    Processes,
    Snapshot,
    Stacks,
    Waits,
    Weights,
)
from hangdoctor.nccl import see_ras
from hangdoctor.units import rate
from hangdoctor.weights import see_weights

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hangdoctor.recording import Recording


def begin(header: Header, engine: Engine) -> Facts:
    """Return the facts before anything was seen."""
    return Facts(header=header, engine=engine.name)


def derive(recording: Recording, engine: Engine) -> Facts:
    """Fold a whole recording."""
    facts = begin(recording.header, engine)
    for snapshot, blocks in recording.steps():
        facts = step(facts, snapshot, blocks, engine)
    return facts


def step(facts: Facts, snapshot: Snapshot | None, blocks: Iterable[bytes], engine: Engine) -> Facts:
    """Take in a snapshot and the log's bytes up to it; None stands for a log without snapshots."""
    newest_s = facts.timeline.last_time_s
    facts = log_news.hear(facts, blocks, engine)
    if snapshot is None:
        facts = log_news.finish_log(facts, engine)
    else:
        facts = log_news.date_news(facts, snapshot)
        if facts.timeline.last_time_s != newest_s or facts.stamped_at_s is None:
            written_at_s = snapshot.at_s - (facts.log_silent_s or 0.0)
            facts = msgspec.structs.replace(facts, stamped_at_s=written_at_s)
        facts = msgspec.structs.replace(
            facts,
            at_s=snapshot.at_s,
            first_at_s=snapshot.at_s if facts.first_at_s is None else facts.first_at_s,
            sections=facts.sections | _sections(snapshot),
        )
        first = facts.at_s == facts.first_at_s
        facts = see_processes(facts, snapshot, engine)
        if first and log_news.is_older(facts):
            facts = msgspec.structs.replace(
                facts, timeline=Timeline(), rank_log_at_s={}, log_moved_at_s=None, older_log=True
            )
        if isinstance(snapshot.processes, Processes):
            allocations = see_allocations(
                facts.host_memory,
                facts.tracks.values(),
                facts.timeline,
                snapshot.at_s,
                first=first,
            )
            facts = msgspec.structs.replace(facts, host_memory=allocations)
        facts = _see_stacks(facts, snapshot, engine)
        facts = _see_waits(facts, snapshot)
        facts = _see_weights(facts, snapshot)
        facts = _see_caches(facts, snapshot, engine)
        facts = _see_gpus(facts, snapshot, engine)
        if isinstance(snapshot.host, Host):
            facts = msgspec.structs.replace(
                facts,
                host=snapshot.host,
                host_first=facts.host_first or snapshot.host,
                memory_peak=see_peak(facts.memory_peak, snapshot.host, snapshot.at_s),
            )
        if snapshot.nccl_ras is not None:
            ras = see_ras(facts.ras, snapshot.nccl_ras, snapshot.at_s)
            facts = msgspec.structs.replace(facts, ras=ras)
        if snapshot.flight_recorder is not None:
            facts = see_dumps(facts, snapshot.flight_recorder)
    return _conclude(facts, engine)


def see_dumps(facts: Facts, recorder: FlightRecorder | Missing) -> Facts:
    """Take in dumps of the Flight Recorder, of whatever moment they are."""
    if isinstance(recorder, Missing):
        return facts
    found = compare(recorder) if recorder.dumps else None
    return msgspec.structs.replace(
        facts, collectives=found or facts.collectives, unusable_dumps=recorder.unusable
    )


def _sections(snapshot: Snapshot) -> dict[str, Missing | None]:
    found: dict[str, Missing | None] = {}
    for name in SECTIONS:
        section = getattr(snapshot, name)
        if section is not None:
            found[name] = section if isinstance(section, Missing) else None
    return found


def _see_stacks(facts: Facts, snapshot: Snapshot, engine: Engine) -> Facts:
    if not isinstance(snapshot.stacks, Stacks):
        return facts
    known = dict(facts.tracks)
    for pid, stacks in snapshot.stacks.by_pid.items():
        if pid in known:
            known[pid] = tracks.see_stacks(known[pid], stacks, snapshot.at_s, engine.waits)
    return msgspec.structs.replace(facts, tracks=known)


def _see_waits(facts: Facts, snapshot: Snapshot) -> Facts:
    if not isinstance(snapshot.waits, Waits):
        return facts
    known = dict(facts.tracks)
    for pid, waits in snapshot.waits.by_pid.items():
        if pid in known:
            known[pid] = tracks.see_waits(known[pid], waits, snapshot.at_s)
    locks = facts.locks
    searched = snapshot.waits.locks_searched
    if isinstance(snapshot.waits.locks, tuple):
        # A look that does not search says nothing of the files that only a search finds.
        kept = () if searched else tuple(lock for lock in locks if not lock.waiters)
        locks = (*snapshot.waits.locks, *kept)
    return msgspec.structs.replace(facts, tracks=known, locks=locks)


def _see_weights(facts: Facts, snapshot: Snapshot) -> Facts:
    if not isinstance(snapshot.weights, Weights):
        return facts
    known = dict(facts.tracks)
    private = {
        pid: track.process.rss_bytes - track.process.rss_file_bytes
        for pid in snapshot.weights.held
        if (track := known.get(pid))
        and track.process.rss_bytes is not None
        and track.process.rss_file_bytes is not None
    }
    took_s = snapshot.took_s.get("weights", 0.0)
    if snapshot.weights.checkpoint is not None:
        took_s = 0.0  # the model's files are listed now and then only
    cost_s = min(took_s, facts.loading.last_took_s) if facts.loading else 0.0
    loading, read = see_weights(facts.loading, snapshot.weights, private, snapshot.at_s)
    loading = msgspec.structs.replace(loading, took_s=cost_s, last_took_s=took_s)
    for pid, (bytes_per_s, file) in read.items():
        if pid in known:
            known[pid] = tracks.moved(
                known[pid],
                snapshot.at_s,
                f"reads {rate(bytes_per_s)} of {file or 'weights'}",
            )
    return msgspec.structs.replace(facts, loading=loading, tracks=known)


def _see_caches(facts: Facts, snapshot: Snapshot, engine: Engine) -> Facts:
    """Let a compiler's cache that grows count as progress of the ranks that run its code.

    Another launch may fill the same cache: a rank that uses no CPU does not, nor one that waits for
    its GPU in that code.
    """
    if not isinstance(snapshot.caches, Caches):
        return facts
    at_s = snapshot.at_s
    seen, grown = see_caches(facts.caches, snapshot.caches, engine.caches, at_s)
    known = dict(facts.tracks)
    for cache, path in grown:
        for pid, track in known.items():
            used_pct = (track.cpu_pct or 0) + (track.children_pct or 0)
            compiles = wait_kind(track, engine) != "device" and runs_code(track.stack, cache)
            if track.rank and used_pct >= WORK_PCT and compiles:
                known[pid] = tracks.moved(track, at_s, f"{cache.title} fills its cache {path}")
    return msgspec.structs.replace(facts, caches=seen, tracks=known)


def _see_gpus(facts: Facts, snapshot: Snapshot, engine: Engine) -> Facts:
    if not isinstance(snapshot.gpus, Gpus):
        return facts
    at_s = snapshot.at_s
    ours = tracks.own_pids(facts.tracks.values())
    cards = {
        index: see_card(facts.cards.get(index), gpu, at_s, ours)
        for index, gpu in snapshot.gpus.cards.items()
    }
    known = dict(facts.tracks)
    mapped: set[int] = set()
    families = {pid: family(known, pid) for pid, track in known.items() if track.rank}
    for pids in families.values():
        mapped.update(cards_of(cards, pids))
    for index in mapped.union(cards_of(cards, known.keys())):
        if isinstance(gpu := cards[index].gpu, Gpu):
            cards[index] = msgspec.structs.replace(cards[index], held=gpu)
    nobodys = {
        index
        for index, card in cards.items()
        if index not in mapped and not others_only(card, ours)
    }
    for pid, pids in families.items():
        track = known[pid]
        # A rank whose card NVML does not tell, as in a PID namespace of its own, may be behind any
        # card that is nobody's; one that uses none is behind none.
        anybody = set() if facts.cpu_launch else nobodys
        own = cards_of(cards, pids) or tuple(anybody)
        uses_it = may_use_card(track, engine)
        for index in own:
            card = cards[index]
            if by := moves_data_of(card, pids, at_s):
                known[pid] = tracks.moved(known[pid], at_s, by)
            elif card.shared and uses_it and work_of(card, at_s):
                known[pid] = msgspec.structs.replace(known[pid], shared_work_at_s=at_s)
    return msgspec.structs.replace(facts, cards=cards, tracks=known)


def _conclude(facts: Facts, engine: Engine) -> Facts:
    """Compute what follows from everything together: sizes, and the view of each rank."""
    launcher = facts.launcher
    command = launcher.process.title if launcher else " ".join(facts.header.command)
    sizes = sizes_of(engine, command, facts.timeline.launch.sizes)
    cpu = (
        facts.cpu_launch or facts.timeline.launch.on_cpu or matches_any(engine.detect.cpu, command)
    )
    # Of two processes of one name the one that is there counts, and of these the older.
    ranked = [track for track in facts.tracks.values() if track.rank]
    ranked.sort(key=lambda track: (track.present, -track.process.start_ticks))
    by_name = {track.rank: track for track in ranked if track.rank}
    names = set(by_name) | {name for name in facts.timeline.ranks if name}
    expected = expected_ranks(sizes)
    if not names <= set(expected):
        expected = ()  # named by another scheme than the one we know
    before = {rank.name: rank for rank in facts.ranks}
    stands = logged_stands(facts.timeline, engine)
    ranks = tuple(
        rank_view(name, by_name.get(name), before.get(name), facts, engine, stand=stands.get(name))
        for name in sorted(names | set(expected), key=rank_order)
    )
    return msgspec.structs.replace(
        facts,
        sizes=sizes,
        expected=expected,
        expected_count=expected_count(sizes),
        cpu_launch=cpu or None,
        ranks=ranks,
        blocked={
            pid: blocked[0]
            for pid, track in facts.tracks.items()
            if track.role
            and (blocked := blocked_threads(track, facts.at_s or 0.0, facts.name_of))
            and blocked[0].tid == pid
        },
    )
