"""Starts a server command that outlives us, and ends one that we started for certain."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from hangdoctor.collect import procfs
from hangdoctor.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

GRACE_S = 10.0
"""From SIGTERM to SIGKILL. A server that hangs in its warm-up ignores the first for ever."""

KILL_S = 10.0
"""From SIGKILL to giving up; only a process in state D is still there then."""

_PROC = "/proc"
_PAUSE_S = 0.1


class Started:
    """A command that we started.

    Attributes:
        pid: of the command, which leads its own session and group.
        start_ticks: with the pid, it names the process for ever.
        command: what was started.
        log_path: the file that has its stdout and stderr.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], command: tuple[str, ...], log_path: Path
    ) -> None:
        self.pid = process.pid
        stat = procfs.read_stat(_PROC, process.pid)
        self.start_ticks = stat.start_ticks if stat else 0
        self.command = command
        self.log_path = log_path
        self._process = process
        _running.append(process)

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None as long as it runs."""
        return self._process.poll()


_running: list[subprocess.Popen[bytes]] = []  # kept to our end: they run on, and that is no leak


def start(command: Sequence[str], log_path: Path) -> Started:
    """Start a command with its output in a file, so that nothing of us can end or block it.

    It gets a session of its own (no Ctrl-C, no hang-up of our terminal), no descriptor of ours,
    an empty stdin, and PYTHONUNBUFFERED=1.

    Raises:
        InputError: it cannot be started, or the file cannot be written.
    """
    if not command:
        raise InputError("no command to start", hint="hangdoctor watch -- COMMAND ...")
    try:
        log = log_path.open("ab")
    except OSError as error:
        raise InputError(
            f"cannot write the log {log_path}: {error.strerror}", hint="--record DIR elsewhere"
        ) from error
    with log:
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise InputError(
                f"cannot start {shlex.quote(command[0])}: {reason}",
                hint="after -- comes the server's own command, as one would type it",
            ) from error
    return Started(process, tuple(command), log_path)


def end(started: Started, *, grace_s: float = GRACE_S) -> tuple[int, ...]:
    """End the command and all that it started: SIGTERM to it, then SIGKILL to what is left.

    Only descendants are touched, each known by its pid and start, and what runs in the session
    that we made for it.

    Returns:
        The pids that are still there, which the kernel does not let go of (state D); mostly none.
    """
    seen: dict[int, int] = {started.pid: started.start_ticks}
    left = _left(started, seen)
    if started.pid in left:
        _signal(started.pid, started.start_ticks, signal.SIGTERM)
    left = _wait(lambda: _left(started, seen), grace_s)

    def kill() -> dict[int, int]:
        for pid, ticks in _left(started, seen).items():
            _signal(pid, ticks, signal.SIGKILL)
        return _left(started, seen)

    if left:
        left = _wait(kill, KILL_S)
    started.poll()
    return tuple(sorted(left))


def _wait(left: Callable[[], dict[int, int]], within_s: float) -> dict[int, int]:
    until_s = time.monotonic() + within_s
    while (pids := left()) and time.monotonic() < until_s:
        time.sleep(_PAUSE_S)
    return pids


def _left(started: Started, seen: dict[int, int]) -> dict[int, int]:
    """Return what still runs of all that the command started, and remember it in `seen`."""
    started.poll()  # so that it does not stay as a zombie of ours
    stats = procfs.scan(_PROC)
    ours = [pid for pid, ticks in seen.items() if pid in stats and stats[pid].start_ticks == ticks]
    ours += [
        pid
        for pid, stat in stats.items()
        if stat.session == started.pid and stat.start_ticks >= started.start_ticks
    ]
    for pid in procfs.descendants(stats, list(dict.fromkeys(ours))):
        seen[pid] = stats[pid].start_ticks
    return {
        pid: ticks
        for pid, ticks in seen.items()
        if pid in stats and stats[pid].start_ticks == ticks and stats[pid].state != "Z"
    }


def _signal(pid: int, start_ticks: int, number: signal.Signals) -> None:
    """Signal a process if it is still the same one."""
    stat = procfs.read_stat(_PROC, pid)
    if stat and stat.start_ticks == start_ticks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
