"""One verdict from a launch, a recording, a log, or several of them together."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from hangdoctor import engines
from hangdoctor.commands.interrupt import INTERRUPTED, finish, nothing_seen
from hangdoctor.commands.late_log import with_log
from hangdoctor.commands.sources import (
    DETECT_BYTES,
    as_file,
    engine_named,
    find,
    header_of,
    log_of,
    longest_phases,
    read_dumps,
    shown,
    sort_sources,
)
from hangdoctor.diagnose import diagnose as judge
from hangdoctor.errors import EvidenceError, UsageError
from hangdoctor.facts.fold import begin, derive, see_dumps, step
from hangdoctor.logs.timeline import detect_engine
from hangdoctor.model import Header, LogPosition, Snapshot
from hangdoctor.recording import (
    bare_log,
    load,
)
from hangdoctor.render import RENDERERS
from hangdoctor.signals import ended_in_order
from hangdoctor.streams import put, say

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hangdoctor.engines import Engine
    from hangdoctor.facts import Facts
    from hangdoctor.model import FlightRecorder


def diagnose(
    sources: Sequence[str],
    *,
    log: str | None,
    good: Sequence[Path],
    for_s: float,
    record: Path | None,
    output: str,
    engine_name: str | None,
    native: bool,
    peek: bool,
    stall_after_s: float | None,
    still_running: bool,
) -> str | int:
    """Give one verdict; return its state, or the exit code of a Ctrl-C, after the verdict so far.

    Without a `stall_after_s` a recording is judged by its own.
    """
    with ended_in_order():
        try:
            facts, engine, interrupted = _look(
                sources,
                log=log,
                good=good,
                for_s=for_s,
                record=record,
                engine_name=engine_name,
                native=native,
                peek=peek,
                stall_after_s=stall_after_s,
                still_running=still_running,
            )
        except KeyboardInterrupt:
            return nothing_seen()
        if interrupted and facts.at_s is None:
            return nothing_seen()
        diagnosis = judge(facts, engine)
        put(RENDERERS[output](facts, diagnosis))
        return INTERRUPTED if interrupted else diagnosis.state


def _look(
    sources: Sequence[str],
    *,
    log: str | None,
    good: Sequence[Path],
    for_s: float,
    record: Path | None,
    engine_name: str | None,
    native: bool,
    peek: bool,
    stall_after_s: float | None,
    still_running: bool,
) -> tuple[Facts, Engine, bool]:
    """Return what the sources tell, and whether a Ctrl-C ended the look at a launch."""
    interrupted = False
    pids, directories, logs, dumps = sort_sources(sources)
    if log is not None:
        logs.append(log)
    if record is not None and (directories or ((logs or dumps) and not pids)):
        raise UsageError(
            "--record needs a running launch: a recording or a log is kept already",
            hint="hangdoctor diagnose PID --log FILE --record DIR",
        )
    if len(pids) + len(directories) > 1 or len(logs) > 1:
        raise UsageError(
            "more than one launch was named",
            hint="one launch's: hangdoctor diagnose PID --log FILE; to compare logs: hangdoctor"
            " diff-logs GOOD OTHER",
        )
    normal_s = longest_phases(good, engine_name)
    recorder = read_dumps(dumps) if dumps else None
    if directories:
        with ExitStack() as exits:
            files = [as_file(each, exits) for each in logs]
            facts, engine = _from_recording(
                directories[0], files, engine_name, stall_after_s, normal_s
            )
    elif pids or not (logs or dumps):
        facts, engine, interrupted = _from_launch(
            pids[0] if pids else None,
            logs[0] if logs else None,
            for_s=for_s,
            record=record,
            engine_name=engine_name,
            native=native,
            peek=peek,
            stall_after_s=Header().stall_after_s if stall_after_s is None else stall_after_s,
            normal_s=normal_s,
            recorder=recorder,
        )
    elif not logs:
        engine = engine_named(engine_name)
        # The dumps do not tell the engine: the default one stays unnamed.
        header = Header(source=", ".join(map(shown, dumps)), engine=engine_name or "")
        if stall_after_s is not None:
            header = msgspec.structs.replace(header, stall_after_s=stall_after_s)
        facts = begin(header, engine)
    else:
        with ExitStack() as exits:
            file = as_file(logs[0], exits)
            facts, engine = facts_of_log(
                file, logs[0], engine_name, still_running=still_running, normal_s=normal_s
            )
    if recorder is not None:
        facts = see_dumps(facts, recorder)
    return facts, engine, interrupted


def _from_launch(
    pid: int | None,
    log: str | None,
    *,
    for_s: float,
    record: Path | None,
    engine_name: str | None,
    native: bool,
    peek: bool,
    stall_after_s: float,
    normal_s: dict[str, float],
    recorder: FlightRecorder | None,
) -> tuple[Facts, Engine, bool]:
    """Look at a launch; return what was seen, and whether a Ctrl-C ended the look."""
    from hangdoctor.live import Live  # 40 ms that a recording and a log need not wait for

    launch, engine = find(pid, engine_name)
    log_source, log_name = log_of(launch, log)
    header = header_of(launch, engine, stall_after_s, log_name)
    header = msgspec.structs.replace(header, normal_s=normal_s)
    with Live(
        launch.roots,
        engine,
        header,
        log=log_source,
        record=record,
        native=native,
        peek=peek,
    ) as live:
        began_s = time.monotonic()
        interrupted = False
        try:
            for facts in live.looks():
                # Two looks at least: with one nothing can be said to move or to stand.
                if time.monotonic() - began_s >= for_s and facts.watched_s > 0:
                    break
        except KeyboardInterrupt:
            interrupted = True
            if sys.stderr.isatty():
                say("")  # below the ^C
        if recorder is not None:
            live.add_dumps(recorder)
        facts, interrupted = finish(live, interrupted=interrupted)
        if live.recording_failed:
            say(f"hangdoctor: the recording is incomplete: {live.recording_failed.strerror}")
        return facts, engine, interrupted


def _from_recording(
    directory: Path,
    logs: list[Path],
    engine_name: str | None,
    stall_after_s: float | None,
    normal_s: dict[str, float],
) -> tuple[Facts, Engine]:
    recording = load(directory)
    header = msgspec.structs.replace(
        recording.header,
        source=shown(directory),
        normal_s=normal_s or recording.header.normal_s,
        stall_after_s=recording.header.stall_after_s if stall_after_s is None else stall_after_s,
    )
    recording = msgspec.structs.replace(recording, header=header)
    engine = engine_named(engine_name or recording.header.engine or None)
    if logs:
        recording = with_log(recording, logs[0], engine)
    if not recording.snapshots and recording.log_path is None:
        raise EvidenceError(
            f"{directory} holds neither a snapshot nor a log",
            hint="hangdoctor diagnose PID --for 30 --record DIR",
        )
    return derive(recording, engine), engine


def facts_of_log(
    path: Path,
    name: str,
    engine_name: str | None,
    *,
    still_running: bool,
    normal_s: dict[str, float],
) -> tuple[Facts, Engine]:
    """Return what a log alone tells, and its engine.

    Raises:
        EvidenceError: it is empty, or of no known engine.
    """
    with path.open("rb") as file:
        head = file.read(DETECT_BYTES)
        status = os.fstat(file.fileno())
    if not head.strip():
        raise EvidenceError(
            f"the log {name} is empty", hint="look at the launch itself: hangdoctor diagnose PID"
        )
    found = engine_name or detect_engine(head)
    if found is None:
        raise EvidenceError(
            f"{name} is not recognised as the log of an engine "
            f"({', '.join(engines.names())} are known)",
            hint="name the engine to read it all the same: --engine sglang",
        )
    engine = engine_named(found)
    recording = bare_log(path, still_running=still_running)
    header = msgspec.structs.replace(
        recording.header, source=shown(name), engine=engine.name, normal_s=normal_s
    )
    recording = msgspec.structs.replace(recording, header=header)
    facts = derive(recording, engine)  # without snapshots: to its very end, newline or not
    if still_running:
        position = LogPosition(
            read_bytes=status.st_size, silent_s=max(0.0, time.time() - status.st_mtime)
        )
        now = Snapshot(at_s=0.0, wall_s=time.time(), log=position)
        facts = step(facts, now, (), engine)
    return facts, engine
