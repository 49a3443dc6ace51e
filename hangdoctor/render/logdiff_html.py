"""A comparison of logs as one HTML file, each rank's lines side by side; it needs nothing else."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from hangdoctor.render.logdiff_answer import (
    answer,
    clock,
    compact,
    duration,
    headline,
    last_line,
    next_steps,
)
from hangdoctor.render.logdiff_text import (
    MARKS,
    about_logs,
    shown_lines,
    visible_arguments,
)
from hangdoctor.render.text import clean

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hangdoctor.engines import Engine
    from hangdoctor.logs.diff import LogDiff, RankDiff
    from hangdoctor.logs.summary import Line

MOST_ROWS = 2000
"""Rows of one rank's lines without `everything`."""

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --new: #2a72; --gone: #c333; --word: #c902; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem }
table { border-collapse: collapse; margin: .5rem 0 1rem }
td, th { border: 1px solid var(--line); padding: .2rem .5rem; text-align: left;
  vertical-align: top }
td.n { text-align: right }
.side { table-layout: fixed; width: 100%; font: 12px/1.4 ui-monospace, monospace }
.side td { overflow-wrap: anywhere }
.side .no { width: 4.5rem; text-align: right; opacity: .6 }
.new { background: var(--new) } .gone { background: var(--gone) } .word { background: var(--word) }
.skip td { text-align: center; opacity: .6 }
code { font-family: ui-monospace, monospace; overflow-wrap: anywhere }
summary { cursor: pointer; font-weight: 600; padding: .3rem 0 }
"""


def to_html(
    diff: LogDiff, engine: Engine, *, context: int, everything: bool, ranks: Sequence[str]
) -> str:
    """Return the comparison as an HTML document; equal lines further than `context` are folded."""
    shown = [rank for rank in diff.ranks if not ranks or rank.rank in ranks]
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{_text(headline(diff))}</title><style>{_STYLE}</style>",
        f"<h1>{_text(headline(diff))}</h1>",
        _list(answer(diff)),
        "<h2>Logs</h2>",
        _list(about_logs(diff)),
        "<h2>Ranks</h2>",
        _table(
            ("rank", "milestones", "first missing", "good log has it at", "last line"),
            (_rank_cells(rank) for rank in shown),
        ),
        "<h2>Phases</h2>",
        _table(
            ("phase", "good", "other", "ratio"),
            (
                (
                    phase.phase,
                    ", ".join(map(duration, phase.good_s)),
                    ("" if phase.other_s is None else duration(phase.other_s))
                    + (" (not ended)" if phase.open else ""),
                    "" if phase.ratio is None else f"{phase.ratio:.1f}",
                )
                for phase in diff.phases
            ),
        ),
    ]
    arguments, said = visible_arguments(diff, everything=everything)
    if arguments or said:
        parts.append("<h2>Arguments</h2>")
        rows = (
            (
                each.name,
                " or ".join(value or "(none)" for value in each.good),
                each.other or "(none)",
            )
            for each in arguments
        )
        parts += [_table(("argument", "good", "other"), rows) if arguments else "", _list(said)]
    if diff.values:
        parts.append("<h2>Values out of the good logs' range</h2>")
        rows = (
            (
                f"{each.where} {each.key}",
                " to ".join(each.good),
                ", ".join(f"{value} ({rank})" for rank, value in each.other.items()),
            )
            for each in diff.values
        )
        parts.append(_table(("value", "good", "other"), rows))
    if found := shown_lines(diff, ranks):
        parts.append("<h2>Lines</h2>")
        line_rows = []
        for each in found:
            line = each.line or each.good_line
            good = f"{each.good_line.text}" if each.good_line else ""
            own = each.line.text if each.line else ""
            line_rows.append(
                (
                    f"{MARKS[each.kind]} {each.kind}",
                    each.severity,
                    compact(each.ranks),
                    str(each.count),
                    str(line.number) if line else "",
                    good,
                    own,
                )
            )
        parts.append(
            _table(("", "severity", "ranks", "times", "line", "good log", "here"), line_rows)
        )
    parts.append("<h2>Side by side</h2>")
    for rank in shown:
        parts += _side(diff, rank, context, everything=everything)
    if tips := next_steps(diff, engine):
        items = []
        for tip in tips:
            command = f"<br><code>{_text(tip.command)}</code>" if tip.command else ""
            items.append(f"<li>{_text(tip.what)}{command}</li>")
        parts += ["<h2>Next</h2><ol>", *items, "</ol>"]
    return "\n".join(part for part in parts if part)


def _rank_cells(rank: RankDiff) -> tuple[str, ...]:
    step = rank.missing[0] if rank.missing else None
    return (
        rank.name,
        f"{rank.reached} of {rank.expected}",
        step.text if step else "none",
        duration(step.at_s) if step else "",
        last_line(rank),
    )


def _side(diff: LogDiff, rank: RankDiff, context: int, *, everything: bool) -> Iterator[str]:
    """Yield one rank's lines beside those of its counterpart."""
    if rank.counterpart is None:
        return
    good = diff.good[diff.reference].streams.get(rank.counterpart, ())
    own = diff.other.streams.get(rank.rank, ())
    if not good and not own:
        return
    rows = list(_rows(good, own, diff.alignments.get(rank.rank, ())))
    opened = " open" if rank.missing and rank.rank else ""
    theirs = rank.counterpart or "launch"
    title = rank.name if theirs == rank.name else f"{rank.name}, beside the good log's {theirs}"
    yield f"<details{opened}><summary>{_text(title)}</summary><table class=side>"
    yield "<tr><th class=no></th><th>good log</th><th class=no></th><th>this log</th></tr>"
    skipped = 0
    near = _near(rows, context)
    for index, (left, right) in enumerate(rows):
        if not everything and (index not in near or index > MOST_ROWS):
            skipped += 1
            continue
        if skipped:
            yield _folded(skipped)
            skipped = 0
        kind = "" if left and right else " class=gone" if left else " class=new"
        yield f"<tr{kind}>{_cells(left)}{_cells(right)}</tr>"
    if skipped:
        yield _folded(skipped)
    yield "</table></details>"


def _rows(
    good: Sequence[Line], own: Sequence[Line], pairs: Sequence[tuple[int, int]]
) -> Iterator[tuple[Line | None, Line | None]]:
    i = j = 0
    for left, right in (*pairs, (len(good), len(own))):
        yield from ((line, None) for line in good[i:left])
        yield from ((None, line) for line in own[j:right])
        if left < len(good):
            yield good[left], own[right]
        i, j = left + 1, right + 1


def _near(rows: Sequence[tuple[Line | None, Line | None]], context: int) -> set[int]:
    """Return the rows that differ, and those at most so many away."""
    return {
        near
        for index, (left, right) in enumerate(rows)
        if not (left and right)
        for near in range(index - context, index + context + 1)
    }


def _folded(count: int) -> str:
    return f"<tr class=skip><td colspan=4>{count} further lines</td></tr>"


def _cells(line: Line | None) -> str:
    if line is None:
        return "<td class=no></td><td></td>"
    at = f' title="{clock(line.time_s)}"' if line.time_s is not None else ""
    return f"<td class=no{at}>{line.number}</td><td>{_text(line.text)}</td>"


def _list(texts: Iterable[str]) -> str:
    items = "".join(f"<li>{_text(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(cell)}</th>" for cell in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _text(text: str) -> str:
    return html.escape(clean(text))
