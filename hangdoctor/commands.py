"""What the commands do: from a source to facts, a diagnosis, and what is printed.

stdout is data, stderr is talk.
"""

from __future__ import annotations

import inspect
import math
import os
import select
import shlex
import stat
import tempfile
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hangdoctor import __version__, engines
from hangdoctor.diagnose import diagnose as judge
from hangdoctor.engines import rank_name, role_of
from hangdoctor.errors import EvidenceError, InputError, UsageError
from hangdoctor.facts import derive, step
from hangdoctor.live import Live
from hangdoctor.logs.parse import ParserState, parse
from hangdoctor.logs.timeline import detect_engine, phase_durations
from hangdoctor.model import Header, LogPosition, LogSource, Missing, Processes, Snapshot
from hangdoctor.recording import (
    LOG_BLOCK_BYTES,
    LOG_NAME,
    Recording,
    bare_log,
    check_log,
    is_recording,
    load,
)
from hangdoctor.render import RENDERERS
from hangdoctor.render.json import encode
from hangdoctor.render.text import verdict_line
from hangdoctor.rules import RULES, rule_id
from hangdoctor.streams import is_heard, put, say
from hangdoctor.target import find_log, resolve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hangdoctor.engines import Engine, Phase
    from hangdoctor.facts import Facts
    from hangdoctor.findings import Diagnosis
    from hangdoctor.launch import Started
    from hangdoctor.target import Launch

PROBE_BYTES = 1 << 16
"""A directory without room for so much is not recorded into."""
WRITER_MS = 3000
"""So long a FIFO waits for whoever writes it."""
DETECT_BYTES = 4 << 20
"""So much of a log's start is read to recognise the engine."""

MOST_LINES = 200
"""So many of a command's lines are shown after each look, its newest."""
LONGEST_LINE = 2000
ZONES_S = 900.0
"""Time zones differ by multiples of this."""
SOON_S = 60.0
"""A log's first stamp is at most so much younger than the first rank, and rather older."""


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
    stall_after_s: float | None,
    still_running: bool,
) -> str:
    """Give one verdict; return its state.

    Without a `stall_after_s` a recording is judged by its own.
    """
    pids, directories, logs = _sort_sources(sources)
    if log is not None:
        logs.append(log)
    if record is not None and (directories or (logs and not pids)):
        raise UsageError(
            "--record needs a running launch: a recording or a log is kept already",
            hint="hangdoctor diagnose PID --log FILE --record DIR",
        )
    if len(pids) + len(directories) > 1 or len(logs) > 1:
        raise UsageError(
            "more than one launch was named",
            hint="name one PID or one recording, and at most one log of the same launch",
        )
    normal_s = _longest_phases(good, engine_name)
    if directories:
        with ExitStack() as exits:
            files = [_log_file(each, exits) for each in logs]
            facts, engine = _from_recording(
                directories[0], files, engine_name, stall_after_s, normal_s
            )
    elif pids or not logs:
        facts, engine = _from_launch(
            pids[0] if pids else None,
            logs[0] if logs else None,
            for_s=for_s,
            record=record,
            engine_name=engine_name,
            native=native,
            stall_after_s=Header().stall_after_s if stall_after_s is None else stall_after_s,
            normal_s=normal_s,
        )
    else:
        with ExitStack() as exits:
            file = _log_file(logs[0], exits)
            facts, engine = _judge_log(
                file, logs[0], engine_name, still_running=still_running, normal_s=normal_s
            )
    diagnosis = judge(facts, engine)
    put(RENDERERS[output](facts, diagnosis))
    return diagnosis.state


def watch(
    command: Sequence[str],
    *,
    pid: int | None,
    log: str | None,
    good: Sequence[Path],
    record: Path | None,
    output: str,
    engine_name: str | None,
    native: bool,
    stall_after_s: float,
    interval_s: float,
    timeout_s: float | None,
    until: str,
    events: bool,
    kill_on_exit: bool,
) -> str | int:
    """Follow a launch until a verdict; return its state, or the exit code of a Ctrl-C."""
    started: Started | None = None
    log_source: Path | str | Missing
    normal_s = _longest_phases(good, engine_name)
    if command:
        started, header, roots, engine, log_source = _start(
            command, record, log, engine_name, stall_after_s
        )
    else:
        launch, engine = _find(pid, engine_name)
        roots = launch.roots
        log_source, log_name = _log_of(launch, log)
        header = _header(launch, engine, stall_after_s, log_name)
    header = msgspec.structs.replace(header, normal_s=normal_s)
    interrupted = False
    diagnosis: Diagnosis | None = None
    lines = _Lines() if command and output == "text" and not events else None
    try:
        with Live(
            roots,
            engine,
            header,
            log=log_source,
            record=record,
            interval_s=interval_s,
            native=native,
            started=started,
            own_log=started is not None,
            heard=lines.hear if lines else None,
        ) as live:
            talk = _Talk(events=events, started=started)
            began_s = time.monotonic()
            try:
                for facts in live.looks():
                    if lines:
                        lines.show()
                    diagnosis = judge(facts, engine)
                    if not talk.tell(facts, diagnosis) or _is_over(diagnosis, until):
                        break
                    if timeout_s is not None and time.monotonic() - began_s >= timeout_s:
                        if until != "forever":
                            talk.say(f"not decided within the {timeout_s:.0f} s of --timeout")
                        break
            except KeyboardInterrupt:
                interrupted = True
            try:
                facts = live.finish(wait=not interrupted)
            except KeyboardInterrupt:
                interrupted = True
                facts = live.finish(wait=False)
            if lines:
                lines.show(whole=True)
            diagnosis = judge(facts, engine)
            if live.recording_failed:
                talk.say(f"the recording is incomplete: {live.recording_failed.strerror}")
        if not events:
            put(RENDERERS[output](facts, diagnosis))
    finally:
        if started is not None:
            _leave(started, kill=kill_on_exit)
    return 130 if interrupted else diagnosis.state


def explain(rule: str) -> str:
    """Return the text of a rule.

    Raises:
        UsageError: there is no such rule.
    """
    rules = {rule_id(each): each for each in RULES}
    if rule not in rules:
        raise UsageError(f"there is no rule {rule!r}", hint=f"rules: {', '.join(sorted(rules))}")
    return f"{rule}\n\n{inspect.getdoc(rules[rule])}"


class _Talk:
    """Says on stderr, or as JSON lines on stdout, what changes while a launch is watched."""

    def __init__(self, *, events: bool, started: Started | None) -> None:
        self._events = events
        self._last: tuple[object, ...] = ()
        self._ranks: dict[str, Phase | None] = {}
        if started is not None:
            self.say(f"started pid {started.pid}, its log is {started.log_path}")

    def say(self, text: str) -> None:
        say(f"hangdoctor: {text}")

    def tell(self, facts: Facts, diagnosis: Diagnosis) -> bool:
        """Say what is new; False where whoever reads the events has gone."""
        now = (diagnosis.state, diagnosis.phase, diagnosis.culprits)
        phases = {rank.name: rank.phase for rank in facts.ranks}
        if now == self._last and phases == self._ranks:
            return is_heard() or not self._events
        self._last, self._ranks = now, phases
        if self._events:
            event = {
                "at_s": facts.at_s,
                "state": diagnosis.state,
                "phase": diagnosis.phase,
                "culprits": list(diagnosis.culprits),
                "confidence": diagnosis.confidence,
                "still_s": diagnosis.still_s,
                "title": diagnosis.title,
                "ranks": phases,
            }
            return put(encode(event).decode())
        say(f"{facts.at_s or 0:7.1f} s  {verdict_line(diagnosis)}  {diagnosis.title}")
        return True


class _Lines:
    """The lines of a command's log, shown on stderr between the lines of what changes."""

    def __init__(self) -> None:
        self._newest: deque[bytes] = deque(maxlen=MOST_LINES)
        self._count = 0
        self._begun = b""

    def hear(self, block: bytes) -> None:
        """Take in the log's next bytes; a flood needs no more memory than its newest lines."""
        *lines, self._begun = (self._begun + block).split(b"\n")
        self._begun = self._begun[-LOG_BLOCK_BYTES:]
        self._newest.extend(lines)
        self._count += len(lines)

    def show(self, *, whole: bool = False) -> None:
        """Show what is new; at the end the line as well that was only begun."""
        if whole and self._begun:
            self.hear(b"\n")
        lines = [f"  | {_as_seen(line)}" for line in self._newest]
        left_out = self._count - len(lines)
        self._newest.clear()
        self._count = 0
        if left_out:
            lines.insert(0, f"  | ({left_out} lines are left out here, the log has them)")
        if lines:
            say(*lines)


def _as_seen(line: bytes) -> str:
    """Return what a terminal would show of a line: a bar overwrites itself."""
    shown = line.rstrip(b"\r").rpartition(b"\r")[2]
    return shown[:LONGEST_LINE].decode(errors="replace")


def _is_over(diagnosis: Diagnosis, until: str) -> bool:
    if until == "forever":
        return diagnosis.state == "dead"
    if until == "ready":
        return diagnosis.state in ("ready", "dead")
    return diagnosis.state in ("ready", "dead", "hung")


def _start(
    command: Sequence[str],
    record: Path | None,
    log: str | None,
    engine_name: str | None,
    stall_after_s: float,
) -> tuple[Started, Header, tuple[int, ...], Engine, Path]:
    from hangdoctor.launch import start

    if log is not None:
        raise UsageError(
            "--log and -- COMMAND exclude each other", hint="the command's output is its log"
        )
    engine = _engine(engine_name)
    if record is None:
        folder = Path(tempfile.mkdtemp(prefix="hangdoctor-"))
    else:
        folder = record
        if is_recording(folder) or (folder / LOG_NAME).exists():
            raise InputError(f"{folder} holds a recording already", hint="name another directory")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Before the command runs: once it does, a recording that fails must not matter.
            probe = folder / "probe"
            probe.write_bytes(bytes(PROBE_BYTES))
            probe.unlink()
        except OSError as error:
            raise InputError(
                f"cannot record into {folder}: {error.strerror}", hint="name another directory"
            ) from error
    started = start(command, folder / LOG_NAME)
    header = Header(
        hangdoctor=__version__,
        created_wall_s=time.time(),
        source=_shown(shlex.join(command)),
        stall_after_s=stall_after_s,
        engine=engine.name,
        command=tuple(map(_shown, command)),
        log=LogSource(origin=_shown(started.log_path)),
    )
    return started, header, (started.pid,), engine, started.log_path


def _leave(started: Started, *, kill: bool) -> None:
    """Say what becomes of the command that we started, or end it."""
    from hangdoctor.launch import end

    if started.poll() is not None:
        say(f"hangdoctor: pid {started.pid} has ended; log: {started.log_path}")
    elif kill:
        left = end(started)
        what = f"could not be ended: {left}" if left else "was ended"
        say(f"hangdoctor: pid {started.pid} {what}; log: {started.log_path}")
    else:
        say(
            f"hangdoctor: pid {started.pid} runs on; log: {started.log_path}",
            f"  look deeper: hangdoctor diagnose {started.pid} --record DIR",
            f"  end it: kill -TERM -- -{started.pid}; if it hangs, kill -KILL -- -{started.pid}",
        )


def _from_launch(
    pid: int | None,
    log: str | None,
    *,
    for_s: float,
    record: Path | None,
    engine_name: str | None,
    native: bool,
    stall_after_s: float,
    normal_s: dict[str, float],
) -> tuple[Facts, Engine]:
    launch, engine = _find(pid, engine_name)
    log_source, log_name = _log_of(launch, log)
    header = _header(launch, engine, stall_after_s, log_name)
    header = msgspec.structs.replace(header, normal_s=normal_s)
    with Live(launch.roots, engine, header, log=log_source, record=record, native=native) as live:
        began_s = time.monotonic()
        for facts in live.looks():
            # Two looks at least: with one nothing can be said to move or to stand.
            if time.monotonic() - began_s >= for_s and facts.watched_s > 0:
                break
        if live.recording_failed:
            say(f"hangdoctor: the recording is incomplete: {live.recording_failed.strerror}")
        return live.finish(), engine


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
        source=_shown(directory),
        normal_s=normal_s or recording.header.normal_s,
        stall_after_s=recording.header.stall_after_s if stall_after_s is None else stall_after_s,
    )
    recording = msgspec.structs.replace(recording, header=header)
    engine = _engine(engine_name or recording.header.engine or None)
    if logs:
        recording = _with_log(recording, logs[0], engine)
    if not recording.snapshots and recording.log_path is None:
        raise EvidenceError(
            f"{directory} holds neither a snapshot nor a log", hint="record for longer"
        )
    return derive(recording, engine), engine


def _log_file(log: str, exits: ExitStack) -> Path:
    """Return a log as a file; what comes from stdin or a pipe is read to its end into one."""
    path = Path(log)
    mode = 0 if log == "-" else _mode_of(path)
    if mode and not stat.S_ISFIFO(mode):
        check_log(path)
        return path
    try:
        copy = tempfile.NamedTemporaryFile(prefix="hangdoctor-", suffix=".log")  # noqa: SIM115
        exits.enter_context(copy)  # kept until the log was read
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
        raise InputError(
            f"cannot keep a copy of the log {log}: {error.strerror}",
            hint="TMPDIR names the directory that it is kept in",
        ) from error
    return Path(copy.name)


def _judge_log(
    path: Path,
    name: str,
    engine_name: str | None,
    *,
    still_running: bool,
    normal_s: dict[str, float],
) -> tuple[Facts, Engine]:
    with path.open("rb") as file:
        head = file.read(DETECT_BYTES)
        status = os.fstat(file.fileno())
    if not head.strip():
        raise EvidenceError(
            f"the log {name} is empty", hint="look at the launch itself: hangdoctor diagnose PID"
        )
    if head.startswith(b"\x1f\x8b"):
        raise EvidenceError(
            f"the log {name} is packed", hint=f"zcat {name} | hangdoctor diagnose --log -"
        )
    found = engine_name or detect_engine(head)
    if found is None:
        raise EvidenceError(
            f"{name} is not recognised as the log of an engine "
            f"({', '.join(engines.names())} are known)",
            hint="name the engine to read it all the same: --engine sglang",
        )
    engine = _engine(found)
    recording = bare_log(path, still_running=still_running)
    header = msgspec.structs.replace(
        recording.header, source=_shown(name), engine=engine.name, normal_s=normal_s
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


def _with_log(recording: Recording, path: Path, engine: Engine) -> Recording:
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


def _shown(name: str | Path) -> str:
    """Return a name from the command line, which may be any bytes, as text that can be written."""
    return os.fsencode(name).decode(errors="replace")


def _mode_of(path: Path) -> int:
    """Return type and permissions of a file.

    Raises:
        InputError: it is not there, or lies in a directory of somebody else.
    """
    try:
        return path.stat().st_mode
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", hint=f"ls -ld {path}") from error


def _longest_phases(good: Sequence[Path], engine_name: str | None) -> dict[str, float]:
    """Return how long each phase took at the longest in known-good logs.

    Raises:
        InputError: one cannot be read, or does not end ready.
    """
    longest: dict[str, float] = {}
    for path in good:
        check_log(path)
        with path.open("rb") as file:
            engine = _engine(engine_name or detect_engine(file.read(DETECT_BYTES)))
        timeline = derive(bare_log(path), engine).timeline
        if "" not in timeline.ranks or timeline.ranks[""].phase != "ready":
            raise InputError(
                f"{path} is not the log of a good start: it does not come to ready",
                hint=f"hangdoctor diagnose {path}",
            )
        for phase, seconds in phase_durations(timeline).items():
            longest[phase] = max(seconds, longest.get(phase, 0.0))
    return longest


def _find(pid: int | None, engine_name: str | None) -> tuple[Launch, Engine]:
    known = [_engine(name) for name in ([engine_name] if engine_name else engines.names())]
    launch = resolve(pid, known)
    return launch, _engine(launch.engine)


def _header(launch: Launch, engine: Engine, stall_after_s: float, log_name: str | None) -> Header:
    return Header(
        log=LogSource(origin=log_name) if log_name else None,
        hangdoctor=__version__,
        created_wall_s=time.time(),
        source=str(launch.roots[0]),
        stall_after_s=stall_after_s,
        engine=engine.name,
        command=tuple(launch.title.split()),
    )


def _log_of(launch: Launch, log: str | None) -> tuple[Path | str | Missing, str | None]:
    """Return what to read the launch's log from, and what to call it."""
    if log is not None:
        return log, _shown(log)
    found = find_log(launch.roots)
    return (found, None) if isinstance(found, Missing) else (found.path, found.name)


def _engine(name: str | None) -> Engine:
    if name is None:
        return engines.load(engines.names()[0])
    try:
        return engines.load(name)
    except KeyError:
        raise UsageError(
            f"there is no engine {name!r}", hint=f"engines: {', '.join(engines.names())}"
        ) from None


def _sort_sources(sources: Sequence[str]) -> tuple[list[int], list[Path], list[str]]:
    pids: list[int] = []
    directories: list[str] = []
    logs: list[str] = []
    for source in sources:
        path = Path(source)
        there = bool(source) and os.path.lexists(path)
        if source == "-":
            logs.append(source)
        elif there or "/" in source:
            (directories if stat.S_ISDIR(_mode_of(path)) else logs).append(source)
        elif source.isascii() and source.isdecimal():
            pids.append(int(source))
        else:
            raise InputError(
                f"{source!r} is neither a PID, nor a recording, nor a log",
                hint="hangdoctor diagnose [PID | DIRECTORY | LOG]",
            )
    return pids, list(map(Path, directories)), logs
