"""Whom to blame where ranks have logged exceptions: the one that ended, not those that lost it."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import msgspec

from hangdoctor.engines import matches_any
from hangdoctor.findings import Confidence, Evidence, enumerate_names
from hangdoctor.logs.timeline import lacking, logged_stands
from hangdoctor.model import Struct
from hangdoctor.rules.case import (
    failures,
    last_line,
    line_of,
    lost_by_log,
    only_first_rank_heard,
    replicas,
    signs_of,
)
from hangdoctor.rules.exits import Death, blamed_names, death_of_rank, exit_status, oom_message

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hangdoctor.facts import RankFacts
    from hangdoctor.rules.case import Case


class Blame(Struct, frozen=True):
    """Who is to blame for what ranks have logged.

    Attributes:
        culprits: ranks; empty where nothing tells whom.
        confidence: of the culprits.
        victims: ranks that raised only because of others: they gave up waiting, or lost a peer.
        lost: those that lost a peer, where no rank says more, and the launch was not being ended
            before.
        late: those that lost a peer only as the launch was being ended.
        ended: the culprits are known by how they ended: `tell_loss` says it.
        because: what tells the culprits from the others.
        needs: what would tell them, where nothing does.
    """

    culprits: tuple[str, ...] = ()
    confidence: Confidence = "high"
    victims: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    ended: bool = False
    because: tuple[Evidence, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def is_loss(self) -> bool:
        """Whether what the log holds is that a rank ended, and others missed it."""
        return bool(self.lost) or self.ended


def blame_for_failure(case: Case) -> Blame:
    """Return whom to blame where ranks have logged exceptions, or the launcher that one ended.

    A rank whose exception says that it gave up waiting for others, or lost its connection to one,
    is their victim. To blame are, in this order: the ranks that the log names; those that raised
    anything else; those whose stack a fault has put into the log; those that ended by themselves,
    or first; where a wait was given up, those that lack a line that others have; where a peer was
    lost, the only one that raised nothing, else the only such one that lacks a line.
    """
    failed = {name: text for name, text in failures(case).items() if name}
    waited, lost = _victims(case, failed)
    stopped = _say(case, failed, "signal")
    own = tuple(name for name in failed if name not in (*waited, *lost, *stopped))
    blame = Blame(victims=(*waited, *lost))
    if lost and (_ending_before(case, lost) or _ended_from_outside(case, blame)):
        blame = msgspec.structs.replace(blame, late=lost)
    elif not waited and not own:
        blame = msgspec.structs.replace(blame, lost=lost)
    if named := (blamed_by_log(case) or own or _faulted(case, blame)):
        return msgspec.structs.replace(blame, culprits=named)
    if blame.lost or waited:
        found = _ended_by_itself(case, blame)
        if found.culprits:
            return found
    if waited:
        behind = tuple(name for name in lacking(case.facts.timeline) if name not in blame.victims)
        return msgspec.structs.replace(blame, culprits=behind)
    if before := _raised_before(case, blame):
        name, cause = next(iter(before.items()))
        return msgspec.structs.replace(
            blame,
            because=(Evidence(text=f"{name} raised before: {cause[:160]}", rank=name),),
            needs=(f"whether {name} failed by what it raised before it lost its connection",),
        )
    return _by_elimination(case, blame) if blame.lost else blame


def blamed_by_log(case: Case) -> tuple[str, ...]:
    """Return the ranks that the log's own messages say others waited for, or that died.

    Not one that the launcher found dead after it had lost a peer, or given up on one; nor, where
    ranks tell more themselves, one that aborted: NCCL's watchdog does, for a peer's loss.
    """
    failed = {name: text for name, text in failures(case).items() if name}
    victims = {name for names in _victims(case, failed) for name in names}
    signs = [
        sign
        for sign in case.facts.timeline.signs
        if not (sign.kind == "fatal" and sign.status == -signal.SIGABRT and failed)
    ]
    found = [
        name
        for sign in signs
        for name in blamed_names(case, sign)
        if not (sign.kind == "fatal" and name in victims)
    ]
    return tuple(dict.fromkeys(found))


def tell_loss(case: Case, blame: Blame) -> str:
    """Say that a rank ended and others missed it, in the order of cause."""
    words_before = _words_before(case, blame)
    losers = enumerate_names(blame.lost or blame.victims)
    theirs = "its connection" if len(blame.lost) == 1 else "their connections"
    if not blame.culprits or blame.confidence == "low":
        ended = "which had ended without a word"
        if before := _raised_before(case, blame):
            name, cause = next(iter(before.items()))
            ended = f"and {name} had raised {cause[:100]} before"
        elif words_before:
            ended = f"which had ended ({words_before})"
        elif cut := _cut_short(case, _may_have_ended(case, blame)):
            ended = f"which had ended: the log stops within what {enumerate_names(cut)} raised"
        elif _nodes(case) > 1:
            ended = "which had ended, or cannot be reached"
        elif not _may_have_ended(case, blame):
            if len(blame.lost) == len(case.facts.ranks) > 1:
                return f"{losers} lost their connections to one another"
            alive = any(rank.present for rank in case.facts.ranks)
            ended = "which lives, and has closed it" if alive else "of which nothing is told"
        perhaps = f" (perhaps {enumerate_names(blame.culprits)})" if blame.culprits else ""
        return f"{losers} lost {theirs} to a peer{perhaps}, {ended}"
    words = _death_of_culprit(case, blame).words
    many = len(blame.culprits) > 1
    if words.startswith("killed"):
        how = f"{'were' if many else 'was'} {words}"
    elif words_before:
        how = f"ended ({words_before})"
    else:
        how = "ended without a word" + (f" ({words})" if words else "")
    them = "them" if many else "it"
    missed = f"lost {theirs} to" if blame.lost else "gave up waiting for"
    return f"{enumerate_names(blame.culprits)} {how}, and {losers} {missed} {them}"


def advise_on_loss(case: Case, blame: Blame) -> tuple[str, ...]:
    """Return what to do where a rank ended and others missed it."""
    if not blame.culprits:
        return (
            "see whether the kernel ended one: dmesg -T | grep -iE 'killed process|segfault|Xid'",
            "start it below hangdoctor watch, which sees how each process ends",
        )
    name = enumerate_names(blame.culprits)
    death = _death_of_culprit(case, blame)
    looks = [
        f"see what {name} did last: what {blame.victims[0]} raised only tells where it waited",
    ]
    if death.status is None or death.status >= 0:
        looks.append(
            "look for what ends a process without a word: os._exit, sys.exit or a library's exit() "
            "in a patch, an import or an extension"
        )
    elif -death.status in (*_FAULTS, signal.SIGABRT):
        looks.append("start with PYTHONFAULTHANDLER=1, so that a fault prints its stack")
    return (*death.advice, *looks)


def _death_of_culprit(case: Case, blame: Blame) -> Death:
    """Say how the first of the culprits ended."""
    rank = case.facts.rank(blame.culprits[0])
    return death_of_rank(case, rank) if rank else Death(words="", status=None)


_OF_OTHERS = ("timeout", "lost", "signal")
"""Kinds of signs of an exception that others have brought about."""
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP)
"""A process's own faults send these; no launcher does."""
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL)
"""Who ends a launch sends these."""


def _victims(case: Case, failed: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the ranks whose exceptions say that they gave up waiting, and those that lost one.

    An exception that another one brought about is told by the first: that counts.
    """
    waited = _say(case, failed, "timeout")
    lost = _say(case, failed, "lost")
    return waited, tuple(name for name in lost if name not in waited)


def _say(case: Case, failed: Mapping[str, str], kind: str) -> tuple[str, ...]:
    """Return the ranks whose exceptions are signs of a kind."""
    patterns = tuple(sign.pattern for sign in case.engine.signs if sign.kind == kind)
    logs = case.facts.timeline.ranks
    return tuple(
        name
        for name, text in failed.items()
        if matches_any(patterns, text) or matches_any(patterns, logs[name].caused_by)
    )


def _raised_before(case: Case, blame: Blame) -> dict[str, str]:
    """Return what those that lost a peer were handling as they did: their own error, or a detail.

    `except KeyError:` may hold a collective, and `except Exception:` a barrier to clean up.
    """
    logs = case.facts.timeline.ranks
    patterns = tuple(sign.pattern for sign in case.engine.signs if sign.kind in _OF_OTHERS)
    return {
        name: cause
        for name in blame.lost
        if (cause := logs[name].caused_by) and not matches_any(patterns, cause)
    }


def _ending_before(case: Case, lost: tuple[str, ...]) -> bool:
    """Tell whether the launch was being ended before a rank lost its peer: that is a consequence.

    What tells that one of the ranks has died is no such line: it may well come first.
    """
    of_any = _of_any_process(case)
    signs = [
        *signs_of(case, "signal"),
        *signs_of(case, "timeout"),
        *(each for each in signs_of(case, "fatal") if each.id not in of_any and not each.blamed),
    ]
    return any(sign.number < _first_loss(case, lost) for sign in signs)


def _ended_from_outside(case: Case, blame: Blame) -> bool:
    """Tell whether somebody ended the launcher, and no rank is known to have ended before it.

    One that ends because of a rank says so in the log, but for SIGQUIT, which that rank sends it.
    """
    launcher = case.facts.launcher
    if launcher is None or launcher.exit_status is None or launcher.ended_at_s is None:
        return False
    if -launcher.exit_status not in _ENDS or signs_of(case, "fatal"):
        return False
    silent = [rank for rank in case.facts.ranks if rank.name not in blame.victims]
    tracks = [track for rank in silent if (track := case.facts.track(rank))]
    earlier = [t for t in tracks if t.ended_at_s and t.ended_at_s < launcher.ended_at_s]
    faulted = [rank for rank in silent if -(exit_status(case, rank) or 0) in _FAULTS]
    return not (earlier or _by_kernel(case, silent) or faulted)


def _words_before(case: Case, blame: Blame) -> str:
    """Return what the log says of an end before a rank missed its peer; "" for nothing.

    A fault of any process, or an exception without a rank, as of one that had no name yet.
    """
    of_any, first = _of_any_process(case), _first_loss(case, blame.victims)
    faults = [each for each in signs_of(case, "fatal") if each.id in of_any]
    said = next((each.text for each in faults if each.number < first), "")
    launch = case.facts.timeline.ranks.get("")
    if not said and launch is not None and launch.raised_at < first:
        said = failures(case).get("", "")
    return said[:100]


def _of_any_process(case: Case) -> set[str]:
    return {sign.id for sign in case.engine.signs if sign.of_any_process}


def _first_loss(case: Case, victims: tuple[str, ...]) -> int:
    """Return the line in which the first rank says that it has missed its peer."""
    return min(case.facts.timeline.ranks[name].raised_at for name in victims)


def _faulted(case: Case, blame: Blame) -> tuple[str, ...]:
    """Return the ranks whose stack a fault has put into the log, where others lost them."""
    stands = logged_stands(case.facts.timeline, case.engine).items()
    named = tuple(name for name, stand in stands if name and stand.dump.cause)
    return tuple(name for name in named if blame.lost and name not in blame.victims)


def _ended_by_itself(case: Case, blame: Blame) -> Blame:
    """Blame the ranks that ended by themselves, by a fault or for want of memory; or first.

    A launcher ends the others by SIGKILL or SIGTERM. Who aborts may have lost a peer, too, and who
    ends with status 0 may have been told to: of these with medium confidence.
    """
    silent = [rank for rank in case.facts.ranks if rank.name not in blame.victims]
    statuses = {rank.name: exit_status(case, rank) for rank in silent}
    by_kernel = _by_kernel(case, silent)
    by_fault = [
        name
        for name, status in statuses.items()
        if status is not None and (status > 0 or -status in _FAULTS)
    ]
    aborted = [name for name, status in statuses.items() if status == -signal.SIGABRT]
    quit_ = [name for name, status in statuses.items() if status == 0]
    names = [*by_kernel, *(name for name in by_fault if name not in by_kernel)]
    confidence: Confidence = "high"
    if not names and blame.lost:
        names, confidence = aborted or quit_, "medium"
    because = [each for name in names for each in _how_it_ended(case, name)]
    if not names and blame.lost and (first := _gone_first(case, silent)):
        names = [rank.name for rank in first]
        because = [
            Evidence(
                text=f"{rank.name} (pid {rank.pid or 'unknown'}) was gone before the others",
                pid=rank.pid,
                rank=rank.name,
            )
            for rank in first
        ]
    return msgspec.structs.replace(
        blame,
        culprits=tuple(names),
        confidence=confidence,
        ended=bool(names),
        because=tuple(because),
    )


def _by_kernel(case: Case, ranks: list[RankFacts]) -> list[str]:
    """Return the ranks that the kernel killed for want of memory, by its log."""
    tracks = {rank.name: case.facts.track(rank) for rank in ranks}
    return [name for name, track in tracks.items() if track and oom_message(case.facts, track)]


def _how_it_ended(case: Case, name: str) -> tuple[Evidence, ...]:
    rank = case.facts.rank(name)
    last = last_line(case, name)
    return (*(death_of_rank(case, rank).because if rank else ()), *([last] if last else []))


def _gone_first(case: Case, silent: list[RankFacts]) -> list[RankFacts]:
    """Return the ranks that had ended at a look at which all others still lived."""
    facts = case.facts
    ended = {}
    for rank in facts.ranks:
        track = facts.track(rank)
        if track is None:
            return []
        ended[rank.name] = track.ended_at_s
    times = [at_s for at_s in ended.values() if at_s is not None]
    first = [rank for rank in silent if times and ended[rank.name] == min(times)]
    alone = len(first) == sum(at_s == min(times, default=None) for at_s in ended.values())
    return first if alone and len(first) < len(ended) else []


def _by_elimination(case: Case, blame: Blame) -> Blame:
    """Blame the only rank that raised nothing, or the only such one that lacks a line.

    All ranks print their exceptions, also in releases in which only the first prints its start.
    """
    peers = _may_have_ended(case, blame)
    facts = case.facts
    told = facts.log_is_whole and facts.expected_count == len(facts.ranks) and _nodes(case) == 1
    cut = _cut_short(case, peers)
    told = told and not cut
    if told and len(peers) == 1:
        only = f"{peers[0]} is the only rank of {len(facts.ranks)} that logged no exception"
        because = [Evidence(text=only, rank=peers[0]), last_line(case, peers[0])]
        return msgspec.structs.replace(
            blame,
            culprits=(peers[0],),
            confidence="medium",
            because=tuple(filter(None, because)),
        )
    missing = lacking(facts.timeline) if told and not only_first_rank_heard(case) else {}
    behind = [name for name in missing if name in peers]
    if len(behind) == 1:
        lacks = f"{behind[0]} lacks {line_of(case, missing[behind[0]][0])}, which others have"
        return msgspec.structs.replace(
            blame,
            culprits=(behind[0],),
            confidence="low",
            because=(Evidence(text=lacks, rank=behind[0]),),
        )
    of = f" of {enumerate_names(peers)}" if peers else ""
    where = "of all nodes" if _nodes(case) > 1 else "from its start"
    if cut:
        rest = f"the rest of the log: what {enumerate_names(cut)} raised"
        return msgspec.structs.replace(blame, needs=(rest,))
    return msgspec.structs.replace(
        blame,
        needs=(
            f"which{of} had ended first: the log {where}, the kernel's log, or the exit statuses",
        ),
    )


def _may_have_ended(case: Case, blame: Blame) -> list[str]:
    """Return the ranks that those which lost a peer can have lost: not one that still lives."""
    peers: list[str] = []
    for part in replicas(case):
        names = [rank.name for rank in part.facts.ranks]
        if any(name in names for name in blame.lost):
            peers += [rank.name for rank in part.facts.ranks if not rank.present]
    return [name for name in peers if name not in blame.victims]


def _cut_short(case: Case, names: list[str]) -> list[str]:
    """Return the ranks whose traceback the log begins and does not end: they did say something."""
    lost = lost_by_log(case)
    return [name for name in names if name in lost and not lost[name]]


def _nodes(case: Case) -> int:
    return case.facts.sizes.get("nnodes", 1)
