"""Things that were tried, each with what came of it: what a CI is told."""

from __future__ import annotations

from typing import Literal

from hangdoctor.model import Struct

Outcome = Literal["passed", "failed", "undecided", "skipped"]


class Check(Struct, frozen=True):
    """One thing that was tried.

    Attributes:
        name: its id, such as "start-up".
        outcome: undecided where the evidence or the time did not do; skipped where it was not
            tried, or nothing here can tell, and for which a CI is not to fail.
        said: what came of it, in one sentence without a full stop.
        kind: of a failure, such as "hung"; "" else.
        took_s: how long it took; None where that says nothing.
        details: more of it, several lines.
    """

    name: str
    outcome: Outcome
    said: str
    kind: str = ""
    took_s: float | None = None
    details: str = ""


def worst(checks: tuple[Check, ...]) -> Outcome:
    """Return what all of them together came to.

    >>> worst((Check("a", "passed", ""), Check("b", "skipped", "")))
    'passed'
    >>> worst((Check("a", "undecided", ""), Check("b", "failed", "")))
    'failed'
    """
    outcomes = {check.outcome for check in checks}
    order: tuple[Outcome, ...] = ("failed", "undecided", "passed")
    return next((outcome for outcome in order if outcome in outcomes), "skipped")
