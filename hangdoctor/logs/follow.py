"""New bytes of a log while it grows: the one module of logs/ that touches the world.

A file is read from its start, then wherever it grows, through rotation (the name leads to another
file) and truncation. A pipe is read only where that takes nothing from anybody: our own stdin, or a
FIFO that the user names. The stdout of a launch, where it is a pipe, is refused: whoever reads from
it takes the lines away from their real reader.
"""

from __future__ import annotations

import os
import select
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hangdoctor.errors import InputError
from hangdoctor.model import LogPosition, Missing
from hangdoctor.recording import LOG_BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

READ_DEADLINE_S = 3.0
"""A block that takes longer is waited for no more: it is taken up by the look that finds it."""

_PIPE_HINT = "pipe the log in: kubectl logs -f POD | hangdoctor diagnose PID --log -"


class Listener:
    """Follows a log whose storage may be stalled: each call returns, whatever the log does.

    A thread reads, one block at a time. Where it does not come back within the deadline the log is
    Missing, and nothing else is tried before it has; what it then brings is not lost. An error
    in the middle, such as a rotation to a file that cannot be read, is Missing for that time only.

    Args:
        source: as Follower has it.
        within_s: seconds that a block may take.

    Raises:
        InputError: it cannot be opened, or is a pipe that belongs to somebody else.
    """

    def __init__(self, source: str | Path, *, within_s: float = READ_DEADLINE_S) -> None:
        self._source = source
        self._within_s = within_s
        self._follower: Follower | None = None
        self._thread: threading.Thread | None = None
        self._answers: list[tuple[bytes, LogPosition | Missing] | Exception] = []
        self._position: LogPosition | Missing = self._too_long()
        answer = self._ask(self._open)
        if isinstance(answer, Exception):
            raise answer

    def read_all(self) -> Iterator[bytes]:
        """Yield blocks until there is nothing new, or nothing can be had now."""
        while block := self._read():
            yield block

    def position(self) -> LogPosition | Missing:
        """Return how far the log was read at the last `read_all`, or why it could not be."""
        return self._position

    def close(self) -> None:
        """Close the file, unless a read that does not come back still has it."""
        if self._thread is not None and self._thread.is_alive():
            return
        if self._follower is not None:
            self._follower.close()

    def _read(self) -> bytes:
        answer = self._ask(self._look)
        if answer is None:
            self._position = self._too_long()
            return b""
        if isinstance(answer, InputError | OSError):
            self._position = Missing(reason="failed", detail=str(answer))
            return b""
        if isinstance(answer, Exception):
            raise answer
        block, self._position = answer
        return block

    def _ask(
        self, job: Callable[[], tuple[bytes, LogPosition | Missing]]
    ) -> tuple[bytes, LogPosition | Missing] | Exception | None:
        """Return what a job says, or the one before it if that is not back yet; None: too long."""
        within_s = 0.0
        if self._thread is None:
            within_s = self._within_s
            self._thread = threading.Thread(target=self._work, args=(job,), daemon=True)
            self._thread.start()
        self._thread.join(within_s)
        if self._thread.is_alive():
            return None
        self._thread = None
        return self._answers.pop()

    def _work(self, job: Callable[[], tuple[bytes, LogPosition | Missing]]) -> None:
        try:
            self._answers.append(job())
        except Exception as error:  # noqa: BLE001  # raised where it is waited for
            self._answers.append(error)

    def _open(self) -> tuple[bytes, LogPosition | Missing]:
        self._follower = Follower(self._source)
        return b"", LogPosition(read_bytes=0)

    def _look(self) -> tuple[bytes, LogPosition | Missing]:
        if self._follower is None:  # it could not be opened in time, and later not at all
            self._open()
        assert self._follower  # noqa: S101  # opened above
        block = self._follower.read()
        try:
            return block, self._follower.position()
        except OSError as error:  # what was read is not to be lost
            return block, Missing(reason="failed", detail=str(error.strerror))

    def _too_long(self) -> Missing:
        return Missing(
            reason="timeout",
            detail=f"the log could not be read within {self._within_s:g} s",
            hint=f"is its storage stalled? df {self._source}",
        )


class Follower:
    """Reads what was added to a log since the last time, and never waits for more.

    Stalled storage does hold it up; see Listener.

    Args:
        source: path of a file (`/proc/PID/fd/1` too, also where the file was deleted) or of a FIFO;
            "-" for our own stdin.

    Raises:
        InputError: it cannot be opened, or is a pipe that belongs to somebody else.
    """

    def __init__(self, source: str | Path) -> None:
        self.source = str(source)
        self.read_bytes = 0
        self._position = 0
        self._ended = False
        self._last_read_s: float | None = None
        self._own = self.source != "-"
        self._fd = self._open() if self._own else 0
        try:
            status = os.fstat(self._fd)
        except OSError as error:  # a stdin that was closed
            raise self._unreadable(error) from error
        self._regular = stat.S_ISREG(status.st_mode)

    def read(self) -> bytes:
        """Return the next block, at most LOG_BLOCK_BYTES; empty when there is nothing new now."""
        if self._ended:
            return b""
        try:
            block = self._read_file() if self._regular else self._read_pipe()
        except OSError as error:
            raise self._unreadable(error) from error
        if block:
            self.read_bytes += len(block)
            self._last_read_s = time.monotonic()
        return block

    def read_all(self) -> Iterator[bytes]:
        """Yield blocks until there is nothing new; a long log is read in bounded memory."""
        while block := self.read():
            yield block

    def position(self) -> LogPosition:
        """Return how far the log was read, and how long it has been silent.

        A file's silence is told by its time stamp and so covers the time before we came; a pipe's
        begins with the first bytes that we read.
        """
        silent_s: float | None = None
        if self._regular:
            silent_s = max(0.0, time.time() - os.fstat(self._fd).st_mtime)
        elif self._last_read_s is not None:
            silent_s = time.monotonic() - self._last_read_s
        return LogPosition(read_bytes=self.read_bytes, silent_s=silent_s, ended=self._ended)

    def close(self) -> None:
        """Close the file; stdin stays open."""
        if self._own and self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> int:
        try:
            mode = Path(self.source).stat().st_mode
            if self.source.startswith("/proc/") and not stat.S_ISREG(mode):
                raise InputError(
                    f"the log {self.source} is no file: reading it would take lines away from its"
                    " reader",
                    hint=_PIPE_HINT,
                )
            if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
                raise InputError(
                    f"{self.source} is not a log: neither a file nor a pipe",
                    hint=f"ls -ld {self.source}",
                )
            # Not to wait for a FIFO's writer; it means nothing for a file.
            return os.open(self.source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> InputError:
        if not self._own:
            return InputError(f"cannot read stdin: {error.strerror}", hint=_PIPE_HINT)
        hint = f"ls -l {self.source}"
        return InputError(f"cannot read the log {self.source}: {error.strerror}", hint=hint)

    def _read_file(self) -> bytes:
        block = os.pread(self._fd, LOG_BLOCK_BYTES, self._position)
        if not block and self._renewed():
            block = os.pread(self._fd, LOG_BLOCK_BYTES, self._position)
        self._position += len(block)
        return block

    def _renewed(self) -> bool:
        """At the end of a file: go on with what took its place, or with its new start."""
        if os.fstat(self._fd).st_size < self._position:
            self._position = 0
            return True
        if not self._own:
            return False
        try:
            there = Path(self.source).stat()
        except OSError:  # moved away, and the new one not yet made
            return False
        if os.path.samestat(there, os.fstat(self._fd)) or not stat.S_ISREG(there.st_mode):
            return False
        old, self._fd = self._fd, self._open()
        os.close(old)
        self._position = 0
        return True

    def _read_pipe(self) -> bytes:
        # poll and not O_NONBLOCK: that flag would hold for everybody who shares our stdin.
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        events = poll.poll(0)
        if not events:
            return b""
        block = os.read(self._fd, LOG_BLOCK_BYTES)
        # A FIFO that nobody has opened for writing yet reads as ended; only stdin really is.
        if not block and not self._own:
            self._ended = True
        return block
