"""Starts server commands: one that outlives us, or one that is ended for certain.

The second needs a keeper, a process beside us (`hangdoctor.keeper`):

    with keeping() as keeper:
        started = keeper.start(["python", "-m", "sglang.launch_server"], Path("server.log"))
        with Live((started.pid,), engine, header, log=started.log_path, started=started) as live:
            ...                                  # watch it, ask it
        ended = keeper.end()                     # SIGTERM, wait, SIGKILL, until nothing is left

However the block is left, and also when we are killed (kill -9), no descendant of the command is
left: none that ignores SIGTERM, none that became a daemon with a session and a parent of its own.
Only what the kernel does not let go of (state D) stays; it is named, and not waited for for ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hangdoctor import keeper as keeper_process
from hangdoctor.collect import procfs
from hangdoctor.errors import HangdoctorError, InputError
from hangdoctor.model import Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

GRACE_S = 10.0
"""From SIGTERM to SIGKILL. A server that hangs in its warm-up ignores the first for ever."""

NAME_PYTHON = "start it by the whole path of a Python: /path/to/python -m hangdoctor"

_PROC = "/proc"
_PAUSE_S = 0.1
_ANSWER_S = 30.0
"""A keeper that imports from slow storage takes its time; one that does not answer is a fault."""
_BOOT = "import sys; sys.path[:] = {path!r}; from hangdoctor.keeper import main; main()"
LOST = "the process that kept the command was killed"


class Started:
    """A command that we started.

    Attributes:
        pid: of the command, which leads its own session and group.
        start_ticks: with the pid, it names the process for ever.
        command: what was started.
        log_path: the file that has its stdout and stderr.
        poll: returns the exit status, negative for a signal; None as long as it runs.
    """

    def __init__(
        self,
        pid: int,
        start_ticks: int,
        command: tuple[str, ...],
        log_path: Path,
        poll: Callable[[], int | None],
    ) -> None:
        self.pid = pid
        self.start_ticks = start_ticks
        self.command = command
        self.log_path = log_path
        self.poll = poll


class Left(Struct, frozen=True):
    """A process that could not be ended: its state, and where in the kernel it waits."""

    pid: int
    name: str
    state: str
    kernel: str = ""


class Ended(Struct, frozen=True):
    """How a command was ended.

    Attributes:
        status: its exit status, negative for a signal; None where that is not known.
        killed: how many processes needed a SIGKILL.
        left: what is still there, which the kernel or a lack of rights keeps; mostly nothing.
        took_s: how long it took.
        lost: the keeper had been killed, so that what left the command's session is not known.
    """

    status: int | None
    killed: int = 0
    left: tuple[Left, ...] = ()
    took_s: float = 0.0
    lost: bool = False


def what_is_left(ended: Ended) -> list[str]:
    """Say for people what could not be ended, and why; empty where nothing is left."""
    said = [
        f"{each.name} (pid {each.pid}) could not be ended: state {each.state}"
        + (f" in {each.kernel}" if each.kernel not in ("", "0") else "")
        for each in ended.left
    ]
    if ended.lost:
        said.append(f"{LOST}: what left the session of the command may still run")
    return said


_running: list[subprocess.Popen[bytes]] = []  # kept to our end: they run on, and that is no leak


def start(command: Sequence[str], log_path: Path) -> Started:
    """Start a command with its output in a file, so that nothing of us can end or block it.

    It gets a session of its own (no Ctrl-C, no hang-up of our terminal), no descriptor of ours,
    an empty stdin, and PYTHONUNBUFFERED=1.

    Raises:
        InputError: it cannot be started, or the file cannot be written.
    """
    _check(command, log_path)
    try:
        process = keeper_process.spawn(command, log_path)
    except (OSError, ValueError) as error:
        raise _cannot_start(command, _reason(error)) from error
    _running.append(process)
    stat = procfs.read_stat(_PROC, process.pid)
    ticks = stat.start_ticks if stat else 0
    return Started(process.pid, ticks, tuple(command), log_path, process.poll)


@contextlib.contextmanager
def keeping(grace_s: float = GRACE_S) -> Iterator[Keeper]:
    """Give a keeper for one command; when this is left, in whatever way, all of it has ended.

    Args:
        grace_s: from SIGTERM to SIGKILL, where `Keeper.end` is not called or we are killed.

    Raises:
        HangdoctorError: the keeper cannot be started.
    """
    keeper = Keeper(grace_s)
    try:
        yield keeper
    finally:
        keeper.close()


class Keeper:
    """Our end of the keeper; see `keeping`."""

    def __init__(self, grace_s: float) -> None:
        if not sys.executable:
            raise HangdoctorError(
                "Python does not know its own program, which would keep the rest", hint=NAME_PYTHON
            )
        self._grace_s = grace_s
        self._process = subprocess.Popen(
            # Without PYTHON* variables and site-packages' own start: the path has all of it.
            [
                sys.executable,
                "-E",
                "-S",
                "-B",
                "-c",
                _BOOT.format(path=_import_path()),
                str(os.getpid()),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            start_new_session=True,  # a Ctrl-C in our terminal is for us alone
        )
        self._heard = b""
        self._started: Started | None = None
        self._status: int | None = None
        self._ended: Ended | None = None
        self._scratch: Path | None = None
        self._lost = False

    def scratch(self, prefix: str) -> Path:
        """Return a new directory, which is removed when the command has been ended.

        Raises:
            InputError: it cannot be made.
        """
        self._tell({"scratch": prefix})
        answer = self._answer("scratch")
        if "error" in answer:
            raise InputError(
                f"cannot make a temporary directory: {answer['error']}",
                hint="TMPDIR names where it is made",
            )
        self._scratch = Path(answer["scratch"])
        return self._scratch

    def start(
        self,
        command: Sequence[str],
        log_path: Path,
        *,
        environment: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Started:
        """Start the command as `start` does, but for its end; once.

        Args:
            command: with its arguments.
            log_path: the file that its output is added to.
            environment: what it gets besides ours.
            cwd: its working directory; ours if None.

        Raises:
            InputError: it cannot be started, or the file cannot be written.
        """
        _check(command, log_path)
        order: keeper_process.Order = {
            "command": list(command),
            "log": str(log_path.absolute()),
            "cwd": str(cwd) if cwd else os.getcwd(),  # noqa: PTH109  # a string is sent
            "environment": environment or {},
            "grace_s": self._grace_s,
        }
        self._tell({"start": order})
        answer = self._answer("pid")
        if "error" in answer:
            raise _cannot_start(command, answer["error"])
        self._started = Started(
            answer["pid"], answer["start_ticks"], tuple(command), log_path, self._poll
        )
        return self._started

    def end(self, *, grace_s: float | None = None) -> Ended:
        """End the command and all that it started; return how that went.

        SIGTERM to the command, once it has ended to what it left, and SIGKILL to everything after
        `grace_s`. A Ctrl-C meanwhile shortens that to nothing.
        """
        if self._ended is not None:
            return self._ended
        began_s = time.monotonic()
        grace_s = self._grace_s if grace_s is None else grace_s
        interrupted: KeyboardInterrupt | None = None
        while True:
            try:
                self._tell({"end": grace_s})
                answer = self._answer("left", grace_s + keeper_process.KILL_S + _ANSWER_S)
                break
            except KeyboardInterrupt as error:
                interrupted, grace_s = error, 0.0
        left = tuple(Left(**each) for each in answer.get("left", ()))
        killed = answer.get("killed", 0)
        if self._lost and self._started is not None:
            left, killed = _end_session(self._started)
        self._ended = Ended(
            status=self._status,
            killed=killed,
            left=left,
            took_s=time.monotonic() - began_s,
            lost=self._lost,
        )
        if interrupted is not None:
            raise interrupted
        return self._ended

    def close(self) -> None:
        """End all, if that was not done, and the keeper."""
        try:
            self.end()
        finally:
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_ANSWER_S)
            if self._scratch is not None:  # a keeper that was killed leaves it
                shutil.rmtree(self._scratch, ignore_errors=True)

    def _poll(self) -> int | None:
        while self._hear(0.0) is not None:
            pass
        return self._status

    def _tell(self, what: dict[str, Any]) -> None:
        stdin = self._process.stdin
        assert stdin is not None  # noqa: S101  # PIPE was asked for
        try:
            stdin.write(json.dumps(what).encode() + b"\n")
            stdin.flush()
        except OSError:
            self._lost = True

    def _answer(self, key: str, within_s: float = _ANSWER_S) -> dict[str, Any]:
        """Return the next line with this key, or an error."""
        until_s = time.monotonic() + within_s
        while (what := self._hear(max(0.0, until_s - time.monotonic()))) is not None:
            if key in what or "error" in what:
                return what
        self._lost = True
        return {"error": LOST}

    def _hear(self, within_s: float) -> dict[str, Any] | None:
        """Return the next line of the keeper; None where none comes in this time."""
        until_s = time.monotonic() + within_s
        stdout = self._process.stdout
        assert stdout is not None  # noqa: S101  # PIPE was asked for
        while b"\n" not in self._heard:
            poll = select.poll()
            poll.register(stdout.fileno(), select.POLLIN)
            if not poll.poll(1000 * max(0.0, until_s - time.monotonic())):
                return None
            block = os.read(stdout.fileno(), 1 << 16)
            if not block:
                self._lost = self._ended is None
                return None
            self._heard += block
        line, _, self._heard = self._heard.partition(b"\n")
        what: dict[str, Any] = json.loads(line)
        if "exit" in what:
            self._status = what["exit"]
        return what


def _import_path() -> list[str]:
    """Return where the keeper imports from: as we do, but nothing from the working directory."""
    path = [os.path.abspath(entry) for entry in sys.path if entry]  # noqa: PTH100  # a string
    root = str(Path(__file__).resolve().parents[1])
    return path if root in path else [root, *path]


def _check(command: Sequence[str], log_path: Path) -> None:
    if not command:
        raise InputError("no command to start", hint="hangdoctor watch -- COMMAND ...")
    try:
        log_path.open("ab").close()
    except OSError as error:
        raise InputError(
            f"cannot write the log {log_path}: {error.strerror}", hint="--record DIR elsewhere"
        ) from error


def _cannot_start(command: Sequence[str], reason: str) -> InputError:
    return InputError(
        f"cannot start {shlex.quote(command[0])}: {reason}",
        hint="after -- comes the server's own command, as one would type it",
    )


def _reason(error: OSError | ValueError) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _end_session(started: Started) -> tuple[tuple[Left, ...], int]:
    """Kill what is left in the command's session, whose keeper was killed; and what is below it."""
    until_s = time.monotonic() + keeper_process.KILL_S
    killed: set[int] = set()
    while True:
        stats = procfs.scan(_PROC)
        ours = [
            pid
            for pid, stat in stats.items()
            if stat.session == started.pid and stat.start_ticks >= started.start_ticks
        ]
        there = [stats[pid] for pid in procfs.descendants(stats, ours) if stats[pid].state != "Z"]
        if not there or time.monotonic() >= until_s:
            break
        for stat in there:
            keeper_process.send(stat.pid, stat.start_ticks, signal.SIGKILL)
            killed.add(stat.pid)
        time.sleep(_PAUSE_S)
    left = (Left(pid=stat.pid, name=stat.comm, state=stat.state) for stat in there)
    return tuple(left), len(killed)
