"""What a Ctrl-C, a SIGTERM and a hang-up have in common: the verdict so far, then the end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING

from hangdoctor.streams import say

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from hangdoctor.facts import Facts
    from hangdoctor.live import Live

INTERRUPTED = 130


class Ended(KeyboardInterrupt):
    """A SIGTERM or SIGHUP, which is handled where a Ctrl-C is."""


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """Let SIGTERM and SIGHUP interrupt what is done within like a Ctrl-C, and end by them then.

    So the recording is whole and the terminal clear, and whoever sent it sees that it was obeyed.
    One that comes a second time ends us at once; one that is ignored (nohup) stays so.
    """
    got: list[int] = []
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_DFL
        and threading.current_thread() is threading.main_thread()
    ]

    def interrupt(number: int, _frame: FrameType | None) -> None:
        got.append(number)
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)
        raise Ended

    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        if got:
            os.kill(os.getpid(), got[0])


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
