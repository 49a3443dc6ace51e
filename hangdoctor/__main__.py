"""The script `hangdoctor` and `python -m hangdoctor`: the command line, over a net for imports.

A broken installation raises while it is imported, which Python would end with 1: a verdict.
"""

from __future__ import annotations

import os
import sys

CANNOT_START = 2
INTERRUPTED = 130


def main() -> None:
    """Run the command line."""
    try:
        _open_standard_streams()
        from hangdoctor import cli
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:  # noqa: BLE001  # whatever a broken installation raises
        sys.stderr.write(
            f"hangdoctor: cannot start: {type(error).__name__}: {error}\n"
            f"  {sys.executable} -m pip install --upgrade --force-reinstall hangdoctor\n"
        )
        sys.exit(CANNOT_START)
    cli.main()


def _open_standard_streams() -> None:
    """Put /dev/null where a standard stream was closed, so that no file of ours gets its number."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, "w" if fd else "r", encoding="utf-8", closefd=False))
    if hasattr(sys.stdout, "reconfigure"):  # text that the terminal's encoding lacks is escaped
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
