"""What the observer asks a collector, and what a collector is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """One request to a collector. The worker keeps no state that matters: all of it is in here.

    Attributes:
        proc: root of the world's processes, an absolute path.
        roots: pid to start_ticks of the processes the observation started from.
        known: the same of all processes of the tree that were seen before.
        adopt: patterns of titles; an orphan of a root's session and group that has one belongs
            to the tree.
        began_s: the monotonic clock when the recording began.
        files: look at descriptors too.
        locks: search for the lock files that a process may poll for, too.
        native: native frames are wanted, at the price of stopping the target for a moment.
        peek: the registers of running threads are wanted, at the price of stops of microseconds.
        checkpoint: look for the model's files, too.
        model: path or name of the model, as the launch was told; "" where that is not known.
        loaders: pids of the processes that may load weights.
        caches: of each cache of a kernel compiler, by its id, the places where it may be.
    """

    proc: str = "/proc"
    roots: dict[int, int] = {}
    known: dict[int, int] = {}
    adopt: tuple[str, ...] = ()
    began_s: float = 0.0
    files: bool = False
    locks: bool = False
    native: bool = False
    peek: bool = False
    checkpoint: bool = False
    model: str = ""
    loaders: tuple[int, ...] = ()
    caches: dict[str, tuple[str, ...]] = {}


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A read function that a worker process runs.

    Attributes:
        read: takes the request, gives the reply.
        request, reply: their types, as msgspec decodes them.
        deadline_s: past it the worker is killed; the reply is Missing.
        fills: what of a snapshot it fills, for people.
    """

    read: Callable[[Any], Any]
    request: Any
    reply: Any
    deadline_s: float
    fills: str
