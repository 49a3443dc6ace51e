"""The command line in this process: a new interpreter takes ten times as long to start as to work.

For what is said of arguments and files. Where streams, signals, descriptors, or the process itself
matter, a test starts one.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

from hangdoctor import cli


def run_here(*arguments):
    """Return what the command line does with arguments, as `subprocess.run` would."""
    words = ["hangdoctor", *(os.fsdecode(word) for word in map(_text, arguments))]
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", words),
        mock.patch.object(sys, "stdin", io.StringIO()),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            cli.main()
        except SystemExit as end:
            return subprocess.CompletedProcess(words, end.code, out.getvalue(), err.getvalue())
    raise AssertionError("every way out has an exit code")


def _text(argument):
    return argument if isinstance(argument, bytes | os.PathLike) else str(argument)
