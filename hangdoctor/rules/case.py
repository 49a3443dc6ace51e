"""What every rule is given, and the few judgements that several rules share."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from hangdoctor.engines import Engine, Phase, rank_frames
from hangdoctor.facts import Facts, RankFacts, launch_still_s, log_still_s, phase_index, stamp_age_s
from hangdoctor.facts.phases import raised_phase
from hangdoctor.findings import Evidence, Finding, enumerate_names, weakest
from hangdoctor.frames import first_place, place
from hangdoctor.loads import patience_s, stalls
from hangdoctor.logs.timeline import logged_stands
from hangdoctor.model import FileLock, Installation, Missing, Struct
from hangdoctor.rules.sleeps import may_have_slept, wakes_too_late
from hangdoctor.waitgraph import WaitGraph, build

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hangdoctor.blocked import Blocked
    from hangdoctor.engines import Wait
    from hangdoctor.findings import Confidence
    from hangdoctor.logs.stacks import Dump
    from hangdoctor.logs.timeline import SignSeen

HUNG_FACTOR = 2.0
"""`hung` needs twice the stillness that is suspicious: with the default of 20 s, 40 s."""
SYMMETRIC_FACTOR = 6.0
"""Where no rank stands out (all in one collective, all on one file) it may be the network or the
storage that is slow, which nothing here can see: three times as long."""
STORAGE_FACTOR = 15.0
"""Loads from network file systems have paused for 100 s and more, and gone on: with the default,
300 s."""
LOCAL_STORAGE_FACTOR = 6.0
"""Storage that is not known to be a network's, of whose pauses nothing is known: 120 s."""
SURE_FACTOR = 7.5
"""Before this nobody knows whether what sleeps will go on, however still it is: 150 s."""
PIPE_WAITS = (
    "wait_for_partner",
    "fifo_open",
    "anon_pipe_read",
    "fifo_pipe_read",
    "pipe_read",
    "pipe_wait_readable",
)
"""Kernel functions in which a reader or writer of a pipe or FIFO sleeps, of several versions."""
OPEN_WAITS = ("wait_for_partner", "fifo_open")
"""In these a FIFO is opened, and nobody has its other end."""
APART_S = 60.0
"""Stacks in a log that are further apart may not be of the same stall."""
SHORT_WATCH_S = 10.0
"""A shorter look of our own counts where the log has been silent for long: `diagnose PID`."""


class Case(Struct, frozen=True):
    """The facts, the engine's data, and the waits between the ranks."""

    facts: Facts
    engine: Engine
    graph: WaitGraph
    still_s: float | None
    log_still_s: float | None

    @property
    def stall_after_s(self) -> float:
        """Stillness that is suspicious, in seconds."""
        return self.facts.header.stall_after_s

    @property
    def hung_after_s(self) -> float:
        """Stillness after which `hung` may be said where a rank stands out."""
        return HUNG_FACTOR * self.stall_after_s

    @property
    def observed(self) -> bool:
        """Whether there is more than a log: processes were looked at, twice at least."""
        return self.facts.at_s is not None and bool(self.facts.tracks)

    @property
    def everyone(self) -> list[RankFacts]:
        """The ranks that are there; by a log alone all that did not end, for all it says."""
        if self.facts.tracks:
            return [rank for rank in self.facts.ranks if rank.present]
        return [rank for rank in self.facts.ranks if rank.present is not False]

    def still_enough(self, needed_s: float) -> bool:
        """Tell whether stillness was seen for so long.

        Where the log's own time stamps show that nothing has been said for so long, a shorter look
        at the processes is enough.
        """
        if self.still_s is None:
            return False
        if self.still_s >= needed_s:
            return True
        return (
            self.log_still_s is not None
            and self.log_still_s >= needed_s
            and self.still_s >= min(SHORT_WATCH_S, needed_s / 2)
            and self.facts.watched_s - self.still_s < 1.5  # nothing moved in all that time
        )


def make_case(facts: Facts, engine: Engine) -> Case:
    """Return what the rules look at."""
    engine = _with_normal(engine, facts.header.normal_s)
    return Case(
        facts=facts,
        engine=engine,
        graph=build(facts),
        still_s=launch_still_s(facts),
        log_still_s=log_still_s(facts),
    )


def replicas(case: Case) -> tuple[Case, ...]:
    """Return one case for each group of ranks that wait for each other.

    Without attention data parallelism the replicas share no collective: one that idles or loads
    has nothing to do with the waits of another.
    """
    facts = case.facts
    count = facts.sizes.get("dp", 1)
    if count < 2 or facts.sizes.get("dp_attention"):
        return (case,)
    groups: dict[str, list[RankFacts]] = {}
    for rank in facts.ranks:
        groups.setdefault(rank.name.split()[0], []).append(rank)
    if len(groups) < 2 or not all(name.startswith("DP") for name in groups):
        return (case,)
    parts = [
        msgspec.structs.replace(
            facts,
            ranks=tuple(ranks),
            expected=tuple(name for name in facts.expected if name.split()[0] == group),
            expected_count=facts.expected_count // count if facts.expected_count else None,
        )
        for group, ranks in groups.items()
    ]
    return tuple(msgspec.structs.replace(case, facts=part, graph=build(part)) for part in parts)


def _with_normal(engine: Engine, longest_s: Mapping[str, float]) -> Engine:
    """Return the engine with what is normal here in place of what is normal anywhere.

    A phase that took 5 s may take twice as long and 10 s more on another day; not an hour.
    """
    if not longest_s:
        return engine
    phases = tuple(
        msgspec.structs.replace(
            table,
            normal_max_s=2 * longest_s[table.id] + 10,
            normal_note="twice the longest of the known-good logs, and 10 s",
        )
        if table.id in longest_s
        else table
        for table in engine.phases
    )
    return msgspec.structs.replace(engine, phases=phases)


def judge(
    case: Case,
    suspects: tuple[RankFacts, ...],
    finding: Finding,
    *,
    needed_s: float,
    waiters: tuple[RankFacts, ...] = (),
    proven: bool = False,
) -> Finding:
    """Say `hung` with the finding, if everything that must be seen for it was seen.

    Otherwise the finding stays without a state, undecided, with what would decide it. Suspects must
    be seen not to work, and waiters to stay where they wait. Confidence is high at once only where
    it is `proven` that it cannot go on by itself, such as a deadlock; else after long stillness.
    """
    if not case.facts.tracks and (involved := (*suspects, *waiters)):
        return _judge_by_log(case, involved, finding, needed_s)
    needs: list[str] = []
    if not case.still_enough(needed_s):
        needs.append(_longer(case, needed_s))
    phase = finding.phase
    if phase is None:
        needs.append("a stack or a log that tells the phase")
    needs += unseen_progress(case, phase)
    needs += [need for rank in suspects for need in _may_be_working(case, rank, phase, needed_s)]
    needs += [need for rank in (*suspects, *waiters) for need in _goes_round(case, rank, needed_s)]
    if needs:
        confidence: Confidence = "medium" if finding.confidence == "high" else "low"
        return msgspec.structs.replace(
            finding,
            verdict="undecided",
            confidence=confidence,
            needs=(*finding.needs, *dict.fromkeys(needs)),
            lacks_s=_lacks_s(case, suspects, needed_s),
        )
    # A FIFO whose other end nobody has open does not come back, nor a lock without an owner, nor in
    # time who sleeps until nobody waits any more.
    proven = proven or (
        bool(suspects)
        and all(
            rank.kernel in OPEN_WAITS
            or lock_is_dead(rank)
            or wakes_too_late(case.facts, case.engine, rank)
            for rank in suspects
        )
    )
    sure_s = SURE_FACTOR * case.stall_after_s
    if case.still_s is not None and case.still_s < (needed_s if proven else max(needed_s, sure_s)):
        finding = weaker(finding, "medium")  # a short look, and an old log; or it may go on
    if any((_is_busy(rank) and rank.runaway_s is None) or rank.helped_by for rank in suspects):
        finding = weaker(finding, "medium")  # it may be at work that shows nothing
    return msgspec.structs.replace(finding, state="hung")


def ended_by_log(case: Case) -> bool:
    """Tell whether a log alone says that the launch has ended."""
    fatal = signs_of(case, "fatal") + signs_of(case, "signal")
    return bool(fatal) and not case.facts.tracks and not case.facts.header.still_running


def _judge_by_log(
    case: Case, involved: tuple[RankFacts, ...], finding: Finding, needed_s: float
) -> Finding:
    """Say `hung`, or `dead`, with the finding where the engine's own watchdog has proved it.

    Stacks in a log tell where ranks stood, not whether bytes arrived meanwhile: all that counts is
    that no forward ended. One dump of each shows where they stood at the end of that time, two that
    are the same that they stood there for long.
    """
    needs = []
    uncounted = [rank.name for rank in involved if rank.counted_s is None]
    over = all(rank.counted_out for rank in involved if rank.counted_s is not None)
    counted_s = min((rank.counted_s for rank in involved if rank.counted_s is not None), default=0)
    if uncounted:
        needs.append(
            f"whether {enumerate_names(uncounted)} moved meanwhile, which the log does not tell: "
            "hangdoctor diagnose PID --log FILE"
        )
    elif not over and counted_s < needed_s:
        needs.append(f"{needed_s:.0f} s without a forward, seen so far: {counted_s:.0f} s")
    needs += [
        f"whether what {rank.name} waits for goes on: {rank.wait.title if rank.wait else 'a build'}"
        for rank in involved
        if not over and (rank.compiling or (rank.wait and rank.wait.kind in _MAY_COME))
    ]
    if not over and case.facts.launch_log_phase == "ready":
        needs.append("whether it has served since: hangdoctor diagnose PID --log FILE")
    if any(exceptions(case.facts)):
        needs.append("what the exception has to do with it, which the log holds too")
    once = [rank.name for rank in involved if rank.settled_s is None]
    more = (f"a second dump of {enumerate_names(once)}",) if once else ()
    if needs:
        return msgspec.structs.replace(
            weaker(finding, "low"), verdict="undecided", needs=(*finding.needs, *needs, *more)
        )
    sure = over or counted_s >= SURE_FACTOR * case.stall_after_s
    if once or not sure or _apart_s(case, involved) > max(counted_s, APART_S):
        finding = weaker(finding, "medium")
    ended = ended_by_log(case)
    how = " and ended the launch" if over else ", then the launch was ended"
    return msgspec.structs.replace(
        finding,
        state="dead" if ended else "hung",
        title=f"{finding.title}; the watchdog saw no forward end for {counted_s:.0f} s"
        + (how if ended else ""),
        needs=(*finding.needs, *more),
    )


_MAY_COME = ("child", "lock", "network")
"""Kinds of waits that take as long as somebody outside of the ranks does."""


def _apart_s(case: Case, ranks: tuple[RankFacts, ...]) -> float:
    """Return how far apart the stacks of ranks in the log are; 0 where no stamp tells."""
    stands_by_name = logged_stands(case.facts.timeline, case.engine)
    stamps = [
        stand.dump.time_s
        for rank in ranks
        if (stand := stands_by_name.get(rank.name)) and stand.dump.time_s is not None
    ]
    return max(stamps, default=0.0) - min(stamps, default=0.0)


def unseen_progress(case: Case, phase: Phase | None) -> list[str]:
    """Say which sections could show progress in a phase and were not observed."""
    if phase is None:
        return []
    needs = []
    for section in case.engine.phase(phase).progress:
        if section == "gpus" and case.facts.cpu_launch:
            continue
        unseen = section == "log" and case.facts.lacks_log
        if unseen or case.facts.sections.get(section, ...) is not None:
            needs.append(f"a look at {_SECTION_NAMES[section]}, which could show progress")
    weights = case.facts.sections.get("weights")
    if phase == "weights" and isinstance(weights, Missing):
        needs.append("a look at what the ranks read of the weights, which could show progress")
    if case.facts.tracks and "processes" in case.engine.phase(phase).progress:
        blind = [
            track.rank
            for track in case.facts.tracks.values()
            if track.rank and track.present and track.process.io is None
        ]
        needs += [
            f"all open files of {track.rank}: {track.files_missing.detail}"
            for track in case.facts.tracks.values()
            if track.rank
            and track.present
            and track.files_missing is not None
            and track.files_missing.reason == "not-tried"
        ]
        if blind:
            needs.append(f"the I/O counters of {', '.join(sorted(blind))}: run as the same user")
    if "gpus" in case.engine.phase(phase).progress and not case.facts.cpu_launch:
        needs += [
            f"a look at GPU {index}: {card.gpu.detail or card.gpu.reason}"
            for index, card in sorted(case.facts.cards.items())
            if isinstance(card.gpu, Missing)
        ]
    return needs


def storage_patience_s(case: Case) -> float:
    """Return how long the storage of the weights must be silent before that says anything."""
    return patience_s(
        case.facts.loading,
        network_s=STORAGE_FACTOR * case.stall_after_s,
        local_s=LOCAL_STORAGE_FACTOR * case.stall_after_s,
        least_s=case.hung_after_s,
    )


def weaker(finding: Finding, limit: Confidence) -> Finding:
    """Return the finding with its confidence no higher than the limit."""
    return msgspec.structs.replace(finding, confidence=weakest(finding.confidence, limit))


def stands(case: Case, rank: RankFacts) -> Evidence:
    """Return where a rank stands, as evidence."""
    if rank.stack is None:
        return Evidence(text=f"{rank.name}: no stack was seen", rank=rank.name, pid=rank.pid)
    track = case.facts.track(rank)
    doing = waits_in(rank.wait) if rank.wait else "is"
    frames = rank.stack[:3] if not rank.wait else rank.stack[: _wait_index(rank) + 1]
    where = " < ".join(place(frame) for frame in frames[-3:])
    source, at_s = "", track.stack_at_s if track else None
    if rank.stack_line is not None:
        age = f", {rank.stack_age_s:.0f} s old" if rank.stack_age_s is not None else ""
        source = f" (line {rank.stack_line} of the log{age})"
        now_s = case.facts.at_s
        at_s = now_s - rank.stack_age_s if now_s is not None and rank.stack_age_s else None
    native = "".join(f"{name[:60]} < " for name in rank.stack_native[:2])
    return Evidence(
        text=f"{rank.name}{source} {doing}{' at' if not rank.wait else ':'} {native}{where}",
        rank=rank.name,
        pid=rank.pid,
        at_s=at_s,
        frame=where,
        log_line=rank.stack_line,
    )


def waits_in(wait: Wait) -> str:
    """Say in which wait a rank is: one waits *in* an operation, and *for* all else."""
    return f"waits {'in' if wait.kind in ('peers', 'rendezvous') else 'for'} {wait.title}"


def quiet(case: Case, rank: RankFacts) -> Evidence | None:
    """Return how still a rank was, as evidence; None if it moved or was not watched."""
    if rank.still_s is None:
        return None
    cpu = "" if rank.cpu_pct is None else f", CPU {rank.cpu_pct:.0f} %"
    dumps = "" if rank.settled_s is None else f", same stack for {rank.settled_s:.0f} s"
    state = f", state {rank.state}" if rank.state else ""
    call = f", {rank.blocked.text}{_traffic(rank.blocked)}" if rank.blocked else ""
    kernel = f" in {rank.kernel}" if rank.kernel not in ("", "0") else ""
    return Evidence(
        text=f"{rank.name} shows no progress for {rank.still_s:.0f} s"
        f"{state}{kernel}{call}{cpu}{dumps}",
        rank=rank.name,
        pid=rank.pid,
        at_s=case.facts.at_s,
    )


def linked(case: Case, rank: RankFacts) -> Evidence | None:
    """Return the system call in which a rank waits for another process, as evidence."""
    if rank.blocked is None or rank.blocked.waits_for is None:
        return None
    return Evidence(
        text=f"{rank.name} is blocked in {rank.blocked.text}, for {rank.blocked.for_s:.0f} s"
        f"{_traffic(rank.blocked)}",
        rank=rank.name,
        pid=rank.pid,
        at_s=case.facts.at_s,
    )


def _traffic(blocked: Blocked) -> str:
    return f" ({blocked.traffic})" if blocked.traffic else ""


def lock_is_dead(rank: RankFacts) -> bool:
    """Tell whether a rank waits for a lock that nobody is left to release."""
    return bool(rank.locks) and all(lock.owner == "dead" for lock in rank.locks)


def lock_text(case: Case, lock: FileLock) -> str:
    """Say who holds a lock on a file, how old that is, and what keeps it from being known."""
    age = f", {lock.age_s:.0f} s old" if lock.age_s is not None else ""
    if lock.owner == "alive":
        names = [case.facts.name_of(holder.pid, holder.comm) for holder in lock.holders]
        download = ""
        if lock.download_age_s is not None:
            download = f"; its download was last written to {lock.download_age_s:.0f} s ago"
        return f"{lock.path}{age}, held by {enumerate_names(names)}{download}"
    if lock.owner == "dead":
        older = ", and it is older than every process that could" if lock.older_than_all else ""
        gone = "who has taken it is gone" if lock.kind == "soft" else "no process has it open"
        return f"{lock.path}{age}: {gone}{older}"
    return f"{lock.path}{age}: who holds it is not known ({lock.why})"


def besides(case: Case, rank: RankFacts) -> Evidence | None:
    """Return what a rank's other threads are blocked in, those first that no dump lists."""
    threads = [each for each in rank.blocked_besides if each.native is not False]
    if not threads:
        return None
    shown = "; ".join(
        f"{each.thread} ({each.tid}) in {each.text}"
        + (f", below {each.libraries[0]}" if each.libraries else "")
        for each in threads[:3]
    )
    return Evidence(
        text=f"native threads of {rank.name}: {shown}",
        rank=rank.name,
        pid=rank.pid,
        at_s=case.facts.at_s,
    )


def stood_s(rank: RankFacts) -> float:
    """Return how long a rank was seen to stand where it waits, over at least two looks."""
    linked_s = rank.blocked.for_s if rank.blocked and rank.blocked.waits_for else 0.0
    if rank.wait is None and linked_s:
        return linked_s
    if rank.settled_s is None or not rank.pid:
        # A watchdog's count tells how long it has stood somewhere, its dump that it is here.
        return rank.counted_s or rank.settled_s or 0.0
    return min(rank.settled_s, rank.held_s if rank.held_s is not None else rank.settled_s)


def last_line(case: Case, rank: str) -> Evidence | None:
    """Return the last log line of a rank, as evidence."""
    log = case.facts.timeline.ranks.get(rank)
    if log is None or log.last is None:
        return None
    who = rank or "launch"
    return Evidence(
        text=f"last line of {who}: {log.last.text[:160]}", rank=rank, log_line=log.last.number
    )


def exceptions(facts: Facts) -> dict[str, str]:
    """Return the exceptions that ranks have logged, in their last lines' words, by rank."""
    logs = facts.timeline.ranks.items()
    return {name: log.exception for name, log in logs if log.exception}


def failures(case: Case) -> dict[str, str]:
    """Return the exceptions after which their ranks have not come further, by rank."""
    logs = case.facts.timeline.ranks
    return {
        name: text
        for name, text in exceptions(case.facts).items()
        if not _came_past(case, name, logs[name].raised_at)
    }


def signs_of(case: Case, kind: str) -> list[SignSeen]:
    """Return the log's signs of a kind, oldest first, but for those that what follows disproves."""
    return [
        sign
        for sign in case.facts.timeline.signs
        if sign.kind == kind and not _outlived(case, sign)
    ]


def went_on(case: Case, number: int) -> bool:
    """Tell whether anything of the launch moved after a line of the log."""
    timeline = case.facts.timeline
    moved = [log.moved for log in timeline.ranks.values()]
    moved += [bar.number for bar in timeline.bars.values()]
    moved += [timeline.serving.number] if timeline.serving else []
    return any(at > number for at in moved)


def _outlived(case: Case, sign: SignSeen) -> bool:
    """Tell whether the log goes on after a sign as it could not if all had ended there."""
    kind = next((each for each in case.engine.signs if each.id == sign.id), None)
    if sign.kind == "signal":
        return False  # it ends what comes up, too
    if sign.kind == "fatal" and not (kind and kind.of_any_process):
        return _came_past(case, "", sign.number)  # the launcher's word: another launch follows
    if kind and kind.of_any_process and not sign.rank:
        fault = _fault_at(case, sign.number)
        if fault is not None and fault.frames:
            ours = f"/{case.engine.detect.package}/"
            if fault.whole and not any(ours in frame.path for frame in fault.frames):
                return True  # a helper's
            if first_place(fault.frames, rank_frames(case.engine)) is not None:
                return _came_past(case, "", sign.number)
        return went_on(case, sign.number)
    if kind and kind.ends_rank and not sign.rank:
        return went_on(case, sign.number)
    return _came_past(case, sign.rank, sign.number)


def _came_up(case: Case, number: int) -> bool:
    launch = case.facts.timeline.ranks.get("")
    return launch is not None and any(
        at.phase == "ready" and at.number > number for at in launch.milestones
    )


def _came_past(case: Case, rank: str, number: int) -> bool:
    """Tell whether a rank, with "" every one, passed a milestone after a line of the log."""
    logs = case.facts.timeline.ranks
    names = [rank] if rank else [each.name for each in case.facts.ranks]
    if _came_up(case, number):
        return True
    if not names:
        return went_on(case, number)
    return all(name in logs and logs[name].moved > number for name in names)


def _fault_at(case: Case, number: int) -> Dump | None:
    stands = logged_stands(case.facts.timeline, case.engine).values()
    return next((stand.dump for stand in stands if stand.dump.number == number), None)


def launched_version(case: Case) -> str:
    """Return the engine's release, by its installation or its log; "" where neither tells it."""
    installation = case.facts.header.installation
    version = installation.version if isinstance(installation, Installation) else None
    return version or case.facts.timeline.launch.version


def release_numbers(version: str) -> tuple[int, ...]:
    """Return a version's numbers, without what follows them.

    >>> release_numbers("0.5.10.post1") > release_numbers("0.5.9"), release_numbers("0.5.10rc1")
    (True, (0, 5, 10))
    """
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def only_first_rank_heard(case: Case) -> bool:
    """Tell whether no rank has printed anything but the first of each group.

    Some releases have only these print how the start goes on: the others' silence says nothing.
    """
    version = launched_version(case)
    last = case.engine.first_rank_prints_until
    if case.facts.timeline.launch.every_rank_prints or (
        version and release_numbers(version) > release_numbers(last)
    ):
        return False
    logs = case.facts.timeline.ranks
    heard = [rank.name for rank in case.facts.ranks if (log := logs.get(rank.name)) and log.lines]
    firsts = all(re.search(r"\bTP0\b", name) for name in heard)
    return firsts and len(heard) < len(case.facts.ranks)


def phase_of_failure(case: Case, names: Iterable[str]) -> Phase | None:
    """Return the earliest phase that the failures of ranks tell; None if none tells one.

    By their tracebacks, and by messages that come from one phase only.
    """
    names = set(names)
    phases = [raised_phase(case.facts, name, case.engine) for name in names]
    told = {sign.id: sign.phase for sign in case.engine.signs if sign.phase}
    phases += [told.get(sign.id) for sign in case.facts.timeline.signs if sign.rank in names]
    return min(filter(None, phases), key=phase_index, default=None)


def lost_by_log(case: Case) -> dict[str, str]:
    """Return the ranks that have logged an exception after which they end, and that exception.

    The engine's own words say so; any other traceback may have been caught. The text is "" where
    the log ends before the traceback does.
    """
    last_words = {sign.id for sign in case.engine.signs if sign.ends_rank}
    found = [sign.rank for sign in signs_of(case, "exception") if sign.id in last_words]
    return {name: exceptions(case.facts).get(name, "") for name in dict.fromkeys(found)}


def phase_lacked(case: Case, missing: Mapping[str, Sequence[str]]) -> Phase | None:
    """Return the earliest phase whose line a rank lacks: what it should have come to next.

    Args:
        case: as ever.
        missing: by rank, ids of milestones in their order, as `lacking` returns them.
    """
    phases = {milestone.id: milestone.phase for milestone in case.engine.milestones}
    firsts = [phases[lines[0]] for lines in missing.values() if lines and lines[0] in phases]
    return min(firsts, key=phase_index, default=None)


def line_of(case: Case, milestone_id: str) -> str:
    """Return a milestone as its line begins in the log, quoted."""
    examples = (each.examples[0] for each in case.engine.milestones if each.id == milestone_id)
    return f"'{re.split('[=0-9({]', next(examples, milestone_id))[0][:40].strip()}'"


def evidence(*items: Evidence | None) -> tuple[Evidence, ...]:
    """Return the evidence that there is; a line of the log that another item quotes too, once."""
    there = [item for item in items if item is not None]
    return tuple(
        item
        for at, item in enumerate(there)
        if item.log_line is None
        or not any(
            other.log_line == item.log_line
            and item.text in other.text
            and (item.text != other.text or other_at < at)
            for other_at, other in enumerate(there)
            if other_at != at
        )
    )


def evidence_of(signs: Iterable[SignSeen], most: int) -> tuple[Evidence, ...]:
    """Return signs of the log as evidence: whose they are, and what a rank repeats once."""
    first = {(sign.rank, sign.text): sign for sign in reversed(list(signs))}
    return tuple(
        Evidence(
            text=f"{sign.rank}: {sign.text[:200]}" if sign.rank else sign.text[:200],
            rank=sign.rank,
            log_line=sign.number,
        )
        for sign in sorted(first.values(), key=lambda sign: sign.number)[:most]
    )


_SECTION_NAMES = {
    "processes": "the processes",
    "stacks": "the stacks",
    "gpus": "the GPUs",
    "log": "the log (--log FILE; kubectl logs -f POD | hangdoctor diagnose PID --log -)",
}


def _wait_index(rank: RankFacts) -> int:
    return len(rank.stack or ()) - len(rank.operation)


def _lacks_s(case: Case, suspects: tuple[RankFacts, ...], needed_s: float) -> float | None:
    """Return how much more stillness would be enough; None where it is not stillness that lacks."""
    lacks_s = [] if case.still_enough(needed_s) else [max(0.0, needed_s - (case.still_s or 0.0))]
    lacks_s += [
        rank.sleep.over_at_s + needed_s - (case.facts.at_s or 0.0)
        for rank in suspects
        if rank.sleep and may_have_slept(case.facts, case.engine, rank, needed_s)
    ]
    return max(lacks_s, default=None)


def _longer(case: Case, needed_s: float) -> str:
    seen = f"{case.still_s:.0f} s" if case.still_s is not None else "nothing"
    return (
        f"stillness of {needed_s:.0f} s, seen so far: {seen} (diagnose: --for {needed_s + 5:.0f})"
    )


def _may_be_working(case: Case, rank: RankFacts, phase: Phase | None, needed_s: float) -> list[str]:
    """Say why a rank that shows no progress might still be at work."""
    if rank.present is False or rank.state == "T":
        return []
    if rank.runaway_s is None and (
        asleep := may_have_slept(case.facts, case.engine, rank, needed_s)
    ):
        return asleep
    if rank.stack is not None and rank.settled_s is None:
        return [f"a second dump of {rank.name}"]
    if rank.settled_s is not None and rank.settled_s < case.stall_after_s / 4:
        return [f"dumps of {rank.name} that are further apart"]
    if rank.stack_missing is not None or (rank.stack_age_s or 0.0) > 2 * case.stall_after_s:
        return [f"a newer dump of {rank.name}"]
    if rank.shared_work_s is not None and rank.shared_work_s < needed_s:
        cards = enumerate_names([f"GPU {index}" for index in rank.cards])
        return [f"whose work {cards} did {rank.shared_work_s:.0f} s ago: others are on it as well"]
    if rank.reading == "busy" and rank.wait and rank.wait.kind == "device":
        return [f"what GPU {rank.cards[0]} does: it is busy, at a power that tells neither"]
    overdue = past_normal(case, phase)
    watched_s = case.still_s or 0.0  # what may be at work must be watched: no old log stands for it
    if rank.runaway_s is not None and rank.runaway_s >= case.stall_after_s / 2:
        return []
    patient_s = storage_patience_s(case) if stalls(case.facts, rank) else None
    patient_s = patient_s or STORAGE_FACTOR * case.stall_after_s
    if rank.on_storage and watched_s < patient_s:
        return [
            (
                f"{rank.name} waits for storage ({rank.on_storage}), which may still answer: "
                f"{patient_s:.0f} s of it"
            )
        ]
    if _may_wait_for_storage(rank) and watched_s < STORAGE_FACTOR * case.stall_after_s:
        return [
            (
                f"what {rank.name} waits for in the kernel, which may be storage (its wchan), "
                f"or {STORAGE_FACTOR * case.stall_after_s:.0f} s of it"
            )
        ]
    patience_s = SYMMETRIC_FACTOR * case.stall_after_s
    outside = rank.wait is not None and rank.wait.kind in ("network", "lock")
    outside = outside and not lock_is_dead(rank)
    if outside and not (overdue and watched_s >= patience_s):
        return [f"what {rank.name} waits for is outside the launch and may still come"]
    if rank.wait and rank.wait.kind == "child" and watched_s < patience_s:
        return [f"{patience_s:.0f} s without CPU of what {rank.name} has started"]
    if rank.helped_by and not overdue:
        return [f"what {rank.helped_by} below {rank.name} does: it uses CPU, and may be at work"]
    if not _is_busy(rank):
        return []
    if rank.compiling and not overdue:
        return [f"{rank.name} compiles in its own process: that can be silent for minutes"]
    if watched_s < patience_s:
        return [
            (
                f"{rank.name} uses {rank.cpu_pct:.0f} % CPU: native frames tell what for "
                f"(--native), or {patience_s:.0f} s of it"
            )
        ]
    return []


def _may_wait_for_storage(rank: RankFacts) -> bool:
    """Tell whether a rank sleeps, and nothing tells that it is not a file system it waits for."""
    return rank.on_storage is None and rank.state == "S" and not (rank.wait or rank.blocked)


def _is_busy(rank: RankFacts) -> bool:
    """Tell whether a rank uses CPU for what may be work: not to poll its spinning GPU."""
    return rank.cpu_pct is not None and rank.cpu_pct >= 50 and rank.reading != "spinning"


def _goes_round(case: Case, rank: RankFacts, needed_s: float) -> list[str]:
    """Say why a rank that was seen in a wait, or at a place, may not have stayed there.

    A scheduler that serves passes the same places again and again: none of its stacks is new, and
    each dump finds it in another of them.
    """
    if rank.stack is None or not rank.present or (rank.wait and rank.wait.kind == "idle"):
        return []
    enough_s = 0.75 * min(case.still_s or 0.0, needed_s)
    if rank.not_idle_s is not None and rank.not_idle_s < enough_s:
        return [f"dumps in which {rank.name} does not return to its loop"]
    waits = rank.wait is not None and rank.wait.kind in ("peers", "rendezvous", "device")
    if waits and (rank.held_s or 0.0) < enough_s:
        return [f"dumps that all show {rank.name} in the same operation"]
    return []


def past_normal(case: Case, phase: Phase | None) -> bool:
    """Tell whether a phase has lasted longer than is normal for it."""
    age_s = phase_age_s(case, phase)
    return phase is not None and age_s is not None and age_s > case.engine.phase(phase).normal_max_s


def phase_age_s(case: Case, phase: Phase | None) -> float | None:
    """Return how long the launch has been in a phase; None where that is not known.

    By the log's own stamps where the log tells when it began, else since it was first seen.
    """
    facts = case.facts
    if phase is None or facts.at_s is None:
        return None
    in_phase = [rank for rank in facts.ranks if rank.phase == phase]
    since_s = min((rank.phase_since_s for rank in in_phase), default=facts.at_s)
    stamps = [
        reached.time_s
        for log in facts.timeline.ranks.values()
        for reached in log.milestones
        if reached.phase_after == phase and reached.time_s is not None
    ]
    return max(facts.at_s - since_s, stamp_age_s(facts, min(stamps, default=None)) or 0.0)
