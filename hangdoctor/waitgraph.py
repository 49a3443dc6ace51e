"""Who waits for whom. Blame follows the waits, not the count.

Ranks that wait in the same operation for their peers are the healthy ones; the one they wait for
is elsewhere, absent or dead. Two ranks in different operations have diverged. All ranks in the
same operation: no rank is to blame.

Stacks tell the operations. Where a rank is in none, or has no stack, the connection that it reads
tells for whom it waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.engines import PEER_KINDS
from hangdoctor.facts import RankFacts, phase_index
from hangdoctor.frames import first_place, same_shape
from hangdoctor.model import Struct

if TYPE_CHECKING:
    from hangdoctor.engines import Engine
    from hangdoctor.facts import Facts

SPIN_S = 5.0
"""A card that spins shorter than this tells nothing."""


_APART = frozenset(
    {"open", "flock", "fcntl lock", "nanosleep", "clock_nanosleep", "wait4", "waitid"}
)
"""Calls of `Blocked.call`."""


class Link(Struct, frozen=True):
    """A process whose main thread waits for another process through a descriptor.

    Attributes:
        waiter, target: names as in `Facts.name_of`.
        text: in which call, on what.
        for_s: how long it was seen in this same wait.
        sure: nobody else can end the wait; not where it is for an eventfd that both share.
    """

    waiter: str
    target: str
    text: str
    for_s: float
    sure: bool


class WaitGraph(Struct, frozen=True):
    """The ranks by what they do.

    Attributes:
        waiting: in an operation that ends only when their peers join it.
        device: waiting for their own GPU.
        elsewhere: in none of these.
        linked: in none of these, and waiting for another rank through a connection or a lock.
        idle: in their loop, waiting for requests.
        unseen: no stack of them was ever seen.
        absent: should be there and are not.
        suspects: whom the others wait for; empty where nobody waits or none can be told.
        by_elimination: the suspects are the ranks without a stack, all others being in the same
            operation.
        circle: of the linked ranks those that wait for each other, each for the next.
    """

    waiting: tuple[RankFacts, ...] = ()
    device: tuple[RankFacts, ...] = ()
    elsewhere: tuple[RankFacts, ...] = ()
    linked: tuple[RankFacts, ...] = ()
    idle: tuple[RankFacts, ...] = ()
    unseen: tuple[RankFacts, ...] = ()
    absent: tuple[RankFacts, ...] = ()
    suspects: tuple[RankFacts, ...] = ()
    by_elimination: bool = False
    circle: tuple[RankFacts, ...] = ()

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
        key: [] for key in ("waiting", "device", "elsewhere", "linked", "idle", "unseen", "absent")
    }
    for rank in facts.ranks:
        groups[_group(rank, facts)].append(rank)
    sinks = _follow_links(groups, facts)
    # A rank that waits for its GPU may wait for a peer through it: one that runs Python comes
    # first.
    suspects = groups["elsewhere"] if groups["waiting"] or groups["device"] else []
    if groups["waiting"] and not suspects:
        suspects = groups["device"]
    suspects = [*suspects, *(rank for rank in sinks if rank not in suspects)]
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
        circle=_circle(groups["linked"], facts),
    )


def launcher_waits_for(facts: Facts, engine: Engine) -> str | None:
    """Return the id of the wait for its ranks in which a thread of the launcher stands.

    What stands upon it says nothing else: the warm-up request waits in the library that sends it,
    a dozen frames further in.
    """
    launcher = facts.launcher
    if launcher is None or launcher.stack is None:
        return None
    waits = [wait for wait in engine.waits if wait.kind == "ranks-ready"]
    for frames in (launcher.stack, *launcher.other_threads):
        for wait in waits:
            under = not wait.under or first_place(frames, wait.under) is not None
            if under and first_place(frames, wait.frames) is not None:
                return wait.id
    return None


def links(facts: Facts) -> tuple[Link, ...]:
    """Return who waits for whom through a descriptor: ranks, launcher and what belongs to them."""
    return tuple(
        Link(
            waiter=facts.name_of(pid),
            target=facts.name_of(target),
            text=blocked.text,
            for_s=blocked.for_s,
            sure=blocked.waits_for is not None,
        )
        for pid, blocked in facts.blocked.items()
        for target in (blocked.waits_for, blocked.may_wait_for)
        if target is not None
    )


def target_of(rank: RankFacts, facts: Facts) -> RankFacts | None:
    """Return the rank that a rank waits for through a connection or a lock on a file; else None."""
    pid = rank.blocked.waits_for if rank.blocked else None
    if pid is None and len(rank.locks) == 1 and len(rank.locks[0].holders) == 1:
        pid = rank.locks[0].holders[0].pid
    others = (other for other in facts.ranks if pid is not None and other.pid == pid)
    return next((other for other in others if other.name != rank.name), None)


def _follow_links(groups: dict[str, list[RankFacts]], facts: Facts) -> list[RankFacts]:
    """Move ranks that wait for another one through a descriptor to the linked; return the sinks.

    A sink is where such waits end: a rank that is seen in no operation, and waits for none itself.
    """
    free = [*groups["elsewhere"], *groups["unseen"]]
    linked, sinks = [], []
    for rank in free:
        passed = [rank]
        while passed[-1] in free and (target := target_of(passed[-1], facts)) is not None:
            if target in passed:
                break
            passed.append(target)
        end = passed[-1]
        if len(passed) > 1 and end not in groups["waiting"] + groups["device"]:
            # Where it leads back to those that wait in an operation, it is who they wait for.
            linked.append(rank)
            elsewhere = end in groups["elsewhere"] or _in_no_operation(end)
            if elsewhere and target_of(end, facts) is None and end not in sinks:
                sinks.append(end)
    for key in ("elsewhere", "unseen"):
        groups[key] = [rank for rank in groups[key] if rank not in linked]
    groups["linked"] = linked
    return sinks


def _in_no_operation(rank: RankFacts) -> bool:
    """Tell whether a rank without a stack is in a call that no operation of several ranks makes.

    A lock, a poll or a read of a socket may be the inside of one: such a rank may as well wait for
    those who wait for it.
    """
    return rank.blocked is not None and rank.blocked.call in _APART


def _circle(linked: list[RankFacts], facts: Facts) -> tuple[RankFacts, ...]:
    """Return the first circle among the linked ranks; empty where there is none."""
    for rank in linked:
        passed = [rank]
        while (following := target_of(passed[-1], facts)) in linked and following is not None:
            if following in passed:
                return tuple(passed[passed.index(following) :])
            passed.append(following)
    return ()


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
    return rank.reading == "spinning" and all(
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
