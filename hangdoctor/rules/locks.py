"""Rules over locks on files that ranks wait for."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from hangdoctor.facts.phases import earliest_phase
from hangdoctor.findings import Evidence, Finding, enumerate_names
from hangdoctor.rules.case import (
    evidence,
    lock_text,
    quiet,
    stands,
    stood_s,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hangdoctor.facts import RankFacts
    from hangdoctor.model import FileLock
    from hangdoctor.rules.case import Case


def stale_lock_file(case: Case) -> Iterator[Finding]:
    """A rank waits for a lock file that its owner has left behind.

    What it sees: a rank in a wait for a file to go away (PyTorch's FileBaton), the one file below
    the directory of extensions that it can be, and that no process there is has it open, though
    its owner always has. Or a lock of filelock's that has its owner in it, who is gone.
    Why it matters: a build that was killed leaves its lock; who comes after it waits for ever.
    What to do: make sure that no other machine builds there, and delete the file.
    """
    groups: dict[tuple[str, ...], list[RankFacts]] = {}
    for rank in case.facts.ranks:
        waited = stood_s(rank) >= case.stall_after_s / 4
        if rank.present and waited and any(lock.owner == "dead" for lock in rank.locks):
            groups.setdefault(tuple(lock.path for lock in rank.locks), []).append(rank)
    for ranks in groups.values():
        first = ranks[0]
        dead = [lock for lock in first.locks if lock.owner == "dead"]
        only = len(first.locks) == len(dead) == 1
        paths = enumerate_names([lock.path for lock in dead[:4]])
        who = enumerate_names([rank.name for rank in ranks])
        who += " waits" if len(ranks) == 1 else " wait"
        yield Finding(
            rule="stale-lock-file",
            verdict="found" if only else "undecided",
            title=f"{who} for a lock file whose owner is gone: {paths}; delete it"
            if only
            else f"{who} for a lock file; of some the owner is gone: {paths}",
            ranks=tuple(rank.name for rank in ranks),
            phase=earliest_phase(tuple(ranks)),
            confidence="high" if only and dead[0].older_than_all else "medium",
            because=evidence(
                *_each(case, first, first.locks),
                *(stands(case, rank) for rank in ranks[:2]),
            ),
            needs=() if only else ("which of the files it is",),
            advice=tuple(delete_lock(lock) for lock in dead[:2]),
        )


def lock_held(case: Case) -> Iterator[Finding]:
    """A rank waits for a lock on a file that a living process holds.

    What it sees: the kernel's list of locks (flock, fcntl), or who has a lock file open; the rank
    sleeps for it, or polls for it by its stack.
    Why it matters: it goes on when the holder is done. The holder may hang itself.
    What to do: look at what the holder does.
    """
    for rank in case.facts.ranks:
        held = [lock for lock in rank.locks if lock.owner == "alive"]
        if not held or not rank.present or any(lock.owner == "dead" for lock in rank.locks):
            continue
        lock, only = held[0], len(rank.locks) == 1
        names = enumerate_names(
            [case.facts.name_of(holder.pid, holder.comm) for holder in lock.holders]
        )
        pid = lock.holders[0].pid
        holder_rank = next((each for each in case.facts.ranks if each.pid == pid), None)
        yield Finding(
            rule="lock-held",
            verdict="found" if only else "undecided",
            title=f"{rank.name} waits for the lock {lock.path}, held by {names}"
            if only
            else f"{rank.name} waits for one of {len(rank.locks)} locks, such as {lock.path}, "
            f"held by {names}",
            ranks=(rank.name,),
            phase=rank.phase,
            confidence="medium",
            because=evidence(
                *_each(case, rank, held),
                stands(case, holder_rank) if holder_rank else None,
            ),
            advice=(see_holder(lock),),
        )


def lock_owner_unknown(case: Case) -> Iterator[Finding]:
    """A rank waits for a lock file, and from here nobody can tell who holds it.

    What it sees: a rank in a wait for a lock file that no process here has open, where a process
    that cannot be seen may: on another machine that shares the file system, in another container,
    or of another user.
    Why it matters: if that process is gone, the wait never ends; if it builds, it will.
    What to do: look for it where the finding says; if it is gone, delete the file.
    """
    for rank in case.facts.ranks:
        unknown = [lock for lock in rank.locks if lock.owner == "unknown"]
        if not rank.present or not unknown or len(unknown) != len(rank.locks):
            continue
        lock, only = unknown[0], len(unknown) == 1
        yield Finding(
            rule="lock-owner-unknown",
            verdict="undecided",
            title=f"{rank.name} waits for the lock {lock.path}: {lock.why}"
            if only
            else f"{rank.name} waits for one of {len(unknown)} locks, such as {lock.path}: "
            f"{lock.why}",
            ranks=(rank.name,),
            phase=rank.phase,
            confidence="low",
            because=evidence(
                *_each(case, rank, unknown),
                stands(case, rank),
            ),
            needs=(f"who holds {lock.path}, and whether that process still lives",),
        )


def may_wait_for_lock_file(case: Case) -> Iterator[Finding]:
    """A rank without a stack sleeps and wakes as one does that polls for a lock file.

    What it sees: no stack of the rank can be had; its main thread sleeps in the kernel's timer and
    wakes 3 to 30 times a second, as filelock and FileBaton do; and there are locks where the
    launch's libraries keep theirs (PyTorch's extensions, the hub, flashinfer, inductor).
    Why it matters: it is all that can be seen where ptrace is not allowed. Other loops sleep as
    long, so that it never decides anything.
    What to do: get a stack of the rank; hangdoctor preflight says how.
    """
    for rank in case.facts.ranks:
        if not rank.present or not rank.may_poll or rank.moving is not False:
            continue
        if (rank.still_s or 0.0) < case.stall_after_s / 2:
            continue
        locks = sorted(
            rank.may_poll, key=lambda lock: ("dead", "unknown", "alive").index(lock.owner)
        )
        more = f" (and {len(locks) - 1} more)" if len(locks) > 1 else ""
        dead = [lock for lock in locks if lock.owner == "dead"]
        yield Finding(
            rule="may-wait-for-lock-file",
            verdict="undecided",
            title=f"{rank.name} may wait for a lock file: it wakes {rank.polls_per_s:.0f} times a "
            f"second, and there is {lock_text(case, locks[0])}{more}",
            ranks=(rank.name,),
            phase=rank.phase,
            confidence="low",
            because=evidence(
                *_each(case, rank, locks),
                quiet(case, rank),
            ),
            needs=(f"a stack of {rank.name}: hangdoctor preflight says what it takes",),
            advice=tuple(delete_lock(lock) for lock in dead[:1])
            or tuple(see_holder(lock) for lock in locks[:1] if lock.holders),
        )


def delete_lock(lock: FileLock) -> str:
    """Return what to do about a lock file that its owner has left behind."""
    return (
        "make sure that nobody builds (pgrep -a 'ninja|nvcc|cicc|cc1plus'), then delete the lock "
        f"file: rm {shlex.quote(lock.path)}"
    )


def see_holder(lock: FileLock) -> str:
    """Return how to look at who holds a lock."""
    return (
        f"see what the lock's holder does: ps -o pid,stat,wchan:20,time,args {lock.holders[0].pid}"
    )


def _each(case: Case, rank: RankFacts, locks: Sequence[FileLock]) -> Iterator[Evidence]:
    for lock in locks[:4]:
        yield Evidence(text=lock_text(case, lock), rank=rank.name, pid=rank.pid)
