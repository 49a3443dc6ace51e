"""Rules over what NCCL and PyTorch themselves count of their collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hangdoctor.findings import Evidence, Finding, enumerate_names
from hangdoctor.frames import place
from hangdoctor.rules.case import earliest_phase, evidence, judge

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hangdoctor.collectives import Collectives, OpenOperation
    from hangdoctor.model import CollectiveEntry, CollectiveGroup
    from hangdoctor.rules.case import Case

DAY_S = 86400.0
MOST_NAMED = 4
"""Ranks of which the evidence is shown."""


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
        title += f" that {_count(waiters - set(found.behind))} wait in"
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
            f"look at the stacks of {enumerate_names(names)}: what it does instead of joining",
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


def _count(ranks: Iterable[int]) -> str:
    number = len(set(ranks))
    return "one rank" if number == 1 else f"{number} ranks"
