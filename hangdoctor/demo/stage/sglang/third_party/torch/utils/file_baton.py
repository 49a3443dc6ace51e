"""A lock by the existence of a file: who creates it builds, who finds it waits until it is gone."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class FileBaton:
    """Held by whoever created the file; its death releases nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def try_acquire(self) -> bool:
        """Create the file; False where it is there already."""
        try:
            self._fd = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        return True

    def wait(self) -> None:
        """Wait until the file is gone."""
        while self._path.exists():
            time.sleep(0.1)

    def release(self) -> None:
        """Let the next one have it."""
        if self._fd is not None:
            os.close(self._fd)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
