"""Rules over what the log itself proves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.facts import phase_index
from hangdoctor.findings import Finding, enumerate_names
from hangdoctor.launches import ranges
from hangdoctor.logs.timeline import lacking
from hangdoctor.rules.blame import blamed_by_log
from hangdoctor.rules.case import (
    evidence,
    evidence_of,
    exceptions,
    failures,
    last_line,
    line_of,
    lost_by_log,
    only_first_rank_heard,
    phase_lacked,
    phase_of_failure,
    signs_of,
    went_on,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hangdoctor.rules.case import Case


def log_stops(case: Case) -> Iterator[Finding]:
    """A log alone stops before the server was ready.

    What it sees: the last milestone of each rank, and which ranks lack a line that others have.
    Why it matters: a log says where it stops, never how long it has stood there.
    What to do: look at the processes as well: `hangdoctor diagnose PID --log FILE`.
    """
    facts = case.facts
    if facts.tracks or not facts.timeline.lines or facts.launch_log_phase == "ready":
        return
    if signs_of(case, "fatal") + signs_of(case, "signal") and not facts.header.still_running:
        return  # it has not stopped: it has ended
    if lost_by_log(case):
        return
    missing = {name: lines for name, lines in lacking(facts.timeline).items() if lines}
    if not facts.log_is_whole or len(missing) == len(facts.ranks):
        missing = {}
    behind = [rank for rank in facts.ranks if rank.name in missing]
    phases = [phase for rank in facts.ranks if (phase := rank.log_phase or rank.phase)]
    silent = [
        rank
        for rank in facts.ranks
        if rank.log_phase is None and facts.expected and facts.log_is_whole
    ]
    names = tuple(rank.name for rank in (*behind, *(silent if phases else [])))
    logs = facts.timeline.ranks
    unheard = tuple(name for name in names if not (name in logs and logs[name].lines))
    unheard = unheard if only_first_rank_heard(case) else ()
    culprits = tuple(name for name in names if name not in unheard)
    reached = min(phases, key=phase_index) if phases else facts.launch_log_phase
    phase = phase_lacked(case, missing) or reached or phase_of_failure(case, exceptions(facts))
    parts = [
        f"{name} lacks {line_of(case, lines[0])}"
        for name, lines in missing.items()
        if name not in unheard
    ]
    if unheard:
        have = "has" if len(unheard) == 1 else "have"
        parts.append(f"{', '.join(ranges(unheard))} {have} printed nothing")
    title = f"the log stops in {phase}" if phase else _without_phase(case)
    title += f"; {', '.join(parts[:4])}" if parts else ""
    raised = next(iter(failures(case).items()), None)
    if raised:
        title += f"; {raised[0] or 'the launch'} logged {raised[1][:120]}"
    told = {sign.number for sign in signs_of(case, "fatal")}
    faults = [
        sign for sign in facts.timeline.signs if sign.kind == "fatal" and sign.number not in told
    ]
    if faults:
        title += f"; what that ended the log does not tell: {faults[-1].text[:120]}"
    silent_s = facts.log_silent_s
    overdue = (
        facts.header.still_running
        and phase is not None
        and silent_s is not None
        and silent_s > case.engine.phase(phase).normal_max_s
    )
    if overdue:
        title += f", and has been silent for {silent_s:.0f} s"
    yield Finding(
        rule="log-stops",
        verdict="found" if overdue else "undecided",
        title=title,
        ranks=names,
        culprits=culprits,
        state="hung" if overdue else "unknown",
        phase=phase,
        confidence="low",
        because=evidence(
            *(last_line(case, rank.name) for rank in (*behind, *facts.ranks)[:4]),
            last_line(case, ""),
        ),
        needs=(
            (
                "how long it has stood there, and where the ranks stand: hangdoctor diagnose PID "
                "--log FILE"
            ),
            "a good start's log to compare with, if the launch is gone",
            *((_WHO_PRINTS,) if unheard else ()),
        ),
        advice=(
            "if it still runs: hangdoctor diagnose PID --log FILE --record DIR",
            *(
                (f"look at {enumerate_names(culprits)} first: the others have come further",)
                if culprits
                else ()
            ),
        ),
    )


def wait_given_up(case: Case) -> Iterator[Finding]:
    """The log says itself that a wait was given up.

    What it sees: the time-out of a watchdog, a barrier or gloo, with the rank that it names.
    Why it matters: the engine has proved the hang; the rank that it names is the one that others
    waited for.
    What to do: look at the named rank's last lines and, where the log has one, its stack.
    """
    facts, timeline = case.facts, case.facts.timeline
    signs = signs_of(case, "timeout")
    if not signs or facts.launch_log_phase == "ready":
        return
    blamed = blamed_by_log(case)
    # Retried, or too late for one rank only: what the log shows of the others is no standstill.
    moved = not facts.tracks and went_on(case, signs[-1].number)
    first = signs[0]
    phases = [
        rank.log_phase
        for rank in facts.ranks
        if rank.log_phase and (not blamed or rank.name in blamed)
    ]
    yield Finding(
        rule="wait-given-up",
        verdict="undecided" if moved else "found",
        title="a wait was given up"
        + (f"; it was for {enumerate_names(blamed)}" if blamed else "")
        + f": {first.text[:120]}",
        ranks=blamed,
        culprits=blamed,
        state="unknown" if moved else None if facts.tracks else "hung",
        phase=min(phases, key=phase_index, default=None)
        or phase_of_failure(case, [sign.rank for sign in signs])
        or facts.launch_log_phase,
        confidence="low" if moved else "high" if blamed else "medium",
        because=evidence_of(signs, 4),
        needs=("whether the launch lives: hangdoctor diagnose PID --log FILE",) if moved else (),
        advice=(
            "read the named rank's last lines before that"
            if blamed
            else "see where each rank stood: its stack, in the log after that line",
            *((_NO_PYSPY,) if any(sign.id == "pyspy-failed" for sign in timeline.signs) else ()),
        ),
    )


_WHO_PRINTS = (
    "whether those that have printed nothing run, and where: some releases print the start on the "
    "first rank only"
)
_NO_PYSPY = (
    "the watchdog could not take stacks: give the server py-spy (pip install py-spy, in a "
    "container SYS_PTRACE), or look before its time is over: hangdoctor diagnose PID"
)


def _without_phase(case: Case) -> str:
    serving = case.facts.timeline.serving
    if serving:
        return (
            "the log does not hold the start; a server was at work up to line "
            f"{serving.number}: {serving.text[:60]}"
        )
    return "no line of the log tells a phase"
