"""Which experiments tell the causes apart that the findings leave open, the cheapest first."""

from __future__ import annotations

import math
import re
import shlex
from typing import TYPE_CHECKING

from hangdoctor import experiments
from hangdoctor.engines import matches_any
from hangdoctor.findings import Step
from hangdoctor.loads import unread_file
from hangdoctor.nccl import ask_by_hand
from hangdoctor.rules.case import SURE_FACTOR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hangdoctor.experiments import Experiment
    from hangdoctor.facts import RankFacts
    from hangdoctor.findings import Finding
    from hangdoctor.rules.case import Case

MOST_OF_A_KIND = 2
LEAST_S = 10.0
"""A shorter look says nothing."""


def choose(case: Case, findings: Sequence[Finding], leading: Finding | None) -> tuple[Step, ...]:
    """Return the experiments that fit, at most so many of a kind.

    Args:
        case: as ever.
        findings: all of them.
        leading: the one that decides, or that would if it were surer; None for none, and then there
            is nothing to tell apart.
    """
    if leading is None:
        return ()
    suspect = _suspect(case, leading)
    # What else is there besides says what to try as well; but not of what nobody suspects.
    rules = {leading.rule} | {each.rule for each in findings if each.rule in _BESIDES}
    values = _values(case, leading, suspect)
    found: list[Step] = []
    for each in experiments.load(case.engine.name):
        of_its_kind = sum(step.kind == each.kind for step in found)
        if of_its_kind < MOST_OF_A_KIND and _fits(case, each, rules, leading, suspect):
            step = _filled(each, values)
            found += [step] if step else []
    return tuple(found)


_BESIDES = ("files-changed", "collective-outside-nccl", "gpu-spinning", "busy-without-progress")


def _suspect(case: Case, leading: Finding) -> RankFacts | None:
    names = (*leading.culprits, *leading.ranks)
    found = (case.facts.rank(name) for name in names)
    return next((rank for rank in found if rank is not None and rank.present), None)


def _fits(
    case: Case, each: Experiment, rules: set[str], leading: Finding, suspect: RankFacts | None
) -> bool:
    if not rules & set(each.after):
        return False
    if each.phases and leading.phase not in each.phases:
        return False
    if each.waits:
        kind = suspect.wait.kind if suspect and suspect.wait else ""
        if suspect is None or kind not in each.waits:
            return False
    if each.unless_told and suspect and _told(suspect):
        return False
    if each.device and (each.device == "cpu") != bool(case.facts.cpu_launch):
        return False
    return not matches_any(each.unless, _command(case))


def _told(suspect: RankFacts) -> bool:
    """Tell whether it is known what a rank waits for, or how it spins."""
    path = suspect.blocked is not None and bool(suspect.blocked.path)
    return path or suspect.state == "D" or bool(suspect.locks) or suspect.runaway_s is not None


def _values(case: Case, leading: Finding, suspect: RankFacts | None) -> dict[str, str]:
    """Return what can be filled in; what is not known is not there."""
    facts = case.facts
    values: dict[str, str] = {}
    if suspect is not None:
        values["rank"] = suspect.name
        if suspect.pid is not None:
            values["pid"] = str(suspect.pid)
        if len(suspect.locks) == 1:
            values["lock"] = shlex.quote(suspect.locks[0].path)
        if unread := unread_file(facts, suspect):
            values |= {"file": shlex.quote(unread[0]), "skip": str(unread[1] >> 20)}
    if facts.ras is None:  # else its answer is known
        values["ask_ras"] = ask_by_hand()
    if facts.launcher is not None:
        values["launch"] = str(facts.launcher.process.pid)
    port = re.search(r"--port[= ](\d+)", _command(case))
    if port or case.engine.port:
        values["port"] = port[1] if port else str(case.engine.port)
    lacks_s = leading.lacks_s
    if leading.state == "hung" and leading.confidence != "high":
        lacks_s = SURE_FACTOR * case.stall_after_s - (case.still_s or 0.0)
    if lacks_s is not None and lacks_s > 0:
        values["seconds"] = str(max(math.ceil(lacks_s), int(LEAST_S)) + 5)
    return values


def _filled(each: Experiment, values: dict[str, str]) -> Step | None:
    if not set(_NAME.findall(each.command)) <= values.keys():
        return None

    def fill(text: str) -> str:
        return _NAME.sub(lambda name: values.get(name[1], "it"), text)

    takes_s = float(values["seconds"]) if "{seconds}" in each.command else each.takes_s
    return Step(
        id=each.id,
        kind=each.kind,
        command=fill(each.command),
        takes_s=None if each.kind == "relaunch" else takes_s,
        consent=fill(each.consent),
        outcomes=tuple((fill(one.seen), fill(one.means)) for one in each.outcomes),
    )


_NAME = re.compile(r"\{(\w+)\}")


def _command(case: Case) -> str:
    launcher = case.facts.launcher
    return launcher.process.title if launcher else " ".join(case.facts.header.command)
