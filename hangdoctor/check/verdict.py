"""From a column's cells to its verdict: the worst difference decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.check.model import (
    DEPTHS,
    ROWS,
    Cell,
    Depth,
    Difference,
    Differs,
    Effect,
    NotChecked,
    Subject,
    Verdict,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

EFFECTS: tuple[Effect, ...] = ("invasive", "breaks", "hangs")


def judge(subject: Subject, cells: Mapping[str, Cell]) -> Verdict:
    """Return what the cells of a subject come to.

    A deeper look does not take back what a shallower one found: a server that starts with a patch
    says nothing of the paths that it did not take.
    """
    depth = _deepest(cells)
    if subject.refused or depth is None:
        why = subject.refused or next(
            (cell.why for cell in cells.values() if isinstance(cell, NotChecked)), "nothing to read"
        )
        return Verdict(kind="unchecked", title=f"nothing could be checked: {why}")
    found = [
        (row.depth, difference)
        for row in ROWS
        if isinstance(cell := cells.get(row.key), Differs)
        for difference in cell.differences
    ]
    if not found:
        return Verdict(kind="no-difference", title=f"no difference found, by {depth}", depth=depth)
    at, worst = max(found, key=lambda pair: _weight(*pair))
    effect = weighed(worst)
    # What was seen has no line of its own; what was read of the same effect has.
    places = worst.places or next(
        (one.places for _, one in found if one.places and weighed(one) == effect), ()
    )
    if effect == "invasive":
        words = "invasive"
    elif not worst.sure:
        words = {"breaks": "may break", "hangs": "may hang"}[effect]
    elif at == "reading":
        words = {"breaks": "would break", "hangs": "would hang"}[effect]
    else:
        words = effect
    how = worst.how + (f", with {worst.only_with}" if worst.only_with else "")
    return Verdict(
        kind=effect,
        title=f"{words}: {how}",
        depth=depth,
        places=places,
        phase=worst.phase,
        ranks=worst.ranks,
    )


def weighed(difference: Difference) -> Effect:
    """Return the effect that counts: what needs an option that is off changes, and breaks not."""
    return "invasive" if difference.only_with else difference.effect


def worst_first(differences: Iterable[Difference]) -> Differs | None:
    """Return a cell of these differences, the worst first; None where there are none."""
    found = sorted(differences, key=lambda one: (-EFFECTS.index(weighed(one)), not one.sure))
    return Differs(differences=tuple(found)) if found else None


def _deepest(cells: Mapping[str, Cell]) -> Depth | None:
    checked = {
        row.depth for row in ROWS if row.key in cells and not isinstance(cells[row.key], NotChecked)
    }
    return max(checked, key=DEPTHS.index, default=None)


def _weight(depth: Depth, difference: Difference) -> tuple[int, bool, int]:
    """Order differences: by effect, a sure one before a doubtful one, a seen before a read one."""
    return EFFECTS.index(weighed(difference)), difference.sure, DEPTHS.index(depth)
