"""Which locks on files a process may wait for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hangdoctor.engines import Wait
    from hangdoctor.facts import Facts
    from hangdoctor.model import FileLock
    from hangdoctor.tracks import Track


POLLS_PER_S = (3.0, 30.0)
"""filelock looks every 50 ms whether a lock is free, PyTorch's FileBaton every 100, aiter's 200."""


def locks_of(
    track: Track, wait: Wait | None, operation: tuple[str, ...], locks: tuple[FileLock, ...]
) -> tuple[FileLock, ...]:
    """Return the locks that a process may be waiting for, by its stack and by the kernel.

    A FileBaton waits for a file to go away. Other lock files are polled for a kernel's lock: of
    these only those count whose path belongs to the code that polls.
    """
    pid = track.process.pid
    if certain := tuple(lock for lock in locks if pid in lock.waiters):
        return certain
    if wait is None or wait.kind != "lock":
        return ()
    others = [lock for lock in locks if not any(holder.pid == pid for holder in lock.holders)]
    if operation and operation[0].startswith("file_baton.py:"):
        return tuple(lock for lock in others if lock.kind == "file")
    index = track.wait[1] if track.wait else 0
    callers = [f"/{frame.path}" for frame in (track.stack or ())[index : index + _LOCK_CALLERS]]
    paths = [path for code, path in _LOCKS_OF_CODE if any(code in caller for caller in callers)]
    return tuple(
        lock
        for lock in others
        if lock.kind != "file" and any(re.search(path, lock.path) for path in paths)
    )


def polls_per_s(track: Track, facts: Facts) -> float | None:
    """Return how often a process without a stack wakes from its sleep, if one that polls does so.

    Python sleeps in a timer, and up to 3.10 in select().
    """
    unseen = track.stack_missing is not None or facts.sections.get("stacks") is not None
    rate_per_s, threads = track.sleeps_per_s, track.process.threads
    if not unseen or rate_per_s is None or not threads or threads[0].state != "S":
        return None
    kernel = threads[0].wchan or ""
    sleeps = "nanosleep" in kernel or kernel.startswith(("poll_schedule_timeout", "do_select"))
    return rate_per_s if sleeps and POLLS_PER_S[0] <= rate_per_s <= POLLS_PER_S[1] else None


def may_poll(track: Track, locks: tuple[FileLock, ...]) -> tuple[FileLock, ...]:
    """Return the locks that a process may poll for of which nothing but their place is known."""
    pid = track.process.pid
    return tuple(
        lock
        for lock in locks
        if not any(holder.pid == pid for holder in lock.holders)
        and (
            lock.kind in ("file", "soft")
            or any(re.search(path, lock.path) for _, path in _LOCKS_OF_CODE)
        )
    )


_LOCK_CALLERS = 6
"""A lock is asked for at most so many frames further out."""
_LOCKS_OF_CODE = (
    ("/flashinfer/", r"flashinfer"),
    ("/huggingface_hub/", r"/\.locks/|huggingface"),
    ("/tvm_ffi/", r"tvm[-_]ffi"),
    ("/torch/_inductor/", r"/locks/[^/]*\.lock$"),
    # get_lock of SGLang and vLLM names it by the model's hash and name, in the temporary directory.
    ("/weight_utils.py", r"/[0-9a-f]{64}[^/]*\.lock$"),
)
"""Parts of paths of code that takes locks, and what the paths of its locks look like."""
