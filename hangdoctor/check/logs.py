"""What the log of a launch with a patch says of the patch: often, that it has not run yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.check.model import Cell, Difference, Differs, NotChecked, Same

if TYPE_CHECKING:
    from hangdoctor.check.model import Place
    from hangdoctor.findings import Diagnosis

NOT_YET_RUN = (
    "no forward has run, so what a patch adds to a forward has not run either and is not to blame: "
    "look for a slow copy after the bar is full, a rank without `Load weight end`, a dead child"
)
_MOST_LINES = 8


def cell_of(found: Diagnosis, *, forward_ran: bool | None, outside: tuple[Place, ...] = ()) -> Cell:
    """Return what a launch's log says of the patch that it ran with.

    Args:
        found: the verdict from the log.
        forward_ran: whether a forward may have run by the log; None where that is not known.
        outside: new lines that no forward reaches, which may have run nevertheless.
    """
    if found.state == "ready":
        return Same(note="it came to ready")
    if forward_ran is None:
        return NotChecked(why=f"{found.title}; the log does not tell whether a forward has run")
    if not forward_ran:
        return NotChecked(why=f"{found.title}; {NOT_YET_RUN}{_and(outside)}")
    if found.state in ("hung", "dead"):
        return Differs(
            differences=(
                Difference(
                    how=f"{found.title}, when a forward may have run",
                    effect="hangs" if found.state == "hung" else "breaks",
                    phase=found.phase,
                    ranks=found.culprits,
                    sure=False,
                ),
            )
        )
    return NotChecked(
        why=f"{found.title}; a forward may have run by then, so the patch may be part of it"
    )


def _and(outside: tuple[Place, ...]) -> str:
    if not outside:
        return ""
    lines = [str(place.line) for place in outside]
    shown = ", ".join(lines[:_MOST_LINES]) + (", ..." if len(lines) > _MOST_LINES else "")
    return f"; new lines that no forward reaches may have run: {shown} of {outside[0].file}"
