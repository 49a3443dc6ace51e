"""What the lines of a log add up to: how far each rank has come, by the log alone.

A pure fold: `timeline = advance(timeline, lines, engine)`. It keeps a bounded amount whatever the
log's length, and is cheap to advance every second. The log is one witness of several: a stack tells
the phase of now, a log that of its last line.
"""

from __future__ import annotations

import itertools
import re
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from hangdoctor import frames, known_issues
from hangdoctor.engines import (
    ONLY_RANK,
    PHASES,
    Allocation,
    Bar,
    Milestone,
    Phase,
    Sign,
    load,
    names,
    needle,
)
from hangdoctor.launches import expected_ranks, rank_order
from hangdoctor.logs import stacks
from hangdoctor.logs.parse import ParserState, finish, parse
from hangdoctor.model import Frame

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hangdoctor.engines import Detect, Engine
    from hangdoctor.logs.parse import LogLine

TEXT_LIMIT = 2000
"""Characters of a line that a timeline keeps."""

SIGNS_KEPT = 20
"""Signs of each kind that are kept: the first ones. The newest one of each id comes on top."""

_MILESTONES_KEPT = 64
_POINTS_KEPT = 64
_TRACED_KEPT = 64


class Place(msgspec.Struct, frozen=True, gc=False):
    """A line of the log.

    Attributes:
        number: from 1; text: at most TEXT_LIMIT characters.
        time_s: its own stamp, or the last one before it; None where there was none yet.
    """

    number: int
    text: str
    time_s: float | None = None


class Reached(msgspec.Struct, frozen=True):
    """A milestone that a rank, or the launch, has passed.

    Attributes:
        id: of the milestone; phase: that it belongs to; phase_after: what comes after it.
        number, time_s: the line, as in Place.
        of_each_rank: every rank prints it, so that its absence means something.
        together: no rank comes past it before all have come to it.
        stamped: time_s is the line's own stamp.
    """

    id: str
    phase: Phase
    phase_after: Phase
    number: int
    time_s: float | None = None
    of_each_rank: bool = True
    together: bool = False
    stamped: bool = True


class RankLog(msgspec.Struct, frozen=True):
    """What the log says of one rank, or of the launch as a whole.

    Attributes:
        milestones: in the order of the log. The same one can come again, for a second model; what
            the log repeats without end is kept once.
        counts: how often each milestone came.
        phase: by its last milestone alone; `phase_of` reads it together with the launch's.
        last: its last line that is no bar; lines: how many it had.
        moved: line of its newest milestone, repeated ones included; 0 for none.
        exception: last line of its last traceback, such as "ValueError: too many values"; "" if
            none; raised_at: where it stands.
        raised_in: frames of that traceback, innermost first, the outermost ones left out where
            there are too many.
        caused_by: the exception that the traceback's chain begins with; "" if it is no chain.
        chained_at: where the words stand that join the newest link to those before it.
        allocates: id, bytes and line of the newest allocation of host memory; None for none.
    """

    milestones: tuple[Reached, ...] = ()
    counts: dict[str, int] = {}
    phase: Phase = "start"
    last: Place | None = None
    lines: int = 0
    moved: int = 0
    exception: str = ""
    raised_at: int = 0
    raised_in: tuple[Frame, ...] = ()
    caused_by: str = ""
    chained_at: int = 0
    allocates: tuple[str, int, int] | None = None


class BarLog(msgspec.Struct, frozen=True):
    """A progress bar.

    Attributes:
        done, total: its newest reading.
        number, time_s: where it last advanced.
        runs: how often it began anew: 2 while a second model is loaded.
        item: what it works on, such as "bs=256".
        points: its own clock, in seconds, where it first read so many done; the newest last.
        items: what it worked on when so many were done.
    """

    id: str
    phase: Phase
    done: int
    total: int
    number: int
    time_s: float | None = None
    runs: int = 1
    item: str = ""
    points: tuple[tuple[int, float], ...] = ()
    items: dict[int, str] = {}


class SignSeen(msgspec.Struct, frozen=True):
    """A line that means something besides progress.

    Attributes:
        rank: that printed it, "" for the launch.
        blamed: numbers of the ranks that it says others wait for, or that died.
        status: exit status that it tells, negative for a signal; pid: of that process.
        after_s: how long no forward had ended, where a watchdog tells it.
    """

    id: str
    kind: str
    rank: str
    number: int
    text: str
    time_s: float | None = None
    blamed: tuple[int, ...] = ()
    status: int | None = None
    pid: int | None = None
    after_s: float | None = None


class Mark(msgspec.Struct, frozen=True):
    """The newest line that holds a pattern, or quotes a frame, of a known issue.

    Attributes:
        number, text: of the line, as in Place; rank: that printed it, "" for the launch.
    """

    number: int
    text: str
    rank: str = ""


class Launch(msgspec.Struct, frozen=True):
    """What the log says of the launch itself; None where it does not.

    Attributes:
        sizes: numbers by the names of `Detect.sizes`; "dp_attention" is 1 where it is on.
        on_cpu: it runs without GPUs.
        version: of the engine; model: path of the model; "" where it is not said.
        every_rank_prints: its arguments are of a release in which every rank does.
        options: the known issues' patterns that its arguments match.
    """

    sizes: dict[str, int] = {}
    on_cpu: bool | None = None
    version: str = ""
    model: str = ""
    every_rank_prints: bool = False
    options: frozenset[str] = frozenset()


class Timeline(msgspec.Struct, frozen=True):
    """All that a log says, in bounded memory.

    Attributes:
        ranks: by the rank's name, "" for what is not one rank's.
        bars: by the bar's id.
        sizes: what a bar will go through, as a line before it says, by the bar's id.
        signs: the first SIGNS_KEPT of each kind and the newest of each id, in the order of the log:
            however many warnings come before an exception, it is there.
        marks: where the patterns and frames of known issues were last seen, by pattern.
        launch: what its arguments and its lines say of it.
        launches: how many the file holds; all else is about the last one.
        first_line: where it begins.
        lines: number of the last line; last: that line, if it is no bar.
        first_time_s, last_time_s: first and newest stamp.
        tracing: rank of the exception whose traceback is being printed.
        serving: the newest line, in a log without its start, of a server at work.
        stands: by rank, what the stacks in the log show of it since its last milestone; "" for a
            process that faulthandler does not name. `logged_stands` adds the one that is open.
        dump: whose lines come now.
    """

    ranks: dict[str, RankLog] = {}
    bars: dict[str, BarLog] = {}
    sizes: dict[str, tuple[int, ...]] = {}
    signs: tuple[SignSeen, ...] = ()
    marks: dict[str, Mark] = {}
    launch: Launch = Launch()
    launches: int = 0
    first_line: int = 1
    lines: int = 0
    last: Place | None = None
    first_time_s: float | None = None
    last_time_s: float | None = None
    tracing: str | None = None
    serving: Place | None = None
    stands: dict[str, stacks.Standing] = {}
    dump: stacks.Dump | None = None


def advance(timeline: Timeline, lines: Iterable[LogLine], engine: Engine) -> Timeline:
    """Return the timeline with further lines taken in.

    A second launch in the same file (its arguments, after ranks had begun) starts it over.
    """
    fold = _Fold(timeline, engine)
    for line in lines:
        fold.add(line)
    return fold.result()


def read_timeline(log: bytes, engine: Engine) -> Timeline:
    """Return the timeline of a whole log, its unterminated last line included."""
    lines, state = parse(ParserState(), log, engine)
    return advance(Timeline(), [*lines, *finish(state, engine)], engine)


def phase_of(timeline: Timeline, rank: str) -> Phase:
    """Return the phase that a rank is in by the log.

    What is printed for the whole launch (the HTTP server runs, ready) no rank can be behind of.
    """
    own = timeline.ranks[rank].phase if rank in timeline.ranks else "start"
    floor = timeline.ranks[""].phase if "" in timeline.ranks else "start"
    silent = (_silently_at(rank, timeline) if rank else None) or "start"
    return max(own, floor, silent, key=PHASES.index)


def phase_durations(timeline: Timeline) -> dict[Phase, float]:
    """Return how long each phase took, in seconds, from its first rank's line to the next one's.

    By the log's own stamps; phases without a stamp of their own or of what follows are left out.
    """
    begins: dict[Phase, float] = {}
    for log in timeline.ranks.values():
        for reached in log.milestones:
            if reached.time_s is not None:
                first_s = begins.get(reached.phase_after, reached.time_s)
                begins[reached.phase_after] = min(first_s, reached.time_s)
    ordered = sorted(begins.items(), key=lambda item: (item[1], PHASES.index(item[0])))
    return {
        phase: following[1] - begin_s for (phase, begin_s), following in itertools.pairwise(ordered)
    }


def lacking(timeline: Timeline, *, all_print: bool = False) -> dict[str, tuple[str, ...]]:
    """Return for each rank the milestones that others have passed and it has not, in order.

    Judged within the file, so by the same release, and by counts, so that a second model's are told
    apart. Only milestones that each rank prints; expected ranks that printed nothing are there,
    but none that is seen to print no such lines. Empty once the HTTP server runs: no rank can be
    behind of that.

    Args:
        timeline: of the log.
        all_print: it is known from elsewhere that every rank of this release prints.
    """
    ranks = _with_expected(timeline)
    if "" in timeline.ranks and PHASES.index(timeline.ranks[""].phase) >= PHASES.index("warmup"):
        return {}
    order: dict[str, None] = {}
    for log in ranks.values():
        order |= {reached.id: None for reached in log.milestones if reached.of_each_rank}
    most = {each: max(log.counts.get(each, 0) for log in ranks.values()) for each in order}
    found = {
        name: tuple(each for each in order if log.counts.get(each, 0) < most[each])
        for name, log in ranks.items()
        if all_print or _silently_at(name, timeline) is None
    }
    return {name: found[name] for name in sorted(found, key=rank_order) if found[name]}


def all_ranks_print(timeline: Timeline) -> bool:
    """Tell whether no rank is seen to keep silent about what it must have come past."""
    return all(_silently_at(name, timeline) is None for name in _with_expected(timeline))


def _with_expected(timeline: Timeline) -> dict[str, RankLog]:
    ranks = {name: log for name, log in timeline.ranks.items() if name}
    for name in expected_ranks(timeline.launch.sizes):
        ranks.setdefault(name, RankLog())
    return ranks


def _silently_at(name: str, timeline: Timeline) -> Phase | None:
    """Return how far a rank must have come that prints nothing of it; None where it does print.

    Some releases have the first rank of each group print alone: another one has then come past a
    milestone for all without what is printed before it. Replicas do not wait for one another.
    """
    sizes = timeline.launch.sizes
    replicas = sizes.get("dp", 1) > 1 and not sizes.get("dp_attention")
    counts = timeline.ranks.get(name, RankLog()).counts
    for other, log in timeline.ranks.items():
        if not other or (replicas and other.split()[0] != name.split(maxsplit=1)[0]):
            continue
        unheard = False
        for reached in log.milestones:
            if unheard and reached.together:
                return reached.phase_after
            unheard |= reached.of_each_rank and reached.id not in counts
    return None


def logged_stands(timeline: Timeline, engine: Engine) -> dict[str, stacks.Standing]:
    """Return what the stacks in the log show, by rank, the one that may still grow included."""
    if timeline.dump is None:
        return timeline.stands
    return _with_dump(timeline.stands, timeline.dump, engine, timeline.launch)


def detect_engine(log: bytes) -> str | None:
    """Return the name of the engine that printed a log, None where no line tells it.

    A few hundred kilobytes of its start are enough.
    """
    text = log.replace(b"\0", b"").decode("utf-8", "replace")
    for name in names():
        if any(re.search(pattern, text) for pattern in load(name).detect.log):
            return name
    return None


class _Compiled(msgspec.Struct, frozen=True):
    """What is looked for; each pattern with literal text to look for first.

    Attributes:
        issues, options, frames: of the known issues; frames by their function's name.
        bars: by their ids; sizes: of what they will go through; allocations: of host memory.
    """

    milestones: tuple[tuple[str, re.Pattern[str], Milestone], ...]
    signs: tuple[tuple[str, re.Pattern[str], Sign], ...]
    issues: tuple[tuple[str, re.Pattern[str]], ...]
    options: tuple[tuple[str, re.Pattern[str]], ...]
    frames: dict[str, tuple[str, ...]]
    bars: tuple[tuple[str, re.Pattern[str]], ...]
    sizes: tuple[tuple[str, str, re.Pattern[str]], ...]
    allocations: tuple[tuple[str, str, re.Pattern[str]], ...]


@lru_cache(maxsize=8)
def _compiled(
    name: str,
    milestones: tuple[Milestone, ...],
    signs: tuple[Sign, ...],
    bars: tuple[Bar, ...],
    allocations: tuple[Allocation, ...],
) -> _Compiled:
    lists = [part for issue in known_issues.load(name) for part in (issue.when, issue.unless)]
    by_function: dict[str, tuple[str, ...]] = {}
    for place in dict.fromkeys(place for part in lists for place in part.frames):
        function = place.rpartition(":")[2]
        by_function[function] = (*by_function.get(function, ()), place)
    patterns = dict.fromkeys(pattern for part in lists for pattern in part.log)
    options = dict.fromkeys(pattern for part in lists for pattern in part.options)
    return _Compiled(
        milestones=tuple((needle(m.pattern), re.compile(m.pattern), m) for m in milestones),
        signs=tuple((needle(s.pattern), re.compile(s.pattern), s) for s in signs),
        issues=tuple((needle(pattern), re.compile(pattern)) for pattern in patterns),
        options=tuple((needle(pattern), re.compile(pattern)) for pattern in options),
        frames=by_function,
        bars=tuple((bar.id, re.compile(bar.pattern)) for bar in bars),
        sizes=tuple((bar.id, needle(p), re.compile(p)) for bar in bars for p in bar.sizes),
        allocations=tuple((a.id, needle(a.pattern), re.compile(a.pattern)) for a in allocations),
    )


class _Fold:
    """The timeline while a batch of lines is taken in: its parts are copied once, when touched."""

    def __init__(self, timeline: Timeline, engine: Engine) -> None:
        self.old = timeline
        self.engine = engine
        self.compiled = _compiled(
            engine.name, engine.milestones, engine.signs, engine.bars, engine.allocations
        )
        self.changed = False
        self._open(timeline)

    def _open(self, timeline: Timeline) -> None:
        self.ranks = dict(timeline.ranks)
        self.bars = dict(timeline.bars)
        self.sizes = dict(timeline.sizes)
        self.signs: dict[str, list[SignSeen]] = {}
        for seen in timeline.signs:
            self.signs.setdefault(seen.kind, []).append(seen)
        self.marks = dict(timeline.marks)
        self.launch = timeline.launch
        self.launches = timeline.launches
        self.first_line = timeline.first_line
        self.lines = timeline.lines
        self.last = timeline.last
        self.first_time_s = timeline.first_time_s
        self.last_time_s = timeline.last_time_s
        self.tracing = timeline.tracing
        self.serving = timeline.serving
        self.stands = dict(timeline.stands)
        self.dump = timeline.dump
        self.new_lines: dict[str, int] = {}
        self.new_last: dict[str, Place] = {}
        self.new_moved: dict[str, int] = {}

    def result(self) -> Timeline:
        if not self.changed:
            return self.old
        for rank, last in self.new_last.items():
            log = self.ranks[rank]
            self.ranks[rank] = msgspec.structs.replace(
                log,
                last=last,
                lines=log.lines + self.new_lines[rank],
                moved=self.new_moved.get(rank, log.moved),
            )
        return Timeline(
            ranks=self.ranks,
            bars=self.bars,
            sizes=self.sizes,
            signs=tuple(
                sorted(itertools.chain(*self.signs.values()), key=lambda seen: seen.number)
            ),
            marks=self.marks,
            launch=self.launch,
            launches=self.launches,
            first_line=self.first_line,
            lines=self.lines,
            last=self.last,
            first_time_s=self.first_time_s,
            last_time_s=self.last_time_s,
            tracing=self.tracing,
            serving=self.serving,
            stands=self.stands,
            dump=self.dump,
        )

    def add(self, line: LogLine) -> None:
        self.changed = True
        milestone = None if line.bar else self._milestone(line.text)
        if milestone and milestone.from_start and not self._launch_log().counts:
            milestone = None  # a server that serves prints it, too
            self.serving = Place(line.number, line.text[:TEXT_LIMIT], line.time_s)
        if milestone and milestone.id == "args":
            self._begin(line)
        if line.time_s is not None:
            self.last_time_s = line.time_s
            if self.first_time_s is None:
                self.first_time_s = line.time_s
        self.lines = max(self.lines, line.number)
        if line.bar:
            self._add_bar(line, *line.bar)
            return
        place = Place(line.number, line.text[:TEXT_LIMIT], self.last_time_s)
        if self._add_to_dump(line, place):
            return
        self.last = place
        self._add_line(line.rank, place)
        if milestone:
            self._add_milestone(line, place, milestone)
        if line.time_s is not None:
            self.tracing = None
        self._add_sign(line, place)
        self._add_marks(line, place)
        for allocation, literal, pattern in self.compiled.allocations:
            if literal in line.text and (match := pattern.search(line.text)):
                name = line.rank or ONLY_RANK
                self._add_line(name, place)
                allocates = (allocation, int(float(match["gb"]) * 1e9), place.number)
                self.ranks[name] = msgspec.structs.replace(self.ranks[name], allocates=allocates)
        for bar_id, literal, pattern in self.compiled.sizes:
            if literal in line.text and (match := pattern.search(line.text)):
                self.sizes[bar_id] = tuple(map(int, re.findall(r"\d+", match["sizes"])))

    def _begin(self, line: LogLine) -> None:
        """Take the launch's arguments; of a new launch where ranks have begun, or one has ended.

        An engine that is embedded in a program prints them twice, which is still one launch.
        """
        last_words = {sign.id for sign in self.engine.signs if sign.ends_rank}
        ended = any(
            kind in ("fatal", "signal") or any(sign.id in last_words for sign in signs)
            for kind, signs in self.signs.items()
        )
        if ended or any(log.milestones for name, log in self.ranks.items() if name):
            self._open(Timeline(launches=self.launches, first_line=line.number))
            self.launches += 1
        self.launches = max(1, self.launches)
        launch = _launch_facts(self.launch, self.engine.detect, line.text)
        found = {
            pattern.pattern
            for literal, pattern in self.compiled.options
            if literal in line.text and pattern.search(line.text)
        }
        self.launch = msgspec.structs.replace(launch, options=self.launch.options | found)

    def _launch_log(self) -> RankLog:
        return self.ranks.get("", RankLog())

    def _milestone(self, text: str) -> Milestone | None:
        for literal, pattern, milestone in self.compiled.milestones:
            if literal in text and pattern.search(text):
                return milestone
        return None

    def _add_line(self, rank: str, place: Place) -> None:
        if rank not in self.ranks:
            self.ranks[rank] = RankLog()
        self.new_last[rank] = place
        self.new_lines[rank] = self.new_lines.get(rank, 0) + 1

    def _add_milestone(self, line: LogLine, place: Place, milestone: Milestone) -> None:
        name = "" if milestone.scope == "launch" else line.rank or ONLY_RANK
        if self.stands or self.dump:
            self._has_moved(name)
        if name != line.rank:
            self._add_line(name, place)  # the only rank of a launch has no name in its prefix
        self.new_moved[name] = place.number
        log = self.ranks[name]
        ready = self._launch_log().phase == "ready"
        if ready and milestone.id in log.counts:
            return  # a server that serves repeats some of them for ever
        if self.marks:
            self._forget_quoted(name)
        counts = log.counts | {milestone.id: log.counts.get(milestone.id, 0) + 1}
        milestones = log.milestones
        if milestone.id not in log.counts or (
            len(milestones) < _MILESTONES_KEPT and milestones[-1].id != milestone.id
        ):
            milestones += (
                Reached(
                    milestone.id,
                    milestone.phase,
                    milestone.phase_after,
                    place.number,
                    place.time_s,
                    of_each_rank=milestone.scope == "rank",
                    together=milestone.together,
                    stamped=line.time_s is not None,
                ),
            )
        phase = milestone.phase_after
        if not name:  # what holds for all is never taken back
            phase = max(phase, log.phase, key=PHASES.index)
        self.ranks[name] = msgspec.structs.replace(
            log, counts=counts, milestones=milestones, phase=phase
        )
        self.launches = max(1, self.launches)  # the arguments are lost where the log's head is
        if not ready and not self.launch.on_cpu and _found(self.engine.detect.cpu, line.text):
            self.launch = msgspec.structs.replace(self.launch, on_cpu=True)

    def _add_bar(self, line: LogLine, bar_id: str, done: int, total: int) -> None:
        old = self.bars.get(bar_id)
        if (self.stands or self.dump) and (old is None or done != old.done):
            self._has_moved("")
        if old is None or done < old.done or total != old.total:
            phase = next(bar.phase for bar in self.engine.bars if bar.id == bar_id)
            self.bars[bar_id] = BarLog(
                bar_id,
                phase,
                done,
                total,
                line.number,
                self.last_time_s,
                runs=old.runs + 1 if old else 1,
            )
        elif done > old.done:
            self.bars[bar_id] = msgspec.structs.replace(
                old, done=done, number=line.number, time_s=self.last_time_s
            )
        self.bars[bar_id] = self._with_clock(self.bars[bar_id], line.text)

    def _with_clock(self, bar: BarLog, text: str) -> BarLog:
        """Take in what a bar says besides its count: its clock, and what it works on."""
        match = next(p for bar_id, p in self.compiled.bars if bar_id == bar.id).search(text)
        item = (match.groupdict().get("item") or "") if match else ""
        if item != bar.item:
            items = dict(list(bar.items.items())[-_POINTS_KEPT:])
            bar = msgspec.structs.replace(bar, item=item, items=items | {bar.done: item})
        clock = _BAR_CLOCK.search(text, match.end() if match else 0)
        if clock is None or (bar.points and bar.points[-1][0] >= bar.done):
            return bar
        hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        point = (bar.done, 3600.0 * hours + 60 * minutes + seconds)
        return msgspec.structs.replace(bar, points=(*bar.points[-_POINTS_KEPT:], point))

    def _add_sign(self, line: LogLine, place: Place) -> None:
        text = line.text
        if line.time_s is None:
            if match := _TRACED_FRAME.match(text):
                # Outside of a traceback it is one whose beginning the log does not have.
                self.tracing = self.tracing or ""
                self._add_raised(self.tracing, match, line.number)
            elif self.tracing is not None and text in _CHAINED:
                self._add_link(self.tracing, line.number)
            elif self.tracing is not None and _ERROR_LINE.match(text):
                self._add_exception(self.tracing, text, line.number)
        found = self._sign(text)
        if found is None:
            return
        sign, match = found
        if sign.of_any_process and line.time_s is not None:
            return  # a run-time library prints it bare: the engine's prefix is of one who quotes it
        told = match.groupdict()
        seen = SignSeen(
            sign.id,
            sign.kind,
            line.rank,
            line.number,
            place.text,
            place.time_s,
            tuple(int(number) for number in re.findall(r"\d+", told.get("blamed") or "")),
            _number(told.get("status")),
            _number(told.get("pid")),
            float(told["after"]) if told.get("after") else None,
        )
        if sign.kind == "stack" and seen.pid is not None:
            self._end_dump()
            self.dump = stacks.begin(line, place.time_s, dumped_pid=seen.pid)
        if seen.after_s is not None:
            self._add_watchdog(seen, final=sign.kind == "timeout")
        traced = _TRACEBACK in text
        if sign.kind == "exception" or traced:
            if self.tracing is None or line.time_s is not None:
                self.tracing = line.rank
            if traced:
                self._add_raised(self.tracing, None, line.number)
            elif "Traceback" not in text:
                self._add_exception(line.rank, text, line.number)
        kept = self.signs.setdefault(sign.kind, [])
        newest = kept[SIGNS_KEPT:]
        kept[SIGNS_KEPT:] = [other for other in newest if other.id != sign.id]
        kept.append(seen)

    def _add_to_dump(self, line: LogLine, place: Place) -> bool:
        """Take a line that belongs to a stack; tell whether it does."""
        if line.time_s is None:
            if self.dump is not None and (longer := stacks.extend(self.dump, line.text)):
                self.dump = longer
                self._add_marks(msgspec.structs.replace(line, rank=self.dump.said_by), place)
                return True
            if begun := stacks.begin(line, place.time_s, dumped_pid=None):
                self._end_dump()
                self.dump = begun
                return not begun.cause  # its cause is a line of its own
        if self.dump is not None and not self.dump.paused:
            self.dump = msgspec.structs.replace(self.dump, paused=True)
        return False

    def _end_dump(self) -> None:
        if self.dump is not None:
            self.stands = _with_dump(self.stands, self.dump, self.engine, self.launch)
            self.dump = None

    def _add_watchdog(self, seen: SignSeen, *, final: bool) -> None:
        """Note with a rank's dump what its watchdog says after it."""
        if self.dump is not None and self.dump.said_by == seen.rank:
            self._end_dump()
        rank = seen.rank or ONLY_RANK
        if standing := self.stands.get(rank):
            self.stands[rank] = msgspec.structs.replace(standing, after_s=seen.after_s, final=final)

    def _has_moved(self, rank: str) -> None:
        """Forget what the stacks showed of a rank that has passed a milestone; "": of all."""
        self._end_dump()
        if rank:
            self.stands.pop(rank, None)
        else:
            self.stands.clear()

    def _forget_quoted(self, rank: str) -> None:
        """Forget the frames of known issues that a rank, with "" any, stood in before it moved."""
        quoted = {place for places in self.compiled.frames.values() for place in places}
        self.marks = {
            pattern: mark
            for pattern, mark in self.marks.items()
            if pattern not in quoted or (rank and mark.rank != rank)
        }

    def _add_marks(self, line: LogLine, place: Place) -> None:
        if self._launch_log().phase == "ready":
            return  # they are about what keeps a launch from it
        text = line.text
        for literal, pattern in self.compiled.issues:
            if literal in text and pattern.search(text):
                self.marks[pattern.pattern] = Mark(place.number, place.text, line.rank)
        if text.endswith(")") and (match := _QUOTED_FRAME.fullmatch(text)):
            frame = Frame(match["function"], match["path"], int(match["line"]))
            for wanted in self.compiled.frames.get(frame.function.rpartition(".")[2], ()):
                if frames.matches(frame, wanted):
                    self.marks[wanted] = Mark(place.number, place.text.strip(), line.rank)

    def _sign(self, text: str) -> tuple[Sign, re.Match[str]] | None:
        for literal, pattern, sign in self.compiled.signs:
            if literal in text and (match := pattern.search(text)):
                return sign, match
        return None

    def _add_link(self, rank: str, number: int) -> None:
        """Note that the traceback to come is of an exception that another one brought about."""
        log = self.ranks.get(rank, RankLog())
        self.ranks[rank] = msgspec.structs.replace(
            log, caused_by=log.caused_by or log.exception, chained_at=number
        )

    def _add_raised(self, rank: str, match: re.Match[str] | None, number: int) -> None:
        """Take in the next frame of a traceback; None where another traceback begins."""
        log = self.ranks.get(rank, RankLog())
        if match is None and number - log.chained_at > _LINK_LINES:
            log = msgspec.structs.replace(log, caused_by="")
        frames = log.raised_in if match else ()
        if match:
            frame = Frame(match["function"], match["path"], int(match["line"]))
            frames = (frame, *frames)[:_TRACED_KEPT]
        self.ranks[rank] = msgspec.structs.replace(log, raised_in=frames)

    def _add_exception(self, rank: str, text: str, number: int) -> None:
        log = self.ranks.get(rank, RankLog())
        self.ranks[rank] = msgspec.structs.replace(
            log, exception=text[:TEXT_LIMIT], raised_at=number
        )


def _with_dump(
    stands: dict[str, stacks.Standing], dump: stacks.Dump, engine: Engine, launch: Launch
) -> dict[str, stacks.Standing]:
    """Return what the stacks show with a further one; that of a process that is no rank is not."""
    dump = stacks.close(dump)
    rank = stacks.rank_of(dump, engine, expected_ranks(launch.sizes))
    if not rank and dump.tool == "py-spy":
        return dict(stands)
    return stands | {rank: stacks.see(stands.get(rank), dump)}


_BAR_CLOCK = re.compile(r"\[(?:(\d+):)?(\d+):(\d\d)<")
"""The time that a bar of tqdm has taken, before the time that it thinks is left."""

_QUOTED_FRAME = re.compile(r"\s*(?P<function>[\w.<>]+) \((?P<path>[^\s():]+):(?P<line>\d+)\)")
"""A frame as py-spy prints it, which SGLang's watchdog does into the log."""


def _number(text: str | None) -> int | None:
    return int(text) if text else None


_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = frozenset(
    {
        "During handling of the above exception, another exception occurred:",
        "The above exception was the direct cause of the following exception:",
    }
)
_LINK_LINES = 2
"""So far below such words the next traceback begins: an empty line is between them."""
_TRACED_FRAME = re.compile(
    r'\s*File "(?P<path>[^"]{1,300})", line (?P<line>\d{1,9}), in (?P<function>\S{1,300})'
)
_ERROR_LINE = re.compile(
    r"[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Timeout|Failure|OutOfMemory\w*)(?::|$)"
)


def _launch_facts(launch: Launch, detect: Detect, text: str) -> Launch:
    """Return the facts of a launch with what one line adds."""
    sizes = dict(launch.sizes)
    for name, patterns in detect.sizes.items():
        for pattern in patterns:
            if match := re.search(pattern, text):
                sizes[name] = int(match[1]) if match.re.groups else 1
                break
    return Launch(
        sizes=sizes,
        on_cpu=_found(detect.cpu, text),
        version=_first_group(detect.version, text) or launch.version,
        model=_first_group(detect.model, text) or launch.model,
        every_rank_prints=launch.every_rank_prints or _found(detect.every_rank_prints, text),
    )


def _found(patterns: tuple[str, ...], text: str) -> bool:
    return any(re.search(pattern, text) for pattern in patterns)


def _first_group(patterns: tuple[str, ...], text: str) -> str:
    for pattern in patterns:
        if match := re.search(pattern, text):
            return match[1] or ""
    return ""
