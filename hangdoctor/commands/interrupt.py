"""What a command still says where it was interrupted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.streams import say

if TYPE_CHECKING:
    from hangdoctor.facts import Facts
    from hangdoctor.live import Live

INTERRUPTED = 130


def finish(live: Live, *, interrupted: bool) -> tuple[Facts, bool]:
    """Return the facts at the end, and whether a Ctrl-C came by then: after one nothing waits."""
    try:
        return live.finish(wait=not interrupted), interrupted
    except KeyboardInterrupt:
        return live.finish(wait=False), True


def nothing_seen() -> int:
    """Say that a Ctrl-C came before there was a verdict; return its exit code."""
    say(
        "hangdoctor: interrupted before anything was seen",
        "  a first verdict takes some seconds: hangdoctor diagnose",
    )
    return INTERRUPTED
