"""What a Ctrl-C, a SIGTERM and a hang-up have in common: what is done is ended in order."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_got: list[int] = []


class Ended(KeyboardInterrupt):
    """A SIGTERM or SIGHUP, which is handled where a Ctrl-C is."""


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """Let SIGTERM and SIGHUP interrupt what is done within like a Ctrl-C, and end by them then.

    So the recording is whole and the terminal clear, and whoever sent it sees that it was obeyed.
    One that comes a second time ends us at once, but for a Ctrl-C; one that is ignored (nohup)
    stays so.
    """
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
        and threading.current_thread() is threading.main_thread()
    }
    ends = [number for number, handler in before.items() if handler is signal.SIG_DFL]

    def interrupt(number: int, _frame: FrameType | None) -> None:
        _got.append(number)
        for each in ends:
            signal.signal(each, signal.SIG_DFL)
        _raise(number)

    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        ended_by = [number for number in _got if number in ends]
        _got.clear()
        if ended_by:
            os.kill(os.getpid(), ended_by[0])


def raise_unheard() -> None:
    """Interrupt what goes on after a signal: its exception came where Python only prints it.

    So it does in a destructor, or in the callback of a weak reference, as imports have.
    """
    if _got:
        _raise(_got[0])


def _raise(number: int) -> None:
    raise KeyboardInterrupt if number == signal.SIGINT else Ended
