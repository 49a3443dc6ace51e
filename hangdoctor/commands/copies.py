"""Copies of logs that can be read only once, or only in another form."""

from __future__ import annotations

import tempfile
from typing import IO, TYPE_CHECKING

from hangdoctor.errors import InputError

if TYPE_CHECKING:
    from contextlib import ExitStack


def temporary_copy(log: str, exits: ExitStack) -> IO[bytes]:
    """Return a file to copy a log into, which is there until `exits` ends.

    Raises:
        InputError: it cannot be made.
    """
    try:
        copy = tempfile.NamedTemporaryFile(prefix="hangdoctor-", suffix=".log")  # noqa: SIM115
    except OSError as error:
        raise no_copy(log, error) from error
    return exits.enter_context(copy)


def write_copy(copy: IO[bytes], block: bytes, log: str) -> None:
    """Add a block to a copy.

    Raises:
        InputError: the disk is full.
    """
    try:
        copy.write(block)
        copy.flush()
    except OSError as error:
        raise no_copy(log, error) from error


def no_copy(log: str, error: OSError) -> InputError:
    """Return what to say where a log cannot be copied."""
    return InputError(
        f"cannot keep a copy of the log {log}: {error.strerror}",
        hint="TMPDIR names the directory that it is kept in",
    )
