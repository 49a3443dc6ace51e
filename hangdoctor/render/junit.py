"""Checks, or a diagnosis as one, as JUnit XML: the form that every CI reads."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from hangdoctor.checks import Check
from hangdoctor.render.text import clean, to_text, verdict_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hangdoctor.checks import Outcome
    from hangdoctor.facts import Facts
    from hangdoctor.findings import Diagnosis, State

OUTCOMES: dict[State, Outcome] = {
    "ready": "passed",
    "hung": "failed",
    "dead": "failed",
    "starting": "undecided",
    "slow": "undecided",
    "unknown": "undecided",
}
_ELEMENTS = {"failed": "failure", "undecided": "error", "skipped": "skipped"}


def to_junit(facts: Facts, diagnosis: Diagnosis) -> str:
    """Return a diagnosis as a suite of one test: that the start comes to ready."""
    return checks_to_junit("hangdoctor", (check_of(facts, diagnosis),))


def check_of(facts: Facts, diagnosis: Diagnosis, *, took_s: float | None = None) -> Check:
    """Return a diagnosis as a check of the start-up."""
    outcome = OUTCOMES[diagnosis.state]
    passed = outcome == "passed"
    return Check(
        name="start-up",
        outcome=outcome,
        said=diagnosis.title if passed else f"{verdict_line(diagnosis)}: {diagnosis.title}",
        kind="" if passed else diagnosis.state,
        took_s=facts.at_s if took_s is None else took_s,
        details="" if passed else to_text(facts, diagnosis),
    )


def checks_to_junit(suite: str, checks: Sequence[Check], output: str = "") -> str:
    """Return checks as a JUnit document; what the target said is cleaned, so that it is XML.

    Args:
        suite: its name.
        checks: one test each; an undecided one is an error, and no failure.
        output: lines of the log, for a person who reads the report.
    """
    counts = {
        "tests": len(checks),
        "failures": sum(check.outcome == "failed" for check in checks),
        "errors": sum(check.outcome == "undecided" for check in checks),
        "skipped": sum(check.outcome == "skipped" for check in checks),
    }
    totals = {name: str(count) for name, count in counts.items()}
    totals["time"] = _seconds(sum(check.took_s or 0.0 for check in checks))
    root = ET.Element("testsuites", {"name": _clean(suite)} | totals)
    tests = ET.SubElement(root, "testsuite", {"name": _clean(suite)} | totals)
    for check in checks:
        case = ET.SubElement(
            tests,
            "testcase",
            {
                "classname": _clean(suite).replace(" ", "."),
                "name": _clean(check.name),
                "time": _seconds(check.took_s or 0.0),
            },
        )
        if check.outcome in _ELEMENTS:
            said = {"message": _clean(check.said)}
            if check.outcome != "skipped":
                said["type"] = _clean(check.kind or check.outcome)
            ET.SubElement(case, _ELEMENTS[check.outcome], said).text = _clean(check.details)
        else:
            ET.SubElement(case, "system-out").text = _clean(check.said)
    if output:
        ET.SubElement(tests, "system-out").text = _clean(output)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode")


def _clean(text: str) -> str:
    """Return text that XML may hold: no controls, no halves of characters; lines stay lines."""
    return "\n".join(clean(line) for line in text.splitlines())


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}"
