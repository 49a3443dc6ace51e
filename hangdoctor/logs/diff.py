"""Where one log parts from known-good ones: milestones, ranks, phases, arguments, values, lines.

Pure. A milestone is missing only where that means something. It is not where the log came past it
(it goes on with what follows in the good log), where its release does not print that line, or where
the arguments that decide about it differ: then it is named as undecided, and the next sure one is
looked for. Ranks are matched by name, else by their place: the first with the first.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Literal

import msgspec

from hangdoctor.engines import PHASES, Phase
from hangdoctor.launches import expected_ranks, rank_order
from hangdoctor.logs.align import common
from hangdoctor.logs.summary import SEVERITIES, Key, Line, Severity, Summary
from hangdoctor.logs.templates import mask
from hangdoctor.logs.timeline import Place, SignSeen, all_ranks_print, lacking, phase_durations

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hangdoctor.engines import Engine, Milestone

LAUNCH = "launch"
"""What speaks for all ranks, where a name must be written."""
PAIRS_LIMIT = 300
"""So many new lines are compared with so many missing ones, to find what was only reworded."""

_LEVEL = re.compile(r"^[A-Z]+:\s+(?:[\d.:]+ - )?")
"""What uvicorn puts before a message: a level, and who asks."""
_SECRET = re.compile(r"(?:key|token|password|secret)$")
_FAILS = ("fatal", "timeout")
_MEMORY_SLACK = 1.0
"""GB by which memory may differ from launch to launch."""
_SLACK = 0.02
"""Share by which a number may differ from launch to launch."""
_SLOW_RATIO, _SLOW_S = 1.5, 2.0
"""A phase is slow that took this times the longest of the good ones, and so many seconds more."""

Outcome = Literal["reaches-all", "stops", "fails"]


class Step(msgspec.Struct, frozen=True):
    """A milestone as a good log has it.

    Attributes:
        id, nth: nth of the same id for this rank, from 1.
        text: its line as far as it never differs, "Load weight end."
        phase: that it belongs to.
        number: of its line in the reference log; at_s: when, after that log's first stamp.
        each_rank: every rank prints it.
        sure: OTHER would have printed it as well; why_unsure: else.
    """

    id: str
    nth: int
    text: str
    phase: Phase
    number: int
    at_s: float | None = None
    each_rank: bool = True
    sure: bool = True
    why_unsure: str = ""


class RankDiff(msgspec.Struct, frozen=True):
    """How far one rank came, against its counterpart; "" is the launch as a whole.

    Attributes:
        counterpart: rank of the good log that it is measured by, None where there is none.
        reached, expected: how many milestones; missing: those that lie ahead of it, in order.
        passed_over: not printed although the rank came past them.
        undecided: ahead of it, but it might not print them at all.
        last: its last line; last_at_s: when, after the log's first stamp.
        silent_s: how much longer the log goes on, by its stamps; None where they do not tell.
        lines: that it printed until the server was ready, without those of tracebacks.
        behind_peers: milestones that other ranks of the same log have and it has not.
        exception: the last line of its last traceback.
    """

    rank: str
    counterpart: str | None
    reached: int
    expected: int
    missing: tuple[Step, ...] = ()
    passed_over: tuple[Step, ...] = ()
    undecided: tuple[Step, ...] = ()
    reordered: tuple[str, ...] = ()
    last: Place | None = None
    last_at_s: float | None = None
    silent_s: float | None = None
    lines: int = 0
    behind_peers: tuple[str, ...] = ()
    exception: str = ""

    @property
    def name(self) -> str:
        """Return the rank's name for people."""
        return self.rank or LAUNCH


class PhaseDiff(msgspec.Struct, frozen=True):
    """How long a phase took.

    Attributes:
        good_s: in each good log that has it; other_s: in OTHER.
        open: OTHER's log ends in it, so that it took at least that long.
        slow: far longer than in any good log.
    """

    phase: Phase
    good_s: tuple[float, ...]
    other_s: float | None
    open: bool = False
    slow: bool = False

    @property
    def ratio(self) -> float | None:
        """Return how many times as long as at the longest in a good log."""
        longest = max(self.good_s, default=0.0)
        return self.other_s / longest if self.other_s is not None and longest > 0 else None


class ArgumentDiff(msgspec.Struct, frozen=True):
    """An argument of the launch; None where a launch did not print it.

    Attributes:
        good: the values of the good logs, each once.
        volatile: it differs between launches anyway.
    """

    name: str
    good: tuple[str | None, ...]
    other: str | None
    volatile: bool = False


class ValueDiff(msgspec.Struct, frozen=True):
    """A value in a milestone's line that is not as in the good logs.

    Attributes:
        where: the milestone's text; key: such as "avail mem".
        good: the values of the good logs, least and most where they are numbers.
        other: value by rank, of the ranks that differ.
    """

    where: str
    key: str
    good: tuple[str, ...]
    other: dict[str, str]


class LineDiff(msgspec.Struct, frozen=True):
    """A kind of line that one side has and the other has not, or has otherwise.

    Attributes:
        kind: "new": only OTHER has it; "missing": all good logs have it, before the place that
            OTHER comes to; "changed": the same line with other words; "more": far more often.
        template: of the line; good_template: of what stands in its place, for a changed one.
        ranks: that print it, or that lack it.
        count: how often OTHER has it, or the good log where it is missing.
        line: the first one; good_line: the first one in the reference log.
        serving: it came after the server was ready.
    """

    kind: Literal["new", "missing", "changed", "more"]
    severity: Severity
    template: str
    ranks: tuple[str, ...]
    count: int
    line: Line | None = None
    good_template: str = ""
    good_line: Line | None = None
    good_count: int = 0
    serving: bool = False


class LogDiff(msgspec.Struct, frozen=True):
    """All that differs.

    Attributes:
        good, other: the logs; reference: the good one that OTHER is shown against.
        same_release: of the engine; None where the logs do not tell.
        outcome: "stops": it ends before a milestone; "fails": its lines say that it failed.
        first_missing: the first milestone that it lacks; lacking: ranks that lack it.
        failure: what it failed with.
        ranks: the launch first.
        forward_ran: the model's forward may have run; None where that is not known.
        lines: the worst first.
        later: kinds of lines that the good log has only after the place that OTHER comes to.
        alignments: by rank of OTHER, pairs of indices in the reference's stream and OTHER's.
        begins_at: line of the reference that OTHER begins at, where its head is lost; else 0.
    """

    good: tuple[Summary, ...]
    other: Summary
    reference: int
    same_release: bool | None
    outcome: Outcome
    first_missing: Step | None
    lacking: tuple[str, ...]
    failure: SignSeen | None
    ranks: tuple[RankDiff, ...]
    phases: tuple[PhaseDiff, ...]
    arguments: tuple[ArgumentDiff, ...]
    values: tuple[ValueDiff, ...]
    lines: tuple[LineDiff, ...]
    later: int
    forward_ran: bool | None
    only_here: tuple[str, ...]
    alignments: dict[str, tuple[tuple[int, int], ...]]
    begins_at: int = 0

    @property
    def phase(self) -> Phase | None:
        """Return the phase that OTHER stops in, None where it does not."""
        return self.first_missing.phase if self.first_missing else None


def compare(good: Sequence[Summary], other: Summary, engine: Engine) -> LogDiff:
    """Return where a log parts from known-good ones.

    Args:
        good: logs of launches that became ready, at least one.
        other: the log in question.
        engine: that printed them all.
    """
    reference = _reference(good, other)
    same_release = _same_release(good[reference], other)
    judge = _Judge(good, other, reference, engine, same_release=same_release)
    names = _ranks(good[reference], other)
    alignments = {
        name: tuple(_aligned(good[reference], other, counterpart, name))
        for name in names
        if (counterpart := _counterpart(name, good[reference])) is not None
    }
    begins_at = _begins_at(good[reference], other, alignments)
    ranks = tuple(judge.rank(name, begins_at) for name in names)
    missing = {each.rank: each.missing[0] for each in ranks if each.missing}
    first = min(missing.values(), key=lambda step: step.number, default=None)
    lackers = tuple(
        rank
        for rank, step in missing.items()
        if first and (step.id, step.nth) == (first.id, first.nth)
    )
    failure = _failure(good, other)
    outcome: Outcome = "fails" if failure else "stops" if first else "reaches-all"
    lines, later = _lines(judge, ranks, first, alignments)
    return LogDiff(
        good=tuple(good),
        other=other,
        reference=reference,
        same_release=same_release,
        outcome=outcome,
        first_missing=first,
        lacking=lackers,
        failure=failure,
        ranks=ranks,
        phases=_phases(good, other, stopped=first is not None),
        arguments=tuple(_arguments(good, other, engine)),
        values=tuple(_values(good, other, judge)),
        lines=lines,
        later=later,
        forward_ran=forward_ran(other, engine),
        only_here=judge.only_here(),
        alignments=alignments,
        begins_at=begins_at,
    )


def brief(text: str) -> str:
    """Return a milestone's line as far as it never differs.

    >>> brief("Load weight begin. avail mem=138.28 GB"), brief("sglang is using nccl==2.28.9")
    ('Load weight begin.', 'sglang is using nccl')
    >>> brief("Capture cuda graph begin. This can take up to several minutes. avail mem=68 GB")
    'Capture cuda graph begin.'
    >>> brief('INFO:     127.0.0.1:52396 - "GET /model_info HTTP/1.1" 200 OK')
    'GET /model_info'
    """
    text = _LEVEL.sub("", text)
    head = re.split(r"(?<=\.) |[=:({\[]|(?<!\w)\d| HTTP/", text, maxsplit=1)[0].strip(' "')
    return (head or text)[:60]


def forward_ran(log: Summary, engine: Engine) -> bool | None:
    """Tell whether the model's forward may have run by the log; None where that is not known.

    What a log lacks proves something only where it was read from its start.
    """
    if engine.first_forward is None or not log.head_line:
        return None
    order = PHASES.index(engine.first_forward)
    return any(
        PHASES.index(phase) >= order
        for rank in log.timeline.ranks.values()
        for reached in rank.milestones
        for phase in (reached.phase, reached.phase_after)
    )


def _reference(good: Sequence[Summary], other: Summary) -> int:
    """Return the good log that is most like the other: of its release, then of its size."""

    def likeness(summary: Summary) -> tuple[bool, bool]:
        ranks = set(summary.timeline.ranks) >= set(other.timeline.ranks)
        return bool(_same_release(summary, other)), ranks

    return max(range(len(good)), key=lambda index: (*likeness(good[index]), -index))


def _same_release(one: Summary, other: Summary) -> bool | None:
    """Tell whether two logs are of the same release; None where nothing tells.

    Each release of an engine has arguments of its own. Without them the wording of the milestones
    that both have is compared, which can only tell that they differ.
    """
    if one.arguments and other.arguments:
        return one.arguments.keys() == other.arguments.keys()
    words = [
        {key[0]: brief(text) for texts in each.texts.values() for key, text in texts.items()}
        for each in (one, other)
    ]
    shared = (words[0].keys() & words[1].keys()) - {"capture-begin", "capture-end"}
    if any(words[0][each] != words[1][each] for each in shared):
        return False
    return None


def _ranks(good: Summary, other: Summary) -> list[str]:
    """Return the ranks of OTHER that there are or should be, the launch first."""
    names = {name for name in other.timeline.ranks if name} | set(
        expected_ranks(other.timeline.launch.sizes)
    )
    if not names:  # it came to no rank, and does not say how many it should have
        names = {name for name in good.timeline.ranks if name}
    return ["", *sorted(names, key=rank_order)]


def _counterpart(rank: str, good: Summary) -> str | None:
    if rank in good.timeline.ranks or not rank:
        return rank
    names = sorted((name for name in good.timeline.ranks if name), key=rank_order)
    if not names:
        return None
    numbers = [number for _, number in rank_order(rank)]
    place = numbers[0] if len(numbers) == 1 else sum(numbers)
    return names[0] if place == 0 or len(names) == 1 else names[1 + (place - 1) % (len(names) - 1)]


class _Judge:
    """What all ranks of a comparison share."""

    def __init__(
        self,
        good: Sequence[Summary],
        other: Summary,
        reference: int,
        engine: Engine,
        *,
        same_release: bool | None,
    ) -> None:
        self.good = good
        self.other = other
        self.reference = good[reference]
        self.milestones = {each.id: each for each in engine.milestones}
        self.second_model = engine.second_model
        self.same_release = same_release
        self.since, self.until = self._releases()
        self.begun_s = other.timeline.first_time_s
        all_print = all(all_ranks_print(each.timeline) for each in good)
        self.peers = lacking(other.timeline, all_print=all_print)
        self.launch_line = self._launch_line()

    def steps(self, rank: str) -> list[Step]:
        """Return the milestones that a rank of OTHER is measured by."""
        counterpart = _counterpart(rank, self.reference)
        if counterpart is None:
            return []
        log = self.reference.timeline.ranks.get(counterpart)
        if log is None:
            return []
        texts = self.reference.texts.get(counterpart, {})
        begun_s = self.reference.timeline.first_time_s
        in_all = set.intersection(
            *(set(_keys(each, _counterpart(rank, each) or rank)) for each in self.good)
        )
        only_each = counterpart != rank and not self._both_first(rank, counterpart)
        steps, counts = [], dict[str, int]()
        for reached in log.milestones:
            counts[reached.id] = counts.get(reached.id, 0) + 1
            key = (reached.id, counts[reached.id])
            if key not in in_all or (only_each and not reached.of_each_rank):
                continue
            why = self._why_unsure(self.milestones.get(reached.id), key[1])
            after_s = None
            if reached.time_s is not None and begun_s is not None:
                after_s = reached.time_s - begun_s
            steps.append(
                Step(
                    id=reached.id,
                    nth=key[1],
                    text=brief(texts.get(key, reached.id)),
                    phase=reached.phase,
                    number=reached.number,
                    at_s=after_s,
                    each_rank=reached.of_each_rank,
                    sure=not why,
                    why_unsure=why,
                )
            )
        return steps

    def rank(self, rank: str, begins_at: int) -> RankDiff:
        """Return how far a rank of OTHER came; what lies before its head cannot be judged."""
        own = _keys(self.other, rank)
        there = set(own)
        steps = [
            step
            for step in self.steps(rank)
            if step.number >= begins_at or (step.id, step.nth) in there
        ]
        known = [(step.id, step.nth) for step in steps]
        last = max((index for index, key in enumerate(known) if key in there), default=-1)
        if rank and self.launch_line is not None:  # no rank can be behind of the launch
            passed = [i for i, step in enumerate(steps) if step.number < self.launch_line]
            last = max([last, *passed])
        ahead = steps[last + 1 :]
        log = self.other.timeline.ranks.get(rank)
        last_place = log.last if log else None
        return RankDiff(
            rank=rank,
            counterpart=_counterpart(rank, self.reference),
            reached=sum(key in there for key in known),
            expected=sum(step.sure or key in there for step, key in zip(steps, known, strict=True)),
            missing=tuple(step for step in ahead if step.sure),
            passed_over=tuple(
                step
                for step, key in zip(steps[: last + 1], known, strict=False)
                if key not in there and step.sure
            ),
            undecided=tuple(step for step in ahead if not step.sure),
            reordered=self._reordered(known, own),
            last=last_place,
            last_at_s=self._after(last_place.time_s if last_place else None),
            silent_s=self._silent(last_place),
            lines=sum(1 for line in self.other.streams.get(rank, ()) if line.template),
            behind_peers=tuple(brief(self._text(each)) for each in self.peers.get(rank, ())),
            exception=log.exception if log else "",
        )

    def only_here(self) -> tuple[str, ...]:
        """Return the milestones of OTHER that no good log has, by their text."""
        theirs = {key[0] for each in self.good for texts in each.texts.values() for key in texts}
        own = {
            key[0]: brief(text)
            for texts in self.other.texts.values()
            for key, text in texts.items()
        }
        return tuple(text for each, text in own.items() if each not in theirs)

    def _both_first(self, rank: str, counterpart: str) -> bool:
        own = [name for name in _ranks(self.reference, self.other) if name]
        theirs = sorted((name for name in self.reference.timeline.ranks if name), key=rank_order)
        return own[:1] == [rank] and theirs[:1] == [counterpart]

    def _text(self, milestone_id: str) -> str:
        """Return the text of a milestone in OTHER, else in the reference."""
        for summary in (self.other, self.reference):
            for texts in summary.texts.values():
                for key, text in texts.items():
                    if key[0] == milestone_id:
                        return text
        return milestone_id

    def _reordered(self, known: list[Key], own: list[Key]) -> tuple[str, ...]:
        """Return the milestones that come in another order than in any good log."""
        shared = [key for key in own if key in set(known)]
        theirs = [key for key in known if key in set(own)]
        kept = {shared[j] for _, j in common(theirs, shared)}
        return tuple(brief(self._text(key[0])) for key in shared if key not in kept)

    def _after(self, time_s: float | None) -> float | None:
        if time_s is None or self.begun_s is None:
            return None
        return time_s - self.begun_s

    def _silent(self, last: Place | None) -> float | None:
        end_s = self.other.timeline.last_time_s
        if last is None or last.time_s is None or end_s is None:
            return None
        return max(0.0, end_s - last.time_s)

    def _launch_line(self) -> int | None:
        """Return the reference's line of the last milestone that OTHER's launch reached.

        Only of those that it reaches when all ranks have begun to serve.
        """
        log = self.reference.timeline.ranks.get("")
        other = self.other.timeline.ranks.get("")
        if log is None or other is None:
            return None
        there = {each.id for each in other.milestones}
        lines = [
            each.number
            for each in log.milestones
            if each.id in there and PHASES.index(each.phase) >= PHASES.index("server")
        ]
        return max(lines, default=None)

    def _releases(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the first and last release that OTHER can be of, by what it prints."""
        since: tuple[int, ...] = (0,)
        until: tuple[int, ...] = (1 << 30,)
        for log in self.other.timeline.ranks.values():
            for milestone_id in log.counts:
                milestone = self.milestones.get(milestone_id)
                if milestone and milestone.since:
                    since = max(since, _version(milestone.since))
                if milestone and milestone.until:
                    until = min(until, _version(milestone.until))
        return since, until

    def _why_unsure(self, milestone: Milestone | None, nth: int) -> str:
        """Return why OTHER might never print a milestone; "" where it is sure to."""
        if milestone is None:
            return ""
        if self.same_release is False:
            if milestone.since and self.since < _version(milestone.since):
                return f"releases before {milestone.since} do not print it"
            if milestone.until and self.until > _version(milestone.until):
                return f"releases after {milestone.until} do not print it"
        launches = self.reference.timeline.launch, self.other.timeline.launch
        on_cpu = {launch.on_cpu for launch in launches}
        if "device" in milestone.depends_on and on_cpu == {True, False}:
            return "one of the launches runs on the CPU"
        for name in (*milestone.depends_on, *(self.second_model if nth > 1 else ())):
            theirs, own = (each.arguments.get(name) for each in (self.reference, self.other))
            if theirs != own and (self.same_release or None not in (theirs, own)):
                return f"{name} is {own} here and {theirs} there"
        return ""


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def _keys(summary: Summary, rank: str) -> list[Key]:
    """Return the milestones of a rank, each with its how manieth."""
    log = summary.timeline.ranks.get(rank)
    counts: dict[str, int] = {}
    keys = []
    for reached in log.milestones if log else ():
        counts[reached.id] = counts.get(reached.id, 0) + 1
        keys.append((reached.id, counts[reached.id]))
    return keys


def _begins_at(
    good: Summary, other: Summary, alignments: dict[str, tuple[tuple[int, int], ...]]
) -> int:
    """Return the good log's line that OTHER begins at, 0 where both begin at the beginning."""
    if other.head_line or not good.head_line:
        return 0
    firsts = [
        good.streams[counterpart][pairs[0][0]].number
        for rank, pairs in alignments.items()
        if pairs and (counterpart := _counterpart(rank, good)) is not None
    ]
    return min((number for number in firsts if number > good.head_line), default=0)


def _failure(good: Sequence[Summary], other: Summary) -> SignSeen | None:
    """Return what OTHER failed with.

    A traceback before the server became ready did not hinder it, and one that every launch prints
    is none. What ends a server that had become ready counts as well.
    """
    usual = {(sign.id, mask(sign.text)) for each in good for sign in each.timeline.signs}
    ready = "" in other.timeline.ranks and other.timeline.ranks[""].phase == "ready"
    ends = [sign for sign in other.timeline.signs if sign.kind in _FAILS]
    if ready:
        (ready_line,) = [
            each.number for each in other.timeline.ranks[""].milestones if each.phase == "ready"
        ][:1]
        ends = [sign for sign in ends if sign.number > ready_line]
    else:
        ends += [sign for sign in other.timeline.signs if sign.kind == "exception"]
    ends = [sign for sign in ends if (sign.id, mask(sign.text)) not in usual]
    return min(ends, key=lambda sign: sign.number, default=None)


def _phases(good: Sequence[Summary], other: Summary, *, stopped: bool) -> tuple[PhaseDiff, ...]:
    theirs = [phase_durations(each.timeline) for each in good]
    own = phase_durations(other.timeline)
    ends: dict[Phase, float] = {}
    if stopped:
        begins = [
            (reached.time_s, PHASES.index(reached.phase_after))
            for log in other.timeline.ranks.values()
            for reached in log.milestones
            if reached.time_s is not None
        ]
        last_s = other.timeline.last_time_s
        if begins and last_s is not None:
            phase = PHASES[max(place for _, place in begins)]
            begun_s = min(time_s for time_s, place in begins if PHASES[place] == phase)
            ends[phase] = max(0.0, last_s - begun_s)
    found = []
    for phase in PHASES:
        good_s = tuple(each[phase] for each in theirs if phase in each)
        other_s = own.get(phase, ends.get(phase))
        if not good_s and other_s is None:
            continue
        longest = max(good_s, default=0.0)
        slow = (
            bool(good_s)
            and other_s is not None
            and (other_s > longest * _SLOW_RATIO and other_s > longest + _SLOW_S)
        )
        found.append(
            PhaseDiff(phase, good_s, other_s, open=phase in ends and phase not in own, slow=slow)
        )
    return tuple(found)


def _arguments(good: Sequence[Summary], other: Summary, engine: Engine) -> Iterator[ArgumentDiff]:
    """Yield the arguments that are not as in any good log, the volatile ones last."""
    given = [each.arguments for each in good if each.arguments]
    if not given or not other.arguments:
        return
    names = dict.fromkeys(itertools.chain(other.arguments, *given))
    found = []
    for name in names:
        values = tuple(dict.fromkeys(each.get(name) for each in given))
        if other.arguments.get(name) not in values:
            own = other.arguments.get(name)
            if _SECRET.search(name):
                values, own = tuple(map(_hidden, values)), _hidden(own)
            found.append(ArgumentDiff(name, values, own, name in engine.volatile))
    yield from sorted(found, key=lambda each: (each.volatile, None in (*each.good, each.other)))


def _hidden(value: str | None) -> str | None:
    return value if value in (None, "None", "''") else "***"


def _values(good: Sequence[Summary], other: Summary, judge: _Judge) -> Iterator[ValueDiff]:
    """Yield the values in milestones' lines that lie outside of what the good logs have.

    Not memory on the CPU: it is the machine's, and says nothing of the launch.
    """
    on_cpu = any(each.timeline.launch.on_cpu for each in (*good, other))
    usual: dict[tuple[Key, str], list[str]] = {}
    for summary in good:
        for by_key in summary.values.values():
            for key, values in by_key.items():
                for name, value in values.items():
                    usual.setdefault((key, name), []).append(value)
    found: dict[tuple[Key, str], dict[str, str]] = {}
    for rank, by_key in other.values.items():
        for key, values in by_key.items():
            for name, value in values.items():
                known = usual.get((key, name))
                if known and _differs(value, known) and not (on_cpu and value.endswith("GB")):
                    found.setdefault((key, name), {})[rank or LAUNCH] = value
    for (key, name), own in found.items():
        known = usual[key, name]
        numbers = sorted(known, key=lambda value: _number(value) or 0.0)
        good_values = (
            tuple(dict.fromkeys((numbers[0], numbers[-1])))
            if all(_number(value) is not None for value in known)
            else tuple(dict.fromkeys(known))
        )
        yield ValueDiff(brief(judge._text(key[0])), name, good_values, own)  # noqa: SLF001


def _differs(value: str, known: list[str]) -> bool:
    """Tell whether a value is not among known ones; numbers may lie a little beside them."""
    if value in known:
        return False
    number = _number(value)
    numbers = [found for each in known if (found := _number(each)) is not None]
    if number is None or not numbers:
        return True
    slack = _SLACK * max(map(abs, numbers))
    if value.endswith("GB"):
        slack = max(slack, _MEMORY_SLACK)
    return not min(numbers) - slack <= number <= max(numbers) + slack


def _number(value: str) -> float | None:
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)(?: ?[A-Za-z]{1,3})?", value)
    return float(match[1]) if match else None


def _aligned(good: Summary, other: Summary, counterpart: str, rank: str) -> list[tuple[int, int]]:
    first = [line.template for line in good.streams.get(counterpart, ())]
    second = [line.template for line in other.streams.get(rank, ())]
    return common(first, second)


def _lines(
    judge: _Judge,
    ranks: Sequence[RankDiff],
    first: Step | None,
    alignments: dict[str, tuple[tuple[int, int], ...]],
) -> tuple[tuple[LineDiff, ...], int]:
    """Return the kinds of lines that differ, and how many the good log has only later."""
    good, other = judge.good, judge.other
    milestones = {
        mask(text)
        for each in (*good, other)
        for texts in each.texts.values()
        for text in texts.values()
    }
    new = [diff for diff in _new(good, other) if diff.template not in milestones]
    missing, later = _missing(judge, ranks, first, alignments)
    missing = [diff for diff in missing if diff.template not in milestones]
    changed = _pair(new, missing)
    found = [*new, *missing, *changed, *_more(good, other)]
    if judge.same_release is False:
        later = 0

    def order(diff: LineDiff) -> tuple[bool, int, int, int, int]:
        place = diff.line or diff.good_line
        kinds = ("new", "changed", "more", "missing")
        return (
            diff.serving,
            SEVERITIES.index(diff.severity),
            kinds.index(diff.kind),
            diff.count,
            place.number if place else 0,
        )

    return tuple(sorted(found, key=order)), later


def _new(good: Sequence[Summary], other: Summary) -> list[LineDiff]:
    """Return what only OTHER has.

    What stands before the arguments belongs to the launch before where there are several.
    """
    known = {template for each in good for template in each.templates}
    return [
        LineDiff(
            kind="new",
            severity=seen.severity,
            template=template,
            ranks=_sorted(seen.ranks),
            count=seen.count,
            line=seen.first,
            serving=seen.serving,
        )
        for template, seen in other.templates.items()
        if template not in known
        and not (
            seen.first.number < other.head_line and any(each.timeline.launches > 1 for each in good)
        )
    ]


def _missing(
    judge: _Judge,
    ranks: Sequence[RankDiff],
    first: Step | None,
    alignments: dict[str, tuple[tuple[int, int], ...]],
) -> tuple[list[LineDiff], int]:
    """Return what every good log has where OTHER came past, and lacks, wholly or in some ranks."""
    good, other, chosen = judge.good, judge.other, judge.reference
    same_ranks = {rank for rank in chosen.timeline.ranks if rank} == {
        rank for rank in other.timeline.ranks if rank
    }
    ends = _ends(chosen, ranks, first, alignments)
    whole = max(ends.values(), default=float("inf"))
    firsts: dict[tuple[str, str], int] = {}
    for rank, stream in chosen.streams.items():
        for line in stream:
            firsts.setdefault((rank, line.template), line.number)
    found, later = [], 0
    for template, seen in chosen.templates.items():
        if not all(template in each.templates for each in good) or seen.serving:
            continue
        own = other.templates.get(template)
        if own is not None and not same_ranks:
            continue
        if seen.first.number < chosen.head_line and other.timeline.launches > 1:
            continue
        have = set(own.ranks) if own else set()
        lack = [rank for rank in seen.ranks if rank not in have]
        if own is not None and len(own.ranks) >= min(
            len(each.templates[template].ranks) for each in good
        ):
            continue  # another rank prints it, such as whichever comes first
        past = [
            rank
            for rank in lack
            if firsts.get((rank, template), float("inf")) < ends.get(rank, whole)
        ]
        if past:
            found.append(
                LineDiff(
                    kind="missing",
                    severity="note" if seen.severity != "error" else "warning",
                    template=template,
                    ranks=_sorted(dict.fromkeys(past, 1)),
                    count=sum(seen.ranks[rank] for rank in past),
                    good_line=seen.first,
                    good_count=seen.count,
                )
            )
        elif lack and own is None:
            later += 1
    return found, later


def _ends(
    good: Summary,
    ranks: Sequence[RankDiff],
    first: Step | None,
    alignments: dict[str, tuple[tuple[int, int], ...]],
) -> dict[str, float]:
    """Return up to which line of the good log each of its ranks' streams was come to."""
    ends: dict[str, float] = {}
    for rank in ranks:
        if rank.counterpart is None:
            continue
        stop = rank.missing[0].number if rank.missing else None
        if not rank.rank and first is not None:
            stop = first.number
        if stop is None:
            ends[rank.counterpart] = float("inf")
            continue
        stream = good.streams.get(rank.counterpart, ())
        reached = [stream[i].number for i, _ in alignments.get(rank.rank, ())]
        own_end = max((number for number in reached if number < stop), default=0)
        ends[rank.counterpart] = own_end
    return ends


def _more(good: Sequence[Summary], other: Summary) -> Iterator[LineDiff]:
    """Yield what OTHER repeats far more often than any good log."""
    for template, seen in other.templates.items():
        most = max(
            (each.templates[template].count for each in good if template in each.templates),
            default=0,
        )
        if most and seen.count >= 10 * most and seen.count >= most + 20 and not seen.serving:
            yield LineDiff(
                kind="more",
                severity=seen.severity,
                template=template,
                ranks=_sorted(seen.ranks),
                count=seen.count,
                line=seen.first,
                good_count=most,
            )


def _pair(new: list[LineDiff], missing: list[LineDiff]) -> list[LineDiff]:
    """Take the lines that say the same with other words out of both, and return them as changed."""
    changed = []
    words = [(diff, diff.template.split()) for diff in missing[:PAIRS_LIMIT]]
    for diff in new[:PAIRS_LIMIT]:
        own = diff.template.split()
        best, share = None, 0.6
        for index, (_, theirs) in enumerate(words):
            if len(theirs) != len(own) or len(own) < 4:
                continue
            equal = sum(a == b for a, b in zip(own, theirs, strict=True)) / len(own)
            if equal > share:
                best, share = index, equal
        if best is None:
            continue
        lost, _ = words.pop(best)
        missing.remove(lost)
        changed.append(
            msgspec.structs.replace(
                diff,
                kind="changed",
                good_template=lost.template,
                good_line=lost.good_line,
                good_count=lost.good_count,
            )
        )
    kept = {diff.template for diff in changed}
    new[:] = [diff for diff in new if diff.template not in kept]
    return changed


def _sorted(ranks: dict[str, int]) -> tuple[str, ...]:
    return tuple(rank or LAUNCH for rank in sorted(ranks, key=rank_order))
