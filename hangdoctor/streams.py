"""stdout is data, stderr is talk: the two ways out, and what happens where nobody listens."""

from __future__ import annotations

import os
import select
import sys

from hangdoctor.errors import InputError
from hangdoctor.redaction import redact_text


def put(text: str) -> bool:
    """Write data to stdout, at once, and as it is but for what looks like a secret.

    Returns:
        False where its reader has gone (`| head -1`): what it read was right, and the exit code
        stays what it is.

    Raises:
        InputError: it cannot be written, such as to a disk that is full.
    """
    try:
        sys.stdout.write(redact_text(text).rstrip("\n") + "\n")
        sys.stdout.flush()
    except OSError as error:
        # Python tries again at its own end, and would change the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return False
        raise InputError(
            f"cannot write the answer to stdout: {error.strerror}", hint="where does it lead? df"
        ) from error
    return True


def is_heard() -> bool:
    """Tell whether stdout still leads to somebody: False for a pipe whose reader has gone."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return not any(events & select.POLLERR for _, events in poll.poll(0))


def say(text: str, *more: str) -> None:
    """Write lines to stderr, clean of what a terminal would obey; nobody has to listen."""
    from hangdoctor.render.text import clean  # 14 ms that help and completion need not spend

    try:
        sys.stderr.write("".join(redact_text(clean(line)) + "\n" for line in (text, *more)))
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
