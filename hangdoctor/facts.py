"""From snapshots and a log to facts: the only place that compares snapshots or ranks.

A fold: `facts = step(facts, snapshot, log)`, and `derive` is its reduction over a recording. It
reads no clock; "now" is the time of the last snapshot. `None` means not known.
"""

from __future__ import annotations

import re
import zlib
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import msgspec

from hangdoctor import gpus as gpu_readings
from hangdoctor import tracks
from hangdoctor.blocked import Blocked, LockWait, blocked_threads, describe_peek, lock_waits
from hangdoctor.busy import Busy, Loop, find_loop
from hangdoctor.collectives import Collectives, compare
from hangdoctor.engines import (
    PHASES,
    Cache,
    Engine,
    Phase,
    Role,
    Sign,
    Wait,
    is_compiler,
    is_observer,
    load,
    matches_any,
    needle,
    rank_name,
    role_of,
)
from hangdoctor.frames import call_path, find_wait, first_place, place
from hangdoctor.gpus import Card
from hangdoctor.launches import Sizes, expected_count, expected_ranks, rank_order, sizes_of
from hangdoctor.logs.parse import LogLine, ParserState, finish, parse
from hangdoctor.logs.stacks import is_part
from hangdoctor.logs.timeline import RankLog, Timeline, advance, logged_stands, phase_of
from hangdoctor.model import (
    SECTIONS,
    Caches,
    FileLock,
    FlightRecorder,
    Frame,
    Gpu,
    Gpus,
    Header,
    Host,
    LogPosition,
    Missing,
    Process,
    Processes,
    Snapshot,
    Stacks,
    Struct,
    Waits,
    Weights,
)
from hangdoctor.nccl import Ras, see_ras
from hangdoctor.tracks import Track
from hangdoctor.units import rate
from hangdoctor.weights import SAMPLES_KEPT, Loading, see_weights

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hangdoctor.logs.stacks import Standing
    from hangdoctor.recording import Recording

MOVING_S = 5.0
"""A rank that moved within the last so many seconds is moving."""
WORK_PCT = 5.0
"""Descendants with this much of a core between them are at work."""
HELP_FACTOR = 6.0
"""Descendants that are no compilers count for so many times the stillness that is suspicious: with
the default of 20 s, 120 s. One that spins must not count for ever, whatever it is."""
BUILD_PAUSE_S = 10.0
"""Children that ended so soon after a compiler was seen count as the build's, and as nobody's after
a program that looks at processes."""
TEMPLATES_REMEMBERED = 4096
RAS_S = 5.0
"""Counts that differ in a healthy job have moved on after so long."""
RAS_AGAIN_S = 10.0
"""Where RAS has not answered."""
WEIGHTS_S, WEIGHTS_SHARE = 2.0, 10.0
"""Between two looks at the weights, and how much longer than a look that is at the least."""
CHECKPOINT_S, GROWING_S, UNKNOWN_S = 60.0, 5.0, 15.0
"""The same for the model's files: found, still being downloaded, not found."""
CACHES_S = 5.0
POLLS_PER_S = (3.0, 30.0)
"""filelock looks every 50 ms whether a lock is free, PyTorch's FileBaton every 100, aiter's 200."""
DUMPS_S = 30.0
"""PyTorch writes its dumps once, minutes after a collective got stuck."""


class RankFacts(Struct, frozen=True):
    """One rank as it stands now.

    Attributes:
        name: as the log names it, "TP0".
        pid: None for a rank that is only known from the log or from the size of the launch.
        present: its process is there; False if it ended or never came, None if not known.
        state: of its main thread, as the kernel says.
        phase: whose code it runs; None if neither stack nor log tells.
        phase_since_s: time at which it was first seen in that phase.
        in_phase_s: how long it has been in it, by the log's stamps where they reach further back
            than our looks; at least so long where it was in it when we came. None without a
            process or a phase.
        wait: what its stack waits in; None if in nothing known, or no stack.
        stack: Python frames of its main thread, innermost first; None where never seen.
        place: the innermost frame, for people; "" without a stack.
        operation: names of the functions from the wait's frame outwards: equal for two ranks that
            wait in the same operation.
        moving: it moved in the last seconds; None if nothing could show it.
        still_s: how long it was seen not to move; None if it is moving or was not watched.
        moved_by: what moved last.
        cpu_pct: of one core.
        cards: indices of its GPUs; empty where not known.
        reading: what its GPUs do.
        log_phase: the phase by the log alone.
        phase_sure: the phase is told by the log or by a frame that belongs to it alone.
        settled_s: how long its stack has shown nothing new, over at least two dumps; else None.
        held_s: how long every dump has shown it in the same wait; None where it is in none.
        not_idle_s: how long no dump has shown it waiting for requests; None if none ever did.
        stack_age_s: how old its last dump is, None where none was made; stack_missing: why the
            one after that failed.
        stack_line: the line of the log that its stack is read from; None where we dumped it.
        stack_native: native functions upon that stack, innermost first; only the log's have them.
        counted_s: how long no forward had ended by the engine's own watchdog, at that line and as
            far as the same stack stands before it. None where it says nothing, or only that the
            rank is still being built.
        counted_out: that was the watchdog which ends the launch.
        runaway_s: how long it has made tiny writes at a rate that nothing explains; else None.
        loop: what its busiest thread spins in; None where none spins, or nothing tells.
        caught_in: the calls in which its busiest thread was caught by its registers, for people; ""
            where it was not peeked at.
        helped_by: name of a busy process below it that is no compiler; else "".
        compiling: its stack goes through a kernel compiler or tuner.
        on_storage: the kernel function, where a thread of it waits for a file system; else "". None
            where that could not be read.
        kernel: what the kernel says its main thread waits in, "0" or "" where nothing.
        blocked: the system call that its main thread is blocked in, and what for; None where it
            runs or that is not known.
        locks: that it may be waiting for; the one that it does, where the kernel tells.
        polls_per_s: how often it wakes from its sleep, where no stack tells what for and one that
            polls for a lock file wakes as often; else None.
        may_poll: locks that it then may poll for.
        blocked_besides: its other threads that wait for something in particular, longest first.
        lock_waits: its threads that wait for locks of Python's, which tell no owner, the main
            thread first; empty where that is not one of them.
    """

    name: str
    pid: int | None = None
    present: bool | None = None
    state: str | None = None
    phase: Phase | None = None
    phase_since_s: float = 0.0
    in_phase_s: float | None = None
    wait: Wait | None = None
    stack: tuple[Frame, ...] | None = None
    place: str = ""
    operation: tuple[str, ...] = ()
    moving: bool | None = None
    still_s: float | None = None
    moved_by: str = ""
    cpu_pct: float | None = None
    cards: tuple[int, ...] = ()
    reading: gpu_readings.Reading | None = None
    log_phase: Phase | None = None
    phase_sure: bool = False
    settled_s: float | None = None
    held_s: float | None = None
    not_idle_s: float | None = None
    stack_age_s: float | None = None
    stack_missing: Missing | None = None
    stack_line: int | None = None
    stack_native: tuple[str, ...] = ()
    counted_s: float | None = None
    counted_out: bool = False
    runaway_s: float | None = None
    loop: Loop | None = None
    caught_in: str = ""
    helped_by: str = ""
    compiling: bool = False
    on_storage: str | None = ""
    kernel: str = ""
    blocked: Blocked | None = None
    blocked_besides: tuple[Blocked, ...] = ()
    lock_waits: tuple[LockWait, ...] = ()
    locks: tuple[FileLock, ...] = ()
    polls_per_s: float | None = None
    may_poll: tuple[FileLock, ...] = ()


class MemoryUse(Struct, frozen=True):
    """How full a memory was at a time, without the page cache that the kernel takes back first."""

    of: str
    used_bytes: int
    limit_bytes: int
    at_s: float

    @property
    def share(self) -> float:
        """The part that is used, from 0 to 1."""
        return self.used_bytes / self.limit_bytes


class HostMemory(Struct, frozen=True):
    """Host memory that a rank has said to allocate.

    Attributes:
        id: of the allocation; number: of its line.
        total_bytes: that it will be.
        base_bytes: what the process had when that was first seen; late: it may have had less.
        samples: times, and what it has grown by since; the newest last.
    """

    id: str
    number: int
    total_bytes: int
    base_bytes: int
    late: bool = False
    samples: tuple[tuple[float, int], ...] = ()


class CacheSeen(Struct, frozen=True):
    """A cache of a kernel compiler.

    Attributes:
        path, newest_wall_s: as in CacheDirectory.
        grew_at_s: when it was last seen to grow; times: how often it was.
    """

    path: str
    newest_wall_s: float
    grew_at_s: float | None = None
    times: int = 0


class Facts(Struct, frozen=True):
    """All that is known after the last snapshot.

    Attributes:
        header, engine: of the recording; the engine's name.
        at_s: time of the last snapshot; first_at_s: of the first. None before any.
        timeline: the log, folded; parser: where its reader stands.
        templates: words of lines that were there before; news: ranks of which the log said
            something new since the last snapshot, with the time stamp of that line; muted: what
            comes without a stamp now is a watchdog's, and none.
        sections: by section name, Missing if the last look failed and None if it succeeded;
            a section that was never looked at is absent.
        tracks: all processes that were seen, by pid.
        parents: titles of what stands above the processes, by pid.
        cards: GPUs by index.
        host: first and last view of the machine; memory_peak: the tightest that memory was.
        caches: of kernel compilers, by their id.
        host_memory: that ranks allocate now, by rank.
        ras: what NCCL's RAS counts; None where it was not asked, or did not answer.
        collectives: what the Flight Recorder's dumps say; None where none was read.
        unusable_dumps: files of it that could not be used, with the reason.
        log_moved_at_s: when the log last said something new.
        rank_log_at_s: the same by rank.
        bars_at_s: when each progress bar last advanced; bar_news: bars that have since the last
            snapshot.
        stamped_at_s: when the log's newest time stamp was written.
        log_silent_s: time since the log was written at all, whatever it said.
        older_log: what the log held when we came was another launch's.
        ranks: one a rank, in the order of their names.
        locks: on files, as last seen.
        blocked: what the main threads of the processes that have a role are blocked in, by pid.
        sizes: numbers of ranks, as command line and log tell them.
        expected: names of the ranks that this machine should have; empty where not known.
        expected_count: how many that are, known also where their names are not.
        cpu_launch: the launch uses no GPU; None where not known.
    """

    header: Header
    engine: str
    at_s: float | None = None
    first_at_s: float | None = None
    timeline: Timeline = Timeline()
    parser: ParserState = ParserState()
    templates: frozenset[int] = frozenset()
    news: dict[str, float | None] = {}
    muted: bool = False
    sections: dict[str, Missing | None] = {}
    tracks: dict[int, Track] = {}
    cards: dict[int, Card] = {}
    parents: dict[int, str] = {}
    host_first: Host | None = None
    host: Host | None = None
    memory_peak: MemoryUse | None = None
    loading: Loading | None = None
    caches: dict[str, CacheSeen] = {}
    host_memory: dict[str, HostMemory] = {}
    ras: Ras | None = None
    collectives: Collectives | None = None
    unusable_dumps: dict[str, Missing] = {}
    log_moved_at_s: float | None = None
    rank_log_at_s: dict[str, float] = {}
    bars_at_s: dict[str, float] = {}
    bar_news: frozenset[str] = frozenset()
    stamped_at_s: float | None = None
    log_silent_s: float | None = None
    older_log: bool = False
    ranks: tuple[RankFacts, ...] = ()
    locks: tuple[FileLock, ...] = ()
    blocked: dict[int, Blocked] = {}
    sizes: Sizes = {}
    expected: tuple[str, ...] = ()
    expected_count: int | None = None
    cpu_launch: bool | None = None

    @property
    def watched_s(self) -> float:
        """Seconds from the first snapshot to the last."""
        return (self.at_s or 0.0) - (self.first_at_s or 0.0)

    @property
    def launcher(self) -> Track | None:
        """The process that launched the ranks: of several, such as a shell's, the innermost."""
        launchers = [track for track in self.tracks.values() if track.role == "launcher"]
        parents = {track.process.ppid for track in self.tracks.values() if track.rank}
        nearest = [track for track in launchers if track.process.pid in parents]
        return next(iter(nearest or launchers[-1:]), None)

    @property
    def launch_log_phase(self) -> Phase | None:
        """The phase that the log's lines for the whole launch tell."""
        launch = self.timeline.ranks.get("")
        said = launch.phase if launch and launch.milestones else None
        return max(said, self.bar_phase, key=phase_index)

    @property
    def bar_phase(self) -> Phase | None:
        """The furthest phase that has shown a progress bar; no rank is behind of it.

        Only the first rank has bars. That it loads or captures proves that all have come so far:
        the set-up of the groups, and the barrier after the load, end for all ranks together. Not
        for those of another replica.
        """
        if self.sizes.get("dp", 1) > 1 and not self.sizes.get("dp_attention"):
            return None
        phases = [bar.phase for bar in self.timeline.bars.values()]
        return max(phases, key=phase_index, default=None)

    @property
    def log_is_whole(self) -> bool:
        """Whether the log was read from the launch's start: then an absent line proves something.

        A file can have lost its head before we came: the line with the arguments shows that it has
        not.
        """
        launch = self.timeline.ranks.get("")
        from_start = self.header.log is None or self.header.log.from_start
        return from_start and launch is not None and "args" in launch.counts

    @property
    def lacks_log(self) -> bool:
        """Whether nothing of this launch's own log was seen, though there is a log."""
        return self.older_log and not self.timeline.lines

    @property
    def cards_untold(self) -> Missing | None:
        """Why it cannot be told which card is whose; None where it can, or no card is in use."""
        ranks = [rank for rank in self.ranks if rank.present and rank.pid is not None]
        seen = [card.last for card in self.cards.values() if card.last is not None]
        if self.cpu_launch or not ranks or any(rank.cards for rank in ranks):
            return None
        named = [process for gpu in seen for process in gpu.processes or ()]
        hint = "run hangdoctor on the node itself, in its own PID namespace"
        if named and all(process.name == "" for process in named):
            detail = "the driver's PIDs are of another namespace, and no open device file tells it"
        elif seen and all(gpu.processes is None for gpu in seen):
            detail = "the driver names no processes, and no open device file tells it"
        else:
            return None
        return Missing(reason="unsupported", detail=detail, hint=hint)

    def name_of(self, pid: int, comm: str = "") -> str:
        """Return a process's name for people: its rank or role, else its pid and program."""
        track = self.tracks.get(pid)
        if track is not None and (track.rank or track.role):
            return track.rank or track.role
        comm = comm or (track.process.comm if track is not None else "")
        return f"pid {pid} ({comm})" if comm else f"pid {pid}"

    def track(self, rank: RankFacts) -> Track | None:
        """Return the track of a rank's process."""
        return self.tracks.get(rank.pid) if rank.pid is not None else None

    def rank(self, name: str) -> RankFacts | None:
        """Return a rank by name."""
        return next((rank for rank in self.ranks if rank.name == name), None)


def begin(header: Header, engine: Engine) -> Facts:
    """Return the facts before anything was seen."""
    return Facts(header=header, engine=engine.name)


def derive(recording: Recording, engine: Engine) -> Facts:
    """Fold a whole recording."""
    facts = begin(recording.header, engine)
    for snapshot, blocks in recording.steps():
        facts = step(facts, snapshot, blocks, engine)
    return facts


def step(facts: Facts, snapshot: Snapshot | None, blocks: Iterable[bytes], engine: Engine) -> Facts:
    """Take in a snapshot and the log's bytes up to it; None stands for a log without snapshots."""
    newest_s = facts.timeline.last_time_s
    facts = hear(facts, blocks, engine)
    if snapshot is None:
        facts = _finish_log(facts, engine)
    else:
        facts = _date_news(facts, snapshot)
        if facts.timeline.last_time_s != newest_s or facts.stamped_at_s is None:
            written_at_s = snapshot.at_s - (facts.log_silent_s or 0.0)
            facts = msgspec.structs.replace(facts, stamped_at_s=written_at_s)
        facts = msgspec.structs.replace(
            facts,
            at_s=snapshot.at_s,
            first_at_s=snapshot.at_s if facts.first_at_s is None else facts.first_at_s,
            sections=facts.sections | _sections(snapshot),
        )
        first = facts.at_s == facts.first_at_s
        facts = _see_processes(facts, snapshot, engine)
        if first and _log_is_older(facts):
            facts = msgspec.structs.replace(
                facts, timeline=Timeline(), rank_log_at_s={}, log_moved_at_s=None, older_log=True
            )
        facts = _see_host_memory(facts, snapshot)
        facts = _see_stacks(facts, snapshot, engine)
        facts = _see_waits(facts, snapshot)
        facts = _see_weights(facts, snapshot)
        facts = _see_caches(facts, snapshot, engine)
        facts = _see_gpus(facts, snapshot)
        if isinstance(snapshot.host, Host):
            facts = _see_host(facts, snapshot.host, snapshot.at_s)
        if snapshot.nccl_ras is not None:
            ras = see_ras(facts.ras, snapshot.nccl_ras, snapshot.at_s)
            facts = msgspec.structs.replace(facts, ras=ras)
        if snapshot.flight_recorder is not None:
            facts = see_dumps(facts, snapshot.flight_recorder)
    return _conclude(facts, engine)


def see_dumps(facts: Facts, recorder: FlightRecorder | Missing) -> Facts:
    """Take in dumps of the Flight Recorder, of whatever moment they are."""
    if isinstance(recorder, Missing):
        return facts
    found = compare(recorder) if recorder.dumps else None
    return msgspec.structs.replace(
        facts, collectives=found or facts.collectives, unusable_dumps=recorder.unusable
    )


def next_looks(facts: Facts) -> dict[str, float]:
    """Say how often each collector should look now, in seconds between two looks.

    Stacks come at once when something looks stuck: a quarter of the stillness that is suspicious.
    """
    stall_after_s = facts.header.stall_after_s
    still = launch_still_s(facts)
    stuck = still is not None and still >= stall_after_s / 4
    stacks_s = min(10.0, max(1.0, stall_after_s / (4 if stuck else 2)))
    looks = {
        "processes": 1.0,
        "gpus": 1.0,
        "files": 5.0,
        "stacks": stacks_s,
        "waits": stacks_s,
        "host": 2.0,
    }
    if any(
        rank.polls_per_s is not None or (rank.wait is not None and rank.wait.kind == "lock")
        for rank in facts.ranks
    ):
        looks["locks"] = stacks_s
    if loaders(facts):
        loading = facts.loading
        looks["weights"] = max(WEIGHTS_S, WEIGHTS_SHARE * loading.took_s if loading else 0.0)
        known = loading is not None and loading.checkpoint is not None
        growing = loading is not None and loading.unfinished
        looks["checkpoint"] = GROWING_S if growing else CHECKPOINT_S if known else UNKNOWN_S
    if any(rank.compiling for rank in facts.ranks):
        looks["caches"] = CACHES_S
    if stuck and facts.cards and not facts.cpu_launch:
        looks["nccl_ras"] = RAS_S if facts.ras else RAS_AGAIN_S
        looks["flight_recorder"] = DUMPS_S
    return looks


def loaders(facts: Facts) -> tuple[int, ...]:
    """Return the pids of the ranks that may still load weights."""
    return tuple(
        rank.pid
        for rank in facts.ranks
        if rank.pid is not None
        and rank.present
        and phase_index(rank.phase) <= phase_index("weights")
    )


def model_of(facts: Facts, engine: Engine) -> str:
    """Return path or name of the model, as the launch was told; "" where that is not known."""
    launcher = facts.launcher
    command = launcher.process.title if launcher else " ".join(facts.header.command)
    for pattern in engine.detect.model:
        if match := re.search(pattern, command):
            return match[1]
    return facts.timeline.launch.model


def launch_still_s(facts: Facts) -> float | None:
    """Return how long nothing of the launch was seen to move; None before two looks."""
    if facts.at_s is None or facts.first_at_s is None:
        return None
    latest = facts.first_at_s
    if facts.log_moved_at_s is not None:
        latest = max(latest, facts.log_moved_at_s)
    for track in _movers(facts):
        if track.moved_at_s is not None:
            latest = max(latest, track.moved_at_s)
    return facts.at_s - latest


def log_still_s(facts: Facts) -> float | None:
    """Return how long the log has said nothing new, by its own time stamps where it is older."""
    if facts.at_s is None or facts.log_moved_at_s is None:
        return None
    return facts.at_s - facts.log_moved_at_s


def stamp_age_s(facts: Facts, stamp_s: float | None) -> float | None:
    """Return how long ago a line of the log was written, by its time stamp; None if not known.

    At least so long: lines without a stamp may have followed the newest one before we came.
    """
    newest_s, newest_at_s = facts.timeline.last_time_s, facts.stamped_at_s
    if stamp_s is None or newest_s is None or newest_at_s is None or facts.at_s is None:
        return None
    return max(0.0, newest_s - stamp_s) + facts.at_s - newest_at_s


def phase_index(phase: Phase | None) -> int:
    """Return the place of a phase in the usual order; -1 for none."""
    return PHASES.index(phase) if phase else -1


def _movers(facts: Facts) -> list[Track]:
    """Return the processes whose progress is the launch's.

    The ranks; and until the server runs also what is there besides them, since before that the
    launcher imports and spawns. Later it serves requests, which is no progress.
    """
    before_server = phase_index(facts.launch_log_phase) < phase_index("warmup")
    return [
        track
        for track in facts.tracks.values()
        if track.owner is None and (track.rank or before_server)
    ]


def _sections(snapshot: Snapshot) -> dict[str, Missing | None]:
    found: dict[str, Missing | None] = {}
    for name in SECTIONS:
        section = getattr(snapshot, name)
        if section is not None:
            found[name] = section if isinstance(section, Missing) else None
    return found


def hear(facts: Facts, blocks: Iterable[bytes], engine: Engine) -> Facts:
    """Take in bytes of the log alone; the next `step` dates what they say.

    For a log that was there before the first snapshot and may be long: it is read in blocks.
    """
    for block in blocks:
        lines, parser = parse(facts.parser, block, engine)
        facts = _take_lines(msgspec.structs.replace(facts, parser=parser), lines, engine)
    return facts


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


def _date_news(facts: Facts, snapshot: Snapshot) -> Facts:
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


def _log_is_older(facts: Facts) -> bool:
    """Tell whether the log was last written before the launch began: it is another launch's.

    A log that is opened to append holds the last start until the new one says its first word.
    """
    ages = [
        track.process.age_s
        for track in facts.tracks.values()
        if track.role == "launcher" and track.process.age_s is not None
    ]
    return bool(ages) and facts.log_silent_s is not None and facts.log_silent_s > max(ages) + 1


def _finish_log(facts: Facts, engine: Engine) -> Facts:
    """Take in the unterminated last line of a log that will not grow."""
    return _take_lines(facts, finish(facts.parser, engine), engine)


def _see_processes(facts: Facts, snapshot: Snapshot, engine: Engine) -> Facts:
    section = snapshot.processes
    if not isinstance(section, Processes):
        return facts
    at_s = snapshot.at_s
    known = dict(facts.tracks)
    present = {process.pid for process in section.processes}
    reaped_s = tracks.reaped(known, present)
    for process in section.processes:
        before = known.get(process.pid)
        if before is not None and before.process.start_ticks != process.start_ticks:
            before = None  # the pid was given to another process
        known[process.pid] = tracks.see_process(
            before, process, at_s, reaped_s=reaped_s.get(process.pid, 0.0)
        )
    for pid, track in known.items():
        if (pid not in present and track.present) or pid in section.ended:
            known[pid] = tracks.see_end(track, at_s, section.ended.get(pid))
    for pid in section.roots:
        if pid in section.ended and pid not in known:  # it ended before the first look
            unseen = Process(pid=pid, ppid=0, start_ticks=0, title="", comm="", state="", cpu_s=0.0)
            known[pid] = tracks.see_end(
                tracks.see_process(None, unseen, at_s), at_s, section.ended[pid]
            )
    # Compilers come and go by the thousand; what they used is in their parents' counters.
    known = {
        pid: track
        for pid, track in known.items()
        if track.present or track.role or pid in section.roots
    }
    known = _name_processes(known, section.roots, engine)
    workers: dict[int, list[Track]] = {pid: [] for pid, track in known.items() if track.role}
    for track in known.values():
        if track.owner is not None and track.present:
            workers.setdefault(track.owner, []).append(track)
    stands = logged_stands(facts.timeline, engine)
    for pid, helpers in workers.items():
        known[pid] = _credit_descendants(
            _see_observer(known[pid], helpers, stands, at_s),
            helpers,
            at_s,
            HELP_FACTOR * facts.header.stall_after_s,
        )
    return msgspec.structs.replace(facts, tracks=known, parents=section.parents)


def _see_host_memory(facts: Facts, snapshot: Snapshot) -> Facts:
    """Follow the growth of ranks whose last word was how much host memory they allocate."""
    if not isinstance(snapshot.processes, Processes):
        return facts
    at_s = snapshot.at_s
    found: dict[str, HostMemory] = {}
    for track in facts.tracks.values():
        log = facts.timeline.ranks.get(track.rank or "")
        rss_bytes = track.process.rss_bytes
        if track.rank is None or not track.present or log is None or rss_bytes is None:
            continue
        if log.allocates is None or log.last is None or log.last.number > log.allocates[2]:
            continue  # it has gone on since
        identity, total_bytes, number = log.allocates
        memory = facts.host_memory.get(track.rank)
        if memory is None or memory.number != number:
            late = at_s == facts.first_at_s
            memory = HostMemory(
                id=identity,
                number=number,
                total_bytes=total_bytes,
                base_bytes=rss_bytes,
                late=late,
            )
        grown = max(0, rss_bytes - memory.base_bytes)
        samples = (*memory.samples[-SAMPLES_KEPT:], (at_s, grown))
        found[track.rank] = msgspec.structs.replace(memory, samples=samples)
    return msgspec.structs.replace(facts, host_memory=found)


def _name_processes(
    known: dict[int, Track], roots: Sequence[int], engine: Engine
) -> dict[int, Track]:
    """Give every process its role, and to those without one the process that they work for."""
    named: dict[int, Track] = {}
    for pid, track in known.items():
        compiles = _compiles(engine.name, track.process.title)
        role = None if compiles else _role(engine.name, track.process.title)
        name = role.id if role and not role.helper else None
        # A role once seen stays: at its end a process loses its title before it goes.
        named[pid] = msgspec.structs.replace(
            track,
            role=name or track.role,
            rank=(rank_name(role, track.process.title) if role else None) or track.rank,
            owner=None,
            compiles=compiles,
            observes=_observes(engine.name, track.process.title),
        )
    roles = {track.role for track in named.values()}
    for pid in roots:
        if pid in named and not named[pid].role:  # a wrapper where there is a launcher below it
            role_id = "wrapper" if "launcher" in roles else "launcher"
            named[pid] = msgspec.structs.replace(named[pid], role=role_id)
    for pid, track in named.items():
        parents = _parents(track, named)
        if any(_is_fork(track, named[parent]) for parent in parents):
            track = msgspec.structs.replace(track, role="", rank=None)  # noqa: PLW2901
        owner = next((parent for parent in parents if named[parent].role), None)
        named[pid] = track if track.role else msgspec.structs.replace(track, owner=owner)
    return named


def _is_fork(track: Track, parent: Track) -> bool:
    """Tell whether a process still bears the title of the one that forked it.

    It does until it runs a program of its own, or ends: neither is one of the launch's own.
    """
    if track.rank is not None or parent.rank is not None:
        return track.rank == parent.rank
    return bool(track.role) and track.process.title == parent.process.title


@lru_cache(maxsize=4096)
def _role(engine_name: str, title: str) -> Role | None:
    """Return the role by a title; titles stay, and there are many processes."""
    return role_of(load(engine_name), title)


@lru_cache(maxsize=4096)
def _compiles(engine_name: str, title: str) -> bool:
    return is_compiler(load(engine_name), title)


@lru_cache(maxsize=4096)
def _observes(engine_name: str, title: str) -> bool:
    return is_observer(load(engine_name), title)


def _parents(track: Track, known: dict[int, Track]) -> list[int]:
    """Return the pids of a process's ancestors that are known, its parent first."""
    found: list[int] = []
    parent = track.process.ppid
    while parent in known and parent not in found and parent != track.process.pid:
        found.append(parent)
        parent = known[parent].process.ppid
    return found


def _see_observer(
    owner: Track, workers: Sequence[Track], stands: dict[str, Standing], at_s: float
) -> Track:
    """Note that something looks at a process: it is below it, holds it, or has printed its stack.

    It may be there for so short a time that only the log tells.
    """
    stand = stands.get(owner.rank or "")
    line = stand.dump.number if stand else owner.logged_line
    held = owner.process.state == "t" or bool(owner.process.tracer_pid)
    if held or line != owner.logged_line or any(track.observes for track in workers):
        owner = msgspec.structs.replace(owner, observed_at_s=at_s)
    return msgspec.structs.replace(owner, logged_line=line) if line != owner.logged_line else owner


def _credit_descendants(
    owner: Track, workers: Sequence[Track], at_s: float, limit_s: float
) -> Track:
    """Let the work of compilers count as the owner's progress, that of others for a while.

    A compiler that sleeps, is stopped, or waits for a child that does so works no more than they.
    What looks at the owner, as a watchdog has it done, does not work for it.
    """
    workers = [track for track in workers if not track.observes]
    if owner.moved_at_s is not None and owner.moved_at_s != owner.lent_at_s:
        # It moved by itself since others' work counted last.
        owner = msgspec.structs.replace(owner, lent_since_s=None, lent_at_s=None)
    compilers = [track for track in workers if track.compiles]
    compile_pct = sum((track.cpu_pct or 0) + (track.children_pct or 0) for track in compilers)
    others_pct = sum(
        (track.cpu_pct or 0) + (track.children_pct or 0) for track in workers if not track.compiles
    )
    ended_pct = owner.children_pct or 0
    if owner.compiled_at_s is not None and at_s - owner.compiled_at_s <= BUILD_PAUSE_S:
        compile_pct += ended_pct
    elif owner.observed_at_s is None or at_s - owner.observed_at_s > BUILD_PAUSE_S:
        others_pct += ended_pct
    if compile_pct >= WORK_PCT:
        name = _busiest(compilers) or "a compiler that has ended"
        used_pct = sum(track.cpu_pct or 0 for track in compilers)
        owner = tracks.moved(owner, at_s, f"{name} compiles ({used_pct:.0f} % CPU)")
        return msgspec.structs.replace(
            owner,
            compiled_at_s=at_s if compilers else owner.compiled_at_s,
            lent_since_s=None,
            lent_at_s=None,
        )
    if others_pct < WORK_PCT or owner.moved_at_s == at_s:
        return owner
    since_s = owner.lent_since_s if owner.lent_since_s is not None else at_s
    owner = msgspec.structs.replace(owner, lent_since_s=since_s)
    if at_s - since_s > limit_s:
        return owner
    name = _busiest(workers) or "a child that has ended"
    owner = tracks.moved(owner, at_s, f"{name} works below it ({others_pct:.0f} % CPU)")
    return msgspec.structs.replace(owner, lent_at_s=at_s)


def _busiest(workers: Sequence[Track]) -> str:
    """Return the name of the process that uses most CPU; "" where there is none."""
    busiest = max(workers, key=lambda track: track.cpu_pct or 0, default=None)
    return busiest.process.comm if busiest else ""


def _see_stacks(facts: Facts, snapshot: Snapshot, engine: Engine) -> Facts:
    if not isinstance(snapshot.stacks, Stacks):
        return facts
    known = dict(facts.tracks)
    for pid, stacks in snapshot.stacks.by_pid.items():
        if pid in known:
            known[pid] = tracks.see_stacks(known[pid], stacks, snapshot.at_s, engine.waits)
    return msgspec.structs.replace(facts, tracks=known)


def _see_waits(facts: Facts, snapshot: Snapshot) -> Facts:
    if not isinstance(snapshot.waits, Waits):
        return facts
    known = dict(facts.tracks)
    for pid, waits in snapshot.waits.by_pid.items():
        if pid in known:
            known[pid] = tracks.see_waits(known[pid], waits, snapshot.at_s)
    locks = facts.locks
    searched = snapshot.waits.locks_searched
    if isinstance(snapshot.waits.locks, tuple):
        # A look that does not search says nothing of the files that only a search finds.
        kept = () if searched else tuple(lock for lock in locks if not lock.waiters)
        locks = (*snapshot.waits.locks, *kept)
    return msgspec.structs.replace(facts, tracks=known, locks=locks)


def _see_weights(facts: Facts, snapshot: Snapshot) -> Facts:
    if not isinstance(snapshot.weights, Weights):
        return facts
    known = dict(facts.tracks)
    private = {
        pid: track.process.rss_bytes - track.process.rss_file_bytes
        for pid in snapshot.weights.held
        if (track := known.get(pid))
        and track.process.rss_bytes is not None
        and track.process.rss_file_bytes is not None
    }
    took_s = snapshot.took_s.get("weights", 0.0)
    if snapshot.weights.checkpoint is not None:
        took_s = 0.0  # the model's files are listed now and then only
    cost_s = min(took_s, facts.loading.last_took_s) if facts.loading else 0.0
    loading, read = see_weights(facts.loading, snapshot.weights, private, snapshot.at_s)
    loading = msgspec.structs.replace(loading, took_s=cost_s, last_took_s=took_s)
    for pid, (bytes_per_s, file) in read.items():
        if pid in known:
            known[pid] = tracks.moved(
                known[pid],
                snapshot.at_s,
                f"reads {rate(bytes_per_s)} of {file or 'weights'}",
            )
    return msgspec.structs.replace(facts, loading=loading, tracks=known)


def _see_caches(facts: Facts, snapshot: Snapshot, engine: Engine) -> Facts:
    """Let a compiler's cache that grows count as progress of the ranks that run its code.

    Another launch may fill the same cache: a rank that uses no CPU does not.
    """
    if not isinstance(snapshot.caches, Caches):
        return facts
    at_s = snapshot.at_s
    seen, known = dict(facts.caches), dict(facts.tracks)
    for cache in engine.caches:
        now, before = snapshot.caches.by_id.get(cache.id), facts.caches.get(cache.id)
        if now is None:
            continue
        old = before or CacheSeen(path=now.path, newest_wall_s=now.newest_wall_s)
        grew = now.newest_wall_s > old.newest_wall_s
        seen[cache.id] = CacheSeen(
            path=now.path,
            newest_wall_s=max(now.newest_wall_s, old.newest_wall_s),
            grew_at_s=at_s if grew else old.grew_at_s,
            times=old.times + grew,
        )
        for pid, track in known.items() if grew else ():
            used_pct = (track.cpu_pct or 0) + (track.children_pct or 0)
            if track.rank and used_pct >= WORK_PCT and runs_code(track.stack, cache):
                known[pid] = tracks.moved(track, at_s, f"{cache.title} fills its cache {now.path}")
    return msgspec.structs.replace(facts, caches=seen, tracks=known)


def runs_code(stack: tuple[Frame, ...] | None, cache: Cache) -> bool:
    """Tell whether a stack goes through the code of the compiler that fills a cache."""
    return any(part in f"/{frame.path}" for frame in stack or () for part in cache.code)


def _see_gpus(facts: Facts, snapshot: Snapshot) -> Facts:
    if not isinstance(snapshot.gpus, Gpus):
        return facts
    at_s = snapshot.at_s
    cards = {
        index: gpu_readings.see_card(facts.cards.get(index), gpu, at_s)
        for index, gpu in snapshot.gpus.cards.items()
    }
    known = dict(facts.tracks)
    mapped: set[int] = set()
    families = {pid: _family(known, pid) for pid, track in known.items() if track.rank}
    for pids in families.values():
        mapped.update(gpu_readings.cards_of(cards, pids))
    for index in mapped.union(gpu_readings.cards_of(cards, known.keys())):
        if isinstance(gpu := cards[index].gpu, Gpu):
            cards[index] = msgspec.structs.replace(cards[index], held=gpu)
    for pid, pids in families.items():
        track = known[pid]
        # A rank whose card NVML does not tell, as in a PID namespace of its own, may be behind any
        # card that is nobody's; one that uses none is behind none.
        anybody = set() if facts.cpu_launch else set(cards) - mapped
        own = gpu_readings.cards_of(cards, pids) or tuple(anybody)
        for index in own:
            if by := gpu_readings.moves_data_of(cards[index], pids, at_s):
                known[pid] = tracks.moved(track, at_s, by)
    return msgspec.structs.replace(facts, cards=cards, tracks=known)


def _family(known: dict[int, Track], pid: int) -> frozenset[int]:
    """Return the pids under which the driver may know a rank: its own, its inner, its children."""
    own = known[pid].process
    family = {pid, own.inner_pid or pid}
    family |= {child for child, track in known.items() if track.owner == pid}
    return frozenset(family)


def _see_host(facts: Facts, host: Host, at_s: float) -> Facts:
    peak = facts.memory_peak
    for use in memory_uses(host, at_s):
        if peak is None or use.share >= peak.share:
            peak = use
    return msgspec.structs.replace(
        facts, host=host, host_first=facts.host_first or host, memory_peak=peak
    )


def memory_uses(host: Host, at_s: float) -> list[MemoryUse]:
    """Return how full the memory is that the launch may use: its cgroup's and the machine's."""
    uses = []
    if host.cgroup_limit_bytes and host.cgroup_used_bytes is not None:
        used, limit = host.cgroup_used_bytes, host.cgroup_limit_bytes
        uses.append(MemoryUse(of="the cgroup", used_bytes=used, limit_bytes=limit, at_s=at_s))
    if host.memory_total_bytes and host.memory_available_bytes is not None:
        total = host.memory_total_bytes
        used = total - host.memory_available_bytes
        uses.append(MemoryUse(of="the machine", used_bytes=used, limit_bytes=total, at_s=at_s))
    return uses


def _conclude(facts: Facts, engine: Engine) -> Facts:
    """Compute what follows from everything together: sizes, and the view of each rank."""
    launcher = facts.launcher
    command = launcher.process.title if launcher else " ".join(facts.header.command)
    sizes = sizes_of(engine, command, facts.timeline)
    cpu = (
        facts.cpu_launch or facts.timeline.launch.on_cpu or matches_any(engine.detect.cpu, command)
    )
    # Of two processes of one name the one that is there counts, and of these the older.
    ranked = [track for track in facts.tracks.values() if track.rank]
    ranked.sort(key=lambda track: (track.present, -track.process.start_ticks))
    by_name = {track.rank: track for track in ranked if track.rank}
    names = set(by_name) | {name for name in facts.timeline.ranks if name}
    expected = expected_ranks(sizes)
    if not names <= set(expected):
        expected = ()  # named by another scheme than the one we know
    before = {rank.name: rank for rank in facts.ranks}
    stands = logged_stands(facts.timeline, engine)
    ranks = tuple(
        _rank_view(name, by_name.get(name), before.get(name), facts, engine, stand=stands.get(name))
        for name in sorted(names | set(expected), key=rank_order)
    )
    return msgspec.structs.replace(
        facts,
        sizes=sizes,
        expected=expected,
        expected_count=expected_count(sizes),
        cpu_launch=cpu or None,
        ranks=ranks,
        blocked={
            pid: blocked[0]
            for pid, track in facts.tracks.items()
            if track.role
            and (blocked := blocked_threads(track, facts.at_s or 0.0, facts.name_of))
            and blocked[0].tid == pid
        },
    )


def _rank_view(
    name: str,
    track: Track | None,
    before: RankFacts | None,
    facts: Facts,
    engine: Engine,
    *,
    stand: Standing | None,
) -> RankFacts:
    at_s = facts.at_s or 0.0
    dumped_s = track.stack_at_s if track and track.stack_at_s is not None else at_s
    log_phase = _log_phase(name, facts)
    if track is None:
        watched = facts.sections.get("processes", ...) is None
        return _with_logged_stack(
            RankFacts(
                name=name,
                present=False if watched else None,
                phase=log_phase,
                log_phase=log_phase,
                phase_sure=log_phase is not None,
            ),
            stand,
            facts,
            engine,
        )
    started = track.role == "spawn_main"
    phase, phase_sure = _phase(
        track.stack, track.stack_at_s, log_phase, facts.rank_log_at_s.get(name), engine
    )
    if phase is None and started:
        phase = "start"
    wait = None
    operation: tuple[str, ...] = ()
    if track.wait and track.stack:
        wait = next(wait for wait in engine.waits if wait.id == track.wait[0])
        operation = call_path(track.stack[track.wait[1] :])
    moved_at_s = max(
        track.moved_at_s if track.moved_at_s is not None else -1e12,
        facts.rank_log_at_s.get(name, -1e12),
    )
    recently = at_s - moved_at_s <= MOVING_S
    watched_s = at_s - track.first_at_s
    moving = recently if watched_s >= MOVING_S or (recently and watched_s >= 1) else None
    still_s = at_s - max(track.first_at_s, moved_at_s) if moving is False else None
    cards = gpu_readings.cards_of(facts.cards, _family(facts.tracks, track.process.pid))
    blocked = blocked_threads(track, at_s, facts.name_of)
    lock_waiting = lock_waits(track, at_s)
    polls_per_s = _polls_per_s(track, facts)
    since_s = before.phase_since_s if before and before.phase == phase else at_s
    in_phase_s = max(at_s - since_s, _logged_phase_s(name, phase, facts) or 0.0)
    view = RankFacts(
        name=name,
        pid=track.process.pid,
        present=track.present and track.process.state not in "ZX",
        state=track.process.state,
        phase=phase,
        phase_since_s=since_s,
        in_phase_s=in_phase_s if phase else None,
        wait=wait,
        stack=track.stack,
        place=place(track.stack[0]) if track.stack else "",
        operation=operation,
        moving=moving,
        still_s=still_s,
        moved_by=track.moved_by,
        cpu_pct=track.cpu_pct,
        cards=cards,
        reading=facts.cards[cards[0]].reading if cards else None,
        log_phase=log_phase,
        phase_sure=phase_sure,
        settled_s=dumped_s - track.settled_at_s
        if track.settled_at_s is not None and track.settled_dumps > 1
        else None,
        held_s=dumped_s - track.held_since_s if track.held_since_s is not None else None,
        not_idle_s=dumped_s - track.idle_at_s if track.idle_at_s is not None else None,
        stack_age_s=at_s - dumped_s if track.stack_at_s is not None else None,
        stack_missing=track.stack_missing,
        runaway_s=at_s - track.runaway_since_s if track.runaway_since_s is not None else None,
        loop=_loop(track, facts),
        caught_in=describe_peek(track.waits.peek, facts.name_of)
        if track.waits and track.waits.peek and track.present
        else "",
        helped_by=_helper(facts, track),
        compiling=bool(track.stack) and _read_stack(engine.name, track.stack or ()).compiling,
        on_storage=tracks.on_storage(track.process),
        kernel=(track.process.threads[0].wchan or "") if track.process.threads else "",
        blocked=next((each for each in blocked if each.tid == track.process.pid), None),
        blocked_besides=tuple(
            sorted(
                (each for each in blocked if each.tid != track.process.pid),
                key=lambda each: -each.for_s,
            )
        ),
        lock_waits=lock_waiting
        if lock_waiting[:1] and lock_waiting[0].tid == track.process.pid
        else (),
        locks=_locks_of(track, wait, operation, facts.locks),
        polls_per_s=polls_per_s,
        may_poll=_may_poll(track, facts.locks) if polls_per_s is not None else (),
    )
    own = track.process.inner_pid or track.process.pid
    if view.stack is not None or stand is None or stand.dump.pid not in (None, own):
        return view  # a dump with another pid is another launch's
    return _with_logged_stack(view, stand, facts, engine)


def _polls_per_s(track: Track, facts: Facts) -> float | None:
    """Return how often a process without a stack wakes from its sleep, if one that polls does so.

    Python sleeps in a timer, and up to 3.10 in select().
    """
    unseen = track.stack_missing is not None or facts.sections.get("stacks") is not None
    rate_per_s, threads = track.sleeps_per_s, track.process.threads
    if not unseen or rate_per_s is None or not threads or threads[0].state != "S":
        return None
    kernel = threads[0].wchan or ""
    sleeps = "nanosleep" in kernel or kernel.startswith(("poll_schedule_timeout", "do_select"))
    return rate_per_s if sleeps and POLLS_PER_S[0] <= rate_per_s <= POLLS_PER_S[1] else None


def _may_poll(track: Track, locks: tuple[FileLock, ...]) -> tuple[FileLock, ...]:
    """Return the locks that a process may poll for of which nothing but their place is known."""
    pid = track.process.pid
    return tuple(
        lock
        for lock in locks
        if not any(holder.pid == pid for holder in lock.holders)
        and (
            lock.kind in ("file", "soft")
            or any(re.search(path, lock.path) for _, path in _LOCKS_OF_CODE)
        )
    )


def _locks_of(
    track: Track, wait: Wait | None, operation: tuple[str, ...], locks: tuple[FileLock, ...]
) -> tuple[FileLock, ...]:
    """Return the locks that a process may be waiting for, by its stack and by the kernel.

    A FileBaton waits for a file to go away. Other lock files are polled for a kernel's lock: of
    these only those count whose path belongs to the code that polls.
    """
    pid = track.process.pid
    if certain := tuple(lock for lock in locks if pid in lock.waiters):
        return certain
    if wait is None or wait.kind != "lock":
        return ()
    others = [lock for lock in locks if not any(holder.pid == pid for holder in lock.holders)]
    if operation and operation[0].startswith("file_baton.py:"):
        return tuple(lock for lock in others if lock.kind == "file")
    index = track.wait[1] if track.wait else 0
    callers = [f"/{frame.path}" for frame in (track.stack or ())[index : index + _LOCK_CALLERS]]
    paths = [path for code, path in _LOCKS_OF_CODE if any(code in caller for caller in callers)]
    return tuple(
        lock
        for lock in others
        if lock.kind != "file" and any(re.search(path, lock.path) for path in paths)
    )


_LOCK_CALLERS = 6
"""A lock is asked for at most so many frames further out."""
_LOCKS_OF_CODE = (
    ("/flashinfer/", r"flashinfer"),
    ("/huggingface_hub/", r"/\.locks/|huggingface"),
    ("/tvm_ffi/", r"tvm[-_]ffi"),
    ("/torch/_inductor/", r"/locks/[^/]*\.lock$"),
    # get_lock of SGLang and vLLM names it by the model's hash and name, in the temporary directory.
    ("/weight_utils.py", r"/[0-9a-f]{64}[^/]*\.lock$"),
)
"""Parts of paths of code that takes locks, and what the paths of its locks look like."""


def _loop(track: Track, facts: Facts) -> Loop | None:
    """Return the loop that a rank spins in; for an older recording by the process as a whole."""
    found = find_loop(
        track.busy,
        track.busy_stacks,
        track.files,
        track.waits,
        name_of=facts.name_of,
        sharing=partial(_sharing, facts, track),
    )
    counted = any(thread.write_calls_per_s is not None for thread in track.busy)
    if counted or track.runaway_since_s is None:
        return found
    whole = Busy(
        tid=track.process.pid,
        name=track.process.comm,
        cpu_pct=track.cpu_pct or 0.0,
        system_pct=0.0,
        write_calls_per_s=track.write_calls_per_s,
        bytes_per_write=track.bytes_per_write,
        read_calls_per_s=track.read_calls_per_s,
        bytes_per_read=track.bytes_per_read,
    )
    return find_loop((whole,), {}, track.files)


def _sharing(facts: Facts, track: Track, number: int) -> str:
    """Say which other processes have an eventfd open, and whose threads wait for it."""
    parts = []
    for pid, other in facts.tracks.items():
        fds = [file.fd for file in other.files or () if file.identity == number]
        if other is track or not fds or not tracks.lives(other):
            continue
        calls = [
            wait.call
            for wait in (other.waits.threads if other.waits else ())
            if any(each.identity == number for each in wait.objects)
        ]
        waits = f" and waits for in {calls[0]}" if calls else ""
        parts.append(f", which {facts.name_of(pid)} has open too (descriptor {fds[0]}){waits}")
    return "".join(parts[:2])


def _helper(facts: Facts, owner: Track) -> str:
    """Return the name of a process below a rank that uses CPU for it and is no compiler."""
    busy = [
        track
        for track in facts.tracks.values()
        if track.owner == owner.process.pid
        and tracks.lives(track)
        and not (track.compiles or track.observes)
        and (track.cpu_pct or 0) >= WORK_PCT
    ]
    return _busiest(busy)


def _log_phase(name: str, facts: Facts) -> Phase | None:
    """Return how far a rank is by the log: its own lines, or the launch's that speak for all."""
    logs = facts.timeline.ranks
    said = any(logs[key].milestones for key in (name, "") if key in logs)
    if not said and not facts.log_is_whole:
        return facts.bar_phase  # nothing was said, or we did not hear it
    return max(phase_of(facts.timeline, name), facts.bar_phase, key=phase_index)


def _logged_phase_s(name: str, phase: Phase | None, facts: Facts) -> float | None:
    """Return how long ago the log's own stamps say that a rank's phase began; None if they do not.

    Only the milestones at the log's end that lead into this phase: a second model loads again.
    """
    began: list[float] = []
    for key in (name, ""):
        log = facts.timeline.ranks.get(key, RankLog())
        for reached in reversed(log.milestones):
            if reached.phase_after != phase:
                break
            if reached.time_s is not None:
                began.append(reached.time_s)
    return stamp_age_s(facts, min(began, default=None))


def _phase(
    stack: tuple[Frame, ...] | None,
    stack_at_s: float | None,
    log_phase: Phase | None,
    log_at_s: float | None,
    engine: Engine,
) -> tuple[Phase | None, bool]:
    """Return the phase whose code a rank runs, and whether that is sure.

    The stack is the newer witness, unless the log spoke after the dump. Frames that only say "at
    least this far" leave it to the log which of the later phases it is.
    """
    if stack is None:
        return log_phase, log_phase is not None
    read = _read_stack(engine.name, stack)
    best, weak = read.phase, read.at_least
    log_is_newer = log_at_s is not None and log_at_s > (stack_at_s or 0.0)
    if best and not (log_is_newer and phase_index(log_phase) > phase_index(best)):
        return best, True
    phases: list[Phase] = [*weak, *([log_phase] if log_phase else []), *([best] if best else [])]
    return max(phases, key=phase_index, default=None), log_phase is not None


def raised_phase(facts: Facts, rank: str, engine: Engine) -> Phase | None:
    """Return the phase whose code a rank's last logged exception came from; None if none tells."""
    log = facts.timeline.ranks.get(rank)
    return _read_stack(engine.name, log.raised_in).phase if log and log.raised_in else None


def _with_logged_stack(
    rank: RankFacts, stand: Standing | None, facts: Facts, engine: Engine
) -> RankFacts:
    """Return a rank of which we have no stack with what the stacks in the log show of it.

    They are no older than its last milestone: what came before one is forgotten.
    """
    if stand is None:
        return rank
    dump = stand.dump
    if not dump.frames:
        why = "torn by another's" if dump.torn else "without its main thread's frames"
        missing = Missing(
            reason="failed", detail=f"the dump of it in line {dump.number} of the log is {why}"
        )
        return msgspec.structs.replace(rank, stack_missing=rank.stack_missing or missing)
    found = find_wait(dump.frames, engine.waits)
    phase, sure = _phase(dump.frames, 0.0, rank.log_phase, None, engine)
    serves = phase_index(phase) >= phase_index("server")
    counted = stand.after_s is not None and (stand.final or serves)
    counted_s = (stand.after_s or 0.0) + (stand.held_s or 0.0) if counted else None
    return msgspec.structs.replace(
        rank,
        phase=phase,
        phase_sure=sure,
        stack=dump.frames,
        stack_line=dump.number,
        stack_native=dump.native,
        stack_age_s=stamp_age_s(facts, dump.time_s),
        place=place(dump.frames[0]),
        wait=found[0] if found else None,
        operation=call_path(dump.frames[found[1] :]) if found else (),
        settled_s=stand.held_s,
        held_s=stand.held_s if found else None,
        compiling=_read_stack(engine.name, dump.frames).compiling,
        counted_s=counted_s,
        counted_out=counted and stand.final,
        **({} if rank.moving is not None else _moving_by_log(stand, counted_s)),
    )


def _moving_by_log(stand: Standing, counted_s: float | None) -> dict[str, Any]:
    """Return what the dumps in the log tell of whether a rank moves; nothing if there is one."""
    if stand.moved and stand.same_dumps == 1:
        where = stand.dump.frames[0].function
        return {"moving": True, "moved_by": f"its stack changes, now in {where}"}
    still_s = counted_s if counted_s is not None else stand.held_s
    return {} if still_s is None else {"moving": False, "still_s": still_s}


class _StackRead(Struct, frozen=True):
    """What an engine's places say of a stack.

    Attributes:
        phase: whose code it runs; at_least: the phases that it has reached.
        compiling: it goes through a kernel compiler or tuner.
    """

    phase: Phase | None
    at_least: tuple[Phase, ...]
    compiling: bool


@lru_cache(maxsize=256)
def _read_stack(engine_name: str, stack: tuple[Frame, ...]) -> _StackRead:
    """Look for all places of an engine in a stack; it stays the same for many looks."""
    engine = load(engine_name)
    found = [(first_place(stack, table.frames), table.id) for table in engine.phases]
    best = min(
        ((index, phase) for index, phase in found if index is not None),
        key=lambda place_of_phase: place_of_phase[0],
        default=None,
    )
    return _StackRead(
        phase=best[1] if best else None,
        at_least=tuple(
            table.id for table in engine.phases if first_place(stack, table.weak_frames) is not None
        ),
        compiling=any(part in f"/{frame.path}" for frame in stack for part in engine.compile_paths),
    )
