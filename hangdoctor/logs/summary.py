"""What of one log is compared with others: its timeline, its lines by template, its arguments.

A pure fold in bounded memory. Lines are kept until the launch is ready: a start is compared, and
what a server prints while it serves says nothing of it. After that only errors are.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

import msgspec

from hangdoctor.engines import needle
from hangdoctor.logs.arguments import arguments
from hangdoctor.logs.parse import ParserState, finish, parse
from hangdoctor.logs.templates import Masker
from hangdoctor.logs.timeline import Timeline, advance

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hangdoctor.engines import Engine
    from hangdoctor.logs.parse import LogLine

STREAM_LIMIT = 4000
"""Lines of one rank that are kept in their order: the first ones."""
TEMPLATE_LIMIT = 20_000
"""Templates of one log that are counted."""
TEXT_LIMIT = 1000
"""Characters of a line that are kept."""

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

Key = tuple[str, int]
"""A milestone's id, and its how manieth of the same rank: 2 for that of a second model."""


class Line(msgspec.Struct, frozen=True, gc=False):
    """A line with its template; `template` is "" for a line that only continues the one before."""

    number: int
    text: str
    template: str
    time_s: float | None = None


class Seen(msgspec.Struct, frozen=True):
    """A template of one log.

    Attributes:
        ranks: how often each rank printed it, "" for lines without a rank.
        first: its first line; first_rank: who printed it.
        severity: by the engine's signs, and by words that errors and warnings have.
        serving: it came only after the server was ready.
    """

    ranks: dict[str, int]
    first: Line
    first_rank: str
    severity: Severity
    serving: bool = False

    @property
    def count(self) -> int:
        """Return how often it came."""
        return sum(self.ranks.values())


class Summary(msgspec.Struct, frozen=True):
    """What of one log is compared.

    Attributes:
        name: of the log, as it was given.
        timeline: of its last launch, as everything else here.
        arguments: of the launch, by name, as they are written; empty where they are not there.
        values: of a milestone's line by rank and milestone, such as {"avail mem": "69.03 GB"}.
        steps: the milestones of each rank by their text, in the order of the log.
        streams: lines of each rank in order, until the server was ready.
        templates: all templates, each with its first line.
        head_line: number of the line with the arguments; 0 where there is none.
        cut: there was more than is kept.
    """

    name: str
    timeline: Timeline
    arguments: dict[str, str]
    values: dict[str, dict[Key, dict[str, str]]]
    texts: dict[str, dict[Key, str]]
    streams: dict[str, tuple[Line, ...]]
    templates: dict[str, Seen]
    head_line: int = 0
    cut: bool = False


def summarize(name: str, blocks: Iterable[bytes], engine: Engine) -> Summary:
    """Return what of a log is compared, from its bytes in blocks of any size."""
    state, gathering = ParserState(), _Gathering(engine)
    for block in blocks:
        lines, state = parse(state, block, engine)
        gathering.add(lines)
    gathering.add(finish(state, engine))
    return gathering.result(name)


def severity(text: str) -> Severity:
    """Return how bad a line sounds.

    >>> severity("ValueError: too many values"), severity("UserWarning: x"), severity("Use fa3.")
    ('error', 'warning', 'note')
    """
    if _ERROR.search(text):
        return "error"
    return "warning" if _WARNING.search(text) else "note"


def values_of(text: str) -> dict[str, str]:
    """Return what a line says in the form `key=value` or `key: value`, without times.

    >>> values_of("Load weight end. elapsed=0.28 s, type=X, avail mem=138.13 GB, mem usage=0.1 GB.")
    {'type': 'X', 'avail mem': '138.13 GB', 'mem usage': '0.1 GB'}
    >>> values_of("KV Cache is allocated. dtype: torch.bfloat16, #tokens: 10716828")
    {'dtype': 'torch.bfloat16', '#tokens': '10716828'}
    >>> values_of("sglang is using nccl==2.28.9"), values_of("begin. bs=[1, 2], avail mem=1 GB")
    ({'nccl': '2.28.9'}, {'bs': '[1, 2]', 'avail mem': '1 GB'})
    """
    found = {}
    for part in _BETWEEN.split(text[:TEXT_LIMIT]):
        match = _VALUE.match(part)
        if match and not _TIMES.search(match["key"]):
            key = match["key"].rpartition(" is using ")[2]
            found[key.removeprefix("Using ")] = match["value"].rstrip(". ")
    return found


# A capital inside a word ends none: "ImportError", but not "error".
_ERROR = re.compile(
    r"Traceback|\w(?:Error|Exception)\b(?!s)|\bFATAL\b|\b[Ff]atal\b|^Killed\b|\bAborted\b"
    r"|Segmentation fault|out of memory|NCCL WARN|core dumped|\bXid\b|SIGQUIT|hit an exception"
)
_WARNING = re.compile(r"(?i)warn|fail|error|deprecat|not found|cannot|unable|timed? ?out|invalid")
_BETWEEN = re.compile(r",\s(?![^\[({]*[\])}])|\.\s")
_VALUE = re.compile(r"\s*(?P<key>#?[A-Za-z_][\w #-]{0,40}?) ?(?:==|[=:](?!//)) ?(?P<value>\S.*)$")
_TIMES = re.compile(r"elapsed|took|throughput|#(?:new|cached|pending)|token usage|-req$")


class _Template:
    """A template while a log is read."""

    __slots__ = ("first", "first_rank", "ranks", "serving", "severity")

    def __init__(self, first: Line, rank: str, how: Severity, *, serving: bool) -> None:
        self.first, self.first_rank, self.severity, self.serving = first, rank, how, serving
        self.ranks: dict[str, int] = {}


class _Gathering:
    """The summary while a log is read."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.mask = Masker()
        self.timeline = Timeline()
        self.args = next(
            (
                (needle(m.pattern), re.compile(m.pattern))
                for m in engine.milestones
                if m.id == "args"
            ),
            None,
        )
        self.signs: tuple[tuple[str, re.Pattern[str], Severity], ...] = tuple(
            (needle(sign.pattern), re.compile(sign.pattern), _SIGN_SEVERITY[sign.kind])
            for sign in engine.signs
            if sign.kind in _SIGN_SEVERITY
        )
        self._restart()

    def _restart(self) -> None:
        self.arguments: dict[str, str] = {}
        self.values: dict[str, dict[Key, dict[str, str]]] = {}
        self.texts: dict[str, dict[Key, str]] = {}
        self.streams: dict[str, list[Line]] = {}
        self.templates: dict[str, _Template] = {}
        self.steps_seen: dict[str, int] = {}
        self.head_line = 0
        self.cut = False
        self.ready = False

    def result(self, name: str) -> Summary:
        return Summary(
            name=name,
            timeline=self.timeline,
            arguments=self.arguments,
            values=self.values,
            texts=self.texts,
            streams={rank: tuple(lines) for rank, lines in self.streams.items()},
            templates={
                text: Seen(each.ranks, each.first, each.first_rank, each.severity, each.serving)
                for text, each in self.templates.items()
            },
            head_line=self.head_line,
            cut=self.cut,
        )

    def add(self, lines: Sequence[LogLine]) -> None:
        """Take lines in; a line with the arguments may begin another launch."""
        begin = 0
        for index, line in enumerate(lines):
            if self._has_arguments(line):
                self._add_batch(lines[begin:index])
                self._add_arguments(line)
                begin = index + 1
        self._add_batch(lines[begin:] if begin else lines)

    def _has_arguments(self, line: LogLine) -> bool:
        if self.args is None or line.bar:
            return False
        literal, pattern = self.args
        return literal in line.text and pattern.search(line.text) is not None

    def _add_arguments(self, line: LogLine) -> None:
        before = self.timeline.first_line
        self.timeline = advance(self.timeline, (line,), self.engine)
        if self.timeline.first_line != before:
            self._restart()
        self.arguments = arguments(line.text) or self.arguments
        self.head_line = line.number
        self._add_steps((line,))
        self._add_line(line)

    def _add_batch(self, lines: Sequence[LogLine]) -> None:
        if not lines:
            return
        self.timeline = advance(self.timeline, lines, self.engine)
        self._add_steps(lines)
        ready_line = self._ready_line()
        for line in lines:
            if line.bar:
                continue
            if ready_line is None or line.number <= ready_line:
                self._add_line(line)
            elif _ERROR.search(line.text):
                self._add_line(line, serving=True)

    def _ready_line(self) -> int | None:
        launch = self.timeline.ranks.get("")
        if launch is None or launch.phase != "ready":
            return None
        return next(each.number for each in launch.milestones if each.phase == "ready")

    def _add_line(self, line: LogLine, *, serving: bool = False) -> None:
        text = line.text[:TEXT_LIMIT]
        # A frame of a traceback, the source line of a warning: it belongs to the line above.
        continues = line.time_s is None and text[0].isspace()
        template = "" if continues else self.mask(text)
        kept = Line(line.number, text, template, line.time_s)
        stream = self.streams.setdefault(line.rank, [])
        if not serving:
            if len(stream) < STREAM_LIMIT:
                stream.append(kept)
            else:
                self.cut = True
        if continues:
            return
        seen = self.templates.get(template)
        if seen is None:
            if len(self.templates) >= TEMPLATE_LIMIT:
                self.cut = True
                return
            seen = _Template(kept, line.rank, self._severity(text), serving=serving)
            self.templates[template] = seen
        seen.ranks[line.rank] = seen.ranks.get(line.rank, 0) + 1

    def _severity(self, text: str) -> Severity:
        for literal, pattern, how in self.signs:
            if literal in text and pattern.search(text):
                return how
        return severity(text)

    def _add_steps(self, lines: Sequence[LogLine]) -> None:
        """Keep the text and the values of milestones that the timeline has found in lines."""
        texts: dict[int, list[LogLine]] | None = None
        for rank, log in self.timeline.ranks.items():
            seen = self.steps_seen.get(rank, 0)
            if len(log.milestones) == seen:
                continue
            if texts is None:
                texts = {}
                for line in lines:
                    if not line.bar:
                        texts.setdefault(line.number, []).append(line)
            counts: dict[str, int] = {}
            for index, reached in enumerate(log.milestones):
                counts[reached.id] = counts.get(reached.id, 0) + 1
                if index >= seen and (found := texts.get(reached.number)):
                    line = next((each for each in found if each.rank == rank), found[0])
                    key = (reached.id, counts[reached.id])
                    self.texts.setdefault(rank, {})[key] = line.text[:TEXT_LIMIT]
                    if reached.phase not in ("start", "warmup", "ready"):
                        self.values.setdefault(rank, {})[key] = values_of(line.text)
            self.steps_seen[rank] = len(log.milestones)


_SIGN_SEVERITY: dict[str, Severity] = {
    "exception": "error",
    "fatal": "error",
    "timeout": "error",
    "lost": "error",
    "signal": "warning",
    "heartbeat": "warning",
    "stack": "warning",
    "warning": "warning",
}
