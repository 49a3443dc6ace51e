"""Reads that may block, one process's never at the cost of another's."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

_Key = TypeVar("_Key", bound="Hashable")
_Value = TypeVar("_Value")

_MOST_THREADS = 32


class Bounded(Generic[_Key, _Value]):
    """Runs jobs in threads that can be left behind.

    As a rule one thread does them all, in order. Where that one does not come to an end in half
    of the time, others do the rest. A job that blocks keeps its thread, and is not tried again
    before that has returned: there is never more than one thread for a key.
    """

    def __init__(self) -> None:
        self._stuck: dict[_Key, threading.Thread] = {}

    def run(
        self, jobs: Mapping[_Key, Callable[[], _Value]], *, within_s: float
    ) -> dict[_Key, _Value]:
        """Return the answers that came within the time; a key that blocks is not among them.

        Raises:
            Exception: what a job raised; jobs answer for the errors that they expect.
        """
        self._stuck = {key: one for key, one in self._stuck.items() if one.is_alive()}
        todo = deque((key, job) for key, job in jobs.items() if key not in self._stuck)
        done: dict[_Key, _Value] = {}
        failures: list[Exception] = []
        busy: dict[_Key, threading.Thread] = {}

        def work() -> None:
            while todo:
                try:
                    key, job = todo.popleft()
                except IndexError:  # another thread took the last one
                    return
                busy[key] = threading.current_thread()
                try:
                    done[key] = job()
                except Exception as error:  # noqa: BLE001  # raised again where it is waited for
                    failures.append(error)
                finally:
                    del busy[key]

        until = time.monotonic() + within_s
        threads = [_started(work)]
        threads[0].join(within_s / 2)
        if threads[0].is_alive():
            threads += [_started(work) for _ in range(min(len(todo), _MOST_THREADS))]
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        todo.clear()
        self._stuck.update(busy)
        if failures:
            raise failures[0]
        return dict(done)


def _started(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
