"""Rules over what NCCL and PyTorch themselves count of their collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hangdoctor.engines import PEER_KINDS
from hangdoctor.facts.phases import earliest_phase
from hangdoctor.findings import Evidence, Finding, enumerate_names
from hangdoctor.frames import place
from hangdoctor.nccl import OTHERS, ask_by_hand, diverged, lags
from hangdoctor.rules.case import evidence, judge

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hangdoctor.collectives import Collectives, OpenOperation
    from hangdoctor.facts import RankFacts
    from hangdoctor.model import (
        CollectiveEntry,
        CollectiveGroup,
        NcclCommunicator,
        NcclRank,
        NcclRas,
    )
    from hangdoctor.nccl import Lag, Ras
    from hangdoctor.rules.case import Case

DAY_S = 86400.0
LASTING_S = 4.0
"""Counts must have been the same for so long; RAS is asked every five seconds."""
FRESH_S = 20.0
"""Older counts tell nothing of now; they are asked for as long as nothing moves."""
MOST_NAMED = 4
"""Ranks of which the evidence is shown."""


def nccl_ranks_behind(case: Case) -> Iterator[Finding]:
    """NCCL counts fewer collectives on a rank than on others of the same communicator.

    What it sees: the counts of NCCL's RAS, unchanged over several looks; a rank that has launched
    a part of what others have. It is named if no other communicator has it wait in turn, and its
    stack is in no collective and does not idle.
    Why it matters: the others wait in the collective that it has not launched. That it is not in
    it is NCCL's own word, and holds where no stack can be seen.
    What to do: look at where that rank stands; its innermost frames say what it does instead.
    """
    ras = _ras(case)
    found = [lag for one in _standing(case) for lag in lags(one)]
    if ras is None or not found:
        return
    ahead = {rank.pid for lag in found for rank in lag.ahead if rank.pid is not None}
    blamed = [lag for lag in found if lag.behind.pid is None or lag.behind.pid not in ahead]
    suspects = tuple(
        dict.fromkeys(rank for lag in blamed for rank in _ranks_of(case, lag.behind, lag))
    )
    elsewhere = tuple(rank for rank in suspects if not _is_met(rank) and rank.present is not False)
    shown = blamed or found
    names = tuple(rank.name for rank in elsewhere)
    who = enumerate_names(names) or enumerate_names([rank.name for rank in suspects])
    lag = shown[0]
    finding = Finding(
        rule="nccl-ranks-behind",
        verdict="found",
        title=f"{who or 'a rank of another machine'} has launched {_times(lag.launched)} "
        f"{lag.op or 'collectives'}, others {lag.highest}: NCCL's own counts",
        ranks=tuple(rank.name for rank in suspects),
        culprits=names,
        phase=earliest_phase(elsewhere or suspects),
        confidence="medium" if ras.latest.form == "text" else "high",
        because=evidence(*(_lag(case, lag) for lag in shown[:MOST_NAMED]), *_standing_since(case)),
        advice=(
            f"look at what {who or 'it'} does instead",
            f"ask NCCL again: {ask_by_hand(ras.latest.address)}",
        ),
    )
    if not elsewhere:
        yield msgspec.structs.replace(
            finding,
            verdict="undecided",
            confidence="low",
            needs=("which rank left the common path: compare the ranks' stacks",),
        )
        return
    if any(rank.moving for rank in elsewhere):
        yield msgspec.structs.replace(finding, verdict="undecided", culprits=(), confidence="low")
        return
    yield judge(case, elsewhere, finding, needed_s=case.hung_after_s)


def nccl_ranks_diverged(case: Case) -> Iterator[Finding]:
    """NCCL counts collectives on two ranks of which each has launched some that the other has not.

    What it sees: the counts of NCCL's RAS, unchanged over several looks.
    Why it matters: ranks of one communicator launch the same sequence. Where they do not, neither
    of their operations can end; which of them is wrong the counts do not tell.
    What to do: compare the two ranks' stacks from the outside in; where they part is the branch.
    """
    for communicator in _standing(case):
        if pair := diverged(communicator):
            one, other = (_label(case, rank) for rank in pair)
            yield Finding(
                rule="nccl-ranks-diverged",
                verdict="found",
                title=f"{one} and {other} have launched different collectives on one communicator",
                ranks=tuple(rank.name for each in pair for rank in _ranks_of(case, each, None)),
                confidence="medium",
                because=evidence(
                    *(
                        Evidence(text=f"{_label(case, rank)} has launched {_counts(rank)}")
                        for rank in pair
                    ),
                    *_standing_since(case),
                ),
                advice=("compare the two stacks from the outside in: where they part",),
            )
            return


def nccl_reports_trouble(case: Case) -> Iterator[Finding]:
    """NCCL's RAS cannot reach a rank, or a rank has reported an error.

    What it sees: ranks that RAS calls unresponsive or dead, and asynchronous errors.
    Why it matters: RAS is a thread of NCCL's in each process; it answers whatever Python does. One
    that does not is of a process that is stopped or gone, or cannot be reached over the network.
    What to do: see whether the process is there and runs, and whether its host can be reached.
    """
    ras = _ras(case)
    if ras is None:
        return
    items: dict[str, Evidence] = {}
    ranks: dict[str, None] = {}
    for communicator in ras.latest.communicators:
        for rank in communicator.ranks:
            if not rank.error and rank.state not in ("unresponsive", "dead", "abort"):
                continue
            name = _label(case, rank)
            what = f"reports {rank.error}" if rank.error else f"is {rank.state} to NCCL's RAS"
            items.setdefault(f"{name} {what}", Evidence(text=f"{name} {what}", pid=rank.pid))
            ranks.update({one.name: None for one in _ranks_of(case, rank, None)})
    if items:
        yield Finding(
            rule="nccl-reports-trouble",
            verdict="found",
            title="; ".join(list(items)[:3]),
            ranks=tuple(ranks),
            confidence="medium",
            because=tuple(items.values()),
            advice=("see whether the process runs: grep State /proc/PID/status",),
        )


def collective_outside_nccl(case: Case) -> Iterator[Finding]:
    """A card spins in a collective, and NCCL has counted the same on all ranks.

    What it sees: a card that spins, or a rank that waits for its GPU, with another rank elsewhere;
    and in several looks the same counts of NCCL's RAS on all ranks. Had the spinning rank launched
    one more collective of NCCL than the other, the counts would differ.
    Why it matters: the collective is none of NCCL's: custom all-reduce, symmetric memory,
    flashinfer's or a captured graph. NCCL's settings, and its debug output, do not matter to it.
    What to do: find the rank that has not come; to change the path, switch off one at a time:
    --disable-custom-all-reduce, --disable-cuda-graph.
    """
    ras, graph = _ras(case), case.graph
    if ras is None or ras.alike_since_s is None or ras.at_s - ras.alike_since_s < LASTING_S:
        return
    waiting = tuple(rank for rank in graph.device if rank not in graph.suspects)
    if not waiting:
        return
    names = tuple(rank.name for rank in waiting)
    alone = bool(graph.elsewhere or graph.waiting or graph.absent)
    verb = "waits" if len(names) == 1 else "wait"
    what = f"what {enumerate_names(names)} {verb} for on the GPU"
    yield Finding(
        rule="collective-outside-nccl",
        verdict="found" if alone else "undecided",
        title=f"{what} is no collective of NCCL's: it has counted the same on all ranks"
        if alone
        else f"{what} is outside NCCL, or all have joined it and NCCL's transport stands still",
        ranks=names,
        confidence="medium" if alone else "low",
        because=evidence(
            Evidence(
                text=f"NCCL {ras.latest.version} counts the same on all ranks of "
                f"{_communicators(ras.latest)}, unchanged for "
                f"{ras.at_s - ras.alike_since_s:.0f} s",
                at_s=ras.at_s,
            ),
            *(
                Evidence(text=f"{rank.name} has launched {_counts(rank_counts)}", rank=rank.name)
                for rank in waiting[:2]
                if (rank_counts := _nccl_rank(ras.latest.communicators, rank)) is not None
            ),
        ),
        needs=() if alone else ("native frames of the ranks: --native",),
        advice=("switch off one at a time: --disable-custom-all-reduce, --disable-cuda-graph",),
    )


def flight_recorder_ranks_behind(case: Case) -> Iterator[Finding]:
    """Flight Recorder dumps show ranks that others wait for, and that wait for nobody.

    What it sees: operations that some ranks of a process group enqueued and others did not; of
    these, the ranks with nothing open themselves. And ranks in whose own record operations are
    still open that their peers saw complete, which needs all: their GPU, or their watchdog with
    it, has stopped answering.
    Why it matters: the ranks with open operations are the victims. The ones that are named stand
    elsewhere: in a lock, a load, a dead GPU.
    What to do: look at the stacks of the ranks that are named, and at their GPUs' Xid errors.
    """
    found = case.facts.collectives
    if found is None or not found.behind:
        return
    names = _names(case, found, found.behind)
    shown = found.behind[:MOST_NAMED]
    items = [_behind(case, found, rank) for rank in shown if rank in found.waited_for]
    items += [_stopped(case, found, rank) for rank in shown if rank in found.stopped]
    waiters = {waiter for ranks in found.waited_for.values() for waiter in ranks}
    title = f"{enumerate_names(names)} {'is' if len(names) == 1 else 'are'} behind in collectives"
    if waiters - set(found.behind):
        title += f" that {_waiting(waiters - set(found.behind))} in"
    finding = Finding(
        rule="flight-recorder-ranks-behind",
        verdict="found",
        title=title,
        ranks=names,
        culprits=names,
        confidence="medium" if found.undumped else "high",
        because=evidence(*items, _age(found)),
        needs=_undumped_needs(case, found),
        advice=(
            f"look at the stacks of {enumerate_names(names)}: where it stands instead",
            "look for errors of its GPU: dmesg | grep -i xid; nvidia-smi -q",
        ),
    )
    yield _judged(case, finding)


def flight_recorder_ranks_diverged(case: Case) -> Iterator[Finding]:
    """Flight Recorder dumps show different operations under the same number of a group.

    What it sees: the first number under which ranks of one process group enqueued different
    operations, or the same one with shapes that must be alike and are not.
    Why it matters: none of them can end, or it ends with wrong numbers. A branch that only some
    ranks take is the usual cause; which of them is wrong the counts do not tell.
    What to do: compare the frames of the two operations from the outside in.
    """
    found = case.facts.collectives
    for divergence in found.diverged[:2] if found else ():
        parts = [
            f"{operation} on {enumerate_names(_names(case, found, ranks))}"
            for operation, ranks in divergence.ranks_by_operation.items()
        ]
        everyone = [rank for ranks in divergence.ranks_by_operation.values() for rank in ranks]
        finding = Finding(
            rule="flight-recorder-ranks-diverged",
            verdict="found",
            title=f"the ranks are out of step in {_group(divergence.group)}: number "
            f"{divergence.seq} is {', '.join(parts[:4])}",
            ranks=_names(case, found, sorted(everyone)),
            confidence="high",
            needs=("which rank left the common path: compare what each decided before it",),
            advice=(
                "record frames with it: TORCH_INCLUDE_STACK_TRACE=1, TORCH_INCLUDE_ONLY_ACTIVE=0",
            ),
        )
        yield _judged(case, finding)


def flight_recorder_undecided(case: Case) -> Iterator[Finding]:
    """Flight Recorder dumps show open operations, and name no rank.

    What it sees: operations that all members with a dump enqueued and none completed, or that wait
    for ranks of which there is no dump.
    Why it matters: with all dumps there it is no rank but what carries the operation (network,
    NVLink, driver), or nothing is wrong and the dumps were written in the middle of it. A rank
    that cannot even write its dump is a suspect: a dump with stacks needs Python's lock.
    What to do: get the missing dumps; else test the links: all_reduce_perf of nccl-tests.
    """
    found = case.facts.collectives
    if found is None or found.behind or found.diverged or not found.open:
        return
    oldest = min(found.open, key=_since)
    absent = sorted({rank for one in found.open for rank in one.undumped})
    what = f"{oldest.entry.op} {oldest.entry.seq} of {_group(oldest.group)}"
    if absent:
        names = _names(case, found, absent)
        title = f"ranks wait in {what}; of {enumerate_names(names)} there is no dump"
    elif any(one.missing for one in found.open):
        names = _names(case, found, sorted({one.rank for one in found.open}))
        title = f"{enumerate_names(names)} wait for each other in different operations"
    else:
        names = ()
        title = f"all members have enqueued {what}, and none has seen it complete"
    yield Finding(
        rule="flight-recorder-undecided",
        verdict="undecided",
        title=title,
        ranks=names,
        confidence="low",
        because=evidence(_open(case, found, oldest), _age(found)),
        needs=_undumped_needs(case, found)
        or ("whether it stood still: dumps some seconds apart, or the launch's PID or log",),
        advice=() if absent else ("test what carries it: all_reduce_perf of nccl-tests",),
    )


def _judged(case: Case, finding: Finding) -> Finding:
    """Give a finding from dumps its state: by what was seen of the launch, else by the dumps."""
    facts = case.facts
    found = facts.collectives
    suspects = tuple(rank for rank in facts.ranks if rank.name in finding.culprits)
    finding = msgspec.structs.replace(finding, phase=earliest_phase(suspects))
    if case.observed:
        if any(rank.moving for rank in suspects):
            return msgspec.structs.replace(
                finding, verdict="undecided", culprits=(), confidence="low"
            )
        return judge(case, suspects, finding, needed_s=case.hung_after_s)
    if found is not None and found.open_s is not None and found.open_s < case.stall_after_s:
        return msgspec.structs.replace(
            finding,
            verdict="undecided",
            culprits=(),
            confidence="low",
            needs=(
                *finding.needs,
                f"dumps of operations that have been open for {case.stall_after_s:.0f} s",
            ),
        )
    if found is not None and found.gave_up:
        return msgspec.structs.replace(finding, state="hung")
    return msgspec.structs.replace(
        finding,
        needs=(
            *finding.needs,
            "whether the job stood still when the dumps were written: its log, or its PID",
        ),
    )


def _ras(case: Case) -> Ras | None:
    """Return what NCCL counts, if that was told of late and nothing has moved since."""
    ras = case.facts.ras
    age_s = (case.facts.at_s or 0.0) - ras.at_s if ras else 0.0
    moved = case.still_s is not None and case.still_s < age_s
    return None if moved or age_s > FRESH_S else ras


def _standing(case: Case) -> list[NcclCommunicator]:
    """Return the communicators whose counts have been the same for some looks."""
    ras = _ras(case)
    if ras is None:
        return []
    return [
        one
        for one in ras.latest.communicators
        if ras.at_s - ras.since_s.get(one.id, ras.at_s) >= LASTING_S
    ]


def _standing_since(case: Case) -> Iterator[Evidence]:
    ras = case.facts.ras
    if ras is not None and ras.since_s:
        lasting_s = ras.at_s - min(ras.since_s.values())
        yield Evidence(text=f"the counts have not changed for {lasting_s:.0f} s", at_s=ras.at_s)


def _lag(case: Case, lag: Lag) -> Evidence:
    ahead = enumerate_names([_label(case, rank) for rank in lag.ahead[:MOST_NAMED]])
    return Evidence(
        text=f"{_label(case, lag.behind)} has launched {_times(lag.launched)} "
        f"{lag.op or 'collectives'} on communicator {lag.communicator.id[:18]}, {ahead} "
        f"{lag.highest}",
        pid=lag.behind.pid,
    )


def _ranks_of(case: Case, rank: NcclRank, lag: Lag | None) -> list[RankFacts]:
    """Return the launch's ranks that a rank of NCCL's stands for."""
    known = case.facts.ranks
    if rank.number != OTHERS:
        return [one for one in known if one.pid is not None and one.pid == rank.pid]
    if lag is None or lag.communicator.size != len(known):
        return []
    named = {one.pid for one in lag.communicator.ranks}
    return [one for one in known if one.pid not in named]


def _is_met(rank: RankFacts) -> bool:
    """Tell whether a rank stands in a collective itself, or waits for requests."""
    return rank.wait is not None and rank.wait.kind in (*PEER_KINDS, "idle")


def _label(case: Case, rank: NcclRank) -> str:
    if rank.number == OTHERS:
        return "the other ranks"
    name = next((one.name for one in _ranks_of(case, rank, None)), None)
    return name or f"rank {rank.number} of the communicator" + (
        f" on {rank.host}" if rank.host else ""
    )


def _nccl_rank(communicators: Iterable[NcclCommunicator], rank: RankFacts) -> NcclRank | None:
    return next(
        (one for each in communicators for one in each.ranks if one.pid == rank.pid is not None),
        None,
    )


def _counts(rank: NcclRank) -> str:
    told = [f"{count} {op or 'collectives'}" for op, count in rank.counts.items() if count]
    return ", ".join(told) or "nothing"


def _communicators(latest: NcclRas) -> str:
    count = len(latest.communicators) + latest.alike
    return "the only communicator" if count == 1 else f"all {count} communicators"


def _times(count: int) -> str:
    return str(count) if count else "no"


def _behind(case: Case, found: Collectives, rank: int) -> Evidence:
    waits = [one for one in found.open if rank in one.missing]
    first = min(waits, key=lambda one: (one.entry.is_p2p, _since(one)))
    waiters = [one.rank for one in waits if _same(one, first)]
    (name,) = _names(case, found, [rank])
    verb = "has not joined" if first.entry.state != "started" else "has not begun"
    return Evidence(
        text=f"{name} {verb} {first.entry.op} {first.entry.seq} of {_group(first.group)}, in which "
        f"{enumerate_names(_names(case, found, waiters))} "
        f"{'waits' if len(waiters) == 1 else 'wait'}",
        rank=name,
        frame=_frames(first.entry),
    )


def _stopped(case: Case, found: Collectives, rank: int) -> Evidence:
    record = found.stopped[rank]
    name, peer = _names(case, found, [rank, record.peer])
    return Evidence(
        text=f"the record of {name} has stopped: {record.entry.op} {record.entry.seq} of "
        f"{_group(record.group)} is open in it, while {peer} saw {record.completed} complete, "
        "which needs all of them: the GPU, or the watchdog with it, no longer answers",
        rank=name,
        frame=_frames(record.entry),
    )


def _open(case: Case, found: Collectives, one: OpenOperation) -> Evidence:
    (name,) = _names(case, found, [one.rank])
    return Evidence(
        text=f"{name} has {one.entry.op} {one.entry.seq} of {_group(one.group)} open, "
        f"{one.entry.state}",
        rank=name,
        frame=_frames(one.entry),
    )


def _age(found: Collectives) -> Evidence | None:
    if found.open_s is None or not 1 <= found.open_s < DAY_S:  # older: it is a copy's stamp
        return None
    return Evidence(
        text=f"these had been open for {found.open_s:.0f} s when the dumps were written, by the "
        "files' time stamps"
    )


def _undumped_needs(case: Case, found: Collectives) -> tuple[str, ...]:
    if not found.undumped:
        return ()
    shown = enumerate_names(_names(case, found, found.undumped[:8]))
    more = f" and {len(found.undumped) - 8} more" if len(found.undumped) > 8 else ""
    new = "dumps of the same moment" if found.outdated else "dumps"
    return (f"{new} of {shown}{more}",)


def _names(case: Case, found: Collectives | None, ranks: Iterable[int]) -> tuple[str, ...]:
    """Return the launch's names of global ranks; "rank 3" where they are not known.

    PyTorch numbers the ranks of a launch in the order of their names.
    """
    known = case.facts.ranks
    if found is None or len(known) != len(found.world):
        return tuple(f"rank {rank}" for rank in ranks)
    return tuple(known[found.world.index(rank)].name for rank in ranks)


def _group(group: CollectiveGroup) -> str:
    members = ",".join(map(str, group.ranks[:8])) + (",..." if len(group.ranks) > 8 else "")
    return f"{group.description or 'group'} {group.name} (ranks {members})"


def _frames(entry: CollectiveEntry) -> str | None:
    return " < ".join(place(frame) for frame in entry.frames[:3]) or None


def _since(one: OpenOperation) -> tuple[float, int]:
    return one.entry.created_wall_s or 0.0, one.entry.record_id


def _same(one: OpenOperation, other: OpenOperation) -> bool:
    return (one.group.name, one.entry.seq, one.entry.is_p2p) == (
        other.group.name,
        other.entry.seq,
        other.entry.is_p2p,
    )


def _waiting(ranks: set[int]) -> str:
    return "one rank waits" if len(ranks) == 1 else f"{len(ranks)} ranks wait"
