"""What shall happen in the pretend launch, and which verdict would be right: the truth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hangdoctor.demo.kinds import Fault, StallPhase
from hangdoctor.findings import enumerate_names

if TYPE_CHECKING:
    from hangdoctor.findings import Diagnosis, State

DEFAULT_FAULT: Fault = "lock"
_PHASE_OF: dict[Fault, StallPhase] = {
    "fifo": "warmup",
    "compile": "graph-capture",
    "stale-lock-file": "graph-capture",
}
"""Where a fault strikes if nothing else is said: where it has been met; else in `weights`."""

_ALL_RANKS: tuple[Fault, ...] = ("slow", "stale-lock-file")
"""Slow storage is slow for all; and a build that waits for its lock file does so in all ranks."""

_DOES: dict[Fault, str] = {
    "slow": "all ranks read from slow storage: slow, and no hang",
    "barrier": "{rank} sleeps and does not come to where its peers wait for it",
    "lock": "{rank} deadlocks: two of its threads take two locks in opposite order",
    "eventfd": "{rank} writes to an eventfd for ever and does nothing else",
    "fifo": "{rank} opens a FIFO that nobody reads",
    "stopped": "{rank} is stopped by a signal (SIGSTOP)",
    "killed": "{rank} is killed (SIGKILL), and its launcher does not notice",
    "compile": "{rank} compiles C code and its peers wait for it: slow, and no hang",
    "stale-lock-file": "all ranks wait for a build's lock file, whose owner was killed before",
}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What shall happen.

    Attributes:
        fault: what goes wrong; phase: in which phase.
        rank: number of the rank that it strikes.
        ranks: how many there are.
        stall_after_s: as `watch` is told; what is killed must have been seen there before.
    """

    fault: Fault
    phase: StallPhase
    rank: int
    ranks: int
    stall_after_s: float

    @property
    def settings(self) -> dict[str, str | int | float | None]:
        """What the launch itself is told, see the stage's dumper."""
        return {
            "fault": self.fault,
            "phase": self.phase,
            "rank": None if self.fault in _ALL_RANKS else self.rank,
            "dwell_s": 3 + min(10.0, self.stall_after_s / 2),
        }

    @property
    def done(self) -> str:
        """What is done to the launch, in one sentence without a full stop."""
        if self.fault == "none":
            return "nothing goes wrong: it comes to ready"
        return f"in {self.phase}, {_DOES[self.fault].format(rank=f'TP{self.rank}')}"


def make_plan(
    fault: Fault | None, phase: StallPhase | None, *, rank: int, ranks: int, stall_after_s: float
) -> Plan:
    """Return a plan, with what was not chosen filled in.

    >>> make_plan(None, None, rank=1, ranks=4, stall_after_s=5).done
    'in weights, TP1 deadlocks: two of its threads take two locks in opposite order'
    >>> make_plan("fifo", None, rank=1, ranks=4, stall_after_s=5).phase
    'warmup'
    """
    fault = fault or DEFAULT_FAULT
    return Plan(
        fault=fault,
        phase=phase or _PHASE_OF.get(fault, "weights"),
        rank=rank,
        ranks=ranks,
        stall_after_s=stall_after_s,
    )


def right_states(plan: Plan) -> tuple[State, ...]:
    """Return the states of which one is the right one."""
    if plan.fault == "none":
        return ("ready",)
    if plan.fault in ("slow", "compile"):
        return ("starting", "slow")
    return ("dead",) if plan.fault == "killed" else ("hung",)


def compare(plan: Plan, diagnosis: Diagnosis) -> str:
    """Say how the verdict differs from the truth; empty where it does not.

    Who is at work without a fault may be named as the one that others wait for, or not.
    """
    states = right_states(plan)
    if diagnosis.state not in states:
        return f"it is {' or '.join(states)}, and not {diagnosis.state}"
    if diagnosis.state == "ready":
        return ""
    if diagnosis.phase != plan.phase:
        return f"the phase is {plan.phase}, and not {diagnosis.phase}"
    struck = () if plan.fault in _ALL_RANKS else (f"TP{plan.rank}",)
    allowed = (struck, ()) if plan.fault in ("slow", "compile") else (struck,)
    if diagnosis.culprits not in allowed:
        named = enumerate_names(diagnosis.culprits) or "nobody"
        return f"{enumerate_names(struck) or 'nobody'} is to blame, and not {named}"
    return ""
