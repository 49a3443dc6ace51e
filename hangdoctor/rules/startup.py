"""Rules over how far the launch has come, and whether it still lives."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from hangdoctor.engines import ONLY_RANK
from hangdoctor.facts import phase_index
from hangdoctor.facts.phases import earliest_phase, launch_phase
from hangdoctor.findings import Evidence, Finding, enumerate_names, weakest
from hangdoctor.frames import place
from hangdoctor.logs.timeline import logged_stands
from hangdoctor.model import Installation
from hangdoctor.rules.blame import Blame, advise_on_loss, blame_for_failure, tell_loss
from hangdoctor.rules.case import (
    ended_by_log,
    evidence,
    evidence_of,
    failures,
    judge,
    last_line,
    lost_by_log,
    past_normal,
    phase_of_failure,
    signs_of,
    stands,
)
from hangdoctor.rules.deaths import END_IT, exception_of
from hangdoctor.rules.exits import describe_status
from hangdoctor.tracks import lives
from hangdoctor.waitgraph import launcher_waits_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hangdoctor.engines import Phase
    from hangdoctor.facts import RankFacts
    from hangdoctor.findings import Confidence
    from hangdoctor.rules.case import Case


def launch_ended(case: Case) -> Iterator[Finding]:
    """The launch has ended.

    What it sees: its root process and its ranks are gone; or, in a log alone, a line that says
    that it ended. Ranks whose exception says that they lost a peer, or gave up waiting for one,
    are told from the rank that ended first: by what the others raised, by exit statuses.
    Why it matters: there is nothing to wait for.
    What to do: read the first exception; the ones after it are its consequences. Where a rank
    ended without a word, look at what it did last: os._exit in a patch, the out-of-memory killer.
    """
    facts = case.facts
    ready = facts.launch_log_phase == "ready"
    fatal = signs_of(case, "fatal") + signs_of(case, "signal")
    blame = blame_for_failure(case)
    if facts.tracks:
        launcher = facts.launcher
        if launcher is not None and lives(launcher):
            return
        if any(rank.present for rank in facts.ranks) or (launcher is None and not facts.ranks):
            return
        how = describe_status(launcher.exit_status if launcher else None)
        ended = f"the launch has ended{how and ' with '}{how}"
        if how.startswith("killed"):
            ended = (
                "the launch has ended" if _ended_itself(case, blame) else f"the launch was {how}"
            )
    elif ended_by_log(case):
        ended = "the log tells that the launch ended"
    else:
        return
    failed = tuple(name for name in failures(case) if name)
    culprits = blame.culprits
    faults = _faults(case)
    text, advice = _what_ended_it(case, blame, faults)
    ranks = tuple(rank for rank in facts.ranks if rank.name in culprits) or facts.ranks
    # In the order of cause: who ended by an exception of its own comes before those that lost it.
    failed = tuple(sorted(failed, key=lambda name: name in blame.victims))
    yield Finding(
        rule="launch-ended",
        verdict="found",
        title=ended + (" after it had been ready" if ready else "") + (f": {text}" if text else ""),
        ranks=tuple(dict.fromkeys((*culprits, *failed))),
        culprits=culprits,
        state="dead",
        phase="ready"
        if ready
        else phase_of_failure(case, (*culprits, *failed, ""))
        or earliest_phase(ranks)
        or facts.launch_log_phase,
        confidence=weakest(blame.confidence, "high" if facts.tracks or failed else "medium"),
        because=evidence(
            *blame.because,
            *(exception_of(case, name) for name in (*failed[:3], "")),
            *faults,
            *evidence_of(fatal, 3),
            last_line(case, ""),
        ),
        needs=blame.needs,
        advice=advice,
    )


def _ended_itself(case: Case, blame: Blame) -> bool:
    """Tell whether the log says why a launcher is killed: its handler kills the tree and itself."""
    raised = [name for name in lost_by_log(case) if name not in blame.late]
    return bool(signs_of(case, "fatal") or raised)


def _what_ended_it(case: Case, blame: Blame, faults: list[Evidence]) -> tuple[str, tuple[str, ...]]:
    """Return what a launch ended of, in the log's words, and what to do; the words may be ""."""
    raised = failures(case)
    if blame.is_loss:
        return tell_loss(case, blame), advise_on_loss(case, blame)
    first = next((text for name, text in raised.items() if name and name in blame.culprits), "")
    others = (text for name, text in raised.items() if name and name not in blame.late)
    if first := first or next(others, ""):
        return first, ("read the first exception in the log; those after it are its consequences",)
    fatal = signs_of(case, "fatal")
    killed = [sign for sign in fatal if sign.status == -signal.SIGKILL]
    if killed:
        who = next((sign.text[:100] for sign in fatal if sign.blamed), killed[0].text[:100])
        return f"a rank was killed by SIGKILL: {who}", (
            "see whether memory ran out: dmesg -T | grep -i 'killed process'",
        )
    if faults:
        return faults[0].text, (
            "read the stack below that line: its innermost frame is where the process faulted",
        )
    if text := raised.get("", ""):
        return text, ("read the first exception in the log; those after it are its consequences",)
    given_up = signs_of(case, "timeout")
    if fatal or given_up:
        return (given_up or fatal)[0].text[:160], (
            "read the log before that line, from further back if this is its tail",
        )
    return "", ()


def exception_in_rank(case: Case) -> Iterator[Finding]:
    """A rank logged an exception, and the launch is still there, or the log does not tell its end.

    What it sees: the words with which a rank ends, and its processes or others alive and still; or
    those words in a log alone.
    Why it matters: the rank will never join its peers. The signal that should end the launch does
    not always reach it.
    What to do: read that traceback first; where it says that a connection to a peer was lost, look
    at the rank that ended. End the launch.
    """
    facts = case.facts
    lost = lost_by_log(case)
    if not facts.tracks:
        if lost and not ended_by_log(case):
            yield _lost_in_log(case, lost)
        return
    failed = tuple(name for name, text in lost.items() if text and facts.rank(name))
    if not failed or not any(rank.present for rank in facts.ranks):
        return
    ranks = tuple(rank for rank in facts.ranks if rank.name in failed)
    blame = blame_for_failure(case)
    first = next((name for name in failed if name in blame.culprits), failed[0])
    finding = Finding(
        rule="exception-in-rank",
        verdict="found",
        title=tell_loss(case, blame)
        if blame.is_loss
        else f"{enumerate_names(failed)} failed: {lost[first]}",
        ranks=failed,
        culprits=blame.culprits,
        phase=earliest_phase(ranks),
        confidence=blame.confidence,
        because=evidence(
            *blame.because,
            *(exception_of(case, name) for name in failed[:3]),
            *(stands(case, rank) for rank in ranks[:2]),
        ),
        needs=blame.needs,
        advice=(
            *(advise_on_loss(case, blame) if blame.is_loss else ("read that traceback first",)),
            END_IT,
        ),
    )
    yield judge(case, (), finding, needed_s=case.stall_after_s / 2, proven=True)


def launcher_waits_for_ranks(case: Case) -> Iterator[Finding]:
    """The launcher waits for its ranks' ready message.

    What it sees: the launcher's stack in its wait for the ranks.
    Why it matters: it is healthy; the HTTP port opens only after every rank is ready, so that a
    refused /health is no fault of the server's.
    What to do: look at the ranks.
    """
    launcher = case.facts.launcher
    if launcher is None or launcher.wait is None or not lives(launcher):
        return
    wait = case.engine.wait(launcher.wait[0])
    if wait.kind != "ranks-ready":
        return
    yield Finding(
        rule="launcher-waits-for-ranks",
        verdict="found",
        title="the launcher waits for its ranks to be ready; the HTTP port is not open before that",
        confidence="high",
        because=(
            Evidence(
                text=f"launcher waits in {wait.title}",
                pid=launcher.process.pid,
                at_s=launcher.stack_at_s,
            ),
        ),
    )


def warmup_request_unanswered(case: Case) -> Iterator[Finding]:
    """The ranks are idle while the launcher waits for its warm-up request, or for them.

    What it sees: all ranks in their loop waiting for requests, the server not ready, and the
    launcher's warm-up without an answer, or its wait for the ranks without an end, for long.
    Why it matters: the request never reached the ranks, or its answer got lost between them and
    the launcher: a proxy in the environment, the detokenizer.
    What to do: send a request by hand; unset http_proxy; look at the detokenizer.
    """
    graph, facts = case.graph, case.facts
    everyone = case.everyone
    if not everyone or len(graph.idle) != len(everyone):
        return
    waits_for = launcher_waits_for(case.facts, case.engine)
    phase: Phase = "warmup"
    title = "all ranks are idle, and the warm-up request has no answer"
    if waits_for in ("launcher-ready", "controller-ready"):
        phase = "server"
        title = "all ranks are built and idle, and the launcher still waits for their ready message"
    elif facts.launch_log_phase != "warmup" and waits_for != "warmup-response":
        return
    finding = Finding(
        rule="warmup-request-unanswered",
        verdict="found",
        title=title,
        phase=phase,
        confidence="medium",
        because=evidence(stands(case, everyone[0]), last_line(case, "")),
        advice=(
            "send one by hand: curl --noproxy '*' http://127.0.0.1:PORT/model_info",
            "see whether a proxy takes it: env | grep -i proxy",
        ),
    )
    yield judge(case, (), finding, needed_s=3 * case.stall_after_s)


def idle_and_ready(case: Case) -> Iterator[Finding]:
    """The server is ready; its schedulers poll.

    What it sees: the line that it is ready, ranks in their loop. An idle scheduler uses a whole
    core and, at TP of 2 and more, makes thousands of small writes a second in a broadcast.
    Why it matters: it looks like a hang and is none.
    What to do: nothing. SGLang's --sleep-on-idle saves the CPU.
    """
    facts = case.facts
    idle = [rank.name for rank in case.graph.idle]
    said = facts.launch_log_phase == "ready"
    earlier = [
        rank
        for rank in facts.ranks
        if rank.stack and rank.phase and phase_index(rank.phase) < phase_index("server")
    ]
    if said and earlier:
        yield _log_of_another_launch(case, earlier)
        return
    if not said and not _serves(case):
        return
    confidence: Confidence = "high" if said and facts.tracks else "medium"
    title = "the server is ready" + (f"; {_who_waits(idle)} for requests" if idle else "")
    busy = [rank for rank in facts.ranks if rank.stack and rank.present]
    if busy and not idle and case.still_s is not None and case.still_s >= case.hung_after_s:
        confidence = "low"
        title = (
            f"the server was ready; for {case.still_s:.0f} s no rank was seen to move or to wait "
            "for requests"
        )
    yield Finding(
        rule="idle-and-ready",
        verdict="found",
        title=title,
        ranks=tuple(idle),
        state="ready",
        phase="ready",
        confidence=confidence,
        because=evidence(
            last_line(case, "") if said else None,
            *(stands(case, rank) for rank in case.graph.idle[:1]),
        ),
    )


def still_progressing(case: Case) -> Iterator[Finding]:
    """The launch is not ready, and moves.

    What it sees: bytes read from files, memory or GPU memory that grows, compilers at work, a
    stack that was never seen before, a new line or a bar that advances.
    Why it matters: a slow start that is ended is the costliest false alarm.
    What to do: wait. Past the phase's normal time it is called slow.
    """
    facts = case.facts
    if not case.observed or facts.launch_log_phase == "ready" or case.still_s is None:
        return
    moving = [rank for rank in facts.ranks if rank.moving]
    if case.still_s >= case.stall_after_s or case.facts.watched_s < 1:
        return
    launcher = facts.launcher
    alive = any(rank.present for rank in facts.ranks) or (launcher and lives(launcher))
    if not alive or not (moving or _moved_at_all(case)):
        return
    phase = launch_phase(facts)
    if phase_index(phase) >= phase_index("server") and not facts.launch_log_phase:
        return  # without the log, its loop looks the same before and after it is ready
    overdue = past_normal(case, phase)
    what = [f"{rank.name} {rank.moved_by}" for rank in moving if rank.moved_by]
    if not what and launcher and launcher.moved_by and not facts.ranks:
        what = [f"the launcher {launcher.moved_by}"]
    title = "overdue, but it moves" if overdue else "it moves"
    yield Finding(
        rule="still-progressing",
        verdict="found",
        title=title + (f": {'; '.join(what[:3])}" if what else ""),
        ranks=tuple(rank.name for rank in moving),
        state="slow" if overdue else "starting",
        phase=phase or "start",
        confidence="high" if moving else "medium",
        because=evidence(
            *(
                Evidence(
                    text=f"{rank.name} {rank.moved_by or 'moves'}", rank=rank.name, at_s=facts.at_s
                )
                for rank in moving[:4]
            ),
        ),
        advice=()
        if any(rank.present is False and rank.pid for rank in facts.ranks)
        else ("wait, and look again",),
    )


def files_changed(case: Case) -> Iterator[Finding]:
    """The engine's files are not those that were released, or are newer than the processes.

    What it sees: hashes against the wheel's own list, time stamps against the processes' start.
    Why it matters: a patch is the first suspect of a new hang. A file that changed after the
    processes had started has no effect on them, however right it is.
    What to do: relaunch after patching; revert the patch to see whether the hang goes with it.
    """
    installation = case.facts.header.installation
    if not isinstance(installation, Installation) or not installation.changed_files:
        return
    late = [file for file in installation.changed_files if file.newer_than_launch]
    patched = [file for file in installation.changed_files if file.differs_from_release]
    parts = []
    if patched:
        differ = "differs" if len(patched) == 1 else "differ"
        parts.append(f"{_paths([file.path for file in patched])} {differ} from the release")
    if late:
        parts.append(
            f"{_paths([file.path for file in late])} changed long after the processes had started, "
            "without effect on them"
        )
    if not parts:
        return
    yield Finding(
        rule="files-changed",
        verdict="found",
        title="; ".join(parts),
        confidence="high",
        because=tuple(
            Evidence(text=f"{installation.path}: {file.path} sha256 {file.sha256[:12]}")
            for file in installation.changed_files[:5]
        ),
        advice=("relaunch to run what the files hold now",) if late else (),
    )


def _lost_in_log(case: Case, lost: dict[str, str]) -> Finding:
    """Say of a log alone that a rank has ended; the launch has too, or hangs without it."""
    facts = case.facts
    only = len(facts.ranks) == 1
    names = tuple(name or ONLY_RANK for name in lost if name or only)
    blame = blame_for_failure(case)
    text = next((text for name, text in lost.items() if text and name in blame.culprits), "")
    text = text or next(filter(None, lost.values()), "")
    gave_up = {*blame.victims, *(sign.rank for sign in signs_of(case, "timeout"))}
    blamed = blame.culprits
    if not blame.is_loss:
        blamed = blamed or tuple(name for name in names if name not in gave_up)
    after = " after the server had been ready" if facts.launch_log_phase == "ready" else ""
    signs = [sign for sign in signs_of(case, "exception") if sign.rank in lost]
    return Finding(
        rule="exception-in-rank",
        verdict="found",
        title=tell_loss(case, blame) + after
        if blame.is_loss
        else f"{enumerate_names(names) or 'a rank'} failed{after}: "
        + (text or "the log ends within the traceback"),
        ranks=names,
        culprits=blamed,
        state="hung" if facts.header.still_running else "dead",
        phase="ready"
        if after
        else phase_of_failure(case, lost)
        or earliest_phase(tuple(rank for rank in facts.ranks if rank.name in names))
        or facts.launch_log_phase,
        confidence=weakest(blame.confidence, "high" if text else "medium"),
        because=evidence(
            *blame.because,
            *(
                Evidence(text=sign.text[:200], rank=sign.rank or None, log_line=sign.number)
                for sign in signs[:2]
            ),
            *(exception_of(case, name) for name in tuple(lost)[:3]),
        ),
        needs=blame.needs,
        advice=(
            *(
                advise_on_loss(case, blame)
                if blame.is_loss
                else ("read that traceback first",)
                if text
                else ("get the rest of the log: its exception",)
            ),
            "a rank ends after these words: if processes are left, end them",
        ),
    )


def _serves(case: Case) -> bool:
    """Tell from the stacks alone whether the server is ready.

    All ranks are idle, the launcher serves HTTP, and none of its threads waits for the answer to
    its warm-up request any more.
    """
    facts, launcher = case.facts, case.facts.launcher
    everyone = [rank for rank in facts.ranks if rank.present is not False]
    if facts.launch_log_phase or launcher is None or launcher.wait is None:
        return False
    if not everyone or len(case.graph.idle) != len(everyone) or launcher.dumps < 2:
        return False
    idle = case.engine.wait(launcher.wait[0]).kind == "idle"
    return idle and launcher_waits_for(case.facts, case.engine) is None


def _log_of_another_launch(case: Case, earlier: list[RankFacts]) -> Finding:
    """Return what to say where the log tells `ready` and the stacks that it still starts."""
    names = [rank.name for rank in earlier]
    return Finding(
        rule="idle-and-ready",
        verdict="undecided",
        title=f"the log says that the server is ready, and {enumerate_names(names[:4])} still "
        f"{'starts' if len(names) == 1 else 'start'}: it may be another launch's log",
        ranks=tuple(names),
        confidence="low",
        because=evidence(last_line(case, ""), *(stands(case, rank) for rank in earlier[:2])),
        needs=("this launch's own log: --log FILE",),
    )


def _who_waits(names: list[str]) -> str:
    return f"{enumerate_names(names[:4])} {'waits' if len(names) == 1 else 'wait'}"


def _moved_at_all(case: Case) -> bool:
    """Tell whether anything moved while we watched, the log included."""
    first = case.facts.first_at_s or 0.0
    times = [track.moved_at_s for track in case.facts.tracks.values() if track.owner is None]
    times.append(case.facts.log_moved_at_s)
    return any(at_s is not None and at_s > first for at_s in times)


def _faults(case: Case) -> list[Evidence]:
    """Return the faults that ended processes, with their places, by faulthandler's dumps."""
    return [
        Evidence(
            text=f"Fatal Python error: {stand.dump.cause}"
            + (f", at {place(stand.dump.frames[0])}" if stand.dump.frames else ""),
            rank=rank or None,
            log_line=stand.dump.number,
        )
        for rank, stand in logged_stands(case.facts.timeline, case.engine).items()
        if stand.dump.cause
    ]


def _paths(paths: list[str]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(paths[:3]) + more
