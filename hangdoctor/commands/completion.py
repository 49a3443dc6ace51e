"""What a shell offers to complete: quick, and silent whatever goes wrong."""

from __future__ import annotations

import contextlib
import re

MOST_TITLE = 60
_UNSAFE = re.compile(r"[^A-Za-z0-9_./=, @+-]")
"""Titles are anybody's words, and zsh evaluates what it is given: only these are passed on."""


def engine_names(incomplete: str) -> list[str]:
    """Return the engines whose names begin so."""
    from hangdoctor import engines

    return [name for name in engines.names() if name.startswith(incomplete)]


def rule_ids(incomplete: str) -> list[tuple[str, str]]:
    """Return the rules and known issues whose ids begin so, each with a line about it."""
    from hangdoctor.commands.explain import summaries

    return [found for found in summaries().items() if found[0].startswith(incomplete)]


def launch_pids(incomplete: str) -> list[tuple[str, str]]:
    """Return the PIDs of running launches that begin so; none where what is typed is a path."""
    if incomplete and not incomplete.isdecimal():
        return []
    with contextlib.suppress(Exception):  # a shell that completes is no place for errors
        from hangdoctor import engines
        from hangdoctor.target import find_launches

        launches = find_launches([engines.load(name) for name in engines.names()])
        return [
            (str(launch.roots[0]), _UNSAFE.sub("?", launch.title)[:MOST_TITLE])
            for launch in launches
            if str(launch.roots[0]).startswith(incomplete)
        ]
    return []
