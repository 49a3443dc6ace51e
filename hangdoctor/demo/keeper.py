"""Starts the pretend launch in a folder of its own, and ends both when its stdin ends.

It is a process beside hangdoctor, since no signal handler runs at a kill -9: a pipe ends at every
end. All that the launch starts is in one process group, and becomes a child of the keeper when its
parent dies, so that the keeper knows for certain that nothing is left.

    stdin    {"settings": {...}, "ranks": 4, ...}, one line, see `Order`; then nothing until the end
    stdout   {"pid": 4711, "folder": "/tmp/..."} or {"error": "..."}, one line
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TypedDict

SHARD_BYTES = 1 << 20
LOG_NAME = "server.log"
END_S = 10.0
_PR_SET_CHILD_SUBREAPER = 36


class Order(TypedDict):
    """What the keeper is told.

    Attributes:
        settings: for the stage's dumper; the keeper adds the folder.
        python: the interpreter and its options.
        stage: the directory that the launch imports from.
        ranks: how many.
        shards, reference_bytes: of the model, and of the file that is read slowly.
        stale_lock: leave a lock file behind whose owner has been killed.
    """

    settings: dict[str, Any]
    python: list[str]
    stage: str
    ranks: int
    shards: int
    reference_bytes: int
    stale_lock: bool


def main() -> None:
    """Keep one launch."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # only the end of stdin ends it
    order: Order = json.loads(sys.stdin.buffer.readline())
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    folder: Path | None = None
    group = 0
    try:
        try:
            folder = Path(tempfile.mkdtemp(prefix="hangdoctor-demo-"))
            furnish(folder, order)
            group = launch(folder, order)
        except OSError as error:
            answer({"error": f"{error.strerror}: {error.filename or 'TMPDIR'}"})
            return
        answer({"pid": group, "folder": str(folder)})
        while sys.stdin.buffer.read(1 << 16):
            pass
    finally:
        end(group, folder)


def furnish(folder: Path, order: Order) -> None:
    """Put the model and what else the launch reads into its folder."""
    model = folder / "tiny-deepseek-v2"
    model.mkdir()
    for number in range(1, order["shards"] + 1):
        name = f"model-{number:05}-of-{order['shards']:05}.safetensors"
        (model / name).write_bytes(os.urandom(1024) * (SHARD_BYTES // 1024))
    (folder / "reference.pt").write_bytes(bytes(order["reference_bytes"]))
    if order["stale_lock"]:
        directory = folder / "torch_extensions"
        directory.mkdir()
        if (owner := os.fork()) == 0:
            os.open(directory / "lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(owner, 0)


def launch(folder: Path, order: Order) -> int:
    """Start the launcher; return its pid, which is its process group's too."""
    settings = json.dumps(order["settings"] | {"folder": str(folder)})
    arguments = ["--model-path", str(folder / "tiny-deepseek-v2"), "--tp", str(order["ranks"])]
    with (folder / LOG_NAME).open("ab") as log:
        process = subprocess.Popen(
            [*order["python"], "-m", "sglang.launch_server", *arguments, "--device", "cpu"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=order["stage"],
            env=os.environ
            | {
                "SGLANG_DUMPER": settings,
                "TMPDIR": str(folder),  # a compiler's, too
                "TORCH_EXTENSIONS_DIR": str(folder / "torch_extensions"),
            },
            start_new_session=True,
        )
    return process.pid


def end(group: int, folder: Path | None) -> None:
    """Kill the group, wait until nothing of it is left, and remove the folder."""
    if group:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        until_s = time.monotonic() + END_S
        while reap() and time.monotonic() < until_s:
            time.sleep(0.02)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def reap() -> bool:
    """Take leave of the children that have ended, orphans included; tell whether any is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def answer(what: dict[str, Any]) -> None:
    """Say one line to whoever started us."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
