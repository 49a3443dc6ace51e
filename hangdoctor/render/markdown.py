"""Checks, or a diagnosis, as Markdown: for an issue, or for the summary of a CI job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.render.markup import fenced, inline, table_row
from hangdoctor.render.text import to_text, verdict_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hangdoctor.checks import Check
    from hangdoctor.facts import Facts
    from hangdoctor.findings import Diagnosis


def to_markdown(facts: Facts, diagnosis: Diagnosis) -> str:
    """Return a diagnosis: its verdict as a heading, and the report as a block."""
    lines = [f"### {inline(verdict_line(diagnosis))}", "", inline(diagnosis.title), ""]
    return "\n".join([*lines, *fenced(to_text(facts, diagnosis).splitlines())])


def checks_to_markdown(title: str, checks: Sequence[Check]) -> str:
    """Return checks as a table, and below it the details of those that did not pass."""
    lines = [f"### {inline(title)}", "", "| check | outcome | seconds | |", "|---|---|---|---|"]
    for check in checks:
        took = "" if check.took_s is None else f"{check.took_s:.1f}"
        lines.append(table_row((check.name, check.outcome, took, check.said)))
    for check in checks:
        if check.details and check.outcome != "passed":
            lines += ["", f"<details><summary>{inline(check.name)}</summary>", ""]
            lines += fenced(check.details.splitlines())
            lines += ["", "</details>"]
    return "\n".join(lines)
