"""Who waits for whom. Blame follows the waits, not the count.

Ranks that wait in the same operation for their peers are the healthy ones; the one they wait for
is elsewhere, absent or dead. Two ranks in different operations have diverged. All ranks in the
same operation: no rank is to blame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.facts import RankFacts, phase_index
from hangdoctor.frames import same_shape
from hangdoctor.model import Struct

if TYPE_CHECKING:
    from hangdoctor.facts import Facts

PEER_KINDS = ("peers", "rendezvous")
SPIN_S = 5.0
"""A card that spins shorter than this tells nothing."""


class WaitGraph(Struct, frozen=True):
    """The ranks by what they do.

    Attributes:
        waiting: in an operation that ends only when their peers join it.
        device: waiting for their own GPU.
        elsewhere: in none of these.
        idle: in their loop, waiting for requests.
        unseen: no stack of them was ever seen.
        absent: should be there and are not.
        suspects: whom the others wait for; empty where nobody waits or none can be told.
        by_elimination: the suspects are the ranks without a stack, all others being in the same
            operation.
    """

    waiting: tuple[RankFacts, ...] = ()
    device: tuple[RankFacts, ...] = ()
    elsewhere: tuple[RankFacts, ...] = ()
    idle: tuple[RankFacts, ...] = ()
    unseen: tuple[RankFacts, ...] = ()
    absent: tuple[RankFacts, ...] = ()
    suspects: tuple[RankFacts, ...] = ()
    by_elimination: bool = False

    @property
    def operations(self) -> tuple[tuple[str, ...], ...]:
        """The different operations that ranks wait in, each as its first rank shows it."""
        different: list[tuple[str, ...]] = []
        for rank in self.waiting:
            if not any(same_shape(rank.operation, other) for other in different):
                different.append(rank.operation)
        return tuple(different)


def build(facts: Facts) -> WaitGraph:
    """Sort the ranks by what they do, and follow their waits to whom they lead."""
    groups: dict[str, list[RankFacts]] = {
        key: [] for key in ("waiting", "device", "elsewhere", "idle", "unseen", "absent")
    }
    for rank in facts.ranks:
        groups[_group(rank, facts)].append(rank)
    # A rank that waits for its GPU may wait for a peer through it: one that runs Python comes
    # first.
    suspects = groups["elsewhere"] if groups["waiting"] or groups["device"] else []
    if groups["waiting"] and not suspects:
        suspects = groups["device"]
    by_elimination = False
    if not suspects and groups["waiting"]:
        first = groups["waiting"][0].operation
        together = all(same_shape(first, rank.operation) for rank in groups["waiting"])
        if together and not groups["idle"]:
            suspects = groups["absent"] or groups["unseen"]
            by_elimination = not groups["absent"]
    return WaitGraph(
        **{key: tuple(ranks) for key, ranks in groups.items()},
        suspects=tuple(_earliest(suspects, groups["waiting"])),
        by_elimination=by_elimination and bool(suspects),
    )


def _group(rank: RankFacts, facts: Facts) -> str:
    if rank.present is False:
        return "absent"
    if rank.stack is None:
        return "unseen"
    kind = rank.wait.kind if rank.wait else None
    if kind in PEER_KINDS:
        return "waiting"
    if kind == "idle":
        return "idle"
    if kind == "device" or _spins(rank, facts):
        return "device"
    return "elsewhere"


def _spins(rank: RankFacts, facts: Facts) -> bool:
    """Tell whether all cards of a rank have been spinning for a while."""
    at_s = facts.at_s or 0.0
    cards = [facts.cards[index] for index in rank.cards if index in facts.cards]
    return bool(cards) and all(
        card.reading == "spinning" and at_s - card.since_s >= SPIN_S for card in cards
    )


def _earliest(suspects: list[RankFacts], waiting: list[RankFacts]) -> list[RankFacts]:
    """Leave those suspects that have passed the waiters' place already.

    A rank that is further than the ranks that wait is not whom they wait for, if others are behind.
    """
    if not waiting or len(suspects) < 2:
        return suspects
    furthest = max(phase_index(rank.phase) for rank in waiting)
    behind = [rank for rank in suspects if phase_index(rank.phase) <= furthest]
    return behind or suspects
