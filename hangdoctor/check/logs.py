"""What the log of a launch with a patch says of the patch: often, that it has not run yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.check.model import Cell, NotChecked, Same

if TYPE_CHECKING:
    from hangdoctor.check.model import Place
    from hangdoctor.engines import Phase
    from hangdoctor.findings import Diagnosis

_NOT_YET_RUN = (
    "no forward has run, so what a patch adds to a forward has not run either and is not to blame"
)
_LOOK_FOR = {
    "weights": "look for a slow copy after the bar is full, a rank without `Load weight end`, a "
    "dead child",
    "distributed-init": "look for a rank or node that has not come to the rendezvous",
    "kv-cache": "look for a rank that still allocates, and at the memory of its card",
}
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
        return NotChecked(why=f"{found.title}; {not_yet_run(found.phase)}{_and(outside)}")
    return NotChecked(
        why=f"{found.title}; a forward may have run by then, so the patch may be part of it: what "
        "decides it is a launch of the same command without it"
    )


def not_yet_run(phase: Phase | None) -> str:
    """Return what holds where a log has no line of a first forward, and what to look at."""
    look_for = _LOOK_FOR.get(phase or "", "")
    return _NOT_YET_RUN + (f": {look_for}" if look_for else "")


def _and(outside: tuple[Place, ...]) -> str:
    if not outside:
        return ""
    lines = [str(place.line) for place in outside]
    shown = ", ".join(lines[:_MOST_LINES]) + (", ..." if len(lines) > _MOST_LINES else "")
    return f"; new lines that no forward reaches may have run: {shown} of {outside[0].file}"
