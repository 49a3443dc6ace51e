"""How processes of the launch ended, by all that can tell."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

from hangdoctor.findings import Evidence
from hangdoctor.model import KernelMessage, Struct
from hangdoctor.rules.case import evidence, signs_of

if TYPE_CHECKING:
    from hangdoctor.facts import Facts, RankFacts
    from hangdoctor.logs.timeline import SignSeen
    from hangdoctor.rules.case import Case
    from hangdoctor.tracks import Track

NEARLY_FULL = 0.95
"""A memory that is this full, without the page cache, explains a SIGKILL."""
TICKS_PER_S = 100
"""Of Process.start_ticks; on every Linux that is in use."""


class Death(Struct, frozen=True):
    """How a process ended, as far as anything tells.

    Attributes:
        words: for a title, such as "killed by SIGKILL: out of memory"; "" if nothing tells.
        status: as os.waitstatus_to_exitcode gives it; None where not known.
        because: where it is known from, and what explains it.
        advice: what would tell more.
    """

    words: str
    status: int | None
    because: tuple[Evidence, ...] = ()
    advice: tuple[str, ...] = ()


def death_of(case: Case, track: Track | None, name: str, *, told: int | None = None) -> Death:
    """Say how a process ended, by all that can tell.

    Args:
        case: as ever.
        track: of the process; None where it was never seen alive.
        name: for people.
        told: the exit status that the log tells.
    """
    facts = case.facts
    seen = track.exit_status if track is not None else None
    status = told if seen is None else seen
    by_log = ["by the log"] if seen is None and told is not None else []
    killed = oom_message(facts, track) if track else None
    first, last = _oom_counts(facts)
    rose = first is not None and last is not None and last > first
    counted = f"the cgroup's oom_kill rose from {first} to {last}"
    words = describe_status(status)
    because: list[Evidence | None] = [
        Evidence(text=f"{name}: exit status {status} {' '.join(by_log)}".strip())
        if status is not None
        else None
    ]
    advice = []
    if facts.host is None or not isinstance(facts.host.kernel_log, tuple):
        advice.append("see whether the kernel killed it: dmesg -T | grep -i 'killed process'")
    if killed is not None:
        words = "killed by SIGKILL: out of memory, by the kernel's log"
        because.append(Evidence(text=f"kernel: {killed.text}"))
        advice = []
    elif rose and status in (-9, None):
        words = f"{words or 'killed'}: {counted}, out of memory"
        advice = []
    if rose:
        because.append(Evidence(text=counted))
    if status in (-9, None):
        because.append(_memory_before(facts))
    if status == -9 and killed is None and not rose:
        because.append(_no_oom(facts))
    if killed is not None or rose:
        advice.append("give it more memory (host memory, the pod's limit), or load with less")
    return Death(words=words, status=status, because=evidence(*because), advice=tuple(advice))


def describe_status(status: int | None) -> str:
    """Write an exit status for people; "" where it is not known.

    >>> describe_status(-9), describe_status(1), describe_status(-7)
    ('killed by SIGKILL', 'exit status 1', 'killed by SIGBUS')
    """
    if status is None:
        return ""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def death_of_rank(case: Case, rank: RankFacts) -> Death:
    """Say how a rank ended, by its process or by what the launcher's log tells of it."""
    track = case.facts.track(rank)
    told = _told_status(case, rank)
    if track is None:  # it died before we came: of zombies that all ended alike one is known
        ended = zombies(case.facts)
        statuses = {zombie.exit_status for zombie in ended}
        if len(statuses) == 1:
            track = ended[0]
    return death_of(case, track, rank.name, told=told)


def exit_status(case: Case, rank: RankFacts) -> int | None:
    """Return a rank's exit status, as seen or as the launcher's log tells it; None if unknown."""
    track = case.facts.track(rank)
    seen = track.exit_status if track is not None else None
    return _told_status(case, rank) if seen is None else seen


def blamed_names(case: Case, sign: SignSeen) -> tuple[str, ...]:
    """Return the ranks that a message tells by their numbers; empty where those are not known.

    The launcher counts the processes that it started: the ranks of its own node, pipeline stage by
    stage (SGLang: entrypoints/engine.py); with data parallelism that is the controller alone.
    """
    facts = case.facts
    names = {rank.name for rank in facts.ranks}
    named = [f"TP{number}" for number in sign.blamed]
    if sign.kind == "fatal" and facts.sizes.get("dp", 1) > 1:
        return ()
    if sign.kind == "fatal" and facts.expected:
        named = [facts.expected[each] for each in sign.blamed if each < len(facts.expected)]
    return tuple(dict.fromkeys(name for name in named if name in names))


def zombies(facts: Facts) -> list[Track]:
    """Return the launcher's children that have ended, that it has not waited for, and no rank's."""
    launcher = facts.launcher
    return [
        track
        for track in facts.tracks.values()
        if launcher is not None
        and track.present
        and track.process.state == "Z"
        and not track.rank
        and track.process.ppid == launcher.process.pid
    ]


def kernel_messages(facts: Facts) -> list[KernelMessage]:
    """Return what the kernel's log has told since the launch began."""
    starts = [track.process.start_ticks for track in facts.tracks.values() if track.role]
    born_s = min(starts, default=0) / TICKS_PER_S
    return [message for message in _messages(facts) if starts and message.boot_s >= born_s]


def oom_message(facts: Facts, track: Track) -> KernelMessage | None:
    """Return the kernel's line that it killed this process.

    Number, name and time must fit: the kernel counts in the outermost PID namespace.
    """
    born_s = track.process.start_ticks / TICKS_PER_S
    for message in _messages(facts):
        match = _OOM.search(message.text)
        if match is None or message.boot_s < born_s - 1:
            continue
        if int(match["pid"]) == track.process.pid and match["comm"] == track.process.comm:
            return message
    return None


_OOM = re.compile(r"Killed process (?P<pid>\d+) \((?P<comm>.*?)\)")


def _told_status(case: Case, rank: RankFacts) -> int | None:
    """Return the exit status that the launcher's log tells of a rank.

    SGLang up to 0.5.9 tells the rank in one line and the status in the next.
    """
    about: tuple[str, ...] = ()
    for sign in signs_of(case, "fatal"):
        named = blamed_names(case, sign)
        about = named if sign.blamed else about
        if sign.status is None:
            continue
        by_pid = sign.pid is not None and sign.pid == rank.pid
        if by_pid or rank.name in (about if sign.pid is None else named):
            return sign.status
    return None


def _messages(facts: Facts) -> tuple[KernelMessage, ...]:
    log = facts.host.kernel_log if facts.host else None
    return log if isinstance(log, tuple) else ()


def _oom_counts(facts: Facts) -> tuple[int | None, int | None]:
    first, last = facts.host_first, facts.host
    return (first.oom_kills if first else None), (last.oom_kills if last else None)


def _memory_before(facts: Facts) -> Evidence | None:
    peak = facts.memory_peak
    if peak is None or peak.share < NEARLY_FULL:
        return None
    return Evidence(
        text=f"memory of {peak.of} was {100 * peak.share:.0f} % full without the page cache "
        f"({peak.used_bytes / 1e9:.1f} of {peak.limit_bytes / 1e9:.1f} GB)",
        at_s=peak.at_s,
    )


def _no_oom(facts: Facts) -> Evidence | None:
    """Say that memory did not run out, where both witnesses were heard."""
    first, last = _oom_counts(facts)
    if first is None or last is None or facts.watched_s <= 0:
        return None
    heard = facts.host is not None and isinstance(facts.host.kernel_log, tuple)
    beside = " and the kernel's log tells of no kill of it" if heard else ""
    return Evidence(
        text=f"the cgroup's oom_kill stayed at {last}{beside}: somebody sent the signal"
        if heard
        else f"the cgroup's oom_kill stayed at {last}"
    )
