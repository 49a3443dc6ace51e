"""Joins a recording with a log that was kept apart from it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from hangdoctor.engines import rank_name, role_of
from hangdoctor.facts.fold import derive
from hangdoctor.logs.parse import ParserState, parse
from hangdoctor.model import LogPosition, LogSource, Processes, Snapshot
from hangdoctor.recording import (
    Recording,
    bare_log,
    check_log,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hangdoctor.engines import Engine


ZONES_S = 900.0
"""Time zones differ by multiples of this."""
SOON_S = 60.0
"""A log's first stamp is at most so much younger than the first rank, and rather older."""


def with_log(recording: Recording, path: Path, engine: Engine) -> Recording:
    """Give a recording without a log one that was kept apart.

    Each snapshot gets what was written by then, as the log's stamps tell; a line without one is as
    old as the line before it. Where they cannot tell, all of it counts as written by the last
    moment, which never makes the launch look still for longer than it was.
    """
    check_log(path)
    header = msgspec.structs.replace(recording.header, log=LogSource(origin=str(path)))
    if not recording.snapshots:
        return msgspec.structs.replace(recording, header=header, log_path=path)
    positions = _positions(path, recording.snapshots, engine)
    snapshots = tuple(
        msgspec.structs.replace(snapshot, log=position)
        for snapshot, position in zip(recording.snapshots, positions, strict=True)
    )
    return msgspec.structs.replace(recording, header=header, log_path=path, snapshots=snapshots)


def _positions(path: Path, snapshots: Sequence[Snapshot], engine: Engine) -> list[LogPosition]:
    """Return how much of a log was there at each snapshot; all of it at the last."""
    whole = path.stat().st_size
    last = LogPosition(read_bytes=whole)
    unknown = [LogPosition(read_bytes=0)] * (len(snapshots) - 1) + [last]
    alone = derive(bare_log(path), engine)
    first_s, ranks_s = alone.timeline.first_time_s, _ranks_start_s(snapshots, engine)
    if first_s is None or ranks_s is None or not alone.log_is_whole:
        return unknown
    # Stamps are in a zone that nobody knows; zones differ by quarters of an hour, and a log begins
    # so shortly before its ranks that only one fits.
    zone_s = ZONES_S * math.ceil((first_s - ranks_s - SOON_S) / ZONES_S)
    found: list[LogPosition] = []
    parser = ParserState()
    read_bytes = 0
    written_s: float | None = None
    with path.open("rb") as log:
        for raw in log:
            lines, parser = parse(parser, raw, engine)
            for line in lines:
                if line.time_s is None:
                    continue
                at_s = line.time_s - zone_s
                while len(found) < len(snapshots) - 1 and snapshots[len(found)].wall_s < at_s:
                    found.append(_written(read_bytes, written_s, snapshots[len(found)].wall_s))
                written_s = at_s
            read_bytes += len(raw)
    return found + [
        _written(whole, written_s, snapshot.wall_s) for snapshot in snapshots[len(found) :]
    ]


def _written(read_bytes: int, written_s: float | None, now_s: float) -> LogPosition:
    silent_s = None if written_s is None else max(0.0, now_s - written_s)
    return LogPosition(read_bytes=read_bytes, silent_s=silent_s)


def _ranks_start_s(snapshots: Sequence[Snapshot], engine: Engine) -> float | None:
    """Return when the first rank started, in seconds since 1970; None if none was seen."""
    starts = []
    for snapshot in snapshots:
        if isinstance(snapshot.processes, Processes):
            for process in snapshot.processes.processes:
                role = role_of(engine, process.title)
                if process.age_s is not None and role and rank_name(role, process.title):
                    starts.append(snapshot.wall_s - process.age_s)
    return min(starts, default=None)
