"""The diagnosis as it stands in a terminal, and in a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from hangdoctor.render.text import MOST_OF_A_LINE

RECORDING = Path(__file__).parents[1] / "recordings" / "h200-tp2-load-sleep-r1"
COMMAND = [sys.executable, "-m", "hangdoctor", "diagnose", str(RECORDING)]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "COLUMNS"}


def in_a_pipe() -> list[str]:
    done = subprocess.run(COMMAND, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    return done.stdout.splitlines()


def in_a_terminal(columns: int) -> list[str]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with subprocess.Popen(COMMAND, stdout=theirs, env=ENVIRONMENT) as process:
        os.close(theirs)
        seen = b""
        while True:
            try:
                block = os.read(ours, 4096)
            except OSError:  # nobody has the other end any more
                break
            if not block:
                break
            seen += block
        process.wait()
    os.close(ours)
    return seen.decode().splitlines()


def _read_only(lines: list[str]) -> list[str]:
    return lines[: lines.index("Next")]


@pytest.mark.parametrize("columns", [60, 80])
def test_in_a_terminal_what_is_read_is_wrapped_and_no_word_is_lost(columns):
    whole, wrapped = in_a_pipe(), in_a_terminal(columns)
    assert max(map(len, _read_only(whole))) > 80
    assert max(map(len, _read_only(wrapped))) <= columns
    assert " ".join(wrapped).split() == " ".join(whole).split()


def test_a_wrapped_line_goes_on_further_in():
    lines = in_a_terminal(60)
    title = next(number for number, line in enumerate(lines) if line.startswith("  + TP0 waits"))
    assert lines[title + 1].startswith("    ")


def test_commands_to_copy_are_left_whole_in_a_terminal():
    whole, wrapped = in_a_pipe(), in_a_terminal(60)
    assert wrapped[wrapped.index("Next") :] == whole[whole.index("Next") :]


def test_a_line_of_the_log_is_quoted_only_so_far():
    lines = [line.strip() for line in in_a_pipe() if "last line of" in line]
    assert lines
    assert max(map(len, lines)) <= MOST_OF_A_LINE
