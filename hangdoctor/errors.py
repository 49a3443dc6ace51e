"""What can go wrong on the user's side, said in one line with a hint and an exit code.

HangdoctorError
├── UsageError        wrong options, or several launches and none chosen           exit 2
├── InputError        a source that cannot be read: no such PID, no such file      exit 2
└── EvidenceError     a source that was read, and decides nothing                  exit 3
"""

from __future__ import annotations


class HangdoctorError(Exception):
    """An error that is drawn as one line: what and why, then the next command to try.

    Args:
        message: what happened and why, one sentence without a full stop.
        hint: what to do now, best a command.
    """

    exit_code = 2

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(HangdoctorError):
    """The command line asks for something that cannot be done."""


class InputError(HangdoctorError):
    """A source cannot be read: a PID that does not exist, a file that is no recording."""


class EvidenceError(HangdoctorError):
    """A source was read but holds nothing to judge by, such as an empty log."""

    exit_code = 3
