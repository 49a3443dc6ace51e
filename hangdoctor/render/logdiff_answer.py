"""The answer of a comparison in a few sentences, and what to look at next: for all formats."""

from __future__ import annotations

import itertools
import shlex
from typing import TYPE_CHECKING, NamedTuple

from hangdoctor.findings import enumerate_names
from hangdoctor.launches import rank_order
from hangdoctor.logs.diff import brief

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hangdoctor.engines import Engine
    from hangdoctor.logs.diff import LogDiff, RankDiff, Step

MOST_ARGUMENTS = 4
MOST_OF_A_LINE = 140
DAY_S = 86400


class Tip(NamedTuple):
    """What to look at next, and the command for it where there is one."""

    what: str
    command: str = ""


def headline(diff: LogDiff) -> str:
    """Return the outcome in one line: what, where, which ranks."""
    if diff.outcome == "reaches-all":
        steps = sum(rank.expected for rank in diff.ranks)
        return f"REACHES every milestone of the good log{_plural(diff)} ({steps} of {steps})"
    word = "FAILS" if diff.outcome == "fails" else "STOPS"
    who = compact(culprits(diff))
    where = f" in {diff.phase}" if diff.phase else " after it was ready"
    return f"{word}{where}{': ' + who if who else ''}"


def answer(diff: LogDiff) -> list[str]:
    """Return what there is to know in sentences, the most important first."""
    said = []
    if diff.failure:
        sign = diff.failure
        who = f"{sign.rank}: " if sign.rank else ""
        said.append(f"line {sign.number} says why it ended: {who}{_quoted(_failure_text(diff))}")
    if diff.first_missing:
        said += _stop(diff, diff.first_missing)
    slow = [phase for phase in diff.phases if phase.slow]
    for phase in slow:
        longest = max(phase.good_s)
        said.append(
            f"{phase.phase} took {'at least ' if phase.open else ''}{duration(phase.other_s)},"
            f" {duration(longest)} at the longest in the good log{_plural(diff)}"
        )
    if diff.begins_at:
        said.append(
            f"the head of the log is lost: what a good start does before line {diff.begins_at} of "
            "the good log is not judged"
        )
    said += _not_overdue(diff)
    if diff.first_missing and diff.forward_ran is False:
        said.append(
            "by the log no rank has come to a forward of the model: code that runs in forward()"
            " alone, such as a patch of it, cannot be what stops this start"
        )
    return said


def next_steps(diff: LogDiff, engine: Engine) -> list[Tip]:
    """Return what to look at next, the cheapest first."""
    if diff.outcome == "reaches-all":
        return _next_when_all_is_there(diff)
    tips = []
    log = "FILE" if diff.other.name == "-" else shlex.quote(diff.other.name)
    if diff.failure:
        begin = max(1, diff.failure.number - 5)
        tips.append(Tip("read it in full", f"sed -n '{begin},{diff.failure.number + 60}p' {log}"))
    else:
        tips.append(
            Tip(
                "if it still runs, what its processes do now",
                f"hangdoctor diagnose PID --log {log} --record DIR",
            )
        )
    who = culprits(diff)
    if who and diff.first_missing and diff.first_missing.each_rank:
        tips.append(Tip(f"{compact(who)} first: the others have come further"))
    if named := _changed_arguments(diff):
        tips.append(Tip(f"start once with the good log's arguments, one at a time: {named}"))
    if diff.phase and (diff.failure is None or diff.failure.kind == "timeout"):
        tips += map(Tip, engine.phase(diff.phase).advice)
    return tips


def culprits(diff: LogDiff) -> tuple[str, ...]:
    """Return the ranks that stand alone behind their peers; none where all stand together."""
    ranks = [rank for rank in diff.ranks if rank.rank]
    behind = tuple(rank.rank for rank in ranks if rank.behind_peers)
    return behind if len(behind) < len(ranks) else ()


def compact(names: Sequence[str]) -> str:
    """Return names of ranks in a row, runs of them as such.

    >>> compact(["TP0", "TP1", "TP2", "TP5", "launch"]), compact(["TP0", "TP1"])
    ('TP0-TP2, TP5, launch', 'TP0, TP1')
    """
    ordered = sorted(names, key=lambda name: (rank_order(name) or (("~", 0),), name))

    def place(item: tuple[int, str]) -> tuple[str, int]:
        index, name = item
        parts = rank_order(name)
        return (name.rstrip("0123456789"), parts[-1][1] - index) if parts else (name, -index)

    shown = []
    for _, run in itertools.groupby(enumerate(ordered), key=place):
        found = [name for _, name in run]
        shown += [f"{found[0]}-{found[-1]}"] if len(found) > 2 else found
    return ", ".join(shown)


def duration(seconds: float | None) -> str:
    """Return a time span as people write it.

    >>> duration(None), duration(0.4), duration(31), duration(3905)
    ('?', '00:00', '00:31', '1:05:05')
    """
    if seconds is None:
        return "?"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def clock(time_s: float | None) -> str:
    """Return a log's own stamp as a time of the day."""
    if time_s is None:
        return "without a stamp"
    seconds = int(time_s) % DAY_S
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def shorten(text: str, width: int) -> str:
    """Return a text cut to a width, with dots where something is lost."""
    return text if len(text) <= width else text[: max(0, width - 3)] + "..."


def last_line(rank: RankDiff) -> str:
    """Return where a rank fell silent, in a few words."""
    if rank.last is None:
        return "printed nothing"
    where = f"line {rank.last.number} at {clock(rank.last.time_s)}"
    if rank.silent_s is not None and rank.silent_s >= 1:
        return f"{where}, silent while the log goes on for {duration(rank.silent_s)}"
    return where


def _stop(diff: LogDiff, step: Step) -> list[str]:
    """Return which ranks lack the first missing milestone, and what they said last."""
    ranks = [rank for rank in diff.ranks if rank.rank]
    behind = culprits(diff)
    lackers = [rank for rank in ranks if rank.rank in (behind or diff.lacking)]
    when = f" at {duration(step.at_s)}" if step.at_s is not None else ""
    there = f"which the good log has{when} (line {step.number})"
    said = []
    if behind:
        first = lackers[0].behind_peers[0]
        rest = len(ranks) - len(behind)
        text = f"{compact(behind)} lack{'s' if len(behind) == 1 else ''} '{first}'"
        has = "has" if rest == 1 else "have"
        said.append(
            f"{text}, {there if first == step.text else 'which the good log has'}; the other "
            f"{f'{rest} ranks' if rest > 1 else 'rank'} {has} it"
        )
    elif not diff.lacking or diff.lacking == ("",):
        said.append(f"the launch lacks '{step.text}', {there}; the ranks lack nothing before it")
    elif len(lackers) == len(ranks) or not step.each_rank:
        every = "the only rank" if len(ranks) == 1 else f"none of the {len(ranks)} ranks"
        lack = "lacks" if len(ranks) == 1 else "has"
        said.append(f"{every} {lack} '{step.text}', {there}")
    else:
        said.append(f"{compact([rank.rank for rank in lackers])} lack '{step.text}', {there}")
    reached = _last_reached(diff)
    if reached and not behind:
        said[-1] += f"; the last one reached is '{reached}'"
    shown = lackers or [rank for rank in ranks if rank.last]
    for rank in sorted(shown, key=lambda rank: rank.last.number if rank.last else 0)[:2]:
        text = f": {_quoted(rank.last.text)}" if rank.last else ""
        said.append(f"last of {rank.name}: {last_line(rank)}{text}")
    for bar in diff.other.timeline.bars.values():
        if bar.phase == step.phase:
            full = "is full" if bar.done == bar.total else "stands"
            said.append(
                f"the bar {bar.id} {full} at {bar.done} of {bar.total}: it counts what one rank"
                " has read, and says nothing of the others"
            )
    undecided = {
        each.text: each.why_unsure
        for rank in diff.ranks
        for each in rank.undecided
        if each.number < step.number
    }
    for text, why in list(undecided.items())[:2]:
        said.append(f"not counted: '{text}', since {why}")
    return said


def _not_overdue(diff: LogDiff) -> list[str]:
    """Say so where the log ends before the phase took longer than it does in a good start."""
    if diff.failure:
        return []
    return [
        f"{phase.phase} has lasted {duration(phase.other_s)} where the log ends, and takes "
        f"{' to '.join(dict.fromkeys((duration(min(phase.good_s)), duration(max(phase.good_s)))))}"
        " in a good start: how long it has stood since, a log cannot tell"
        for phase in diff.phases
        if phase.open and phase.good_s and not phase.slow
    ]


def _last_reached(diff: LogDiff) -> str:
    """Return the text of the newest milestone in OTHER."""
    newest = max(
        (
            (reached.number, rank, reached.id)
            for rank, log in diff.other.timeline.ranks.items()
            for reached in log.milestones
        ),
        default=None,
    )
    if newest is None:
        return ""
    _, rank, milestone_id = newest
    texts = [text for key, text in diff.other.texts.get(rank, {}).items() if key[0] == milestone_id]
    return brief(texts[-1]) if texts else milestone_id


def _failure_text(diff: LogDiff) -> str:
    sign = diff.failure
    assert sign  # noqa: S101  # asked for only then
    log = diff.other.timeline.ranks.get(sign.rank)
    if sign.kind == "exception" and log and log.exception:
        return log.exception
    return sign.text


def _changed_arguments(diff: LogDiff) -> str:
    """Return the good log's values of arguments that differ, where both launches have them."""
    if diff.same_release is False:
        return ""
    named = [each for each in diff.arguments if not each.volatile and each.good[0] is not None]
    shown = ", ".join(f"{each.name}={each.good[0]}" for each in named[:MOST_ARGUMENTS])
    more = len(named) - MOST_ARGUMENTS
    return f"{shown} and {more} more" if more > 0 else shown


def _next_when_all_is_there(diff: LogDiff) -> list[Tip]:
    slow = tuple(phase.phase for phase in diff.phases if phase.slow)
    if slow:
        return [Tip(f"why {enumerate_names(slow)} took longer: lines and arguments that differ")]
    return []


def _quoted(text: str) -> str:
    return f"'{shorten(text.strip(), MOST_OF_A_LINE)}'"


def _plural(diff: LogDiff) -> str:
    return "s" if len(diff.good) > 1 else ""
