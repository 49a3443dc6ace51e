r"""Applies a unified diff to text: exact context, at another line where that fits.

`patch` and `git apply` do the same, but slim images have neither, and the check must write nothing.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from hangdoctor.errors import InputError

_AGAIN = "make it with: diff -u OLD NEW, or git diff"
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class Hunk(NamedTuple):
    """A part of a diff: its lines with their signs, and where the old ones begin, from 1."""

    at: int
    lines: tuple[str, ...]
    ends_open: bool


class FileDiff(NamedTuple):
    """What a diff says of one file; `old` is empty for a new one."""

    old: str
    new: str
    hunks: tuple[Hunk, ...]


def parse(text: str) -> tuple[FileDiff, ...]:
    """Return the files of a unified diff.

    Raises:
        InputError: it is none.
    """
    lines = _lines(text)
    found: list[FileDiff] = []
    at = 0
    while at < len(lines):
        following = lines[at + 1] if at + 1 < len(lines) else ""
        if not (lines[at].startswith("--- ") and following.startswith("+++ ")):
            at += 1
            continue
        old, new = _name(lines[at]), _name(following)
        at += 2
        hunks: list[Hunk] = []
        while at < len(lines) and (match := _HUNK.match(lines[at])):
            at += 1
            olds, news = int(match[2] or 1), int(match[4] or 1)
            body: list[str] = []
            ends_open = False
            while at < len(lines) and (olds or news or lines[at].startswith("\\")):
                line = lines[at] or " "
                at += 1
                if line[0] == "\\":
                    ends_open = True
                    continue
                if line[0] not in " +-":
                    what = f"the diff's hunk for {new} ends too early, at its line {at}"
                    raise InputError(what, hint=_AGAIN)
                olds -= line[0] in " -"
                news -= line[0] in " +"
                body.append(line)
            if olds or news:
                raise InputError(f"the diff's last hunk for {new} is cut off", hint=_AGAIN)
            hunks.append(Hunk(int(match[1]), tuple(body), ends_open))
        found.append(FileDiff("" if old == "/dev/null" else old, new, tuple(hunks)))
    if not found:
        raise InputError("this is no unified diff", hint=_AGAIN)
    return tuple(found)


def apply(diff: FileDiff, text: str) -> str:
    """Return the text with a file's hunks in it.

    Raises:
        InputError: a hunk's context is nowhere; with its line.
    """
    lines = _lines(text)
    shift = 0
    for hunk in diff.hunks:
        old = [line[1:] for line in hunk.lines if line[0] in " -"]
        new = [line[1:] for line in hunk.lines if line[0] in " +"]
        wanted = max(0, hunk.at - 1 + shift) if old else min(hunk.at + shift, len(lines))
        place = _find(lines, old, wanted)
        if place is None:
            raise InputError(
                f"the diff does not fit {diff.old or diff.new}: nothing like its line {hunk.at}",
                hint="was it made against another release?",
            )
        lines[place : place + len(old)] = new
        shift = place - (hunk.at - 1) + len(new) - len(old) if old else shift + len(new)
    return "\n".join(lines) + "\n" if lines else ""


def _lines(text: str) -> list[str]:
    """Return the lines as diff counts them: a form feed ends none, as str.splitlines has it."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines[:-1] if not lines[-1] else lines


def _find(lines: list[str], old: list[str], wanted: int) -> int | None:
    places = range(len(lines) - len(old) + 1)
    return next(
        (
            at
            for at in sorted(places, key=lambda place: abs(place - wanted))
            if lines[at : at + len(old)] == old
        ),
        None,
    )


def _name(line: str) -> str:
    name = line[4:].partition("\t")[0].strip().strip('"')
    return name[2:] if name[:2] in ("a/", "b/") else name
