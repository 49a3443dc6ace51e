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
