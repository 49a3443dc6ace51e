"""What SGLang on the CPU needs: a tiny model's maker, and stand-ins for what only GPUs have.

The programs here run in the environment's own Python.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
LAYERS = "1,2,3"
"""Of the tiny model, those that a patch is asked to dump."""


def cpu_environment(folder: Path) -> dict[str, str]:
    """Return what SGLang on the CPU needs of the environment, with a home of its own."""
    return {
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "HF_HUB_OFFLINE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_HS_DUMP_LAYERS": LAYERS,
        # PyTorch may come with NCCL, which SGLang would then use on the CPU too, and fail.
        "SGLANG_NCCL_SO_PATH": "/nonexistent/libnccl.so",
        "TORCHDYNAMO_DISABLE": "1",  # the first prefill compiles for 20 s otherwise
    }


def stand_ins(packages: Path, into: Path) -> Path:
    """Link the stand-ins for what this environment lacks, and the repairs of SGLang on the CPU."""
    into.mkdir()
    for entry in (HERE / "stand_ins").iterdir():
        name = entry.name.removesuffix(".py")
        if not (packages / name).exists() and name != "__pycache__":
            (into / entry.name).symlink_to(entry)
    return into


@contextmanager
def folder() -> Iterator[Path]:
    """Give a temporary folder of a short path: ZMQ's sockets lie in it, of 107 bytes at most."""
    made = Path(tempfile.mkdtemp(prefix="hd-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
