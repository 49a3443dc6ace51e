"""What the rules say: findings with pointers to their evidence, and the diagnosis made of them."""

from __future__ import annotations

from typing import Literal

from hangdoctor.engines import Phase
from hangdoctor.launches import ranges
from hangdoctor.model import Missing, Struct

State = Literal["ready", "starting", "slow", "hung", "dead", "unknown"]
Verdict = Literal["found", "ruled-out", "undecided"]
Confidence = Literal["low", "medium", "high"]
CONFIDENCES: tuple[Confidence, ...] = ("low", "medium", "high")
"""The weakest first."""

MOST_LISTED = 4
"""More names than so many are written as ranges."""


class Evidence(Struct, frozen=True):
    """One thing that was seen.

    Attributes:
        text: what, for people.
        pid, rank: of which process.
        at_s: when, in recording time.
        frame: the stack frame that shows it.
        log_line: number of the line that shows it, from 1.
    """

    text: str
    pid: int | None = None
    rank: str | None = None
    at_s: float | None = None
    frame: str | None = None
    log_line: int | None = None


class Finding(Struct, frozen=True):
    """What one rule says.

    Attributes:
        rule: its id, for `hangdoctor explain`.
        verdict: found, ruled out, or undecided with what would decide it in `needs`.
        title: one sentence without a full stop.
        ranks: all ranks that it is about.
        culprits: those of them that are to blame.
        state: what the finding means for the launch; None where it only describes.
        phase: the phase that the stall belongs to, where the finding knows it.
        confidence: how sure the rule is of itself.
        because: the evidence.
        needs: what would decide or strengthen it.
        lacks_s: so much more stillness is needed for that; None where it is not stillness.
        advice: what to do next, cheapest first.
    """

    rule: str
    verdict: Verdict
    title: str
    ranks: tuple[str, ...] = ()
    culprits: tuple[str, ...] = ()
    state: State | None = None
    phase: Phase | None = None
    confidence: Confidence = "medium"
    because: tuple[Evidence, ...] = ()
    needs: tuple[str, ...] = ()
    lacks_s: float | None = None
    advice: tuple[str, ...] = ()


class Step(Struct, frozen=True):
    """An experiment that tells causes apart, ready to be made.

    Attributes:
        id, kind: as in the experiment's table: "wait" and "look" are for the launch as it stands.
        command: to run, or what to change in the next start.
        takes_s: about so long; None for a whole start.
        consent: what it does to the processes; "" for nothing.
        outcomes: what may be seen, and what that means.
    """

    id: str
    kind: Literal["wait", "look", "relaunch"]
    command: str
    takes_s: float | None = None
    consent: str = ""
    outcomes: tuple[tuple[str, str], ...] = ()


class Unseen(Struct, frozen=True):
    """A thing that was not observed, for the report."""

    what: str
    missing: Missing


class Normal(Struct, frozen=True):
    """How long the launch is in its phase, against what is normal.

    Attributes:
        in_phase_s: as seen, or as the log's stamps say.
        longest_s: the longest that is still normal; by: whether known-good logs of here say so, or
            public reports, which are generous; note: what that rests on.
    """

    in_phase_s: float
    longest_s: float
    by: Literal["good logs", "public reports"]
    note: str = ""

    @property
    def overdue(self) -> bool:
        """Whether it has lasted longer than is normal."""
        return self.in_phase_s > self.longest_s


class Diagnosis(Struct, frozen=True):
    """The verdict.

    Attributes:
        state, phase, culprits: of the launch.
        still_s: how long nothing was seen to move; None where not known.
        confidence: of the state and the culprits together.
        title: the verdict in one sentence.
        findings: the decisive one first.
        normal: how long it is in its phase; None where that is not known, or it is ready.
        experiments: that tell apart the causes which are left, the cheapest first.
        unseen: what could not be observed.
    """

    state: State
    phase: Phase | None
    culprits: tuple[str, ...] = ()
    still_s: float | None = None
    confidence: Confidence = "low"
    title: str = ""
    findings: tuple[Finding, ...] = ()
    normal: Normal | None = None
    experiments: tuple[Step, ...] = ()
    unseen: tuple[Unseen, ...] = ()


def weakest(one: Confidence, other: Confidence) -> Confidence:
    """Return the lower one of two confidences.

    >>> weakest("high", "medium"), weakest("low", "high")
    ('medium', 'low')
    """
    return min(one, other, key=CONFIDENCES.index)


def enumerate_names(names: tuple[str, ...] | list[str]) -> str:
    """Write names for people; of many, neighbours as a range.

    >>> enumerate_names(["TP0"]), enumerate_names(["TP0", "TP1", "TP2"])
    ('TP0', 'TP0, TP1 and TP2')
    >>> enumerate_names([f"TP{number}" for number in range(64) if number != 37])
    'TP0-TP36 and TP38-TP63'
    """
    if len(names) > MOST_LISTED:
        names = ranges(names)
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
