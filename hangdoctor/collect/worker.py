"""A child process that does the looking, so that looking can be given up.

Reading /proc, asking a driver or waiting for a debugger can block beyond any time-out, in state D
even beyond a kill. So each collector runs in a child of its own, which lives as long as the
observer and answers one request at a time. Past its deadline it is killed, given one second,
abandoned, and replaced.

The two talk through the child's standard input and output: four bytes of length, big-endian, and
that many bytes of MessagePack.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec

from hangdoctor.model import Missing

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import IO

    from hangdoctor.collect.look import Job

MOST_ABANDONED = 3
"""A worker whose predecessors hang this often is not replaced before one of them ends."""

_GRACE_S = 1.0
_PR_SET_PDEATHSIG = 1
_LENGTH_BYTES = 4
_abandoned: list[subprocess.Popen[bytes]] = []  # kept, so that they are reaped when they end


class Worker:
    """The observer's end of one worker.

    Args:
        name: of the collector; `python -m hangdoctor.collect NAME` serves it.
        job: what it runs.
    """

    def __init__(self, name: str, job: Job) -> None:
        self.name = name
        self.job = job
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._mine: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the child if there is none; it gets ready while we do other things."""
        if self._process is not None:
            return
        # In memory: there may be no directory that we may write, or no room in it.
        self._stderr = os.fdopen(os.memfd_create("hangdoctor-stderr"), "w+b")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hangdoctor.collect", self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            # "-m" searches the working directory first; there is no hangdoctor in "/", and no
            # stalled file system under it.
            cwd="/",
            env=os.environ | {"PYTHONPATH": _import_path(), "RUST_BACKTRACE": "0"},
            # Its own session: Ctrl-C on the terminal is for the observer alone, and one kill ends
            # the worker with all that it started.
            start_new_session=True,
        )
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None  # noqa: S101  # PIPE was asked for
            os.set_blocking(pipe.fileno(), False)

    def hopeless(self) -> Missing | None:
        """Return why there is no use in asking now: its predecessors still hang."""
        self._mine = [process for process in self._mine if process.poll() is None]
        if self._process is None and len(self._mine) >= MOST_ABANDONED:
            return Missing(
                reason="timeout",
                detail=f"{len(self._mine)} earlier looks were killed and have not ended",
                hint=f"see what they wait for: cat /proc/{self._mine[0].pid}/wchan",
            )
        return None

    def close(self) -> None:
        """End the child: it leaves when its input ends, and is killed if it does not."""
        if self._process is None:
            return
        stdin = self._process.stdin
        if stdin:
            stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        self._drop()

    def give_up(self) -> Missing:
        """Kill the child, abandon it, and say why there is no answer."""
        self._drop()
        return Missing(
            reason="timeout",
            detail=f"no answer from the collector of {self.job.fills} in {self.job.deadline_s:g} s",
        )

    def broken(self) -> Missing:
        """Say what ended the child, from its last line."""
        process, stderr = self._process, self._stderr
        status: int | None = None
        last = ""
        if process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(_GRACE_S)
        if stderr:
            stderr.seek(0)
            last = (stderr.read().decode(errors="replace").strip().splitlines() or [""])[-1]
        self._drop()
        return Missing(
            reason="failed", detail=f"the collector ended with status {status}: {last}".rstrip(": ")
        )

    def pipes(self) -> tuple[int, int]:
        """Return the descriptors to write requests to and to read replies from."""
        self.start()
        process = self._process
        assert process  # noqa: S101  # started above
        assert process.stdin  # noqa: S101  # PIPE was asked for
        assert process.stdout  # noqa: S101
        return process.stdin.fileno(), process.stdout.fileno()

    def _drop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        for pipe in (process.stdin, process.stdout, self._stderr):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()
        if process.returncode is None:
            _abandoned.append(process)
            self._mine.append(process)


class _Talk:
    """One request to one worker, and how far its answer has come."""

    def __init__(self, worker: Worker, request: object) -> None:
        self.worker = worker
        body = msgspec.msgpack.encode(request)
        self.out = memoryview(len(body).to_bytes(_LENGTH_BYTES, "big") + body)
        self.into = bytearray()
        self.began_s = time.monotonic()
        self.until_s = self.began_s + worker.job.deadline_s

    def reply(self) -> bytes | None:
        """Return the whole reply, or None as long as there is more to come."""
        if len(self.into) < _LENGTH_BYTES:
            return None
        length = int.from_bytes(self.into[:_LENGTH_BYTES], "big")
        body = bytes(self.into[_LENGTH_BYTES:])
        return body if len(body) >= length else None


def ask_all(requests: Mapping[Worker, object]) -> dict[Worker, tuple[Any, float]]:
    """Ask several workers at once and wait for each up to its deadline.

    Returns:
        For each worker its reply, or a Missing, and the seconds that it took.
    """
    answers: dict[Worker, tuple[Any, float]] = {}
    talks = []
    for worker, request in requests.items():
        if missing := worker.hopeless():
            answers[worker] = (missing, 0.0)
        else:
            talks.append(_Talk(worker, request))
    try:
        with selectors.DefaultSelector() as selector:
            for talk in talks:
                stdin, stdout = talk.worker.pipes()
                selector.register(stdin, selectors.EVENT_WRITE, talk)
                selector.register(stdout, selectors.EVENT_READ, talk)
            while open_talks := [talk for talk in talks if talk.worker not in answers]:
                left_s = min(talk.until_s for talk in open_talks) - time.monotonic()
                heard = set()
                for key, events in selector.select(max(0.0, left_s)):
                    talk = key.data
                    heard.add(talk.worker)
                    if events & selectors.EVENT_WRITE:
                        if _write(key.fd, talk):
                            selector.unregister(key.fd)
                    elif not _read(key.fd, talk):
                        _forget(selector, talk)
                        answers[talk.worker] = (talk.worker.broken(), _took(talk))
                    elif (reply := talk.reply()) is not None:
                        _forget(selector, talk)
                        answers[talk.worker] = (_decode(talk.worker, reply), _took(talk))
                now = time.monotonic()
                for talk in open_talks:
                    # Giving up on another may have kept us from one that is answering.
                    if now >= talk.until_s and talk.worker not in {*heard, *answers}:
                        _forget(selector, talk)
                        answers[talk.worker] = (talk.worker.give_up(), _took(talk))
    except BaseException:
        # Whoever is in the middle of an answer would give it to the next question.
        for talk in talks:
            if talk.worker not in answers:
                talk.worker.give_up()
        raise
    return {worker: answers[worker] for worker in requests}


def ask_once(name: str, job: Job, request: object) -> Any:
    """Ask a worker that lives for this one question; return its reply or a Missing."""
    worker = Worker(name, job)
    try:
        return ask_all({worker: request})[worker][0]
    finally:
        worker.close()


def serve(job: Job) -> None:
    """Answer requests until the observer is gone. Runs in the child."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What a library prints must not get between the replies.
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    decoder = msgspec.msgpack.Decoder(job.request)
    while length := _exactly(requests, _LENGTH_BYTES):
        body = _exactly(requests, int.from_bytes(length, "big"))
        if body is None:
            return
        try:
            data = msgspec.msgpack.encode(job.read(decoder.decode(body)))
        except Exception as error:  # noqa: BLE001  # the observer must get an answer, whatever it is
            detail = f"{type(error).__name__}: {error}".encode(errors="replace").decode()
            data = msgspec.msgpack.encode(Missing(reason="failed", detail=detail))
        _send(replies, len(data).to_bytes(_LENGTH_BYTES, "big") + data)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that ends.

    The kernel means the parent's *thread* that started us; a worker that is lost with it is
    replaced at the next question.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _import_path() -> str:
    return os.pathsep.join(os.path.abspath(entry) for entry in sys.path)


def _took(talk: _Talk) -> float:
    return time.monotonic() - talk.began_s


def _decode(worker: Worker, reply: bytes) -> Any:
    try:
        return msgspec.msgpack.decode(reply, type=worker.job.reply)
    except msgspec.DecodeError as error:
        return Missing(reason="failed", detail=f"the collector's answer makes no sense: {error}")


def _write(fd: int, talk: _Talk) -> bool:
    """Write what the pipe takes; tell whether there is nothing more to write."""
    try:
        talk.out = talk.out[os.write(fd, talk.out) :]
    except BlockingIOError:
        return False
    except BrokenPipeError:  # its output ends too, and says so
        return True
    return not talk.out


def _read(fd: int, talk: _Talk) -> bool:
    """Read what has come; tell whether the worker is still there."""
    try:
        data = os.read(fd, 1 << 20)
    except BlockingIOError:
        return True
    talk.into += data
    return bool(data)


def _forget(selector: selectors.BaseSelector, talk: _Talk) -> None:
    for key in [key for key in selector.get_map().values() if key.data is talk]:
        selector.unregister(key.fd)


def _exactly(file: IO[bytes], count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        block = file.read(count - len(data))
        if not block:
            return None
        data += block
    return data


def _send(file: IO[bytes], data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
