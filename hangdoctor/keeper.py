"""The process that keeps a command for us: it starts it, and ends all of it for certain.

It is a process beside hangdoctor, since no signal handler runs at a kill -9: a pipe ends at every
end. All that the command starts becomes a child of the keeper when its own parent dies, whatever
group, session or daemon it made itself, so that the keeper knows for certain that nothing is left.
`hangdoctor.launch.keeping` is the way to use it. The two talk in lines of JSON:

    stdin    {"scratch": "hangdoctor-demo-"}             make a directory that goes with the command
             {"start": {"command": [...], ...}}          see `Order`; once
             {"end": 10.0}                               SIGTERM, and SIGKILL after so many seconds
             its end, or that of whoever started us      the same, with the order's own grace
    stdout   {"scratch": "/tmp/..."}, {"pid": 4711, "start_ticks": 94612}, or {"error": "..."}
             {"exit": -15}                               of the command, negative for a signal
             {"left": [...], "killed": 3}                what no signal ends, mostly nothing
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from hangdoctor.collect import procfs

if TYPE_CHECKING:
    from collections.abc import Sequence

KILL_S = 10.0
"""From SIGKILL to giving up; only a process in state D is still there then."""

_PROC = "/proc"
_PAUSE_S = 0.05
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Order(TypedDict):
    """A command to start.

    Attributes:
        command: with its arguments.
        log: the file that its stdout and stderr are added to.
        cwd: its working directory.
        environment: what it gets besides the keeper's own.
        grace_s: from SIGTERM to SIGKILL at our end; 0 for SIGKILL at once.
    """

    command: list[str]
    log: str
    cwd: str
    environment: dict[str, str]
    grace_s: float


class Left(TypedDict):
    """A process that could not be ended: its state, and where in the kernel it waits."""

    pid: int
    name: str
    state: str
    kernel: str


def main() -> None:
    """Keep one command for the process that started us, whose pid is the first argument."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # only its end, or an order, ends us
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keeper = _Keeper(int(sys.argv[1]))
    try:
        keeper.serve()
    finally:
        keeper.end()


def spawn(
    command: Sequence[str],
    log: Path | str,
    *,
    environment: dict[str, str] | None = None,
    cwd: str | None = None,
    dies_with_us: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a command with its output in a file, so that nothing of us can block it.

    It gets a session of its own (no Ctrl-C, no hang-up of our terminal), no descriptor of ours,
    an empty stdin, and PYTHONUNBUFFERED=1.

    Args:
        command: with its arguments.
        log: the file that its output is added to.
        environment: what it gets besides ours.
        cwd: its working directory; None for ours.
        dies_with_us: the kernel kills it when the thread that calls this ends. Only for a process
            without other threads.

    Raises:
        OSError, ValueError: it cannot be started, or the file cannot be written.
    """
    prctl = ctypes.CDLL(None).prctl if dies_with_us else None
    with Path(log).open("ab") as output:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=cwd,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | (environment or {}),
            preexec_fn=(lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)) if prctl else None,  # noqa: PLW1509  # the keeper has one thread
        )


def send(pid: int, start_ticks: int, number: signal.Signals) -> None:
    """Signal a process if it is still the one that started then, and we may.

    By a pidfd, so that nobody else can get the pid between the look and the signal.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        except OSError:  # a kernel before 5.3, or a sandbox that does not know it
            pidfd = None
        try:
            stat = procfs.read_stat(_PROC, pid)
            if stat is None or stat.start_ticks != start_ticks:
                return
            if pidfd is None:
                os.kill(pid, number)
            else:
                signal.pidfd_send_signal(pidfd, number)
        finally:
            if pidfd is not None:
                os.close(pidfd)


class _Keeper:
    """What the keeper knows: its command, and how it ended."""

    def __init__(self, owner: int) -> None:
        self._pid = 0
        self._start_ticks = 0
        self._status: int | None = None
        self._grace_s = 0.0
        self._scratch: Path | None = None
        self._heard = b""
        self._killed: set[int] = set()
        self._hears = True  # until stdin, or its writer, ends
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)
        # Somebody else may have got the other end of our stdin; nobody can have this.
        with contextlib.suppress(OSError):
            self._poll.register(os.pidfd_open(owner), select.POLLIN)
        if os.getppid() != owner:
            self._hears = False
        # A child that ends wakes the poll.
        self._wakes, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poll.register(self._wakes, select.POLLIN)

    def serve(self) -> None:
        """Do what we are told until we are told to end it, or nobody is there any more."""
        while self._hears:
            for order in self._listen(None):
                if "end" in order:
                    self._grace_s = float(order["end"])
                    return
                self._obey(order)
            self._reap()

    def end(self) -> None:
        """End the command and all that it started, and remove the directory."""
        until_s = time.monotonic() + self._grace_s
        told_command = False
        told: set[tuple[int, int, str]] = set()
        while self._reap() and time.monotonic() < until_s:
            if self._status is None and not told_command:
                send(self._pid, self._start_ticks, signal.SIGTERM)
                told_command = True
            elif self._status is not None:
                # A wrapper such as a shell does not pass it on, and a server that dies at it
                # leaves its children: they get their own time to end, also those that were born
                # while others were told. One that becomes another program is told again: between
                # fork and exec a shell's child catches what the program then never hears of.
                for pid, stat in self._below().items():
                    who = (pid, stat.start_ticks, stat.comm)
                    if who not in told:
                        told.add(who)
                        send(pid, stat.start_ticks, signal.SIGTERM)
            for order in self._listen(_PAUSE_S):
                if "end" in order:  # a second Ctrl-C
                    until_s = min(until_s, time.monotonic() + float(order["end"]))
        until_s = time.monotonic() + KILL_S
        while self._reap() and time.monotonic() < until_s:
            for pid, stat in self._below().items():
                send(pid, stat.start_ticks, signal.SIGKILL)
                self._killed.add(pid)
            time.sleep(_PAUSE_S)
        left = [_left(stat) for stat in self._below().values() if stat.state != "Z"]
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        self._say({"left": left, "killed": len(self._killed)})

    def _obey(self, order: dict[str, Any]) -> None:
        try:
            if "scratch" in order:
                self._scratch = Path(tempfile.mkdtemp(prefix=order["scratch"]))
                self._say({"scratch": str(self._scratch)})
            else:
                self._start(order["start"])
        except (OSError, ValueError) as error:
            self._say({"error": (isinstance(error, OSError) and error.strerror) or str(error)})

    def _start(self, order: Order) -> None:
        process = spawn(
            order["command"],
            order["log"],
            environment=order["environment"],
            cwd=order["cwd"],
            dies_with_us=True,
        )
        # We wait for all children by ourselves.
        process.returncode = 0
        self._pid, self._grace_s = process.pid, order["grace_s"]
        stat = procfs.read_stat(_PROC, process.pid)
        self._start_ticks = stat.start_ticks if stat else 0
        self._say({"pid": self._pid, "start_ticks": self._start_ticks})

    def _listen(self, within_s: float | None) -> list[dict[str, Any]]:
        """Wait for an order or the end of a child; return the orders."""
        if not self._hears:
            time.sleep(within_s or 0.0)
            return []
        for fd, _ in self._poll.poll(None if within_s is None else 1000 * within_s):
            if fd == self._wakes:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakes, 1 << 10)
            elif fd == 0 and (block := os.read(0, 1 << 16)):
                self._heard += block
            else:
                self._hears = False
        *lines, self._heard = self._heard.split(b"\n")
        return [json.loads(line) for line in lines]

    def _reap(self) -> bool:
        """Take leave of the children that have ended, orphans included; tell if any is left."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self._pid:
                    self._status = os.waitstatus_to_exitcode(status)
                    self._say({"exit": self._status})
        except ChildProcessError:
            return False

    def _below(self) -> dict[int, procfs.Stat]:
        stats = procfs.scan(_PROC)
        own = os.getpid()
        return {pid: stats[pid] for pid in procfs.descendants(stats, [own]) if pid != own}

    def _say(self, what: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # nobody may be there to hear it
            os.write(1, json.dumps(what).encode() + b"\n")


def _left(stat: procfs.Stat) -> Left:
    try:
        kernel = procfs.read(f"{_PROC}/{stat.pid}/wchan").decode(errors="replace")
    except OSError:
        kernel = ""
    return {"pid": stat.pid, "name": stat.comm, "state": stat.state, "kernel": kernel}
