"""What NCCL's RAS counts, from one look to the next.

RAS counts the collectives that each rank has *launched* on each communicator. All ranks of one
launch the same sequence, so that at rest one rank's counts are a part of another's: the lower is
behind. Counts of which each is higher in something are of ranks that took different ways. In a
healthy job they differ for moments; only what stays from look to look means anything.

Custom all-reduce, symmetric memory, and the replay of captured graphs are not counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.collect.nccl_ras import DEFAULT_ADDRESS
from hangdoctor.model import Missing, NcclCommunicator, NcclRank, NcclRas, Struct

if TYPE_CHECKING:
    from collections.abc import Mapping

OTHERS = -1
"""Number that stands for the ranks that a text does not name."""


class Ras(Struct, frozen=True):
    """The last answer, and since when it has been the same.

    Attributes:
        latest: the answer; at_s: its time.
        since_s: by communicator, since when each look has shown the same counts.
        alike_since_s: since when each look has shown the same communicators, all with equal
            counts on all ranks; None where the last one has not. Text does not tell counts that
            are equal: they may have moved.
    """

    latest: NcclRas
    at_s: float
    since_s: dict[str, float] = {}
    alike_since_s: float | None = None


class Lag(Struct, frozen=True):
    """A rank that has launched less than others on a communicator.

    Attributes:
        behind: the rank; its number is OTHERS for those that are not named.
        ahead: those that have launched all that it has, and more.
        op, launched, highest: a collective in which that shows, and the numbers of it.
    """

    communicator: NcclCommunicator
    behind: NcclRank
    ahead: tuple[NcclRank, ...]
    op: str
    launched: int
    highest: int


def ask_by_hand(address: str = DEFAULT_ADDRESS) -> str:
    """Return the command that asks RAS.

    >>> ask_by_hand("[::1]:20021")
    'echo verbose status | nc -w 5 ::1 20021'
    """
    host, _, port = address.rpartition(":")
    return f"echo verbose status | nc -w 5 {host.strip('[]')} {port}"


def see_ras(before: Ras | None, answer: NcclRas | Missing, at_s: float) -> Ras | None:
    """Take in an answer; where there is none, what was known before is not known any more."""
    if isinstance(answer, Missing):
        return None
    known = {one.id: one for one in before.latest.communicators} if before else {}
    alike = all(map(is_alike, answer.communicators))
    alike_since_s = at_s if alike and (answer.communicators or answer.alike) else None
    if (
        before
        and before.alike_since_s is not None
        and alike_since_s is not None
        and (before.latest.communicators, before.latest.alike)
        == (answer.communicators, answer.alike)
    ):
        alike_since_s = before.alike_since_s
    return Ras(
        latest=answer,
        at_s=at_s,
        since_s={
            one.id: before.since_s[one.id] if before and known.get(one.id) == one else at_s
            for one in answer.communicators
        },
        alike_since_s=alike_since_s,
    )


def is_alike(communicator: NcclCommunicator) -> bool:
    """Tell whether all ranks of a communicator are known, run, and have launched the same."""
    ranks = communicator.ranks
    return len(ranks) == communicator.size and all(
        rank.state == "running" and not rank.error and rank.counts == ranks[0].counts
        for rank in ranks
    )


def lags(communicator: NcclCommunicator) -> list[Lag]:
    """Return the ranks of a communicator that are behind others; none while it comes or goes."""
    ranks = _counted(communicator)
    if any(rank.state in ("init", "finalize", "abort") for rank in communicator.ranks):
        return []
    found = []
    for rank in ranks:
        ahead = tuple(other for other in ranks if _is_ahead(other.counts, rank.counts))
        if ahead:
            highest = ahead[0].counts
            op = next(op for op in sorted(highest) if highest[op] > rank.counts.get(op, 0))
            found.append(
                Lag(
                    communicator=communicator,
                    behind=rank,
                    ahead=ahead,
                    op=op,
                    launched=rank.counts.get(op, 0),
                    highest=max(other.counts.get(op, 0) for other in ahead),
                )
            )
    return found


def diverged(communicator: NcclCommunicator) -> tuple[NcclRank, NcclRank] | None:
    """Return two ranks of which each has launched something that the other has not."""
    ranks = _counted(communicator)
    for number, rank in enumerate(ranks):
        for other in ranks[number + 1 :]:
            if rank.counts != other.counts and not (
                _is_ahead(rank.counts, other.counts) or _is_ahead(other.counts, rank.counts)
            ):
                return rank, other
    return None


def _counted(communicator: NcclCommunicator) -> list[NcclRank]:
    ranks = [rank for rank in communicator.ranks if rank.counts]
    if communicator.others:
        ranks.append(NcclRank(number=OTHERS, counts=communicator.others))
    return ranks


def _is_ahead(counts: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Tell whether counts are those of another rank that has gone on."""
    ops = counts.keys() | other.keys()
    return counts != other and all(counts.get(op, 0) >= other.get(op, 0) for op in ops)
