"""Looks at a running launch again and again, and folds what it sees while it records it.

What is shown live is what a replay of the recording says: a snapshot that the thinning drops is
not folded in either, except for the moment in which it is the newest.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from hangdoctor.collect import Observer
from hangdoctor.collect.installation import find_installation
from hangdoctor.facts import Facts, loaders, model_of
from hangdoctor.facts.fold import begin, step
from hangdoctor.facts.log_news import hear
from hangdoctor.facts.looks import next_looks
from hangdoctor.logs.follow import Listener
from hangdoctor.model import (
    FlightRecorder,
    Header,
    Installation,
    LogPosition,
    Missing,
    Processes,
    ProcessStacks,
    Snapshot,
    Stacks,
)
from hangdoctor.recording import Recorder, Thinned, thin
from hangdoctor.signals import raise_unheard
from hangdoctor.target import role_patterns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from hangdoctor.engines import Engine
    from hangdoctor.launch import Started

SEARCH_AGAIN_S = 10.0
"""An installation that was not found is looked for again after so long."""
FRESH_S = 30.0
"""At the end one that was found longer ago is looked at again: files are patched meanwhile."""


class Live:
    """A launch under observation; a context manager that leaves the launch as it is.

    Args:
        roots: pids that the tree begins at.
        engine: what to read it as.
        header: of the recording; its log and installation are filled in.
        log: path to follow, "-" for stdin, or why there is none.
        record: directory of the recording, made here; None to keep nothing.
        interval_s: least time between two looks.
        native: native frames are wanted, which stops the processes for moments.
        peek: registers of busy threads are wanted, which stops each for microseconds.
        started: the command, if it is ours: its exit status is known.
        own_log: the launch writes the recording's log itself.
        heard: called with each block of the log as it is read.
    """

    def __init__(
        self,
        roots: Sequence[int],
        engine: Engine,
        header: Header,
        *,
        log: Path | str | Missing,
        record: Path | None = None,
        interval_s: float = 1.0,
        native: bool = False,
        peek: bool = False,
        started: Started | None = None,
        own_log: bool = False,
        heard: Callable[[bytes], None] | None = None,
    ) -> None:
        self.engine = engine
        self._interval_s = interval_s
        self._started = started
        self._tell = heard
        self._exits = ExitStack()
        self._log: Listener | None = None
        self._no_log: Missing | None = None
        if isinstance(log, Missing):
            self._no_log = log
        else:
            self._log = Listener(log)
            self._exits.callback(self._log.close)
        self.header = header
        self._recorder: Recorder | None = None
        if record is not None:
            self._recorder = Recorder(record, header, own_log=own_log)
            self._exits.callback(self._recorder.close)
        self._observer = Observer(roots, native=native, peek=peek, adopt=role_patterns(engine))
        self._exits.callback(self._observer.close)
        self._began_s = time.monotonic()
        self._base = begin(header, engine)
        self._thinned = Thinned()
        self._heard: list[bytes] = []
        self._unplaced: list[bytes] = []
        self._looked_s: dict[str, float] = {}
        self.facts: Facts = self._base
        self._witness: Stacks | None = None
        self._searching: threading.Thread | None = None
        self._searched_s: float | None = None
        self._found: list[Installation | Missing] = []

    def __enter__(self) -> Self:
        """Return it; the workers start with the first look."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write what is still to be written, and end the workers."""
        try:
            self._keep_pending()
        finally:
            self._exits.close()

    @property
    def recording_failed(self) -> OSError | None:
        """Why nothing is recorded any more, such as a disk that is full."""
        return self._recorder.failed if self._recorder else None

    def looks(self) -> Iterator[Facts]:
        """Look for ever, at most every interval; yield the facts after each look.

        Raises:
            KeyboardInterrupt: also for one that Python has swallowed since the last look.
        """
        while True:
            due_s = time.monotonic() + self._interval_s
            yield self.look()
            raise_unheard()
            time.sleep(max(0.0, due_s - time.monotonic()))

    def look(self) -> Facts:
        """Take one snapshot and fold it in."""
        at_s = time.monotonic() - self._began_s
        if self._thinned.kept is None and self._thinned.pending is None:
            self._read_old_log()
        due = self._due(at_s)
        snapshot = self._observer.take(
            due,
            at_s=round(at_s, 3),
            wall_s=round(time.time(), 3),
            model=model_of(self.facts, self.engine),
            loaders=loaders(self.facts),
            cache_places={cache.id: cache.places for cache in self.engine.caches},
        )
        self._looked_s |= dict.fromkeys(due, at_s)
        # The exit before the log: what a command said last is there by then.
        processes = self._with_exit(snapshot.processes)
        news = self._news()
        snapshot = msgspec.structs.replace(
            snapshot, log=self._log_position(at_s), processes=processes
        )
        self._thinned, keep = self._advance(snapshot)
        self._heard = news if keep else [*self._heard, *news]
        self.facts = step(self._base, snapshot, self._heard, self.engine)
        self._see_installation(snapshot)
        return self.facts

    def add_dumps(self, recorder: FlightRecorder) -> None:
        """Keep dumps that the user named, so that the recording tells all that was judged by."""
        at_s = round(time.monotonic() - self._began_s, 3)
        snapshot = Snapshot(at_s=at_s, wall_s=round(time.time(), 3), flight_recorder=recorder)
        self._keep_pending()
        if self._recorder:
            self._recorder.add(snapshot)

    def finish(self, *, wait: bool = True) -> Facts:
        """Return the facts at the end, with the installation that the processes run.

        Args:
            wait: look once more for it if the last look is old, and wait for what is found.
        """
        if wait:
            found = isinstance(self.header.installation, Installation)
            self._search_installation(FRESH_S if found else SEARCH_AGAIN_S)
            if self._searching is not None:
                self._searching.join()  # it has a deadline of its own
        self._take_installation()
        return self.facts

    def _see_installation(self, snapshot: Snapshot) -> None:
        """Look for the installation beside the watching, until it is found."""
        stacks = snapshot.stacks
        if isinstance(stacks, Stacks) and _runs(self.engine.detect.package, stacks):
            self._witness = stacks
        self._take_installation()
        if not isinstance(self.header.installation, Installation):
            self._search_installation(SEARCH_AGAIN_S)

    def _search_installation(self, again_s: float) -> None:
        """Begin a search if there is anything to go by, and the last one is so long ago."""
        if self._searching is not None and self._searching.is_alive():
            return
        if self._searched_s is not None and time.monotonic() - self._searched_s < again_s:
            return
        tracks = {pid: track for pid, track in self.facts.tracks.items() if track.present}
        # Before, what is there may be a wrapper, or a launcher that has not imported anything.
        if self._witness is None and not any(track.rank for track in tracks.values()):
            return
        pids = [pid for pid, track in tracks.items() if track.role]
        if not pids:
            return
        pids.sort(key=lambda pid: tracks[pid].role != "launcher")
        witness = self._witness
        package = self.engine.detect.package
        variables = [limit.environment for limit in self.engine.limits if limit.environment]

        def search() -> None:
            self._found.append(find_installation(package, pids, witness, variables=variables))

        self._searched_s = time.monotonic()
        self._searching = threading.Thread(target=search, daemon=True)
        self._searching.start()

    def _take_installation(self) -> None:
        """Put the installation into the header, once it is found."""
        if not self._found:
            return
        found, before = self._found.pop(), self.header.installation
        # What was found once is not forgotten when the processes have ended.
        if found == before or (isinstance(found, Missing) and isinstance(before, Installation)):
            return
        self.header = msgspec.structs.replace(self.header, installation=found)
        self._base = msgspec.structs.replace(self._base, header=self.header)
        self.facts = msgspec.structs.replace(self.facts, header=self.header)
        if self._recorder:
            self._recorder.update(self.header)

    def _due(self, at_s: float) -> frozenset[str]:
        beats = next_looks(self.facts)
        slack_s = self._interval_s / 4
        return frozenset(
            name
            for name, beat_s in beats.items()
            if at_s - self._looked_s.get(name, -1e9) >= beat_s - slack_s
        )

    def _advance(self, snapshot: Snapshot) -> tuple[Thinned, bool]:
        """Keep the pending snapshot for good if the new one differs from it."""
        thinned, keep = thin(self._thinned, snapshot)
        if keep:
            self._keep_pending()
        return thinned, keep

    def _keep_pending(self) -> None:
        """Keep it once, also where a Ctrl-C falls in here and the end comes here again."""
        pending, heard = self._thinned.pending, self._heard
        if pending is None:
            return
        self._thinned = msgspec.structs.replace(self._thinned, kept=pending, pending=None)
        self._heard = []
        if self._recorder:
            self._recorder.add(pending, b"".join(heard))
        self._base = step(self._base, pending, heard, self.engine)

    def _read_old_log(self) -> None:
        """Read in blocks what the log holds already: it may be long."""
        for block in self._read_log():
            self._base = hear(self._base, [block], self.engine)
            if self._recorder:
                self._recorder.add_log(block)
        self.facts = self._base

    def _read_log(self) -> Iterator[bytes]:
        for block in self._log.read_all() if self._log else ():
            if self._tell:
                self._tell(block)
            yield block

    def _news(self) -> list[bytes]:
        """Return the log's new bytes; none where the snapshot cannot say how far they go.

        A replay hears them at the next snapshot that can, and so do we.
        """
        if self._log is None:
            return []
        self._unplaced += self._read_log()
        if isinstance(self._log.position(), Missing):
            return []
        news, self._unplaced = self._unplaced, []
        return news

    def _log_position(self, at_s: float) -> LogPosition | Missing | None:
        """Return where the log stands, and its silence as of the look's beginning.

        Where a collector does not answer a look takes 5 s, and processes are as old as at its
        beginning: a log that the launch has written to since would seem older than the launch.
        """
        position = self._log.position() if self._log else self._no_log
        if not isinstance(position, LogPosition) or position.silent_s is None:
            return position
        took_s = time.monotonic() - self._began_s - at_s
        return msgspec.structs.replace(position, silent_s=max(0.0, position.silent_s - took_s))

    def _with_exit(self, processes: Processes | Missing | None) -> Processes | Missing | None:
        """Add the exit status of the command that we started: only its parent knows it."""
        if not isinstance(processes, Processes) or self._started is None:
            return processes
        status = self._started.poll()
        if status is None:
            return processes
        ended = processes.ended | {self._started.pid: status}
        left = tuple(p for p in processes.processes if p.pid != self._started.pid)
        return msgspec.structs.replace(processes, processes=left, ended=ended)


def _runs(package: str, stacks: Stacks) -> bool:
    """Tell whether a frame lies in the package, which a launcher that still imports has not."""
    return any(
        f"/{package}/" in frame.path
        for stack in stacks.by_pid.values()
        if isinstance(stack, ProcessStacks)
        for thread in stack.threads
        for frame in thread.frames
    )
