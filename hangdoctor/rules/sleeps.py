"""Whether a sleep explains that a rank stands still, and for how long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.findings import enumerate_names
from hangdoctor.limits import countdowns
from hangdoctor.sleeps import left_s, wakes_in
from hangdoctor.units import duration

if TYPE_CHECKING:
    from hangdoctor.engines import Engine
    from hangdoctor.facts import Facts, RankFacts
    from hangdoctor.limits import Countdown

SOON_S = 1800.0
"""Who wakes later than this wakes alone: PyTorch's groups give up after 30 minutes by default,
those of NCCL after 10 (torch/distributed/constants.py)."""
NAP_FACTOR = 0.25
"""After a sleep of so much of the stillness that is suspicious, 5 s, what follows is counted anew;
a shorter one is part of a loop that polls."""


def asleep_s(facts: Facts, rank: RankFacts) -> tuple[float, float] | None:
    """Return in how many seconds a rank wakes by itself; as `left_s`."""
    wakes = rank.blocked.wakes_at_s if rank.blocked and rank.present else None
    return left_s(wakes, facts.at_s or 0.0)


def wakes_soon(facts: Facts, engine: Engine, rank: RankFacts) -> bool:
    """Tell whether a rank is in the first sleep since it moved, and wakes while that still counts.

    One that sleeps again without having moved in between polls for something.
    """
    left, sleep = asleep_s(facts, rank), rank.sleep
    if left is None or sleep is None or sleep.over_at_s <= (facts.at_s or 0.0):
        return False
    return left[1] <= SOON_S and not wakes_too_late(facts, engine, rank)


def wakes_too_late(facts: Facts, engine: Engine, rank: RankFacts) -> bool:
    """Tell whether a rank sleeps for so long that nobody waits for it any more when it wakes."""
    left = asleep_s(facts, rank)
    if left is None:
        return False
    return left[0] > SOON_S or gives_up_before(facts, engine, rank) is not None


def gives_up_before(facts: Facts, engine: Engine, rank: RankFacts) -> Countdown | None:
    """Return the engine's time-out that ends the others' wait before a rank wakes, if any."""
    left = asleep_s(facts, rank)
    if left is None:
        return None
    others = (each for each in countdowns(facts, engine) if rank.name not in each.ranks)
    return next((e for e in others if e.most_s is not None and e.most_s < left[0]), None)


def sleeps_at(facts: Facts, engine: Engine, rank: RankFacts) -> str:
    """Say where a rank sleeps, and for how long still; "" where that is not known, or moments."""
    left = asleep_s(facts, rank)
    if left is None or left[1] < 1:
        return ""
    at = f"sleeps at {rank.place}" if rank.place else "sleeps"
    if first := gives_up_before(facts, engine, rank):
        wait = "waits" if len(first.ranks) == 1 else "wait"
        names = ["the launcher" if name == "launcher" else name for name in first.ranks]
        others = f"{enumerate_names(names)} {wait}"
        return f"{at} for {duration(left[0])} more, longer than {others}"
    if wakes_too_late(facts, engine, rank):
        return f"{at} for {duration(left[0])} more"
    if rank.sleep is not None and rank.sleep.over_at_s <= (facts.at_s or 0.0):
        return at.replace("sleeps", "woke by itself and sleeps again", 1)
    return f"{at}, and wakes by itself {wakes_in(left)}"


def may_have_slept(facts: Facts, engine: Engine, rank: RankFacts, needed_s: float) -> list[str]:
    """Say why a sleep explains that a rank stands still: it lasts, or has only just ended."""
    at_s, sleep = facts.at_s, rank.sleep
    if at_s is None or sleep is None or rank.present is False:
        return []
    left = asleep_s(facts, rank)
    if left is not None and wakes_soon(facts, engine, rank):
        return [f"what {rank.name} does when it wakes, by itself {wakes_in(left)}"]
    slept_s, awake_s = sleep.over_at_s - sleep.noted_at_s, at_s - sleep.over_at_s
    if slept_s >= NAP_FACTOR * facts.header.stall_after_s and 0 <= awake_s < needed_s:
        return [
            (
                f"{needed_s:.0f} s without progress of {rank.name} since it woke by itself, seen "
                f"so far: {awake_s:.0f} s"
            )
        ]
    return []
