"""The one rule over known issues: matches their tables against the facts.

Each condition is true, false or not known, and so is an issue: found where all that it asks for was
seen, undecided where what was seen fits and the rest could not be seen.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from hangdoctor import known_issues
from hangdoctor.findings import Evidence, Finding
from hangdoctor.frames import first_place, place, same_shape, shape
from hangdoctor.model import Missing, Struct
from hangdoctor.rules.case import launched_version, release_numbers, signs_of, stands
from hangdoctor.tracks import lives

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from hangdoctor.known_issues import Conditions, Fact, KnownIssue
    from hangdoctor.model import Frame
    from hangdoctor.rules.case import Case

WORK_PCT = 5.0
"""A descendant that uses less of a core is not at work."""


class Seen(Struct, frozen=True):
    """What came of one condition.

    Attributes:
        holds: None where it cannot be told.
        because: what shows it.
        needs: what would tell it, where it cannot be told.
        telling: it is a trace of the issue itself, and not only the place where it can happen.
        option: it is about the launch's arguments: telling where the issue has no other trace.
    """

    holds: bool | None
    because: tuple[Evidence, ...] = ()
    needs: str = ""
    telling: bool = False
    option: bool = False


def known_issue(case: Case) -> Iterator[Finding]:
    """The launch looks like a stall that was told about in public.

    What it sees: log lines, stack frames, waits and launch options that together are the signature
    of a reported issue whose cause is known: `hangdoctor explain ISSUE` names them.
    Why it matters: somebody has found the cause and a way round it. It describes and blames nobody:
    whether the launch hangs, and at which rank, is for the other rules to say.
    What to do: compare with the thread that is named; try what it advises, the cheapest first.
    """
    if case.facts.launch_log_phase == "ready":
        return
    moves = _moves(case)
    for issue in known_issues.load(case.facts.engine):
        if moves and not issue.ends_by_itself:
            continue
        asked = _asked(case, issue)
        only_options = not (issue.when.log or issue.when.frames or issue.when.waits)
        ruled_out = _ruled_out(case, issue)
        if any(seen.holds is False for seen in asked) or any(seen.holds for seen in ruled_out):
            continue
        open_ones = [seen for seen in (*asked, *ruled_out) if seen.holds is None]
        if not any(
            seen.holds and (seen.telling or (only_options and seen.option)) for seen in asked
        ):
            continue  # it is at the place where the issue can happen, and no more
        because = tuple(item for seen in asked if seen.holds for item in seen.because)
        likeness = "may be" if open_ones else "looks like"
        yield Finding(
            rule="known-issue",
            verdict="undecided" if open_ones else "found",
            title=f"{likeness} {issue.name}: {issue.title}",
            ranks=tuple(dict.fromkeys(item.rank for item in because if item.rank)),
            confidence="low" if open_ones else "medium",
            because=because,
            needs=tuple(dict.fromkeys(seen.needs for seen in open_ones if seen.needs)),
            advice=(*issue.advice, f"read {issue.url} (hangdoctor explain {issue.id})"),
        )


def _moves(case: Case) -> bool:
    """Tell whether a launch is seen to be alive, and not yet to stand still."""
    facts = case.facts
    if not case.observed or _rank_gone(case, None).holds:
        return False
    if signs_of(case, "fatal") or signs_of(case, "timeout"):
        return False
    if not any(track.present for track in facts.tracks.values()):
        return False
    return not case.still_enough(case.stall_after_s)


def _asked(case: Case, issue: KnownIssue) -> list[Seen]:
    """Look at each list and each fact of an issue's `when`, and at its releases."""
    when = issue.when
    facts = list(_facts(case, when.facts, _newest_mark(case, when)))
    if when.log:  # an issue with lines of its own is told by them: every capture begins at zero
        facts = [msgspec.structs.replace(fact, telling=False) for fact in facts]
    seen = [*_lists(case, when), *facts]
    if issue.since or issue.mended_in:
        seen.append(_releases(case, issue))
    return seen


def _ruled_out(case: Case, issue: KnownIssue) -> list[Seen]:
    """Look at each list and each fact of an issue's `unless`."""
    line = _newest_mark(case, issue.when)
    return [*_lists(case, issue.unless), *_facts(case, issue.unless.facts, line)]


def _lists(case: Case, conditions: Conditions) -> Iterator[Seen]:
    if conditions.log:
        yield _log(case, conditions.log)
    if conditions.frames:
        yield _frames(case, conditions.frames)
    if conditions.waits:
        yield _waits(case, conditions.waits)
    if conditions.phases:
        yield _phases(case, conditions.phases)
    if conditions.options:
        yield _options(case, conditions.options)


def _facts(case: Case, facts: Iterable[Fact], line: _Line) -> Iterator[Seen]:
    return (_FACTS[fact](case, line) for fact in facts)


def _log(case: Case, patterns: Iterable[str]) -> Seen:
    marks = case.facts.timeline.marks
    found = [mark for pattern in patterns if (mark := marks.get(pattern))]
    if found:
        because = tuple(
            Evidence(text=mark.text[:200], rank=mark.rank or None, log_line=mark.number)
            for mark in found[:2]
        )
        return Seen(holds=True, because=because, telling=True)
    if case.facts.log_is_whole:
        return Seen(holds=False)
    return Seen(holds=None, needs="the log from its start: --log FILE")


def _frames(case: Case, patterns: tuple[str, ...]) -> Seen:
    because = []
    for name, pid, at_s, stack in _stacks(case):
        index = first_place(stack, patterns)
        if index is not None:
            where = place(stack[index])
            because.append(
                Evidence(text=f"{name} is in {where}", pid=pid, rank=name, at_s=at_s, frame=where)
            )
    marks = case.facts.timeline.marks
    because += [
        Evidence(text=mark.text[:200], rank=mark.rank or None, log_line=mark.number)
        for pattern in patterns
        if (mark := marks.get(pattern))
    ]
    if because:
        return Seen(holds=True, because=tuple(because[:3]), telling=True)
    return Seen(holds=None if _stacks_lacking(case) else False, needs=_STACKS)


def _stacks(case: Case) -> Iterator[tuple[str, int, float | None, tuple[Frame, ...]]]:
    """Yield the stacks that were seen of the launch's main processes, one a thread."""
    for track in case.facts.tracks.values():
        if not lives(track) or not track.role:
            continue
        for stack in (track.stack or (), *track.other_threads):
            if stack:
                yield track.rank or track.role, track.process.pid, track.stack_at_s, stack


def _stacks_lacking(case: Case) -> bool:
    """Tell whether a stack that would show it may not have been seen; what has ended has none."""
    tracks = [track for track in case.facts.tracks.values() if track.role]
    if tracks and not any(lives(track) for track in tracks):
        return False
    ranks = [rank for rank in case.facts.ranks if rank.present is not False]
    launcher = case.facts.launcher
    return (
        not ranks
        or any(rank.stack is None or rank.stack_missing for rank in ranks)
        or launcher is None
        or launcher.stack is None
    )


def _waits(case: Case, ids: tuple[str, ...]) -> Seen:
    ranks = [rank for rank in case.everyone if rank.wait and rank.wait.id in ids]
    if ranks:
        return Seen(
            holds=True, because=tuple(stands(case, each) for each in ranks[:3]), telling=True
        )
    launcher = case.facts.launcher
    if launcher and lives(launcher) and launcher.stack:
        wanted = [wait for wait in case.engine.waits if wait.id in ids and not wait.under]
        for stack in (launcher.stack, *launcher.other_threads):
            for wait in wanted:
                index = first_place(stack, wait.frames)  # an HTTP client's frames stand on it
                if index is not None:
                    where = place(stack[index])
                    text = f"launcher waits for {wait.title}: {where}"
                    because = Evidence(text=text, pid=launcher.process.pid, frame=where)
                    return Seen(holds=True, because=(because,), telling=True)
    return Seen(holds=None if _stacks_lacking(case) else False, needs=_STACKS)


def _phases(case: Case, phases: tuple[str, ...]) -> Seen:
    facts = case.facts
    known = {rank.phase for rank in facts.ranks if rank.phase and rank.present is not False}
    if facts.launch_log_phase:
        known.add(facts.launch_log_phase)
    if not known:
        return Seen(holds=None, needs="a stack or a log that tells the phase")
    return Seen(holds=bool(known & set(phases)))


def _options(case: Case, patterns: tuple[str, ...]) -> Seen:
    facts = case.facts
    titles = [
        track.process.title
        for track in facts.tracks.values()
        if track.role in ("launcher", "wrapper")
    ]
    command = " ".join([*facts.header.command, *titles])
    for pattern in patterns:
        match = re.search(pattern, command)
        if match or pattern in facts.timeline.launch.options:
            said = match[0] if match else f"the arguments match {pattern}"
            return Seen(holds=True, because=(Evidence(text=f"launched with {said}"),), option=True)
    launch = facts.timeline.ranks.get("")
    if launch is not None and "args" in launch.counts:
        return Seen(holds=False)
    return Seen(holds=None, needs="the launch's arguments: the log from its start")


def _releases(case: Case, issue: KnownIssue) -> Seen:
    version = launched_version(case)
    if not version:
        limit = f"mended in {issue.mended_in}" if issue.mended_in else f"new in {issue.since}"
        return Seen(holds=None, needs=f"the release of {case.facts.engine}: it is {limit}")
    affected = not issue.since or release_numbers(version) >= release_numbers(issue.since)
    mended = bool(issue.mended_in) and release_numbers(version) >= release_numbers(issue.mended_in)
    return Seen(holds=affected and not mended)


# --- Named facts; `line` is the newest line that the issue's patterns have found ----------------

_STACKS = "the stacks of all ranks: hangdoctor diagnose PID"


class _Line(Struct, frozen=True):
    number: int = 0
    rank: str = ""


def _newest_mark(case: Case, when: Conditions) -> _Line:
    marks = [mark for each in when.log if (mark := case.facts.timeline.marks.get(each))]
    newest = max(marks, key=lambda mark: mark.number, default=None)
    return _Line(number=newest.number, rank=newest.rank) if newest else _Line()


def _all_ranks_idle(case: Case, _: object) -> Seen:
    present = [rank for rank in case.facts.ranks if rank.present]
    if not present or any(rank.stack is None for rank in present):
        return Seen(holds=None, needs=_STACKS)
    return Seen(
        holds=len(case.graph.idle) == len(present),
        because=tuple(stands(case, rank) for rank in case.graph.idle[:1]),
    )


def _all_ranks_same_place(case: Case, _: object) -> Seen:
    present = [rank for rank in case.facts.ranks if rank.present is not False]
    stacks = [shape(rank.stack) for rank in present if rank.stack]
    if not present or len(stacks) < len(present):
        return Seen(holds=None, needs=_STACKS)
    together = all(same_shape(stacks[0], other) for other in stacks)
    text = f"all {len(stacks)} ranks stand at the same place"
    return Seen(holds=len(stacks) > 1 and together, because=(Evidence(text=text),))


def _bar_at_full(case: Case, _: object) -> Seen:
    return _bar(case, lambda done, total: done == total)


def _bar_at_zero(case: Case, line: _Line) -> Seen:
    seen = _bar(case, lambda done, _: done == 0)
    bars = case.facts.timeline.bars.values()
    if seen.holds and line.number and max(bar.number for bar in bars) > line.number:
        return Seen(holds=False)  # the line belongs to an earlier bar
    return seen


def _bar(case: Case, stands_at: Callable[[int, int], bool]) -> Seen:
    bars = case.facts.timeline.bars.values()
    newest = max(bars, key=lambda bar: bar.number, default=None)
    if newest is None:
        whole = case.facts.log_is_whole
        return Seen(holds=False if whole else None, needs="the log's progress bars: --log FILE")
    text = f"the bar of {newest.id} stands at {newest.done}/{newest.total}"
    return Seen(
        holds=stands_at(newest.done, newest.total),
        because=(Evidence(text=text, log_line=newest.number),),
        telling=True,
    )


def _gpus_spin(case: Case, _: object) -> Seen:
    cards = [case.facts.cards[i] for rank in case.facts.ranks for i in rank.cards]
    if not cards or any(
        isinstance(card.gpu, Missing) or card.reading == "unknown" for card in cards
    ):
        return Seen(holds=None, needs="readings of all GPUs: hangdoctor diagnose PID")
    text = "the cards of all ranks are busy at idle power"
    spin = all(card.reading == "spinning" for card in cards)
    return Seen(holds=spin, because=(Evidence(text=text, at_s=case.facts.at_s),))


def _line_is_last(case: Case, line: _Line) -> Seen:
    last = case.facts.timeline.ranks[line.rank].last if line.number else None
    if last is None:
        return Seen(holds=None)  # the list of log patterns says what is lacking
    return Seen(holds=last.number <= line.number)


def _no_compiler(case: Case, _: object) -> Seen:
    if not case.observed:
        return Seen(holds=None, needs="what runs below the launch: hangdoctor diagnose PID")
    workers = [
        track
        for track in case.facts.tracks.values()
        if track.owner is not None
        and track.present
        and not track.observes
        and (track.cpu_pct or 0) >= WORK_PCT
    ]
    return Seen(
        holds=not workers,
        because=(Evidence(text="nothing that the launch has started uses CPU"),),
    )


def _rank_gone(case: Case, _: object) -> Seen:
    if not case.observed:
        if case.facts.ranks and all(rank.stack_line is not None for rank in case.facts.ranks):
            return Seen(holds=False)  # each was there when the log's stack of it was taken
        return Seen(holds=None, needs="the launch's processes: hangdoctor diagnose PID")
    gone = [rank for rank in case.facts.ranks if rank.present is False and rank.pid is not None]
    because = tuple(
        Evidence(text=f"{rank.name} (pid {rank.pid}) is gone", pid=rank.pid, rank=rank.name)
        for rank in gone[:3]
    )
    return Seen(holds=bool(gone), because=because)


def _several(size: str) -> Callable[[Case, object], Seen]:
    def several(case: Case, _: object) -> Seen:
        sizes = case.facts.sizes
        if "tp" not in sizes and size not in sizes:
            return Seen(holds=None, needs="the launch's arguments: the log from its start")
        return Seen(holds=sizes.get(size, 1) > 1)

    return several


def _several_tp_groups(case: Case, _: object) -> Seen:
    parts = [_several(size)(case, _) for size in ("dp", "pp")]
    return next((part for part in parts if part.holds), parts[0])


def _stands_still(case: Case, _: object) -> Seen:
    if not case.observed:
        return Seen(holds=None, needs="a look at the launch itself: hangdoctor diagnose PID")
    still = case.still_enough(case.stall_after_s)
    text = f"nothing was seen to move for {case.still_s or 0:.0f} s"
    return Seen(holds=still, because=(Evidence(text=text, at_s=case.facts.at_s),))


def _waits_for_storage(case: Case, _: object) -> Seen:
    ranks = [rank for rank in case.facts.ranks if rank.on_storage]
    if not ranks and not case.observed:
        return Seen(holds=None, needs="the ranks' processes: hangdoctor diagnose PID")
    because = tuple(
        Evidence(
            text=f"{rank.name} waits for storage ({rank.on_storage})",
            pid=rank.pid,
            rank=rank.name,
            at_s=case.facts.at_s,
        )
        for rank in ranks[:3]
    )
    return Seen(holds=bool(ranks), because=because, telling=True)


_FACTS: dict[Fact, Callable[[Case, _Line], Seen]] = {
    "all-ranks-idle": _all_ranks_idle,
    "all-ranks-same-place": _all_ranks_same_place,
    "bar-at-full": _bar_at_full,
    "bar-at-zero": _bar_at_zero,
    "gpus-spin": _gpus_spin,
    "line-is-last": _line_is_last,
    "no-compiler": _no_compiler,
    "pipeline-parallel": _several("pp"),
    "rank-gone": _rank_gone,
    "several-nodes": _several("nnodes"),
    "several-tp-groups": _several_tp_groups,
    "stands-still": _stands_still,
    "waits-for-storage": _waits_for_storage,
}
