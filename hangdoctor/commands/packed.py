"""Logs that are packed: gzip and xz by the standard library, zstd where something can read it."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hangdoctor.commands.copies import temporary_copy, write_copy
from hangdoctor.errors import InputError
from hangdoctor.streams import say

if TYPE_CHECKING:
    from contextlib import ExitStack
    from io import BufferedReader

_BEGINNINGS = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_MODULES = {
    "gzip": ("gzip",),
    "xz": ("lzma",),
    "zstd": ("compression.zstd", "zstandard"),  # Python's own since 3.14
}
_BLOCK_BYTES = 1 << 17


def unpacked(path: Path, name: str, exits: ExitStack) -> Path:
    """Return a packed log as a file that is not, judged by its content; others as they are.

    Of one that breaks off, as when it is copied while it is written, what is there is read.

    Raises:
        InputError: nothing of it can be unpacked.
    """
    with path.open("rb") as file:
        head = file.read(6)
    kind = next((kind for magic, kind in _BEGINNINGS.items() if head.startswith(magic)), None)
    if kind is None:
        return path
    copy = temporary_copy(name, exits)
    with _open(kind, path, name) as source:
        while True:
            try:
                block = source.read1(_BLOCK_BYTES)  # not read: it gives nothing of what breaks off
            except Exception as error:  # each module has errors of its own for damaged data
                if copy.tell() == 0:
                    raise InputError(
                        f"cannot unpack the log {name}: {error}",
                        hint=f"file {shlex.quote(name)}",
                    ) from error
                say(f"hangdoctor: {name} breaks off; what could be unpacked of it is read")
                break
            if not block:
                break
            write_copy(copy, block, name)
    return Path(copy.name)


def _open(kind: str, path: Path, name: str) -> BufferedReader:
    for module in _MODULES[kind]:
        try:
            opener: Any = importlib.import_module(module)
        except ImportError:
            continue
        opened: BufferedReader = opener.open(path, "rb")
        return opened
    raise InputError(
        f"the log {name} is packed with {kind}, which this Python cannot read",
        hint=f"{kind} -dc {shlex.quote(name)} | hangdoctor ... -   (or: pip install zstandard)",
    )
