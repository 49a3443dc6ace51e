"""Rules over what the ranks have started: compilers at work, builds that stand still, others."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from hangdoctor.caches import runs_code
from hangdoctor.engines import is_compiler_pool
from hangdoctor.facts.lineage import HELP_FACTOR, WORK_PCT
from hangdoctor.findings import Evidence, Finding, enumerate_names
from hangdoctor.frames import place
from hangdoctor.rules.case import evidence
from hangdoctor.tracks import lives

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hangdoctor.facts import RankFacts
    from hangdoctor.rules.case import Case
    from hangdoctor.tracks import Track

SOURCES = (".cu", ".cpp", ".cc", ".cxx", ".c", ".hip", ".cuh", ".ptx", ".ll", ".ii", ".i", ".rs")
"""Endings of what a compiler reads: sources first, then what it makes on the way."""


def compile_running(case: Case) -> Iterator[Finding]:
    """Compilers run below a rank, or inside it.

    What it sees: descendants such as nvcc, cicc, ptxas, ninja, cc1plus or inductor workers that
    use CPU: what each compiles, how much CPU it uses, and how long it has been there. Or a rank
    that is busy in a compiler's own code, such as Triton's; and whether its cache grows.
    Why it matters: the rank itself looks idle, and its peers wait, but this is slow and not hung.
    On cold caches SGLang was silent for 27 to 41 s, DeepGEMM sessions take 10 to 20 minutes. Where
    one rank compiles and another waits for it, the one's cache is cold and the other's is warm.
    What to do: wait; keep the caches on a local disk for the next time, one for all ranks.
    """
    for name, rank, owner in _owners(case):
        busy = [track for track in _below(case, owner) if track.compiles and _works(track)]
        busy.sort(key=lambda track: -(track.cpu_pct or 0))
        if not busy:
            if rank is not None and rank.compiling and _works(owner):
                yield _compiles_itself(case, rank)
            continue
        first = busy[0]
        subject = subject_of(first.process.title)
        total = sum(track.cpu_pct or 0 for track in busy)
        more = f" and {len(busy) - 1} more" if len(busy) > 1 else ""
        yield Finding(
            rule="compile-running",
            verdict="found",
            title=f"{name} compiles{f' {subject}' if subject else ''}: {first.process.comm}{more} "
            f"at work below it ({total:.0f} % CPU{_since(first)})" + _out_of_step(case, rank),
            ranks=(rank.name,) if rank else (),
            phase=rank.phase if rank else None,
            confidence="high",
            because=tuple(
                Evidence(
                    text=f"{track.process.comm} (pid {track.process.pid}): {track.cpu_pct or 0:.0f}"
                    f" % CPU{_since(track)}: {track.process.title[:120]}",
                    pid=track.process.pid,
                    rank=rank.name if rank else None,
                    at_s=case.facts.at_s,
                )
                for track in busy[:3]
            ),
            advice=("wait: this is work. Keep the compile caches for the next start",),
        )


def build_stands_still(case: Case) -> Iterator[Finding]:
    """A build below a rank is there, and none of its compilers works.

    What it sees: compilers or build tools below a rank that uses no CPU, as none of them does, for
    half of the stillness that is suspicious; and which of them waits for no other.
    Why it matters: a build that waits (for a lock, for memory, for a job server, for a compiler
    that was stopped) looks from the rank like one that works.
    What to do: look at the process that waits for no other: what it waits for holds all.
    """
    for name, rank, owner in _owners(case):
        below = _below(case, owner)
        if rank is None or any(_works(track) for track in below):
            continue
        # A pool stands still when there is nothing to compile: only who waits for it has a build.
        waits = rank.wait is not None and rank.wait.kind == "child"
        if not any(
            track.compiles and (waits or not is_compiler_pool(case.engine, track.process.title))
            for track in below
        ):
            continue
        if rank.moving is not False or (rank.still_s or 0.0) < case.stall_after_s / 2:
            continue
        parents = {track.process.ppid for track in below}
        ends = [track for track in below if track.process.pid not in parents]
        end = next((track for track in ends if track.process.state == "T"), ends[-1])
        what = _standing(end)
        yield Finding(
            rule="build-stands-still",
            verdict="found",
            title=f"the build that {name} has started stands still: "
            f"{end.process.comm} (pid {end.process.pid}) {what}",
            ranks=(rank.name,),
            phase=rank.phase,
            confidence="medium",
            because=tuple(
                Evidence(
                    text=f"{track.process.comm} (pid {track.process.pid}, state "
                    f"{track.process.state}): {track.process.title[:120]}",
                    pid=track.process.pid,
                    rank=rank.name,
                    at_s=case.facts.at_s,
                )
                for track in below[:5]
            ),
            advice=(
                f"continue it: kill -CONT {end.process.pid}"
                if end.process.state == "T"
                else f"see what it waits for: ls -l /proc/{end.process.pid}/fd; "
                f"cat /proc/{end.process.pid}/wchan",
            ),
        )


def descendant_busy(case: Case) -> Iterator[Finding]:
    """A process below a rank uses CPU, and is no known compiler.

    What it sees: a descendant with at least 5 % of a core that no pattern of
    engines/common.toml knows.
    Why it matters: it may work for the rank (unpack, probe, generate), or spin for ever. So it
    counts as progress for a bounded time only, 120 s with the default.
    What to do: see what it is, and whether what it makes grows.
    """
    limit_s = HELP_FACTOR * case.stall_after_s
    for name, rank, owner in _owners(case):
        busy = [
            track
            for track in _below(case, owner)
            if not (track.compiles or track.observes) and _works(track)
        ]
        if not busy or rank is None or rank.pid is None:
            continue
        first = max(busy, key=lambda track: track.cpu_pct or 0)
        for_s = (case.facts.at_s or 0.0) - (
            owner.lent_since_s if owner.lent_since_s is not None else case.facts.at_s or 0.0
        )
        spent = for_s > limit_s
        yield Finding(
            rule="descendant-busy",
            verdict="undecided",
            title=f"{first.process.comm} (pid {first.process.pid}) below {name} uses "
            f"{first.cpu_pct or 0:.0f} % CPU, and is no known compiler"
            + (f": after {limit_s:.0f} s it no longer counts as progress" if spent else ""),
            ranks=(rank.name,),
            phase=rank.phase,
            confidence="low",
            because=evidence(
                Evidence(
                    text=f"{first.process.title[:160]}{_since(first)}",
                    pid=first.process.pid,
                    rank=rank.name,
                    at_s=case.facts.at_s,
                )
            ),
            needs=(f"what process {first.process.pid} does: is it work, or does it spin?",),
            advice=(f"look at it: ps -o pid,ppid,stat,time,args -p {first.process.pid}",),
        )


def subject_of(title: str) -> str:
    """Return the file that a compiler works on, by its command line; "" where it names none.

    >>> subject_of("/usr/lib/gcc/12/cc1plus -quiet -D_GNU_SOURCE csrc/moe.cpp -o /tmp/ccX.s")
    'moe.cpp'
    >>> subject_of("/usr/bin/ld -o kernel.so a.o b.o"), subject_of("ninja -v -C /tmp/build/moe")
    ('kernel.so', '/tmp/build/moe')
    >>> subject_of("ninja -v")
    ''
    """
    words = title.split()
    after = dict(itertools.pairwise(words))
    made = {after.get("-o"), after.get("--output-file")}
    for ending in SOURCES:
        for word in words[1:]:
            if word.endswith(ending) and word not in made:
                return word.rpartition("/")[2]
    if "-C" in after:
        return after["-C"]
    return (after.get("-o") or "").rpartition("/")[2]


def _compiles_itself(case: Case, rank: RankFacts) -> Finding:
    caches = [
        (cache.title, case.facts.caches[cache.id])
        for cache in case.engine.caches
        if cache.id in case.facts.caches and runs_code(rank.stack, cache)
    ]
    grew = [
        f"{title}'s cache {seen.path} grew {(case.facts.at_s or 0.0) - seen.grew_at_s:.0f} s ago"
        for title, seen in caches
        if seen.grew_at_s is not None
    ]
    still = [f"{title}'s cache {seen.path} did not grow" for title, seen in caches]
    said = f"; {grew[0]}" if grew else ""
    own = [
        frame
        for frame in rank.stack or ()
        if any(part in f"/{frame.path}" for part in case.engine.compile_paths)
    ]
    where = place(own[0]) if own else rank.place
    return Finding(
        rule="compile-running",
        verdict="found" if grew else "undecided",
        title=f"{rank.name} is busy in a compiler, at {where}{said}{_out_of_step(case, rank)}",
        ranks=(rank.name,),
        phase=rank.phase,
        confidence="medium" if grew else "low",
        because=tuple(
            Evidence(text=text, rank=rank.name, at_s=case.facts.at_s) for text in (grew or still)
        ),
        needs=() if grew else (f"whether what {rank.name} compiles into grows",),
    )


def _out_of_step(case: Case, rank: RankFacts | None) -> str:
    """Say who waits in a collective for a rank that compiles."""
    waiting = [other.name for other in case.graph.waiting]
    if rank is None or not waiting or rank.name in waiting:
        return ""
    return (
        f"; {enumerate_names(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for it meanwhile"
    )


def _owners(case: Case) -> list[tuple[str, RankFacts | None, Track]]:
    """Return ranks and other processes of the engine that may have started something."""
    facts = case.facts
    ranks = {rank.pid: rank for rank in facts.ranks if rank.pid is not None}
    return [
        (rank.name if rank else f"the {track.role}", rank, track)
        for pid, track in facts.tracks.items()
        if track.role and lives(track)
        for rank in (ranks.get(pid),)
    ]


def _below(case: Case, owner: Track) -> Sequence[Track]:
    return [
        track
        for track in case.facts.tracks.values()
        if track.owner == owner.process.pid and lives(track)
    ]


def _works(track: Track) -> bool:
    """Tell whether a process, or what it has just waited for, used CPU since the last look."""
    return (track.cpu_pct or 0) >= WORK_PCT or (track.children_pct or 0) >= WORK_PCT


def _since(track: Track) -> str:
    age_s = track.process.age_s
    return f", for {age_s:.0f} s" if age_s is not None and age_s >= 1 else ""


def _standing(track: Track) -> str:
    if track.process.state == "T":
        return "is stopped by a signal"
    kernel = (track.process.threads[0].wchan or "") if track.process.threads else ""
    where = f" in {kernel}" if kernel not in ("", "0") else ""
    return f"waits{where} (state {track.process.state})"
