"""From facts to a diagnosis: runs all rules, and lets the weightiest claim decide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.facts.phases import launch_phase
from hangdoctor.findings import Diagnosis, Normal, Unseen, weakest
from hangdoctor.model import Missing
from hangdoctor.next_steps import choose
from hangdoctor.rules import PER_REPLICA, RULES
from hangdoctor.rules.case import make_case, phase_age_s, replicas

if TYPE_CHECKING:
    from hangdoctor.engines import Engine, Phase
    from hangdoctor.facts import Facts
    from hangdoctor.findings import Confidence, Finding, State
    from hangdoctor.rules.case import Case

_WEIGHT: tuple[State, ...] = ("dead", "hung", "ready", "slow", "starting", "unknown")


def diagnose(facts: Facts, engine: Engine) -> Diagnosis:
    """Return the verdict on what was seen. Pure: the same facts give the same diagnosis."""
    case = make_case(facts, engine)
    parts = replicas(case)
    findings = [
        finding
        for rule in RULES
        for part in (parts if rule in PER_REPLICA else (case,))
        for finding in rule(part)
    ]
    claims = [finding for finding in findings if finding.state is not None]
    claims.sort(
        key=lambda claim: (
            _WEIGHT.index(claim.state or "unknown"),
            not claim.culprits,
            claim.rule in _WITHOUT_CAUSE,
        )
    )
    decisive = claims[0] if claims else None
    state: State = decisive.state or "unknown" if decisive else "unknown"
    suspicion = _suspicion(findings, decisive, state)
    culprits = decisive.culprits if decisive else ()
    phase = decisive.phase if decisive else None
    confidence: Confidence = decisive.confidence if decisive else "low"
    if suspicion is not None:
        # Not enough to call it hung; whom it would be about is worth saying all the same.
        culprits = culprits or suspicion.culprits
        phase = suspicion.phase or phase
        confidence = weakest(confidence, suspicion.confidence)
    if state in ("starting", "slow") and any(
        facts.sections.get(name) is not None and not (name == "gpus" and facts.cpu_launch)
        for name in ("processes", "stacks", "gpus", "log")
    ):
        confidence = "low"  # what was not seen may hide that a rank is waited for
    leading = decisive if decisive and state != "unknown" and suspicion is None else suspicion
    ordered = sorted(
        findings, key=lambda finding: (finding is not decisive, finding is not suspicion)
    )
    phase = phase or launch_phase(facts)
    return Diagnosis(
        state=state,
        phase=phase,
        culprits=culprits,
        still_s=None if state == "ready" else case.still_s,
        confidence=confidence,
        title=_title(case, leading or decisive or _first_doubt(findings), state),
        findings=tuple(ordered),
        normal=_normal(case, phase) if state not in ("ready", "dead") else None,
        experiments=choose(case, findings, leading) if state in ("hung", "unknown") else (),
        unseen=_unseen(facts),
    )


def _normal(case: Case, phase: Phase | None) -> Normal | None:
    """Return how long the launch is in a phase, against what is normal for that."""
    age_s = phase_age_s(case, phase)
    if phase is None or age_s is None:
        return None
    table = case.engine.phase(phase)
    return Normal(
        in_phase_s=age_s,
        longest_s=table.normal_max_s,
        by="good logs" if phase in case.facts.header.normal_s else "public reports",
        note=table.normal_note,
    )


def _suspicion(findings: list[Finding], decisive: Finding | None, state: State) -> Finding | None:
    """Return the finding that would have called it hung, where it was not enough."""
    if state not in ("starting", "slow", "unknown"):
        return None
    return next(
        (
            finding
            for finding in findings
            if finding is not decisive
            and finding.state is None
            and (finding.phase is not None or finding.rule in _WITHOUT_PHASE)
            and (finding.culprits or finding.rule in _SYMMETRIC)
        ),
        None,
    )


_WITHOUT_PHASE = ("flight-recorder-ranks-behind",)
"""Files that a launch left behind can name a rank, and tell nothing of its phase."""
_WITHOUT_CAUSE = ("launch-ended", "wait-given-up")
"""They say that it ended or gave up: another that weighs the same says what from."""
_SYMMETRIC = (
    "ranks-diverged",
    "all-ranks-in-same-wait",
    "all-ranks-wait-for-their-gpus",
    "all-ranks-stand-still",
    "waits-in-a-circle",
    "waiting-for-other-node",
    "warmup-request-unanswered",
)


def _first_doubt(findings: list[Finding]) -> Finding | None:
    """Return what is undecided where nothing is decided: it says more than that nothing is."""
    return next((finding for finding in findings if finding.verdict == "undecided"), None)


def _title(case: Case, leading: Finding | None, state: State) -> str:
    if leading is not None:
        return leading.title
    if case.still_s is not None and case.still_s >= 1:
        return f"nothing was seen to move for {case.still_s:.0f} s, and nothing tells why"
    return "the evidence does not decide it" if state == "unknown" else state


def _unseen(facts: Facts) -> tuple[Unseen, ...]:
    unseen = [
        Unseen(what=name, missing=missing)
        for name, missing in facts.sections.items()
        if missing is not None and not (name == "gpus" and facts.cpu_launch)
    ]
    if facts.lacks_log:
        older = "it was last written before the launch began: it is another launch's"
        hint = "name the log of this launch: --log FILE"
        unseen.append(
            Unseen(what="log", missing=Missing(reason="not-tried", detail=older, hint=hint))
        )
    for track in facts.tracks.values():
        if not track.present or track.owner is not None:
            continue
        name = track.rank or track.role or f"pid {track.process.pid}"
        if track.stack_missing is not None:
            unseen.append(Unseen(what=f"stacks of {name}", missing=track.stack_missing))
        parts = dict(track.process.unreadable)
        if track.files_missing is not None:
            parts["fd"] = track.files_missing
        for what, missing in track.waits.unreadable.items() if track.waits else ():
            parts.setdefault(what, missing)
        unseen += [Unseen(what=f"{what} of {name}", missing=parts[what]) for what in parts]
        if track.waits_missing is not None and "syscall" not in track.process.unreadable:
            unseen.append(Unseen(what=f"waits of {name}", missing=track.waits_missing))
    if facts.loading is not None:
        unseen += [
            Unseen(what=f"weights that {facts.name_of(pid)} reads", missing=missing)
            for pid, missing in facts.loading.unseen.items()
        ]
        why = facts.loading.why_not
        if why is not None and why.reason != "inapplicable":
            unseen.append(Unseen(what="the checkpoint", missing=why))
    unseen += [
        Unseen(what=f"GPU {index}", missing=card.gpu)
        for index, card in facts.cards.items()
        if isinstance(card.gpu, Missing)
    ]
    if untold := facts.cards_untold:
        unseen.append(Unseen(what="which GPU is whose", missing=untold))
    unseen += [
        Unseen(what=f"dump {path}", missing=missing)
        for path, missing in facts.unusable_dumps.items()
    ]
    return tuple(unseen)
