"""A comparison of logs as one JSON document; its keys are a contract with scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from hangdoctor import __version__
from hangdoctor.launches import rank_order
from hangdoctor.render.json import encode
from hangdoctor.render.logdiff_answer import answer, culprits, next_steps
from hangdoctor.render.logdiff_text import parting, shown_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hangdoctor.engines import Engine
    from hangdoctor.logs.diff import LineDiff, LogDiff, RankDiff, Step
    from hangdoctor.logs.summary import Line, Summary

SCHEMA = 1


def to_json(
    diff: LogDiff, engine: Engine, *, context: int, everything: bool, ranks: Sequence[str]
) -> str:
    """Return the comparison as a JSON document; it is whole with and without `everything`."""
    del everything
    return msgspec.json.format(encode(_document(diff, engine, context, ranks))).decode()


def _document(diff: LogDiff, engine: Engine, context: int, ranks: Sequence[str]) -> dict[str, Any]:
    first = diff.first_missing
    sign = diff.failure
    return {
        "schema": SCHEMA,
        "version": __version__,
        "engine": engine.name,
        "outcome": diff.outcome,
        "phase": diff.phase,
        "culprits": list(culprits(diff)),
        "first_missing": _step(first) if first else None,
        "lacking": list(diff.lacking),
        "failure": sign
        and {"id": sign.id, "rank": sign.rank, "line": sign.number, "text": sign.text},
        "answer": answer(diff),
        "next": [
            {"what": tip.what, "command": tip.command or None} for tip in next_steps(diff, engine)
        ],
        "same_release": diff.same_release,
        "forward_ran": diff.forward_ran,
        "logs": [
            _log(summary, is_other=summary is diff.other) for summary in (*diff.good, diff.other)
        ],
        "ranks": [
            _rank(diff, rank, context) for rank in diff.ranks if not ranks or rank.rank in ranks
        ],
        "phases": [
            {
                "phase": phase.phase,
                "good_s": list(phase.good_s),
                "other_s": phase.other_s,
                "ratio": None if phase.ratio is None else round(phase.ratio, 2),
                "open": phase.open,
                "slow": phase.slow,
            }
            for phase in diff.phases
        ],
        "arguments": [msgspec.to_builtins(each) for each in diff.arguments],
        "values": [msgspec.to_builtins(each) for each in diff.values],
        "lines": [_lines(each) for each in shown_lines(diff, ranks)],
        "later": diff.later,
        "only_here": list(diff.only_here),
    }


def _log(summary: Summary, *, is_other: bool) -> dict[str, Any]:
    timeline = summary.timeline
    return {
        "name": summary.name,
        "role": "other" if is_other else "good",
        "lines": timeline.lines,
        "launches": timeline.launches,
        "first_line": timeline.first_line,
        "ranks": sorted((name for name in timeline.ranks if name), key=rank_order),
        "first_time_s": timeline.first_time_s,
        "last_time_s": timeline.last_time_s,
        "cut": summary.cut,
    }


def _rank(diff: LogDiff, rank: RankDiff, context: int) -> dict[str, Any]:
    before, after = parting(diff, rank, context)
    return {
        "rank": rank.name,
        "counterpart": rank.counterpart,
        "reached": rank.reached,
        "expected": rank.expected,
        "missing": [_step(step) for step in rank.missing],
        "passed_over": [_step(step) for step in rank.passed_over],
        "undecided": [_step(step) | {"why": step.why_unsure} for step in rank.undecided],
        "reordered": list(rank.reordered),
        "last": rank.last
        and {
            "line": rank.last.number,
            "text": rank.last.text,
            "time_s": rank.last.time_s,
            "at_s": rank.last_at_s,
        },
        "silent_s": rank.silent_s,
        "lines": rank.lines,
        "behind_peers": list(rank.behind_peers),
        "exception": rank.exception or None,
        "before": [_line(line) for line in before],
        "good_goes_on": [_line(line) for line in after] if rank.missing else [],
    }


def _step(step: Step) -> dict[str, Any]:
    return {
        "id": step.id,
        "nth": step.nth,
        "text": step.text,
        "phase": step.phase,
        "good_line": step.number,
        "good_at_s": step.at_s,
    }


def _lines(each: LineDiff) -> dict[str, Any]:
    return {
        "kind": each.kind,
        "severity": each.severity,
        "ranks": list(each.ranks),
        "count": each.count,
        "template": each.template,
        "line": _line(each.line),
        "good_template": each.good_template or None,
        "good_line": _line(each.good_line),
        "good_count": each.good_count,
        "serving": each.serving,
    }


def _line(line: Line | None) -> dict[str, Any] | None:
    if line is None:
        return None
    return {"number": line.number, "text": line.text, "time_s": line.time_s}
