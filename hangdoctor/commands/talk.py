"""What is said while a launch is watched: what changes, and what its command prints."""

from __future__ import annotations

import os
import sys
from collections import deque
from typing import TYPE_CHECKING, TextIO

from hangdoctor.recording import (
    LOG_BLOCK_BYTES,
)
from hangdoctor.render.json import encode
from hangdoctor.render.text import verdict_line
from hangdoctor.streams import is_heard, put, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from hangdoctor.engines import Phase
    from hangdoctor.facts import Facts
    from hangdoctor.findings import Diagnosis
    from hangdoctor.launch import Started


MOST_LINES = 200
"""So many of a command's lines are shown after each look, its newest."""
LONGEST_LINE = 2000


def terminal() -> TextIO | None:
    """Return where a view can be drawn: stderr, or stdout if only that is a terminal.

    None where stdout leads elsewhere, which somebody keeps or reads, or where escapes are not
    wanted (https://no-color.org) or not understood.
    """
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return None
    if os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        return None
    return sys.stderr if sys.stderr.isatty() else sys.stdout


class Talk:
    """Says on stderr, or as JSON lines on stdout, what changes while a launch is watched.

    Args:
        events: JSON lines are wanted.
        started: the command, if it is ours.
        say: writes lines of talk, such as above a view.
    """

    def __init__(
        self, *, events: bool, started: Started | None, say: Callable[..., None] = say
    ) -> None:
        self._events = events
        self._say = say
        self._last: tuple[object, ...] = ()
        self._ranks: dict[str, Phase | None] = {}
        if started is not None:
            self.say(f"started pid {started.pid}, its log is {started.log_path}")

    def say(self, text: str) -> None:
        """Say a line of our own."""
        self._say(f"hangdoctor: {text}")

    def tell(self, facts: Facts, diagnosis: Diagnosis) -> bool:
        """Say what is new; False where whoever reads the events has gone."""
        now = (diagnosis.state, diagnosis.phase, diagnosis.culprits)
        phases = {rank.name: rank.phase for rank in facts.ranks}
        if now == self._last and phases == self._ranks:
            return is_heard() or not self._events
        withdrawn = self._last[:1] == ("hung",) and diagnosis.state not in ("hung", "dead")
        self._last, self._ranks = now, phases
        if self._events:
            event = {
                "at_s": facts.at_s,
                "state": diagnosis.state,
                "phase": diagnosis.phase,
                "culprits": list(diagnosis.culprits),
                "confidence": diagnosis.confidence,
                "still_s": diagnosis.still_s,
                "title": diagnosis.title,
                "withdrawn": withdrawn,
                "ranks": phases,
            }
            return put(encode(event).decode())
        moves = "it moves again, and " if any(rank.moving for rank in facts.ranks) else ""
        again = f"{moves}hung is withdrawn: " if withdrawn else ""
        line = f"{verdict_line(diagnosis)}  {again}{diagnosis.title}"
        self._say(f"{facts.at_s or 0:7.1f} s  {line}")
        return True


class Lines:
    """The lines of a command's log, shown on stderr between the lines of what changes."""

    def __init__(self) -> None:
        self._newest: deque[bytes] = deque(maxlen=MOST_LINES)
        self._count = 0
        self._begun = b""

    def hear(self, block: bytes) -> None:
        """Take in the log's next bytes; a flood needs no more memory than its newest lines."""
        *lines, self._begun = (self._begun + block).split(b"\n")
        self._begun = self._begun[-LOG_BLOCK_BYTES:]
        self._newest.extend(lines)
        self._count += len(lines)

    def show(self, say: Callable[..., None] = say, *, whole: bool = False) -> None:
        """Show what is new; at the end the line as well that was only begun."""
        if whole and self._begun:
            self.hear(b"\n")
        lines = [f"  | {_as_seen(line)}" for line in self._newest]
        left_out = self._count - len(lines)
        self._newest.clear()
        self._count = 0
        if left_out:
            lines.insert(0, f"  | ({left_out} lines are left out here, the log has them)")
        if lines:
            say(*lines)


def _as_seen(line: bytes) -> str:
    """Return what a terminal would show of a line: a bar overwrites itself."""
    shown = line.rstrip(b"\r").rpartition(b"\r")[2]
    return shown[:LONGEST_LINE].decode(errors="replace")
