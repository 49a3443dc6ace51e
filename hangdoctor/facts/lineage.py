"""Who is who among the processes, and whose work counts as whose progress."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from hangdoctor import tracks
from hangdoctor.engines import Engine, Role, is_compiler, is_observer, load, rank_name, role_of
from hangdoctor.logs.timeline import logged_stands
from hangdoctor.model import Process, Processes, Snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hangdoctor.facts import Facts
    from hangdoctor.logs.stacks import Standing
    from hangdoctor.tracks import Track


WORK_PCT = 5.0
"""Descendants with this much of a core between them are at work."""
HELP_FACTOR = 6.0
"""Descendants that are no compilers count for so many times the stillness that is suspicious: with
the default of 20 s, 120 s. One that spins must not count for ever, whatever it is."""
BUILD_PAUSE_S = 10.0
"""Children that ended so soon after a compiler was seen count as the build's, and as nobody's after
a program that looks at processes."""


def see_processes(facts: Facts, snapshot: Snapshot, engine: Engine) -> Facts:
    """Take in what the processes do, which of them came, and which ended."""
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


def family(known: dict[int, Track], pid: int) -> frozenset[int]:
    """Return the pids under which the driver may know a rank: its own, its inner, its children."""
    own = known[pid].process
    family = {pid, own.inner_pid or pid}
    family |= {child for child, track in known.items() if track.owner == pid}
    return frozenset(family)


def busiest(workers: Sequence[Track]) -> str:
    """Return the name of the process that uses most CPU; "" where there is none."""
    most = max(workers, key=lambda track: track.cpu_pct or 0, default=None)
    return most.process.comm if most else ""


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
        name = busiest(compilers) or "a compiler that has ended"
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
    name = busiest(workers) or "a child that has ended"
    owner = tracks.moved(owner, at_s, f"{name} works below it ({others_pct:.0f} % CPU)")
    return msgspec.structs.replace(owner, lent_at_s=at_s)
