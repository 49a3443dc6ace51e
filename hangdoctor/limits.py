"""What will end a wait by itself, and when: the engine's own time-outs, counted down.

Made from the facts where it is shown or judged; nothing is kept. Nothing is counted whose length an
option or a variable sets that was not seen; where its begin was not seen, only the latest end is
told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hangdoctor.engines import matches_any
from hangdoctor.facts import stamp_age_s
from hangdoctor.frames import first_place
from hangdoctor.model import Installation, Struct
from hangdoctor.units import ends_in
from hangdoctor.waitgraph import launcher_waits_for

if TYPE_CHECKING:
    from hangdoctor.engines import Engine, Limit
    from hangdoctor.facts import Facts, RankFacts
    from hangdoctor.logs.timeline import Reached

SHOWN_AFTER_S = 10.0
"""A wait that has only just begun is nobody's concern."""


class Countdown(Struct, frozen=True):
    """A time-out that runs.

    Attributes:
        id: of the limit; ranks: that wait under it, or "launcher".
        limit_s: how long it is in all; None where that is not known, and then nothing is counted.
        least_s, most_s: so long still, from now; least_s is None where it is not known when the
            wait began.
        ends, message: what happens then, and what the log will say.
        unseen: what would have to be seen to count it.
    """

    id: str
    ranks: tuple[str, ...]
    ends: str
    message: str
    limit_s: float | None = None
    least_s: float | None = None
    most_s: float | None = None
    unseen: str = ""


def countdowns(facts: Facts, engine: Engine) -> tuple[Countdown, ...]:
    """Return the time-outs that run, the one that ends first before the others."""
    if facts.at_s is None:
        return ()
    found = [each for limit in engine.limits if (each := _countdown(facts, engine, limit))]
    return tuple(sorted(found, key=lambda each: (each.most_s is None, each.most_s or 0.0)))


def countdown_words(countdown: Countdown) -> str:
    """Say when a wait ends by itself.

    >>> left = Countdown(id="x", ranks=("TP0",), ends="", message="", least_s=178, most_s=179)
    >>> countdown_words(left)
    'in 179 s'
    """
    if countdown.most_s is None:
        return f"after a time that depends on {countdown.unseen}"
    return ends_in(countdown.least_s, countdown.most_s)


def _countdown(facts: Facts, engine: Engine, limit: Limit) -> Countdown | None:
    if limit.device and (limit.device == "cpu") != bool(facts.cpu_launch):
        return None
    if any(facts.sizes.get(name) for name in limit.not_with):
        return None
    waiting = [rank for rank in facts.ranks if rank.present and _is_under(facts, rank, limit)]
    names = tuple(rank.name for rank in waiting)
    spans = [_span(facts, limit, rank) for rank in waiting]
    if not waiting and launcher_waits_for(facts, engine) in limit.waits:
        names, spans = ("launcher",), [_span(facts, limit, None)]
    if not names:
        return None
    # Of several that wait, the one that began first gives up first, and with it all.
    sure_s = max(least for least, _ in spans)
    mosts = [most for _, most in spans if most is not None]
    most_waited_s = max(mosts) if len(mosts) == len(spans) else None
    if sure_s < SHOWN_AFTER_S:
        return None
    seconds, unseen = _seconds(facts, engine, limit)
    about = Countdown(
        id=limit.id, ranks=names, ends=limit.ends, message=limit.message, unseen=unseen
    )
    if seconds is None:
        return about
    late_s = limit.late_s + limit.late_share * seconds
    most_s = seconds + late_s - sure_s
    if most_s <= 0:
        return None  # it did not end: there is something that we do not know
    least_s = max(0.0, seconds - most_waited_s) if most_waited_s is not None else None
    return msgspec.structs.replace(about, limit_s=seconds, least_s=least_s, most_s=most_s)


def _is_under(facts: Facts, rank: RankFacts, limit: Limit) -> bool:
    by_wait = rank.wait is not None and rank.wait.id in limit.waits
    by_frame = first_place(rank.stack or (), limit.frames) is not None
    if not (by_wait or by_frame):
        return False
    if not limit.thread:
        return True
    track = facts.track(rank)
    if track is None or track.gil_tid == rank.pid:
        return False  # a main thread that keeps the GIL keeps it from the watchdog, too
    return any(first_place(each, (limit.thread,)) is not None for each in track.other_threads)


def _span(facts: Facts, limit: Limit, rank: RankFacts | None) -> tuple[float, float | None]:
    """Return for how long a wait has lasted: at the least, and at the most, where that is known."""
    seen_s = (rank.held_s or 0.0) + (rank.stack_age_s or 0.0) if rank else 0.0
    name = rank.name if rank else ""
    begun = _newest(facts, (limit.begins_with,), name)
    after = _newest(facts, (limit.begins_with, *limit.begins_after), name)
    piped = facts.header.log is not None and facts.header.log.origin == "-"
    least_s = max(seen_s, _age_s(facts, *begun)[0]) if begun else seen_s
    if after is None or piped:  # what a pipe had for us may be older than it seems
        return least_s, None
    # Two waits that look the same to all dumps are told apart by the line between them.
    most_s = _age_s(facts, *after)[1]
    return (least_s, None) if most_s is None else (min(least_s, most_s), most_s)


def _newest(facts: Facts, milestones: tuple[str, ...], rank: str) -> tuple[str, Reached] | None:
    """Return the newest line of milestones, and whose it is.

    Of those that each rank prints only the rank's own counts.
    """
    found = [
        (name, each)
        for name, log in facts.timeline.ranks.items()
        for each in log.milestones
        if each.id in milestones
    ]
    own = [(name, each) for name, each in found if name == rank or not each.of_each_rank]
    return max(own, key=lambda each: each[1].number, default=None)


def _age_s(facts: Facts, name: str, reached: Reached) -> tuple[float, float | None]:
    """Return how old a line is, at the least and at the most.

    One without a stamp is as old at least as the last line that was new.
    """
    age_s = stamp_age_s(facts, reached.time_s)
    if reached.stamped:
        return age_s or 0.0, age_s
    newest_at_s = facts.rank_log_at_s.get(name)
    return (facts.at_s or 0.0) - newest_at_s if newest_at_s is not None else 0.0, age_s


def _seconds(facts: Facts, engine: Engine, limit: Limit) -> tuple[float | None, str]:
    """Return how long the limit is, or what sets it and was not seen."""
    seconds = limit.seconds
    if limit.option:
        told = facts.sizes.get(limit.option)
        if told is None and not _knows_options(facts, engine):
            return None, "the options of the launch, which were not seen"
        seconds = float(told or seconds)
    if limit.environment:
        installation = facts.header.installation
        known = installation.environment if isinstance(installation, Installation) else None
        if known is None:
            return None, f"{limit.environment} of the launcher, which was not seen"
        seconds = _positive(known.get(limit.environment, "")) or seconds
    return seconds, ""


def _knows_options(facts: Facts, engine: Engine) -> bool:
    """Tell whether all options were seen: the log has them, or the command line does."""
    launch = facts.timeline.ranks.get("")
    if launch is not None and "args" in launch.counts:
        return True
    launcher = facts.launcher
    command = launcher.process.title if launcher else " ".join(facts.header.command)
    shown = matches_any(engine.detect.launcher, command)
    return shown and not matches_any(engine.detect.config, command)


def _positive(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if number > 0 else None
