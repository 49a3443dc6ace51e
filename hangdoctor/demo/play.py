"""Plays a launch under a keeper, in a folder of its own, and lets go of both."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hangdoctor.errors import InputError
from hangdoctor.launch import NAME_PYTHON, keeping

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

SHARD_BYTES = 1 << 20
LOG_NAME = "server.log"

_COMPILE_S = 20.0
_DIE_WITH_A_LOCK = """
import os, signal, sys
os.open(sys.argv[1], os.O_CREAT | os.O_EXCL | os.O_WRONLY)
os.kill(os.getpid(), signal.SIGKILL)
"""


class Played(msgspec.Struct, frozen=True):
    """A launch that runs: its launcher's pid, its folder, which holds its log."""

    pid: int
    folder: Path

    @property
    def log(self) -> Path:
        """The file that it writes its log to."""
        return self.folder / LOG_NAME

    @property
    def struck(self) -> bool:
        """Whether the launch has come to where its fault is."""
        return (self.folder / "struck").exists()


@contextlib.contextmanager
def play(plan: Plan) -> Iterator[Played]:
    """Run a launch as planned; all of it is gone when this is left, in whatever way.

    Raises:
        InputError: something that it needs is not here.
    """
    if not sys.executable:
        raise InputError(
            "Python does not know its own program, which the demo would start", hint=NAME_PYTHON
        )
    if plan.fault == "eventfd" and not hasattr(os, "eventfd"):
        raise InputError("this Python has no os.eventfd", hint="hangdoctor demo --fault lock")
    compiler = _compiler() if plan.fault == "compile" else ""
    with keeping(grace_s=0.0) as keeper:
        folder = keeper.scratch("hangdoctor-demo-")
        try:
            model = _furnish(folder, plan)
        except OSError as error:
            raise InputError(
                f"cannot start the pretend launch: {error.strerror}: {error.filename or 'TMPDIR'}",
                hint="TMPDIR names the directory that its files are kept in",
            ) from error
        settings = plan.settings | {"compiler": compiler, "folder": str(folder)}
        started = keeper.start(
            [
                *(sys.executable, *OPTIONS, "-m", "sglang.launch_server"),
                *("--model-path", str(model), "--tp", str(plan.ranks), "--device", "cpu"),
            ],
            folder / LOG_NAME,
            environment={
                "SGLANG_DUMPER": json.dumps(settings),
                "TMPDIR": str(folder),  # a compiler's, too
                "TORCH_EXTENSIONS_DIR": str(folder / "torch_extensions"),
            },
            cwd=STAGE,
        )
        yield Played(pid=started.pid, folder=folder)


def _furnish(folder: Path, plan: Plan) -> Path:
    """Put the model and what else the launch reads into its folder; return the model's path."""
    slow = plan.fault == "slow"
    shards = SLOW_SHARDS if slow else SHARDS
    model = folder / "tiny-deepseek-v2"
    model.mkdir()
    for number in range(1, shards + 1):
        name = f"model-{number:05}-of-{shards:05}.safetensors"
        (model / name).write_bytes(os.urandom(1024) * (SHARD_BYTES // 1024))
    (folder / "reference.pt").write_bytes(bytes(SLOW_SHARDS * SHARD_BYTES if slow else 0))
    if plan.fault == "stale-lock-file":
        directory = folder / "torch_extensions"
        directory.mkdir()
        owner = [sys.executable, *OPTIONS, "-c", _DIE_WITH_A_LOCK, str(directory / "lock")]
        subprocess.run(owner, check=False)
    return model


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
