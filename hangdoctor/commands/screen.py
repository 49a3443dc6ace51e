"""The lower end of a terminal, where the view of a launch is drawn anew after each look.

Nothing of the terminal is changed that would have to be changed back: no other screen, no hidden
cursor, no raw mode. So it is as it was whatever ends us, also a SIGKILL. The cursor rests on a line
of its own below the view, which the terminal's ^C is written on; each drawing begins by going up.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
from typing import TYPE_CHECKING, TextIO

from rich.console import Console

from hangdoctor.render.live import view
from hangdoctor.render.text import clean
from hangdoctor.streams import say

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

    from hangdoctor.facts import Facts
    from hangdoctor.findings import Diagnosis

USUAL_SIZE = 80, 24
"""Columns and rows of a terminal that does not say how large it is."""
_HELD_BACK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH, signal.SIGCONT)
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
"""A character that is wider than we think is cut off at the edge, and shifts no line."""
_REST_OF_LINE, _WHOLE_LINE, _REST_OF_SCREEN, _DOWN = "\x1b[K", "\x1b[2K", "\x1b[J", "\x1b[B"


class Screen:
    """A view at the lower end of a terminal; a context manager that takes it away at its end.

    Args:
        stream: stdout or stderr, a terminal.
        talks: the lines of our talk are shown above the view; else they go to stderr as ever.
        part: how much of the terminal's rows the view may take.
    """

    def __init__(self, stream: TextIO, *, talks: bool, part: float = 1.0) -> None:
        self._fd = stream.fileno()
        self._encoding = stream.encoding
        self._talks = talks
        self._part = part
        self._shown: tuple[Facts, Diagnosis] | None = None
        self._drawn: list[int] = []  # cells of the lines that stand there
        self._columns = 0
        self._is_gone = False
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> Self:
        """Follow the terminal's size from now on."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in (
                (signal.SIGWINCH, self._on_resize),
                (signal.SIGCONT, self._on_continue),
            ):
                self._handlers[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        """Take the view away; the cursor stands where it began."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what it returned before
        with _undisturbed():
            self._shown = None
            self._paint()

    def show(self, facts: Facts, diagnosis: Diagnosis) -> None:
        """Draw the view of this look in place of the one before."""
        with _undisturbed():
            self._shown = facts, diagnosis
            self._paint()

    def say(self, text: str, *more: str) -> None:
        """Write lines of talk, above the view where both share the terminal."""
        if self._talks and self._drawn:
            with _undisturbed():
                self._paint((text, *more))
        else:
            say(text, *more)

    def _on_resize(self, *_: object) -> None:
        with _undisturbed():
            self._paint()

    def _on_continue(self, *_: object) -> None:
        """Begin below what the shell has written while we were stopped."""
        self._drawn = []
        with _undisturbed():
            self._paint()

    def _paint(self, above: tuple[str, ...] = ()) -> None:
        if self._is_gone or not self._is_ours():
            self._drawn = []
            if above:
                say(*above)
            return
        if self._shown is None and not self._drawn:
            return
        columns, rows = self._size()
        lines, cells = self._lines(columns, rows)
        begin = self._to_the_top(columns, clear=bool(above) or not lines)
        said = "".join(f"{clean(line)}\r\n" for line in above)
        # A line is cleared before it is written: at the right edge the cursor stands on the last
        # character and not behind it.
        drawn = "".join(f"{_REST_OF_LINE}{line}\r\n" for line in lines)
        drawn += _REST_OF_SCREEN if lines else ""
        self._drawn, self._columns = cells, columns
        frame = f"{begin}{said}{_NO_WRAP}{drawn}{_WRAP}"
        try:
            data = frame.encode(self._encoding, "backslashreplace")
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            self._is_gone = True  # hung up

    def _to_the_top(self, columns: int, *, clear: bool) -> str:
        """Return what leads from below the view that stands there to its beginning.

        Where the terminal has become narrower, it has broken what does not fit into two lines.
        Cleared is line by line: some terminals keep what a clear of the whole screen takes away.
        """
        if not self._drawn:
            return ""
        rows = sum(max(1, -(-cells // columns)) for cells in self._drawn)
        up = f"\x1b[{rows}A"
        if clear or columns != self._columns:
            return f"\r{up}{_WHOLE_LINE}" + f"{_DOWN}{_WHOLE_LINE}" * rows + up
        return f"\r{up}"

    def _lines(self, columns: int, rows: int) -> tuple[list[str], list[int]]:
        """Return the view's lines as they are written, and their cells."""
        if self._shown is None:
            return [], []
        height = max(1, min(rows - 1, int(rows * self._part)))
        drawn = view(*self._shown, columns, height)
        console = Console(
            file=io.StringIO(),
            width=columns,
            height=rows,
            force_terminal=True,
            force_jupyter=False,
            color_system="standard",
            legacy_windows=False,
        )
        with console.capture() as written:
            console.print(drawn)
        cells = [line.cell_len for line in drawn.renderables if hasattr(line, "cell_len")]
        return written.get().removesuffix("\n").split("\n"), cells

    def _size(self) -> tuple[int, int]:
        """Return columns and rows; not what the environment says, which a resize leaves alone."""
        with contextlib.suppress(OSError):
            columns, rows = os.get_terminal_size(self._fd)
            return columns or USUAL_SIZE[0], rows or USUAL_SIZE[1]
        return USUAL_SIZE

    def _is_ours(self) -> bool:
        """Tell whether the shell has left the terminal to us: not with `&`, or after `bg`."""
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:
            return True  # not the terminal that controls us


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold back a Ctrl-C or a resize: between two halves of a drawing nobody knows where it is."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
