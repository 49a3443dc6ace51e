"""What a command line names: launches, recordings, logs, engines."""

from __future__ import annotations

import os
import re
import select
import stat
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hangdoctor import __version__, engines
from hangdoctor.commands.copies import no_copy, temporary_copy
from hangdoctor.commands.packed import unpacked
from hangdoctor.errors import EvidenceError, InputError, UsageError
from hangdoctor.logs.timeline import detect_engine, phase_durations
from hangdoctor.model import Header, LogSource, Missing
from hangdoctor.recording import (
    LOG_NAME,
    bare_log,
    check_log,
    is_recording,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hangdoctor.engines import Engine
    from hangdoctor.model import FlightRecorder
    from hangdoctor.target import Launch


WRITER_MS = 3000
"""So long a FIFO waits for whoever writes it."""
DETECT_BYTES = 4 << 20
"""So much of a log's start is read to recognise the engine."""


def sort_sources(sources: Sequence[str]) -> tuple[list[int], list[Path], list[str], list[str]]:
    """Return the PIDs, the recordings' directories, the logs and the dumps among the sources.

    Raises:
        InputError: one of them is none of these.
    """
    pids: list[int] = []
    directories: list[str] = []
    logs: list[str] = []
    dumps: list[str] = []
    for source in sources:
        path = Path(source)
        there = bool(source) and os.path.lexists(path)
        if source == "-":
            logs.append(source)
        elif there or "/" in source:
            if stat.S_ISDIR(mode_of(path)):
                (dumps if not is_recording(path) and _of_dumps(source) else directories).append(
                    source
                )
            else:
                (dumps if _of_dumps(source) else logs).append(source)
        elif source.isascii() and source.isdecimal():
            pids.append(int(source))
        else:
            raise InputError(
                f"{source!r} is neither a PID, nor a recording, nor a log",
                hint="hangdoctor diagnose [PID | DIRECTORY | LOG]",
            )
    return pids, list(map(Path, directories)), logs, dumps


def _of_dumps(path: str) -> bool:
    # Brings all collectors with it: 40 ms that a recording need not wait for.
    from hangdoctor.collect.flight_recorder import holds_dumps, looks_like_dump

    return holds_dumps(path) or looks_like_dump(path)


def read_dumps(paths: Sequence[str]) -> FlightRecorder:
    """Read files and directories of Flight Recorder dumps, in a process that may be abandoned.

    Raises:
        InputError: they cannot be read, or hold no dump that can be used.
    """
    from hangdoctor.collect import flight_recorder
    from hangdoctor.collect.worker import ask_once

    request = flight_recorder.Paths(paths=tuple(map(os.path.abspath, paths)))
    found = ask_once("dump_files", flight_recorder.PATHS_JOB, request)
    named = ", ".join(map(shown, paths))
    if isinstance(found, Missing):
        raise InputError(f"cannot read the dumps in {named}: {found.detail}", hint=found.hint)
    if not found.dumps:
        reasons = {missing.detail: missing.hint for missing in found.unusable.values()}
        why, hint = next(iter(reasons.items()), ("none is there", f"ls -l {named}"))
        raise InputError(f"no dump in {named} can be used: {why}", hint=hint)
    return cast("FlightRecorder", found)


def find(pid: int | None, engine_name: str | None) -> tuple[Launch, Engine]:
    """Return the launch that a PID belongs to, or the only one here, and its engine.

    Raises:
        UsageError, InputError: there is none, or there are several.
    """
    from hangdoctor.target import resolve

    known = [engine_named(name) for name in ([engine_name] if engine_name else engines.names())]
    launch = resolve(pid, known)
    return launch, engine_named(launch.engine)


def log_of(launch: Launch, log: str | None) -> tuple[Path | str | Missing, str | None]:
    """Return what to read the launch's log from, and what to call it."""
    from hangdoctor.target import find_log

    if log is not None:
        return log, shown(log)
    found = find_log(launch.roots)
    return (found, None) if isinstance(found, Missing) else (found.path, found.name)


def header_of(launch: Launch, engine: Engine, stall_after_s: float, log_name: str | None) -> Header:
    """Return the header of a recording of the launch that begins now."""
    return Header(
        log=LogSource(origin=log_name) if log_name else None,
        hangdoctor=__version__,
        created_wall_s=time.time(),
        source=str(launch.roots[0]),
        stall_after_s=stall_after_s,
        engine=engine.name,
        command=tuple(launch.title.split()),
    )


def engine_named(name: str | None) -> Engine:
    """Return an engine by its name; the first one without a name.

    Raises:
        UsageError: there is no such engine.
    """
    if name is None:
        return engines.load(engines.names()[0])
    try:
        return engines.load(name)
    except KeyError:
        raise UsageError(
            f"there is no engine {name!r}", hint=f"engines: {', '.join(engines.names())}"
        ) from None


def engine_for(command: Sequence[str], name: str | None) -> Engine:
    """Return the engine that a command starts: the named one, or the one that is recognised.

    Raises:
        UsageError: there is no engine of that name.
    """
    if name is None:
        line = shown(" ".join(command))
        for engine in map(engines.load, engines.names()):
            if any(re.search(pattern, line) for pattern in engine.detect.launcher):
                return engine
    return engine_named(name)


def longest_phases(good: Sequence[Path], engine_name: str | None) -> dict[str, float]:
    """Return how long each phase took at the longest in known-good logs, or recordings' logs.

    Raises:
        InputError: one cannot be read, or does not end ready.
    """
    from hangdoctor.facts.fold import derive

    longest: dict[str, float] = {}
    for named in good:
        path = named / LOG_NAME if is_recording(named) else named
        check_log(path)
        with ExitStack() as exits:
            whole = unpacked(path, shown(path), exits)
            with whole.open("rb") as file:
                engine = engine_named(engine_name or detect_engine(file.read(DETECT_BYTES)))
            timeline = derive(bare_log(whole), engine).timeline
        if "" not in timeline.ranks or timeline.ranks[""].phase != "ready":
            raise InputError(
                f"{path} is not the log of a good start: it does not come to ready",
                hint=f"hangdoctor diagnose {path}",
            )
        for phase, seconds in phase_durations(timeline).items():
            longest[phase] = max(seconds, longest.get(phase, 0.0))
    return longest


def as_file(log: str, exits: ExitStack) -> Path:
    """Return a log as a file; what comes from stdin or a pipe is read to its end into one.

    What is packed (gzip, xz, zstd) is unpacked into one.
    """
    path = Path(log)
    mode = 0 if log == "-" else mode_of(path)
    if mode and not stat.S_ISFIFO(mode):
        check_log(path)
        return unpacked(path, shown(log), exits)
    return unpacked(_piped(log, exits), shown(log), exits)


def _piped(log: str, exits: ExitStack) -> Path:
    """Return what comes from stdin or a FIFO as a file."""
    path = Path(log)
    try:
        copy = temporary_copy(log, exits)
        pipe = 0 if log == "-" else os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if log != "-":
            exits.callback(os.close, pipe)
            poll = select.poll()
            poll.register(pipe, select.POLLIN)
            if not poll.poll(WRITER_MS):
                raise EvidenceError(
                    f"nobody writes to the pipe {log}",
                    hint="kubectl logs POD | hangdoctor diagnose --log -",
                )
            os.set_blocking(pipe, True)
        while block := os.read(pipe, 1 << 20):
            copy.write(block)
        copy.flush()
    except OSError as error:
        raise no_copy(log, error) from error
    return Path(copy.name)


def shown(name: str | Path) -> str:
    """Return a name from the command line, which may be any bytes, as text that can be written."""
    return os.fsencode(name).decode(errors="replace")


def mode_of(path: Path) -> int:
    """Return type and permissions of a file.

    Raises:
        InputError: it is not there, or lies in a directory of somebody else.
    """
    try:
        return path.stat().st_mode
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", hint=f"ls -ld {path}") from error
