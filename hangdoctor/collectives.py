"""Who waits for whom in collectives, by what each rank's Flight Recorder wrote.

A recorder keeps the operations that its rank's *program* enqueued, numbered within each group, and
what its *watchdog* saw complete. What follows from that:

- A rank that has enqueued operation n of a group, where another member has not, waits for that
  member. A count alone blames nobody: the member may itself wait, in this group or in another.
  Whoever is waited for and has nothing open has simply not come: its program stands elsewhere.
- A collective to which all contribute ends for one rank only after all have begun it. Where a peer
  saw operation n complete, this rank has run everything before n in that group, whatever its own
  record says. Old entries that are still open in it are then no waits; its record has stopped, as
  where its GPU or its context failed and the watchdog no longer learns of anything.
- Sends and receives are numbered by each rank for itself, so that their numbers mean nothing to
  another. One that is open waits for its peer if the peer has no open counterpart.
- A recorder is a ring: what it no longer holds was enqueued, and its status still counts it.
- All members have enqueued the same operation and nobody lags: no rank is to blame.

Dumps of different moments prove nothing about each other. One that was written before another rank
enqueued its newest operation is left out, as if there were none: the job went on after it. Whether
anything stood still since, the dumps do not tell; the rules ask for it.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from hangdoctor.model import (
    CollectiveEntry,
    CollectiveGroup,
    FlightRecorder,
    FlightRecorderDump,
    Struct,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ALL_CONTRIBUTE = frozenset(
    {
        "all_gather",
        "_all_gather_base",
        "all_gather_into_tensor_coalesced",
        "all_reduce",
        "all_reduce_barrier",
        "all_to_all",
        "barrier",
        "reduce_scatter",
        "_reduce_scatter_base",
        "reduce_scatter_tensor_coalesced",
    }
)
"""Operations that end for nobody before everybody has begun them; a broadcast's root is free."""

STOPPED_OPERATIONS = 2
"""A watchdog looks every 100 ms: where it is one operation late that tells nothing."""

_SEND_OR_RECEIVE = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")


class OpenOperation(Struct, frozen=True):
    """An operation that a rank enqueued and that has not ended.

    Attributes:
        rank: whose.
        group, entry: which.
        missing: members that have not joined it.
        undumped: members of which no dump is there.
    """

    rank: int
    group: CollectiveGroup
    entry: CollectiveEntry
    missing: tuple[int, ...] = ()
    undumped: tuple[int, ...] = ()


class StoppedRecord(Struct, frozen=True):
    """A rank whose record has stopped before what its peers completed together with it.

    Attributes:
        group: in which that shows.
        entry: the oldest that its record still has open.
        peer, completed: a rank that saw this later operation complete.
    """

    group: CollectiveGroup
    entry: CollectiveEntry
    peer: int
    completed: int


class Divergence(Struct, frozen=True):
    """Different operations under one number of a group.

    Attributes:
        seq: the first such number.
        ranks_by_operation: what it is to which ranks, with the shapes where only they differ.
    """

    group: CollectiveGroup
    seq: int
    ranks_by_operation: dict[str, tuple[int, ...]]


class Collectives(Struct, frozen=True):
    """What all dumps together say.

    Attributes:
        world: all ranks of the job; undumped: those of which no dump is there, or an old one.
        outdated: those whose dump was written before others went on.
        open: operations that had not ended, of each rank and group the oldest one.
        waited_for: rank to the ranks that wait for it, itself waiting for nobody; the one that
            most wait for first.
        stopped: ranks whose record has stopped.
        diverged: where groups are out of step.
        gave_up: an operation's time limit passed.
        open_s: for how long at least the operations with missing members had been open when the
            dumps were written, by the files' time stamps; None where they do not tell.
    """

    world: tuple[int, ...] = ()
    undumped: tuple[int, ...] = ()
    outdated: tuple[int, ...] = ()
    open: tuple[OpenOperation, ...] = ()
    waited_for: dict[int, tuple[int, ...]] = {}
    stopped: dict[int, StoppedRecord] = {}
    diverged: tuple[Divergence, ...] = ()
    gave_up: bool = False
    open_s: float | None = None

    @property
    def behind(self) -> tuple[int, ...]:
        """The ranks to blame, by how many wait for them."""
        return tuple(dict.fromkeys((*self.waited_for, *self.stopped)))


def compare(recorder: FlightRecorder) -> Collectives:
    """Compare the dumps of all ranks."""
    groups = [group.ranks for dump in recorder.dumps.values() for group in dump.groups]
    world = max(groups, key=len, default=tuple(recorder.dumps))
    newest_s = max(map(_newest_s, recorder.dumps.values()), default=0.0)
    dumps = {
        rank: dump
        for rank, dump in recorder.dumps.items()
        if dump.written_wall_s is None or dump.written_wall_s >= newest_s
    }
    views = _views(dumps)
    opened: list[OpenOperation] = []
    stopped: dict[int, StoppedRecord] = {}
    diverged: list[Divergence] = []
    for view in views:
        for rank in view.collectives:
            proven = view.proven(rank)
            still_open = [
                entry
                for entry in view.collectives[rank]
                if entry.state != "completed" and (proven is None or entry.seq > proven[1])
            ]
            if still_open:
                opened.append(view.opened(rank, still_open[0]))
            if found := view.stopped(rank, proven):
                stopped.setdefault(rank, found)
        if found_divergence := view.divergence():
            diverged.append(found_divergence)
    opened += _open_sends(views, stopped)
    edges: dict[int, set[int]] = {}
    for operation in opened:
        for rank in operation.missing:
            edges.setdefault(rank, set()).add(operation.rank)
    waiting = _waiting(opened)
    waited_for = {
        rank: tuple(sorted(_reaching(rank, edges))) for rank in edges if rank not in waiting
    }
    return Collectives(
        world=tuple(sorted(world)),
        undumped=tuple(sorted(set(world) - set(dumps))),
        outdated=tuple(sorted(set(recorder.dumps) - set(dumps))),
        open=tuple(sorted(opened, key=lambda one: (one.rank, one.entry.record_id))),
        waited_for=dict(sorted(waited_for.items(), key=lambda one: (-len(one[1]), one[0]))),
        stopped=dict(sorted(stopped.items())),
        diverged=tuple(diverged),
        gave_up=any(entry.gave_up for dump in dumps.values() for entry in dump.entries),
        open_s=min(
            (
                written_s - one.entry.created_wall_s
                for one in opened
                if one.missing
                and one.entry.created_wall_s is not None
                and (written_s := dumps[one.rank].written_wall_s) is not None
            ),
            default=None,
        ),
    )


def _newest_s(dump: FlightRecorderDump) -> float:
    return max((entry.created_wall_s or 0.0 for entry in dump.entries), default=0.0)


class _View:
    """One process group, as all its members' dumps tell it."""

    def __init__(self, group: CollectiveGroup) -> None:
        self.group = group
        self.told: dict[int, CollectiveGroup] = {}
        self.collectives: dict[int, list[CollectiveEntry]] = {}
        self.sends: dict[int, list[CollectiveEntry]] = {}

    @cached_property
    def enqueued(self) -> dict[int, int]:
        """The last collective that each rank enqueued, where that is known."""
        return {
            rank: max(numbers)
            for rank, entries in self.collectives.items()
            if (numbers := [*(entry.seq for entry in entries), *self._status(rank, "enqueued")])
        }

    @cached_property
    def completed(self) -> list[tuple[int, int]]:
        """The last collective that a rank's watchdog saw complete, and the rank, highest first."""
        found = []
        for rank, entries in self.collectives.items():
            numbers = [entry.seq for entry in entries if entry.state == "completed"]
            numbers += self._status(rank, "completed")
            open_ = [entry.seq for entry in entries if entry.state != "completed"]
            numbers += [open_[0] - 1] if open_ else []  # it would not be the oldest otherwise
            if numbers:
                found.append((max(numbers), rank))
        return sorted(found, reverse=True)

    def proven(self, rank: int) -> tuple[int, int] | None:
        """Return a peer for which a collective ended that needed the rank, and the last such."""
        peer = next((each for each in self.completed if each[1] != rank), None)
        if peer is None:
            return None
        joint = [
            entry.seq
            for entry in self.collectives[rank]
            if entry.seq <= peer[0] and entry.op in ALL_CONTRIBUTE
        ]
        return (peer[1], joint[-1]) if joint else None

    def stopped(self, rank: int, proven: tuple[int, int] | None) -> StoppedRecord | None:
        """Return the proof that a rank's record has stopped, if there is one."""
        if proven is None:
            return None
        stale = [
            entry
            for entry in self.collectives[rank]
            if entry.state != "completed" and entry.seq < proven[1]
        ]
        if len(stale) < STOPPED_OPERATIONS:
            return None
        return StoppedRecord(group=self.group, entry=stale[0], peer=proven[0], completed=proven[1])

    def opened(self, rank: int, entry: CollectiveEntry) -> OpenOperation:
        """Return an open operation with the members that are missing in it."""
        missing = []
        for member in self.collectives:
            enqueued = self.enqueued.get(member)
            absent = enqueued is not None and enqueued < entry.seq
            lags = entry.state == "started" and self._lags(member, entry.seq)
            if member != rank and (absent or lags):
                missing.append(member)
        return OpenOperation(
            rank=rank,
            group=self.group,
            entry=entry,
            missing=tuple(missing),
            undumped=tuple(member for member in self.group.ranks if member not in self.collectives),
        )

    def divergence(self) -> Divergence | None:
        """Return the first number under which ranks have different operations."""
        by_seq: dict[int, dict[int, set[tuple[str, str]]]] = {}
        for rank, entries in self.collectives.items():
            for entry in entries:
                of_rank = by_seq.setdefault(entry.seq, {}).setdefault(rank, set())
                of_rank.add((entry.op, entry.shape))
        for seq in sorted(by_seq):
            if found := _differ(by_seq[seq]):
                return Divergence(group=self.group, seq=seq, ranks_by_operation=found)
        return None

    def _status(self, rank: int, what: Literal["enqueued", "completed"]) -> list[int]:
        """Return a number of a rank's status, unless it may count sends and receives instead."""
        told: int | None = getattr(self.told[rank], what)
        return [] if told is None or self._has_sends else [told]

    @cached_property
    def _has_sends(self) -> bool:
        return any(self.sends.values())

    def _lags(self, member: int, seq: int) -> bool:
        """Tell whether a member has enqueued an operation that its GPU has not come to."""
        return any(
            entry.seq == seq and entry.state == "scheduled" for entry in self.collectives[member]
        )


def _views(dumps: Mapping[int, FlightRecorderDump]) -> list[_View]:
    views: dict[tuple[str, tuple[int, ...]], _View] = {}
    for rank, dump in dumps.items():
        for group in dump.groups:
            view = views.setdefault((group.name, group.ranks), _View(group))
            entries = [entry for entry in dump.entries if entry.group == group.name]
            view.told[rank] = group
            view.collectives[rank] = sorted(
                (entry for entry in entries if not entry.is_p2p), key=lambda entry: entry.seq
            )
            view.sends[rank] = [entry for entry in entries if entry.is_p2p]
    return list(views.values())


def _open_sends(
    views: Iterable[_View], stopped: Mapping[int, StoppedRecord]
) -> list[OpenOperation]:
    """Return the open sends and receives; a stopped record's are not known to be open."""
    found = []
    for view in views:
        members = view.group.ranks
        for rank, entries in view.sends.items():
            for entry in entries:
                if entry.state == "completed" or rank in stopped:
                    continue
                peer = _peer(entry, members)
                missing = peer in view.sends and not any(
                    _is_counterpart(other, entry) for other in view.sends[peer]
                )
                undumped = peer is not None and peer not in view.sends
                found.append(
                    OpenOperation(
                        rank=rank,
                        group=view.group,
                        entry=entry,
                        missing=(peer,) if missing and peer is not None else (),
                        undumped=(peer,) if undumped and peer is not None else (),
                    )
                )
    # A send behind another open operation may only wait for that one to end.
    oldest: dict[int, OpenOperation] = {}
    for one in sorted(found, key=lambda one: one.entry.record_id):
        oldest.setdefault(one.rank, one)
    return list(oldest.values())


def _peer(entry: CollectiveEntry, members: tuple[int, ...]) -> int | None:
    match = _SEND_OR_RECEIVE.fullmatch(entry.op)
    if match is None or int(match[3]) >= len(members):
        return None
    return members[int(match[3])]


def _is_counterpart(other: CollectiveEntry, entry: CollectiveEntry) -> bool:
    match, of_other = _SEND_OR_RECEIVE.fullmatch(entry.op), _SEND_OR_RECEIVE.fullmatch(other.op)
    if match is None or of_other is None or other.state == "completed":
        return False
    return match[1] != of_other[1] and (match[2], match[3]) == (of_other[3], of_other[2])


def _waiting(opened: Iterable[OpenOperation]) -> set[int]:
    """Return the ranks that have something open that may hold them, but their own lateness."""
    front: dict[int, OpenOperation] = {}
    late: set[tuple[int, str, tuple[int, ...], int]] = set()
    for one in opened:
        first = front.setdefault(one.rank, one)
        if one.entry.record_id < first.entry.record_id:
            front[one.rank] = one
        if not one.entry.is_p2p:
            late |= {(rank, *_operation(one)) for rank in one.missing}
    return {
        rank
        for rank, one in front.items()
        if one.entry.is_p2p or (rank, *_operation(one)) not in late
    }


def _operation(one: OpenOperation) -> tuple[str, tuple[int, ...], int]:
    return one.group.name, one.group.ranks, one.entry.seq


def _reaching(rank: int, edges: Mapping[int, set[int]]) -> set[int]:
    """Return all that wait for a rank, also through others."""
    found: set[int] = set()
    todo = [rank]
    while todo:
        new = edges.get(todo.pop(), set()) - found - {rank}
        found |= new
        todo += new
    return found


def _differ(by_rank: Mapping[int, set[tuple[str, str]]]) -> dict[str, tuple[int, ...]]:
    """Return the ranks by what they do, if that is not the same; empty if it is.

    A coalesced batch has several operations under one number: what two ranks share is enough.
    """
    if len(by_rank) < 2:
        return {}
    ops = {rank: {op for op, _ in pairs} for rank, pairs in by_rank.items()}
    first = next(iter(ops.values()))
    if any(first.isdisjoint(other) for other in ops.values()):
        return _grouped({rank: " + ".join(sorted(own)) for rank, own in ops.items()})
    single = {rank: next(iter(pairs)) for rank, pairs in by_rank.items() if len(pairs) == 1}
    shapes = {shape for _, shape in single.values()}
    if len(single) == len(by_rank) and len(shapes) > 1 and "" not in shapes:
        return _grouped({rank: f"{op} of {shape}" for rank, (op, shape) in single.items()})
    return {}


def _grouped(texts: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for rank, text in texts.items():
        found[text] = (*found.get(text, ()), rank)
    return found
