"""What the log says that is new, and when it was new."""

from __future__ import annotations

import re
import zlib
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from hangdoctor.engines import Engine, Sign, needle
from hangdoctor.logs.parse import LogLine, finish, parse
from hangdoctor.logs.stacks import is_part
from hangdoctor.logs.timeline import Timeline, advance
from hangdoctor.model import LogPosition, Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hangdoctor.facts import Facts


TEMPLATES_REMEMBERED = 4096


def hear(facts: Facts, blocks: Iterable[bytes], engine: Engine) -> Facts:
    """Take in bytes of the log alone; the next `step` dates what they say.

    For a log that was there before the first snapshot and may be long: it is read in blocks.
    """
    for block in blocks:
        lines, parser = parse(facts.parser, block, engine)
        facts = _take_lines(msgspec.structs.replace(facts, parser=parser), lines, engine)
    return facts


def finish_log(facts: Facts, engine: Engine) -> Facts:
    """Take in the unterminated last line of a log that will not grow."""
    return _take_lines(facts, finish(facts.parser, engine), engine)


def date_news(facts: Facts, snapshot: Snapshot) -> Facts:
    """Say when the log's news were new: now, or before we came."""
    changes: dict[str, object] = {"news": {}, "bar_news": frozenset()}
    silent_s = None
    if isinstance(snapshot.log, LogPosition):
        silent_s = snapshot.log.silent_s
        changes |= {"log_silent_s": silent_s}
    heard: dict[str, float] = {}
    piped = facts.header.log is not None and facts.header.log.origin == "-"
    for rank, stamp in facts.news.items():
        if facts.at_s is None and piped:
            continue  # lines that a pipe had for us: nobody knows how old they are
        age_s = 0.0
        if facts.at_s is None:
            # Lines that were there before we came are as old as the file's time stamp, and their
            # own stamps against the newest of the file, say.
            age_s = silent_s or 0.0
            if stamp is not None and facts.timeline.last_time_s is not None:
                age_s += max(0.0, facts.timeline.last_time_s - stamp)
        heard[rank] = snapshot.at_s - age_s
    if facts.bar_news and not (facts.at_s is None and piped):
        # One that was there before we came is as old as the file at least.
        at_s = snapshot.at_s - ((silent_s or 0.0) if facts.at_s is None else 0.0)
        changes["bars_at_s"] = facts.bars_at_s | dict.fromkeys(facts.bar_news, at_s)
    if heard:
        changes["log_moved_at_s"] = max(*heard.values(), facts.log_moved_at_s or -1e12)
        changes["rank_log_at_s"] = facts.rank_log_at_s | heard
    return msgspec.structs.replace(facts, **changes)


def is_older(facts: Facts) -> bool:
    """Tell whether the log was last written before the launch began: it is another launch's.

    A log that is opened to append holds the last start until the new one says its first word.
    """
    ages = [
        track.process.age_s
        for track in facts.tracks.values()
        if track.role == "launcher" and track.process.age_s is not None
    ]
    return bool(ages) and facts.log_silent_s is not None and facts.log_silent_s > max(ages) + 1


def _take_lines(facts: Facts, lines: Sequence[LogLine], engine: Engine) -> Facts:
    """Take in lines, and note per rank the time stamp of the last that says something new.

    New is a line whose words were not there before, whatever its numbers and ids; a milestone,
    also when it comes again for a second model; and a bar that advances. Not a stack, and what a
    watchdog says with it. Where another launch begins in the same file, all is new again.
    """
    before, timeline = facts.timeline, advance(facts.timeline, lines, engine)
    templates, news, bar_news = facts.templates, dict(facts.news), set(facts.bar_news)
    if timeline.launches != before.launches:
        before, templates, news = Timeline(), frozenset(), {}
        lines = [line for line in lines if line.number >= timeline.first_line]
        facts = msgspec.structs.replace(facts, rank_log_at_s={}, log_moved_at_s=None)
    fresh: set[int] = set()
    muted = facts.muted
    for line in lines:
        if line.time_s is not None:
            muted = _tells_stillness(engine, line.text)
        words = _words(line)
        if line.bar is None and words not in templates and words not in fresh:
            fresh.add(words)
            if muted or is_part(line):
                continue
            news[line.rank] = line.time_s if line.time_s is not None else news.get(line.rank)
    for name, log in timeline.ranks.items():
        if log.counts != (before.ranks[name].counts if name in before.ranks else {}):
            news[name] = log.last.time_s if log.last else news.get(name)
    for bar_id, bar in timeline.bars.items():
        old = before.bars.get(bar_id)
        if old is None or (bar.runs, bar.done) != (old.runs, old.done):
            news[""] = bar.time_s
            bar_news.add(bar_id)
    if len(templates) > TEMPLATES_REMEMBERED:
        templates = frozenset()  # start over: an old line counts as new once more
    return msgspec.structs.replace(
        facts,
        timeline=timeline,
        templates=templates | fresh,
        news=news,
        muted=muted,
        bar_news=frozenset(bar_news),
    )


def _tells_stillness(engine: Engine, text: str) -> bool:
    """Tell whether a line is a watchdog's, of which no word is progress, nor what it prints."""
    return any(
        literal in text and pattern.search(text)
        for literal, pattern in _stillness(engine.name, engine.signs)
    )


@lru_cache(maxsize=8)
def _stillness(_: str, signs: tuple[Sign, ...]) -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple(
        (needle(sign.pattern), re.compile(sign.pattern))
        for sign in signs
        if sign.kind == "stack" or "(?P<after>" in sign.pattern
    )


def _words(line: LogLine) -> int:
    """Return what is equal for two lines of the same words, whatever their numbers and ids."""
    text = _NUMBERS.sub("", f"{line.rank} {line.text[:200]}")
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


_NUMBERS = re.compile(r"\b[0-9a-fA-F]{8,}\b|[0-9.]+")
