"""Work that a progress bar of the log counts: what is done, how long each took, what is left.

Graph capture, compiles, tuning; the load of the weights is told by more than its bar (`loads`).
Made from the facts where it is shown; nothing is kept.
"""

from __future__ import annotations

import itertools
from statistics import median
from typing import TYPE_CHECKING

from hangdoctor.engines import Phase
from hangdoctor.model import Struct

if TYPE_CHECKING:
    from hangdoctor.engines import Bar, Engine
    from hangdoctor.facts import Facts
    from hangdoctor.logs.timeline import BarLog

RECENT = 8
"""So many of the newest items tell how long the others will take."""
UNLIKE = 3.0
"""An item that takes so many times as long as the longest of these is of another kind."""


class Count(Struct, frozen=True):
    """Work that is counted.

    Attributes:
        id: of the bar; title: what it counts.
        item: that is in progress, such as "bs=256"; item_s: for how long, at the least. "" and None
            where not known.
        took: the items done, with the seconds that each took, by the bar's own clock.
        left: the items to do besides, the next one first, where the log has listed them.
        left_s: how long the rest takes: about, at the least, at the most; None where nothing tells.
    """

    id: str
    title: str
    phase: Phase
    done: int
    total: int
    item: str = ""
    item_s: float | None = None
    took: tuple[tuple[str, float], ...] = ()
    left: tuple[str, ...] = ()
    left_s: tuple[float, float, float] | None = None


def counts(facts: Facts, engine: Engine) -> tuple[Count, ...]:
    """Return the counts that run, the newest first."""
    tables = {bar.id: bar for bar in engine.bars}
    running = [
        bar
        for bar in facts.timeline.bars.values()
        if bar.done < bar.total
        and bar.phase != "weights"
        and any(rank.phase == bar.phase and rank.present is not False for rank in facts.ranks)
    ]
    running.sort(key=lambda bar: -bar.number)
    return tuple(_count(facts, bar, tables[bar.id]) for bar in running)


def _count(facts: Facts, bar: BarLog, table: Bar) -> Count:
    sizes = sorted(facts.timeline.sizes.get(bar.id, ()), reverse=True)
    if len(sizes) != bar.total:
        sizes = []
    unit = bar.item.partition("=")[0] or "size"
    names = {index: f"{unit}={size}" for index, size in enumerate(sizes)} | bar.items
    took = _took(bar)
    at_s = facts.bars_at_s.get(bar.id)
    item_s = facts.at_s - at_s if facts.at_s is not None and at_s is not None else None
    return Count(
        id=bar.id,
        title=table.title,
        phase=bar.phase,
        done=bar.done,
        total=bar.total,
        item=bar.item or names.get(bar.done, ""),
        item_s=item_s,
        took=tuple((names.get(index, f"number {index + 1}"), s) for index, s in took.items()),
        left=tuple(names[i] for i in range(bar.done + 1, bar.total) if i in names),
        left_s=_left_s(list(took.values()), bar.total - bar.done, item_s or 0.0),
    )


def _took(bar: BarLog) -> dict[int, float]:
    """Return the seconds that each item took, by its index: of several at once an equal part."""
    points = bar.points if bar.points and bar.points[0][0] == 0 else ((0, 0.0), *bar.points)
    return {
        index: (later_s - earlier_s) / (later - earlier)
        for (earlier, earlier_s), (later, later_s) in itertools.pairwise(points)
        for index in range(earlier, later)
        if later_s >= earlier_s
    }


def _left_s(took: list[float], left: int, item_s: float) -> tuple[float, float, float] | None:
    """Return how long the rest takes; the first item, which compiles, tells an upper end only."""
    if not took:
        return None
    recent = took[1:][-RECENT:]
    if not recent:
        return took[0] * left, 0.0, took[0] * left
    longest = max(recent)
    if item_s > UNLIKE * max(longest, 1.0):
        return None
    each = median(recent)
    now_s = max(0.0, each * left - min(item_s, each))
    return now_s, 0.8 * max(0.0, min(recent) * left - item_s), 1.2 * longest * left
