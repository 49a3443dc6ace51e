"""Rules over processes of the launch that have died, or are stopped: ranks and all the others."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hangdoctor.facts import launch_still_s, phase_index
from hangdoctor.facts.phases import earliest_phase
from hangdoctor.findings import Evidence, Finding, enumerate_names
from hangdoctor.rules.blame import Blame, advise_on_loss, blame_for_failure, tell_loss
from hangdoctor.rules.case import (
    evidence,
    exceptions,
    failures,
    judge,
    last_line,
    phase_of_failure,
)
from hangdoctor.rules.exits import Death, death_of, death_of_rank, zombies
from hangdoctor.tracks import lives

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hangdoctor.engines import Phase
    from hangdoctor.facts import Facts, RankFacts
    from hangdoctor.rules.case import Case
    from hangdoctor.tracks import Track

TAKES_LEAVE_S = 3.0
"""A launch that ends takes its processes with it within moments: only after so long one is left."""

END_IT = "the launch cannot come up any more: end it, all of its processes"


def rank_died(case: Case) -> Iterator[Finding]:
    """A rank has ended while the launch goes on.

    What it sees: a rank process that was there and is gone or a zombie, with peers alive; how it
    ended (its zombie, a pidfd, the launcher's log line), and whether memory had run out (the
    cgroup's oom_kill before and after, the kernel's log). Peers that logged the loss of their
    connection are told from the one that ended.
    Why it matters: the peers wait for it for ever; a launcher that reads the ranks' pipes in order
    does not notice. SIGKILL is most often the kernel's out-of-memory killer.
    What to do: read the last lines of the rank that ended, not the exception of one that lost it;
    give the launch more memory; end it.
    """
    facts = case.facts
    dead = [rank for rank in facts.ranks if rank.present is False and rank.pid is not None]
    dead += _died_before_we_came(case)
    alive = [rank for rank in facts.ranks if rank.present]
    launcher_gone = facts.launcher is not None and not lives(facts.launcher)
    if not dead or (not alive and launcher_gone):
        return
    failed = [rank for rank in dead if failures(case).get(rank.name)]
    missed = blame_for_failure(case)
    gone = {rank.name for rank in dead}
    known = failed or (missed.is_loss and missed.culprits and gone.issuperset(missed.culprits))
    blame = missed if known else Blame()
    waiting = [rank.name for rank in alive if rank.name not in missed.victims]
    # Those that only lost another are told after it.
    first = [rank for rank in dead if rank.name not in blame.victims]
    names = tuple(rank.name for rank in first or dead)
    death = death_of_rank(case, (first or dead)[0])
    have = "has" if len(names) == 1 else "have"
    were = "was" if len(names) == 1 else "were"
    how = f"{were} {death.words}" if death.words.startswith("killed") else f"{have} died"
    how += f" ({death.words})" if death.words and not death.words.startswith("killed") else ""
    who = f"{enumerate_names(names)} {how}"
    if blame.is_loss:
        who = tell_loss(case, blame)
    yield Finding(
        rule="rank-died",
        verdict="found",
        title=who
        + (f" while {enumerate_names(waiting[:4])} still " if waiting else "")
        + ("" if not waiting else "waits" if len(waiting) == 1 else "wait"),
        ranks=tuple(rank.name for rank in dead),
        # A rank that ended others with it by its exception is to blame for them too.
        culprits=blame.culprits or tuple(name for name in names if name not in blame.victims),
        state="dead",
        # Who lost it had come to where it was missed: with it, as far as barriers go.
        phase=max(
            (earliest_phase(tuple(dead)), phase_of_failure(case, missed.lost)), key=phase_index
        ),
        confidence=blame.confidence,
        because=evidence(
            *(_is_gone(case, rank) for rank in dead[:4]),
            *(blame.because or death.because),
            *(exception_of(case, rank.name) for rank in failed[:2]),
            *(exception_of(case, name) for name in blame.lost[:2] if name not in gone),
            last_line(case, names[0]),
        ),
        needs=blame.needs,
        advice=(
            *(advise_on_loss(case, blame) if blame.is_loss else death.advice),
            END_IT,
        ),
    )


def launcher_died(case: Case) -> Iterator[Finding]:
    """The launcher has ended, and ranks live on.

    What it sees: the process that launched the ranks is gone or a zombie; or ranks whose parent
    is no engine and no Python, as init is.
    Why it matters: nobody is left to serve, or to end the ranks. They hold their GPUs' memory, and
    the next launch does not fit.
    What to do: end the ranks that are left; then start anew.
    """
    facts, launcher = case.facts, case.facts.launcher
    alive = [rank for rank in facts.ranks if rank.present]
    if not alive or (launcher is not None and lives(launcher)):
        return
    if launcher is None and not all(_is_orphan(facts, rank) for rank in alive):
        return
    gone_s = _gone_s(facts, launcher) if launcher else facts.watched_s
    names = [rank.name for rank in alive]
    death = death_of(case, launcher, "launcher") if launcher else Death(words="", status=None)
    why = f" ({death.words})" if death.words else ""
    held = _gpu_memory(case, alive)
    pids = " ".join(str(rank.pid) for rank in alive if rank.pid is not None)
    enough = gone_s >= TAKES_LEAVE_S
    yield Finding(
        rule="launcher-died",
        verdict="found" if enough else "undecided",
        title=f"the launcher is gone{why}, and {enumerate_names(names[:8])} "
        f"{'lives' if len(names) == 1 else 'live'} on without it"
        + (f", with {held / 1e9:.1f} GB of GPU memory" if held else ""),
        ranks=tuple(names),
        culprits=("launcher",),
        state="dead" if enough else None,
        phase=earliest_phase(tuple(alive)),
        confidence="high" if launcher else "medium",
        because=evidence(
            Evidence(
                text=f"the launcher (pid {launcher.process.pid}) "
                f"{'is a zombie' if launcher.present else 'is gone'}, for {gone_s:.0f} s",
                pid=launcher.process.pid,
                at_s=facts.at_s,
            )
            if launcher
            else None,
            *(_parent_of(facts, rank) for rank in alive[:4]),
            *death.because,
            last_line(case, ""),
        ),
        needs=() if enough else ("whether they end by themselves: look again in some seconds",),
        advice=(f"end what is left, it serves nobody: kill {pids}", *death.advice),
    )


def engine_process_died(case: Case) -> Iterator[Finding]:
    """A process that the engine cannot do without has died: the detokenizer, a controller.

    What it sees: a process with a role of its own, that is no rank, gone or a zombie while the
    launcher and ranks live, and no other has taken its place.
    Why it matters: the ranks may load and compute as ever; no request gets an answer, so that the
    warm-up never ends. Several releases do not notice.
    What to do: read its last lines in the log; end the launch.
    """
    facts = case.facts
    launcher = facts.launcher
    alive = [rank for rank in facts.ranks if rank.present]
    if launcher is None or not lives(launcher) or not alive:
        return
    for track, role in _engine_processes(case):
        if lives(track) or _replaced(facts, track, role):
            continue
        gone_s = _gone_s(facts, track)
        enough = gone_s >= TAKES_LEAVE_S
        death = death_of(case, track, role)
        yield Finding(
            rule="engine-process-died",
            verdict="found" if enough else "undecided",
            title=f"the {role} has died" + (f" ({death.words})" if death.words else ""),
            culprits=(role,),
            state="dead" if enough else None,
            phase=earliest_phase(tuple(alive)),
            confidence="high",
            because=evidence(
                Evidence(
                    text=f"the {role} (pid {track.process.pid}) "
                    f"{'is a zombie' if track.present else 'is gone'}, for {gone_s:.0f} s",
                    pid=track.process.pid,
                    at_s=facts.at_s,
                ),
                *death.because,
                last_line(case, ""),
            ),
            needs=() if enough else ("whether the launch ends: look again in some seconds",),
            advice=(
                *death.advice,
                "without it no request gets an answer: end the launch, all of its processes",
            ),
        )


def rank_stopped(case: Case) -> Iterator[Finding]:
    """A process of the launch is stopped, or held by a debugger.

    What it sees: state T or t of the main thread, or a TracerPid; of a rank, the launcher, the
    detokenizer, or another that the engine has started.
    Why it matters: a stopped process runs nothing, and the others wait for it for ever. Ctrl-Z, a
    debugger that was killed, or a container that was paused leave such a process behind.
    What to do: end the debugger, or continue the process with `kill -CONT PID`.
    """
    facts = case.facts
    seen: list[tuple[str, Track, RankFacts | None]] = []
    for rank in facts.ranks:
        track = facts.track(rank)
        if track is not None and rank.present:
            seen.append((rank.name, track, rank))
    if facts.launcher is not None:
        seen.append(("launcher", facts.launcher, None))
    seen += [(role, track, None) for track, role in _engine_processes(case)]
    for name, track, stopped_rank in seen:
        process = track.process
        stopped = process.state in "Tt"
        if not lives(track) or not (stopped or process.tracer_pid):
            continue
        who = name if stopped_rank else f"the {name}"
        by = f" by process {process.tracer_pid}" if process.tracer_pid else ""
        what = f"is held{by} (a debugger)" if process.tracer_pid else "is stopped by a signal"
        alive = tuple(rank for rank in facts.ranks if rank.present)
        finding = Finding(
            rule="rank-stopped",
            verdict="found" if stopped else "undecided",
            title=f"{who} {what}",
            ranks=(name,) if stopped_rank else (),
            culprits=(name,) if stopped else (),
            phase=stopped_rank.phase if stopped_rank else _phase_of_all(case, alive),
            confidence="high",
            because=evidence(
                Evidence(
                    text=f"{who} (pid {process.pid}) is in state {process.state}",
                    pid=process.pid,
                    rank=name if stopped_rank else None,
                    at_s=facts.at_s,
                )
            ),
            needs=_stopped_long_enough(case, track) if stopped else (),
            advice=(
                f"see who holds it: grep -E 'State|TracerPid' /proc/{process.pid}/status",
                f"continue it: kill -CONT {process.pid}",
            ),
        )
        if not stopped or finding.needs:
            yield finding
            continue
        # A process in state T cannot be at work in secret: stillness of half the time is enough.
        suspects = (stopped_rank,) if stopped_rank else ()
        yield judge(case, suspects, finding, needed_s=case.stall_after_s, proven=True)


def exception_of(case: Case, name: str) -> Evidence | None:
    """Return the exception that a rank, or with "" the launch, has logged."""
    text = exceptions(case.facts).get(name)
    return Evidence(text=f"{name or 'launch'}: {text}", rank=name or None) if text else None


def _gone_s(facts: Facts, track: Track) -> float:
    ended_at_s = track.ended_at_s if track.ended_at_s is not None else track.seen_at_s
    if ended_at_s == track.first_at_s:  # a zombie when we came: longer than we know
        return max(TAKES_LEAVE_S, (facts.at_s or 0.0) - ended_at_s)
    return (facts.at_s or 0.0) - ended_at_s


def _engine_processes(case: Case) -> list[tuple[Track, str]]:
    """Return the processes that the engine cannot do without, besides launcher and ranks.

    A zombie has no title any more, but still its name of 15 bytes.
    """
    facts, launcher = case.facts, case.facts.launcher
    roles = {
        role.id: role
        for role in case.engine.roles
        if not role.is_rank and not role.helper and role.id not in ("launcher", "spawn_main")
    }
    found = [
        (track, track.role)
        for track in facts.tracks.values()
        if track.role in roles and track.rank is None
    ]
    known = {track.process.pid for track, _ in found}
    for track in zombies(facts):
        if track.process.pid in known or launcher is None:
            continue
        named = [
            role.id
            for role in roles.values()
            if any(each[:15] == track.process.comm for each in role.examples)
        ]
        if named:
            found.append((track, named[-1]))
    return found


def _replaced(facts: Facts, gone: Track, role: str) -> bool:
    ended_at_s = gone.ended_at_s if gone.ended_at_s is not None else gone.seen_at_s
    return any(
        lives(track) and track.role == role and track.first_at_s >= ended_at_s
        for track in facts.tracks.values()
    )


def _died_before_we_came(case: Case) -> list[RankFacts]:
    """Return the ranks that are missing where the launcher has as many zombies as children.

    A zombie has no title any more, so that nothing else says which rank it was.
    """
    engines = {track.process.pid for track, _ in _engine_processes(case)}
    others = [track for track in zombies(case.facts) if track.process.pid not in engines]
    missing = [rank for rank in case.facts.ranks if rank.present is False and rank.pid is None]
    return missing if others and len(missing) <= len(others) else []


def _is_gone(case: Case, rank: RankFacts) -> Evidence:
    gone = "is gone" if rank.pid and rank.state != "Z" else "is a zombie"
    return Evidence(
        text=f"{rank.name} (pid {rank.pid or 'unknown'}) {gone}",
        pid=rank.pid,
        rank=rank.name,
        at_s=case.facts.at_s,
    )


def _is_orphan(facts: Facts, rank: RankFacts) -> bool:
    """Tell whether a rank's parent is none that starts ranks: those are Python, or unknown."""
    track = facts.track(rank)
    if track is None:
        return False
    seen: set[int] = set()
    while track.process.ppid in facts.tracks and track.process.pid not in seen:
        seen.add(track.process.pid)
        track = facts.tracks[track.process.ppid]
    title = facts.parents.get(track.process.ppid)
    return title is not None and not _PYTHON.search(title)


_PYTHON = re.compile(r"python|pypy|\.py\b|ray", re.IGNORECASE)


def _parent_of(facts: Facts, rank: RankFacts) -> Evidence | None:
    track = facts.track(rank)
    title = facts.parents.get(track.process.ppid) if track else None
    if track is None or title is None:
        return None
    return Evidence(
        text=f"{rank.name} (pid {rank.pid}) is now a child of {track.process.ppid} ({title[:60]})",
        pid=rank.pid,
        rank=rank.name,
    )


def _gpu_memory(case: Case, ranks: list[RankFacts]) -> int:
    pids = {rank.pid for rank in ranks}
    return sum(
        process.used_bytes or 0
        for card in case.facts.cards.values()
        for process in getattr(card.gpu, "processes", None) or ()
        if process.pid in pids
    )


def _phase_of_all(case: Case, alive: tuple[RankFacts, ...]) -> Phase | None:
    return earliest_phase(alive) or case.facts.launch_log_phase or "start"


def _stopped_long_enough(case: Case, track: Track) -> tuple[str, ...]:
    """Ask for a longer look where a process has only just stopped, beside a launch long still.

    A debugger holds it for as long as it looks: py-spy, which a watchdog starts, some seconds.
    """
    since_s = track.stopped_since_s
    stopped_s = (case.facts.at_s or 0.0) - (since_s if since_s is not None else 0.0)
    stops_s = case.stall_after_s / 2
    needed_s = min(stops_s, launch_still_s(case.facts) or 0.0)
    if track.process.state == "t":
        stops_s = needed_s = case.hung_after_s
    if stopped_s >= needed_s:
        return ()
    return (f"whether it stays stopped: {stops_s:.0f} s of it",)
