"""Checks for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.render.text import clean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hangdoctor.checks import Check

_MARKS = {"passed": "+", "failed": "-", "undecided": "?", "skipped": " "}


def checks_to_text(title: str, checks: Sequence[Check]) -> str:
    """Return checks, a line each."""
    lines = [title]
    for check in checks:
        took = "" if check.took_s is None else f" ({check.took_s:.1f} s)"
        lines.append(f"  {_MARKS[check.outcome]} {check.name}{took}: {check.said}")
    return "\n".join(map(clean, lines))
