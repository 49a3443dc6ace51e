"""A comparison of logs for a terminal: the answer first, then what it rests on, then what next."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from hangdoctor.logs.diff import LAUNCH
from hangdoctor.render.logdiff_answer import (
    answer,
    clock,
    compact,
    duration,
    headline,
    last_line,
    next_steps,
    shorten,
)
from hangdoctor.render.text import clean

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hangdoctor.engines import Engine
    from hangdoctor.logs.diff import ArgumentDiff, LineDiff, LogDiff, RankDiff
    from hangdoctor.logs.summary import Line, Summary
    from hangdoctor.render.logdiff_answer import Tip

MOST = 8
"""So many entries of a list are shown without --all."""
MARKS = {"new": "+", "missing": "-", "changed": "~", "more": "*"}


def to_text(
    diff: LogDiff,
    engine: Engine,
    *,
    width: int,
    context: int,
    everything: bool,
    ranks: Sequence[str],
) -> str:
    """Return the comparison as lines of at most `width` columns; commands are left whole.

    Args:
        diff: the comparison.
        engine: that it was made with.
        width: columns.
        context: lines of both logs to show around the place where they part.
        everything: no list is cut, and volatile arguments are shown.
        ranks: to show; empty for all.
    """
    shown = [rank for rank in diff.ranks if not ranks or rank.rank in ranks]
    most = None if everything else MOST
    lines = [headline(diff)]
    lines += [part for text in answer(diff) for part in _wrapped(text, width)]
    lines += ["", "Logs"]
    lines += [part for text in about_logs(diff) for part in _wrapped(text, width)]
    lines += ["", *_ranks(shown, width)]
    if diff.only_here:
        lines += _row(f"only here: {', '.join(diff.only_here)}", width)
    lines += ["", *_phases(diff)]
    if arguments := list(_arguments(diff, width, most)):
        lines += ["", *arguments]
    if values := list(_values(diff, width, most)):
        lines += ["", "Values out of the good logs' range", *values]
    if found := list(_lines(diff, width, most, ranks)):
        lines += ["", *found]
    if context and diff.first_missing:
        lines += ["", *_context(diff, shown, width, context)]
    lines = [clean(line) for line in lines]
    if tips := next_steps(diff, engine):
        lines += ["", "Next"]
        for number, tip in enumerate(tips, start=1):
            lines += _tip(number, tip, width)
    return "\n".join(lines)


def about_logs(diff: LogDiff) -> Iterator[str]:
    """Yield what there is to know of each log, and whether they can be compared line by line."""
    for summary in (*diff.good, diff.other):
        role = "other" if summary is diff.other else "good "
        yield f"{role}  {summary.name}: {describe(summary)}"
    yield {
        True: "same release: both launches print the same set of arguments",
        False: "different releases: lines and arguments that only one of them knows are no"
        " difference, and milestones are judged with care",
        None: "not known whether they are of the same release",
    }[diff.same_release]


def describe(summary: Summary) -> str:
    """Return a log in a few words: length, ranks, launches, how far it came."""
    timeline = summary.timeline
    ranks = sum(1 for name in timeline.ranks if name)
    parts = [f"{timeline.lines} lines", f"{ranks} rank{'s' if ranks != 1 else ''}"]
    if timeline.launches > 1:
        parts.append(
            f"{timeline.launches} launches, of which the last is compared (from line"
            f" {timeline.first_line})"
        )
    launch = timeline.ranks.get("")
    if timeline.first_time_s is not None and timeline.last_time_s is not None:
        begin_s = timeline.first_time_s
        ready_s = (
            next((each.time_s for each in launch.milestones if each.phase == "ready"), None)
            if launch
            else None
        )
        if ready_s is not None:
            parts.append(f"ready after {duration(ready_s - begin_s)}")
        else:
            took = duration(timeline.last_time_s - begin_s)
            parts.append(f"{clock(begin_s)} to {clock(timeline.last_time_s)} ({took})")
    if summary.cut:
        parts.append("too long to keep whole: its first lines are compared")
    return ", ".join(parts)


def _ranks(ranks: Sequence[RankDiff], width: int) -> Iterator[str]:
    """Yield a line for each group of ranks that came equally far, and what they lack."""
    yield shorten(
        "Ranks (milestones of the good log, and when it had the first one missing)", width
    )
    groups: dict[tuple[object, ...], list[RankDiff]] = {}
    for rank in ranks:
        first = [(step.id, step.nth) for step in rank.missing[:1]]
        over = [step.id for step in rank.passed_over]
        key = (rank.rank == "", rank.reached, rank.expected, str(first), str(over))
        groups.setdefault((*key, rank.exception, bool(rank.last)), []).append(rank)
    column = max(len(compact([rank.name for rank in group])) for group in groups.values())
    column = min(column, width // 3)
    for group in groups.values():
        one = group[0]
        name = compact([rank.name for rank in group])
        indent = " " * (column + 12)
        lacks = "all reached"
        if one.missing:
            times = sorted({duration(rank.missing[0].at_s) for rank in group})
            lacks = f"lacks '{one.missing[0].text}' ({'-'.join([*times[:1], *times[1:][-1:]])})"
        yield from _row(f"{name:<{column}} {one.reached:>2} of {one.expected:<2}  {lacks}", width)
        for rank in group if len(group) < 3 else ():
            if rank.rank and (rank.missing or rank.exception):
                yield from _row(f"{indent}{last_line(rank)}", width)
        if len(group) >= 3 and one.rank and one.missing:
            yield from _row(f"{indent}{_last_of(group)}", width)
        if one.passed_over:
            passed = ", ".join(f"'{step.text}'" for step in one.passed_over)
            yield from _row(f"{indent}came past without {passed}", width)
        if one.reordered:
            yield from _row(f"{indent}in another order: {', '.join(one.reordered)}", width)
        if one.exception:
            yield from _row(f"{indent}{one.exception}", width)
    yield from _fewer(ranks, width)


def _fewer(ranks: Sequence[RankDiff], width: int) -> Iterator[str]:
    """Yield the ranks that log far less than their peers."""
    counts = sorted(rank.lines for rank in ranks if rank.rank)
    if len(counts) < 2:
        return
    usual = counts[len(counts) // 2] if len(counts) > 2 else counts[-1]
    few = [rank for rank in ranks if rank.rank and rank.lines * 4 < usual * 3]
    for rank in few[:MOST]:
        yield from _row(
            f"{rank.name} logs less than its peers: {rank.lines} lines, {usual} elsewhere", width
        )


def _last_of(group: Sequence[RankDiff]) -> str:
    """Return when the ranks of a group fell silent."""
    times = sorted(rank.last.time_s for rank in group if rank.last and rank.last.time_s is not None)
    if not times:
        return "printed nothing"
    if times[0] == times[-1]:
        return f"last lines at {clock(times[0])}"
    return f"last lines from {clock(times[0])} to {clock(times[-1])}"


def _phases(diff: LogDiff) -> Iterator[str]:
    many = len(diff.good) > 1
    yield f"{'Phases':<18}{'good' if not many else 'good logs':>13}{'other':>9}{'ratio':>7}"
    for phase in diff.phases:
        if not phase.good_s:
            theirs = "-"
        elif duration(min(phase.good_s)) == duration(max(phase.good_s)):
            theirs = duration(phase.good_s[0])
        else:
            theirs = f"{duration(min(phase.good_s))}-{duration(max(phase.good_s))}"
        own = "-" if phase.other_s is None else duration(phase.other_s)
        ratio = (
            "" if phase.ratio is None or (phase.open and not phase.slow) else f"{phase.ratio:.1f}"
        )
        note = "  slow" if phase.slow else ""
        note += " so far" if phase.open else ""
        yield f"  {phase.phase:<16}{theirs:>13}{own:>9}{ratio:>7}{note}".rstrip()


def _arguments(diff: LogDiff, width: int, most: int | None) -> Iterator[str]:
    shown, unshown = visible_arguments(diff, everything=most is None)
    if not shown and not unshown:
        return
    yield "Arguments" + ("" if shown else ": no difference that matters")
    for each in shown[:most]:
        yield from _row(argument_text(each), width)
    if len(shown) > len(shown[:most]):
        yield f"  and {len(shown) - MOST} more (--all)"
    for text in unshown:
        yield from _row(text, width)


def visible_arguments(diff: LogDiff, *, everything: bool) -> tuple[list[ArgumentDiff], list[str]]:
    """Return the arguments worth showing, and what to say of the rest."""
    if everything:
        return list(diff.arguments), []
    volatile = [each.name for each in diff.arguments if each.volatile]
    only = [
        each
        for each in diff.arguments
        if not each.volatile and (each.other is None or None in each.good)
    ]
    shown = [each for each in diff.arguments if not each.volatile and each not in only]
    said = []
    if only:
        said.append(f"{len(only)} arguments are known to one side only (--all)")
    if volatile:
        said.append(f"not shown, since they differ anyway: {', '.join(volatile)} (--all)")
    return shown, said


def argument_text(each: ArgumentDiff) -> str:
    """Return an argument with both values."""
    good = " or ".join("(none)" if value is None else value for value in each.good)
    other = "(none)" if each.other is None else each.other
    return f"{each.name}: {shorten(good, 200)} -> {shorten(other, 200)}"


def _values(diff: LogDiff, width: int, most: int | None) -> Iterator[str]:
    for each in diff.values[:most]:
        by_value: dict[str, list[str]] = {}
        for rank, value in each.other.items():
            by_value.setdefault(value, []).append(rank)
        own = ", ".join(f"{value} ({compact(ranks)})" for value, ranks in by_value.items())
        good = " to ".join(each.good) if len(each.good) < 3 else " or ".join(each.good[:4])
        yield from _row(f"{each.where} {each.key}: {good} -> {own}", width)
    if most and len(diff.values) > most:
        yield f"  and {len(diff.values) - most} more (--all)"


def _lines(diff: LogDiff, width: int, most: int | None, ranks: Sequence[str]) -> Iterator[str]:
    found = shown_lines(diff, ranks)
    notes = 0
    if most is not None and diff.same_release is False:
        # Of another release most lines are worded otherwise.
        notes = len(found)
        found = [each for each in found if each.severity == "error" and each.kind == "new"]
        notes -= len(found)
    if found:
        yield shorten(
            "Lines (+ only here, - only in the good log, ~ other words, * more often)", width
        )
    for each in found[:most]:
        yield from line_rows(each, width)
    if most and len(found) > most:
        yield f"  and {len(found) - most} more (--all)"
    if notes:
        yield from _row(f"{notes} kinds of lines have other words in that release (--all)", width)
    if diff.later and diff.first_missing:
        yield from _row(f"{diff.later} kinds of lines come in the good log only after that", width)


def shown_lines(diff: LogDiff, ranks: Sequence[str]) -> list[LineDiff]:
    """Return the lines of the wanted ranks."""
    return [each for each in diff.lines if not ranks or set(each.ranks) & set(ranks)]


def line_rows(each: LineDiff, width: int) -> Iterator[str]:
    """Yield a kind of line: its mark, who prints it, and its first line."""
    mark = MARKS[each.kind]
    times = f" x{each.count}" if each.count > 1 else ""
    if each.kind == "more":
        times = f" x{each.count}, {each.good_count} in the good log"
    line = each.line or each.good_line
    who = "" if each.ranks == (LAUNCH,) else f" {compact(each.ranks)}"
    where = f"{'line' if each.line else 'its line'} {line.number}" if line else ""
    notes = " while it serves" if each.serving else ""
    notes += f", {each.severity}" if each.severity != "note" else ""
    yield f"  {mark}{who}{times} ({where}{notes})"
    if each.good_line and each.kind == "changed":
        yield f"      good: {shorten(each.good_line.text.strip(), max(20, width - 12))}"
        yield f"      here: {shorten(line.text.strip() if line else '', max(20, width - 12))}"
    elif line:
        yield f"      {shorten(line.text.strip(), max(20, width - 6))}"


def _context(diff: LogDiff, ranks: Sequence[RankDiff], width: int, context: int) -> Iterator[str]:
    """Yield the last lines of the rank that stops first, and how the good log goes on there."""
    rank = parting_rank(ranks)
    if rank is None or rank.counterpart is None:
        return
    before, after = parting(diff, rank, context)
    yield f"{rank.name}: the last lines here, then how the good log goes on"
    for line in before:
        yield f"  {line.number:>6}   {shorten(line.text, max(20, width - 11))}"
    for line in after:
        yield f"  {line.number:>6} - {shorten(line.text, max(20, width - 11))}"


def parting_rank(ranks: Sequence[RankDiff]) -> RankDiff | None:
    """Return the rank that is farthest behind among those shown."""
    lacking = [rank for rank in ranks if rank.missing and rank.rank] or list(ranks)
    return min(
        lacking, key=lambda rank: rank.missing[0].number if rank.missing else 1 << 60, default=None
    )


def parting(diff: LogDiff, rank: RankDiff, context: int) -> tuple[list[Line], list[Line]]:
    """Return the last lines of a rank, and those that the good log's has after them."""
    own = diff.other.streams.get(rank.rank, ())
    theirs = diff.good[diff.reference].streams.get(rank.counterpart or "", ())
    stop = rank.missing[0].number if rank.missing else None
    pairs = [
        i for i, _ in diff.alignments.get(rank.rank, ()) if stop is None or theirs[i].number < stop
    ]
    begin = max(pairs, default=-1) + 1
    return list(own[-context:]), list(theirs[begin : begin + context])


def _row(text: str, width: int) -> list[str]:
    return _wrapped(text, width, further=4)


def _wrapped(text: str, width: int, further: int = 2) -> list[str]:
    lead = len(text) - len(text.lstrip())
    return textwrap.wrap(
        text,
        max(width, 40),
        initial_indent="  ",
        subsequent_indent="  " + " " * (lead + further),
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    ) or [""]


def _tip(number: int, tip: Tip, width: int) -> list[str]:
    """Return what to look at next; a command stays in one piece, so that it can be copied."""
    lines = textwrap.wrap(
        clean(tip.what) + (":" if tip.command else ""),
        max(width, 40),
        initial_indent=f"  {number}. ",
        subsequent_indent="     ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [*lines, f"     {clean(tip.command)}"] if tip.command else lines
