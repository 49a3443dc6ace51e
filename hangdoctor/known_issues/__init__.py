"""Known issues as data: the schema of known_issues/*.toml, and how one is found.

An issue is a table with closed lists of what must be seen and of what rules it out; there are no
expressions. `ENGINE.toml` holds the issues of one engine, `common.toml` those that PyTorch, NCCL
and other libraries bring into every engine.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import Literal

import msgspec

from hangdoctor import engines
from hangdoctor.engines import Phase, Table

Fact = Literal[
    "all-ranks-idle",  # every rank waits for requests
    "all-ranks-same-place",  # two ranks at least, and all have the same stack
    "bar-at-full",  # the newest progress bar stands at N/N
    "bar-at-zero",  # the newest progress bar stands at 0/N, and was there before the issue's line
    "gpus-spin",  # the cards of all ranks are busy at idle power
    "line-is-last",  # the issue's line is the last one of the rank that printed it
    "no-compiler",  # nothing that the launch has started uses CPU
    "pipeline-parallel",  # more than one pipeline stage
    "rank-gone",  # a rank's process was there and is not any more
    "several-nodes",  # the launch spans nodes
    "several-tp-groups",  # replicas or pipeline stages: the default group is larger than a TP group
    "stands-still",  # nothing was seen to move for as long as is suspicious
    "waits-for-storage",  # the kernel says that a rank waits for a file system
]
FACTS: tuple[Fact, ...] = Fact.__args__  # type: ignore[attr-defined]  # Literal's values


class Conditions(Table, frozen=True, kw_only=True):
    """What is looked at.

    Attributes:
        log: regular expressions, searched in a line without its prefix.
        frames: `path:function`, anywhere in the stack of a rank or of the launcher, or in a stack
            that the log quotes as py-spy prints it.
        waits: ids of waits (engines/*.toml) that a rank or the launcher is in.
        phases: that a rank, or the launch, is in.
        options: regular expressions, searched in the launch's command and in the log's line with
            the server's arguments.
        facts: what the rule works out by itself.
    """

    log: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()
    phases: tuple[Phase, ...] = ()
    options: tuple[str, ...] = ()
    facts: tuple[Fact, ...] = ()


class KnownIssue(Table, frozen=True, kw_only=True):
    """A stall that was told about in public, whose cause somebody has named.

    Attributes:
        id: the repository's name and the number, in lower case with dashes: `sglang-11275`.
        title: the cause in one sentence without a full stop; it follows "looks like ...: ".
        url: of the thread.
        when: every list that is given must hold: one entry of it, of `facts` all of them.
        unless: rules the issue out where one entry of any list holds.
        since, mended_in: the first release that has it, the first that has it no more; "" where
            nobody has said.
        cause: one or two sentences.
        advice: what to do, cheapest first.
        examples: a real line or frame for each pattern in `when.log` and `when.frames`; a test
            enforces it.
        seen_in: where the lines and frames of the signature stand: a log, a thread, a source.
        ends_by_itself: it is slow and no hang, and worth saying of a launch that moves.
    """

    id: str
    title: str
    url: str
    when: Conditions
    unless: Conditions = Conditions()
    since: str = ""
    mended_in: str = ""
    cause: str
    advice: tuple[str, ...]
    examples: tuple[str, ...] = ()
    seen_in: str
    ends_by_itself: bool = False

    @property
    def name(self) -> str:
        """The thread as people write it.

        >>> find("sglang-11275").name
        'sglang#11275'
        """
        repository, number = re.findall(r"([^/]+)/(?:issues|pull)/(\d+)", self.url)[0]
        return f"{repository}#{number}"


class _File(Table, frozen=True, kw_only=True):
    issues: tuple[KnownIssue, ...]


@cache
def load(engine: str) -> tuple[KnownIssue, ...]:
    """Return the issues of an engine, its own before those of every engine."""
    return _read(engine) + _read("common")


@cache
def ids() -> tuple[str, ...]:
    """Return the ids of all issues, sorted."""
    return tuple(sorted(issue.id for issue in _all()))


def find(issue_id: str) -> KnownIssue | None:
    """Return an issue by its id, or by its thread's name; None if there is none.

    >>> find("sglang#11275").id, find("sglang-0")
    ('sglang-11275', None)
    """
    wanted = re.sub("[#_]", "-", issue_id.lower())
    return next((issue for issue in _all() if issue.id == wanted), None)


def describe(issue: KnownIssue) -> str:
    """Return an issue as text: what it is, how it is recognised, what to do, where to read on."""
    lines = [f"{issue.id}: {issue.title}", "", issue.cause]
    if issue.since or issue.mended_in:
        begin = f"since {issue.since}" if issue.since else "of old"
        lines += ["", f"Releases: {begin}" + f", until {issue.mended_in}" * bool(issue.mended_in)]
    lines += ["", "Recognised by:", *_listed(issue.when)]
    if ruled_out := _listed(issue.unless):
        lines += ["", "Ruled out by:", *ruled_out]
    lines += ["", "What to do:", *(f"  - {tip}" for tip in issue.advice)]
    return "\n".join([*lines, "", f"Read on: {issue.url}"])


_HEADINGS = {
    "log": "a line",
    "frames": "a frame",
    "waits": "a wait",
    "phases": "the phase",
    "options": "the arguments",
    "facts": "facts",
}


def _listed(conditions: Conditions) -> list[str]:
    return [
        f"  - {heading}: {(', ' if name == 'facts' else ' or ').join(entries)}"
        for name, heading in _HEADINGS.items()
        if (entries := getattr(conditions, name))
    ]


def _all() -> list[KnownIssue]:
    return [issue for name in (*engines.names(), "common") for issue in _read(name)]


@cache
def _read(name: str) -> tuple[KnownIssue, ...]:
    file = resources.files(__name__).joinpath(f"{name}.toml")
    if not file.is_file():
        return ()
    return msgspec.toml.decode(file.read_bytes(), type=_File).issues
