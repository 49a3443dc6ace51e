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
    seen = "" if at != "reading" or worst.effect == "invasive" else "if it is reached"
    words = {"invasive": "invasive", "breaks": "breaks", "hangs": "hangs"}[worst.effect]
    if seen:
        words = {"breaks": "would break", "hangs": "would hang"}.get(worst.effect, words)
        words += f" {seen}"
    if not worst.sure:
        words = {"breaks": "may break", "hangs": "may hang"}.get(worst.effect, "may be invasive")
    return Verdict(
        kind=worst.effect,
        title=f"{words}: {worst.how}",
        depth=depth,
        places=worst.places,
        phase=worst.phase,
        ranks=worst.ranks,
    )


def worst_first(differences: Iterable[Difference]) -> Differs | None:
    """Return a cell of these differences, the worst first; None where there are none."""
    found = sorted(differences, key=lambda one: (-EFFECTS.index(one.effect), not one.sure))
    return Differs(differences=tuple(found)) if found else None


def _deepest(cells: Mapping[str, Cell]) -> Depth | None:
    checked = {
        row.depth for row in ROWS if row.key in cells and not isinstance(cells[row.key], NotChecked)
    }
    return max(checked, key=DEPTHS.index, default=None)


def _weight(depth: Depth, difference: Difference) -> tuple[int, bool, int]:
    """Order differences: by effect, a sure one before a doubtful one, a seen before a read one."""
    return EFFECTS.index(difference.effect), difference.sure, DEPTHS.index(depth)
