"""A comparison of logs as Markdown, to be pasted into an issue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.render.logdiff_answer import (
    answer,
    duration,
    headline,
    last_line,
    next_steps,
)
from hangdoctor.render.logdiff_text import (
    MOST,
    about_logs,
    argument_text,
    line_rows,
    parting,
    parting_rank,
    shown_lines,
    visible_arguments,
)
from hangdoctor.render.markup import WIDTH, fenced, inline, table_row
from hangdoctor.render.text import clean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hangdoctor.engines import Engine
    from hangdoctor.logs.diff import LogDiff


def to_markdown(
    diff: LogDiff, engine: Engine, *, context: int, everything: bool, ranks: Sequence[str]
) -> str:
    """Return the comparison as Markdown; what the logs say stands in code, and breaks none."""
    shown = [rank for rank in diff.ranks if not ranks or rank.rank in ranks]
    most = None if everything else MOST
    lines = [f"### {inline(headline(diff))}", ""]
    lines += [f"- {inline(text)}" for text in answer(diff)]
    lines += ["", "Logs:", "", *(f"- {inline(text)}" for text in about_logs(diff))]
    lines += ["", "| rank | milestones | first missing | good log has it at | last line |"]
    lines += ["|---|---|---|---|---|"]
    for rank in shown:
        step = rank.missing[0] if rank.missing else None
        cells = (
            rank.name,
            f"{rank.reached} of {rank.expected}",
            step.text if step else "none",
            duration(step.at_s) if step else "",
            last_line(rank),
        )
        lines.append(table_row(cells))
    lines += ["", "| phase | good | other | ratio |", "|---|---|---|---|"]
    for phase in diff.phases:
        ratio = "" if phase.ratio is None else f"{phase.ratio:.1f}"
        other = "" if phase.other_s is None else duration(phase.other_s)
        other += " (not ended)" if phase.open else ""
        lines.append(table_row((phase.phase, ", ".join(map(duration, phase.good_s)), other, ratio)))
    arguments, said = visible_arguments(diff, everything=everything)
    if arguments:
        lines += ["", "Arguments (good -> other):", ""]
        lines += fenced(argument_text(each) for each in arguments[:most])
        lines += [f"and {len(arguments) - MOST} more" for _ in arguments[MOST : MOST + 1] if most]
    lines += [f"\n{inline(text)}" for text in said]
    if diff.values:
        lines += ["", "Values out of the good logs' range (good -> other):", ""]
        lines += fenced(
            f"{each.where} {each.key}: {' to '.join(each.good)} -> "
            + ", ".join(f"{value} ({name})" for name, value in each.other.items())
            for each in diff.values[:most]
        )
    found = shown_lines(diff, ranks)
    if found:
        title = "Lines (+ only here, - only in the good log, ~ worded otherwise, * more often)"
        lines += ["", "<details><summary>" + title + "</summary>", ""]
        lines += fenced(row for each in found[:most] for row in line_rows(each, WIDTH))
        lines += ["", "</details>"]
    rank_shown = parting_rank(shown)
    if context and diff.first_missing and rank_shown:
        before, after = parting(diff, rank_shown, context)
        lines += ["", f"Where {rank_shown.name} parts:", ""]
        lines += fenced(
            [
                *(f"  {line.number:>6}   {line.text}" for line in before),
                *(f"- {line.number:>6}   {line.text}" for line in after),
            ],
            language="diff",
        )
    if tips := next_steps(diff, engine):
        lines += ["", "Next:", ""]
        for number, tip in enumerate(tips, 1):
            command = f": `{clean(tip.command)}`" if tip.command else ""
            lines.append(f"{number}. {inline(tip.what)}{command}")
    return "\n".join(lines)
