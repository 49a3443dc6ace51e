"""All that is known after the last snapshot, and what follows from it.

"Now" is the time of the last snapshot; nothing here reads a clock. `None` means not known.
"""

from __future__ import annotations

import re

from hangdoctor.blocked import Blocked, LockWait
from hangdoctor.busy import Loop
from hangdoctor.caches import CacheSeen
from hangdoctor.collectives import Collectives
from hangdoctor.engines import PHASES, Engine, Phase, Wait
from hangdoctor.gpus import Card, Reading
from hangdoctor.host_memory import HostMemory, MemoryUse
from hangdoctor.launches import Sizes
from hangdoctor.logs.parse import ParserState
from hangdoctor.logs.timeline import Timeline
from hangdoctor.model import FileLock, Frame, Header, Host, Missing, Struct
from hangdoctor.nccl import Ras
from hangdoctor.sleeps import Sleep
from hangdoctor.tracks import Track
from hangdoctor.weights import Loading


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
        reading: what its GPU does; "unknown" where others are on it, and may do that.
        shared_work_s: how long ago a GPU of it worked that others are on as well, for it or them.
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
        sleep: the first that it was seen in since it last moved; None where none was, or its end is
            not known.
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
    reading: Reading | None = None
    shared_work_s: float | None = None
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
    sleep: Sleep | None = None
    blocked_besides: tuple[Blocked, ...] = ()
    lock_waits: tuple[LockWait, ...] = ()
    locks: tuple[FileLock, ...] = ()
    polls_per_s: float | None = None
    may_poll: tuple[FileLock, ...] = ()


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
