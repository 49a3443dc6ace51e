"""Looks at a live launch: the collectors, and the observer that asks them.

Each collector's read function runs in a worker process of its own, so that all look at once and
none can hold up the observer beyond its deadline. The observer only asks and waits.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hangdoctor.collect import (
    caches,
    flight_recorder,
    gpus,
    host,
    nccl_ras,
    processes,
    procfs,
    stacks,
    waits,
    weights,
)
from hangdoctor.collect.exits import Exits
from hangdoctor.collect.look import Job, Look
from hangdoctor.collect.worker import Worker, ask_all
from hangdoctor.model import (
    Caches,
    Gpus,
    Host,
    Missing,
    Processes,
    Snapshot,
    Stacks,
    Waits,
    Weights,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from typing_extensions import Self

COLLECTORS: dict[str, Job] = {
    "processes": Job(
        read=processes.read,
        request=Look,
        reply=Processes | Missing,
        deadline_s=6.0,
        fills="processes, and files where they are due",
    ),
    "stacks": Job(
        read=stacks.read,
        request=Look,
        reply=Stacks | Missing,
        deadline_s=2 * stacks.DUMP_DEADLINE_S + 4.0,
        fills="stacks",
    ),
    "waits": Job(
        read=waits.read, request=Look, reply=Waits | Missing, deadline_s=6.0, fills="waits"
    ),
    "weights": Job(
        read=weights.read, request=Look, reply=Weights | Missing, deadline_s=6.0, fills="weights"
    ),
    "caches": Job(
        read=caches.read, request=Look, reply=Caches | Missing, deadline_s=4.0, fills="caches"
    ),
    "gpus": Job(read=gpus.read, request=Look, reply=Gpus | Missing, deadline_s=5.0, fills="gpus"),
    "host": Job(read=host.read, request=Look, reply=Host | Missing, deadline_s=2.0, fills="host"),
    "nccl_ras": nccl_ras.JOB,
    "flight_recorder": flight_recorder.JOB,
}
"""What can be due, beside parts of sections."""

_PARTS = {"files": "processes", "locks": "waits", "checkpoint": "weights"}
"""What is a part of which section, on a beat of its own."""

NEAR_ROOT = 3
"""Levels below the root (a launcher, a controller) at which engines have their own processes."""
MOST_ENDED = 200
"""Ended processes further down the tree that are kept; a compilation leaves thousands behind."""


class Observer:
    """Takes snapshots of a launch; a context manager that ends its workers.

    Args:
        root_pids: where the tree begins, as `proc` numbers processes.
        native: native frames are wanted in stacks; it stops the target for a moment.
        peek: the registers of running threads are wanted; it stops each for microseconds.
        proc: root of the processes' world.
        adopt: patterns of titles by which an orphan of the launch is known, see `Look.adopt`.
    """

    def __init__(
        self,
        root_pids: Sequence[int],
        *,
        native: bool = False,
        peek: bool = False,
        proc: Path = Path("/proc"),
        adopt: Sequence[str] = (),
    ) -> None:
        self._native = native
        self._peek = peek
        self._proc = str(proc.absolute())
        self._adopt = tuple(adopt)
        stats = {pid: procfs.read_stat(self._proc, pid) for pid in root_pids}
        self._roots = {pid: stat.start_ticks for pid, stat in stats.items() if stat}
        self._root_pids = tuple(root_pids)
        self._known: dict[int, int] = {}
        self._depth = dict.fromkeys(root_pids, 0)
        self._exit_codes: dict[int, int] = {}
        self._exits = Exits(self._proc)
        self._zombies: set[int] = set()
        self._ended: dict[int, int | None] = {pid: None for pid, stat in stats.items() if not stat}
        self._workers: dict[str, Worker] = {}
        self._began_s: float | None = None

    def __enter__(self) -> Self:
        """Return the observer; its workers start when they are first asked."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the workers."""
        self.close()

    def close(self) -> None:
        """End the workers. The target is left as it is."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self._exits.close()

    def take(
        self,
        due: frozenset[str],
        *,
        at_s: float,
        wall_s: float,
        model: str = "",
        loaders: tuple[int, ...] = (),
        cache_places: dict[str, tuple[str, ...]] | None = None,
    ) -> Snapshot:
        """Ask the collectors that are due, all at once, and return what they say.

        Args:
            due: names of COLLECTORS; "files", which brings "processes", "locks", which brings
                "waits", and "checkpoint", which brings "weights".
            at_s: monotonic seconds since the recording began.
            wall_s: seconds since 1970.
            model: as in Look.
            loaders: as in Look.
            cache_places: as `caches` in Look.

        Returns:
            A snapshot whose other sections are None.
        """
        if self._began_s is None:
            self._began_s = time.monotonic() - at_s
        names = due | {name for part, name in _PARTS.items() if part in due}
        look = Look(
            proc=self._proc,
            roots=self._roots,
            known=self._known,
            adopt=self._adopt,
            began_s=self._began_s,
            files="files" in due,
            locks="locks" in due,
            native=self._native,
            peek=self._peek,
            checkpoint="checkpoint" in due,
            model=model,
            loaders=loaders,
            caches=cache_places or {},
        )
        asked = {name: self._worker(name) for name in COLLECTORS if name in names}
        # Nobody else shall see a thread in the moment in which it is stopped to be peeked at.
        apart = {asked["waits"]} if self._peek and "waits" in asked else set()
        answers = ask_all({worker: look for worker in asked.values() if worker not in apart})
        answers |= ask_all(dict.fromkeys(apart, look))
        sections: dict[str, Any] = {name: answers[worker][0] for name, worker in asked.items()}
        if isinstance(found := sections.get("processes"), Processes):
            if self._follow(found) and "host" not in due:
                # Its counters before a death are known; those after it say whether memory ran out.
                worker = self._worker("host")
                sections["host"] = ask_all({worker: look})[worker][0]
            sections["processes"] = msgspec.structs.replace(
                found, roots=self._root_pids, ended=dict(self._ended)
            )
        took_s = {name: round(answers[worker][1], 4) for name, worker in asked.items()}
        return Snapshot(at_s=at_s, wall_s=wall_s, took_s=took_s, **sections)

    def _worker(self, name: str) -> Worker:
        worker = self._workers.get(name)
        if worker is None:
            worker = self._workers[name] = Worker(name, COLLECTORS[name])
        return worker

    def _follow(self, found: Processes) -> bool:
        """Remember who is there, and who no longer is; tell whether one near the root has died."""
        now = {process.pid: process.start_ticks for process in found.processes}
        died = False
        for pid, start in (self._roots | self._known).items():
            if now.get(pid) != start and pid not in self._ended:
                code = self._exits.status(pid)
                code = self._exit_codes.pop(pid, code)
                self._ended[pid] = None if code is None else os.waitstatus_to_exitcode(code)
                died = died or self._depth.get(pid, 9) <= NEAR_ROOT
        for process in found.processes:
            depth = self._depth.setdefault(process.pid, self._depth.get(process.ppid, 0) + 1)
            if process.state == "Z":
                died = died or (process.pid not in self._zombies and depth <= NEAR_ROOT)
                self._zombies.add(process.pid)
                if process.exit_code is not None:
                    self._exit_codes[process.pid] = process.exit_code
            elif depth <= NEAR_ROOT:
                self._exits.hold(process.pid, process.start_ticks)
            if process.pid in self._ended:  # its number is in use again
                del self._ended[process.pid]
        self._known = now
        deep = [pid for pid in self._ended if self._depth.get(pid, 9) >= NEAR_ROOT]
        for pid in deep[:-MOST_ENDED]:
            del self._ended[pid]
        # A compilation passes through many thousands of processes.
        self._zombies &= now.keys()
        self._exit_codes = {pid: code for pid, code in self._exit_codes.items() if pid in now}
        self._depth = {
            pid: depth
            for pid, depth in self._depth.items()
            if pid in now or pid in self._ended or pid in self._roots
        }
        return died
