"""Starts the keeper with its pretend launch, and lets go of both."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hangdoctor.demo import keeper
from hangdoctor.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hangdoctor.demo.plan import Plan

STAGE = Path(__file__).resolve().parent / "stage"
OPTIONS = ("-E", "-S", "-B")
"""Without PYTHON* variables, without site-packages and what they run at start, without writing
byte code beside an installation that may be read-only."""

COMPILERS = ("cc", "gcc", "clang", "g++", "clang++")
SHARDS = 8
SLOW_SHARDS = 40
"""Of 1 MiB: at the speed of slow storage they last longer than anybody watches."""

_END_S = 20.0
_COMPILE_S = 20.0


class Played(msgspec.Struct, frozen=True):
    """A launch that runs: its launcher's pid, its folder, which holds its log."""

    pid: int
    folder: Path

    @property
    def log(self) -> Path:
        """The file that it writes its log to."""
        return self.folder / keeper.LOG_NAME

    @property
    def struck(self) -> bool:
        """Whether the launch has come to where its fault is."""
        return (self.folder / "struck").exists()


class _Answer(msgspec.Struct):
    pid: int = 0
    folder: str = ""
    error: str = ""


@contextlib.contextmanager
def play(plan: Plan) -> Iterator[Played]:
    """Run a launch as planned; all of it is gone when this is left, in whatever way.

    Raises:
        InputError: something that it needs is not here.
    """
    order = _order(plan)
    process = subprocess.Popen(
        [sys.executable, *OPTIONS, keeper.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
        start_new_session=True,  # a Ctrl-C in our terminal is for us alone
    )
    assert process.stdin is not None  # noqa: S101  # for the type checker
    assert process.stdout is not None  # noqa: S101
    folder: Path | None = None
    try:
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
        answer = msgspec.json.decode(line, type=_Answer) if line else _Answer(error="no answer")
        if answer.error:
            raise InputError(
                f"cannot start the pretend launch: {answer.error}",
                hint="TMPDIR names the directory that its files are kept in",
            )
        folder = Path(answer.folder)
        yield Played(pid=answer.pid, folder=folder)
    finally:
        _let_go(process, folder)


def _order(plan: Plan) -> keeper.Order:
    if not sys.executable:
        raise InputError("Python does not know its own program, which the demo would start")
    slow = plan.fault == "slow"
    if plan.fault == "eventfd" and not hasattr(os, "eventfd"):
        raise InputError("this Python has no os.eventfd", hint="hangdoctor demo --fault lock")
    compiler = _compiler() if plan.fault == "compile" else ""
    return {
        "settings": plan.settings | {"compiler": compiler},
        "python": [sys.executable, *OPTIONS],
        "stage": str(STAGE),
        "ranks": plan.ranks,
        "shards": SLOW_SHARDS if slow else SHARDS,
        "reference_bytes": SLOW_SHARDS * keeper.SHARD_BYTES if slow else 0,
        "stale_lock": plan.fault == "stale-lock-file",
    }


def _compiler() -> str:
    """Return a compiler that works.

    Raises:
        InputError: there is none.
    """
    for name in COMPILERS:
        path = shutil.which(name)
        if path is None:
            continue
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            tried = subprocess.run(
                [path, "-x", "c", "-c", "-", "-o", os.devnull],
                input=b"int main(void) { return 0; }\n",
                capture_output=True,
                timeout=_COMPILE_S,
                check=False,
            )
            if tried.returncode == 0:
                return path
    raise InputError(
        f"this fault runs a C compiler, and none that works is on PATH ({', '.join(COMPILERS)})",
        hint="apt-get install gcc, or another fault: hangdoctor demo --fault slow",
    )


def _let_go(process: subprocess.Popen[bytes], folder: Path | None) -> None:
    """End the keeper's stdin, which makes it end all; wait until it has."""
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    if folder is not None:  # the keeper was killed, which killed the launch: its folder is left
        shutil.rmtree(folder, ignore_errors=True)
