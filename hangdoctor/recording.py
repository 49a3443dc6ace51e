"""A recording: a header, snapshots, and the log, in a directory that can be sent to others.

    recording.json      the Header
    snapshots.jsonl     one Snapshot a line, appended and flushed as they come (or .jsonl.gz)
    server.log          the log's bytes as they were read

A snapshot knows how many bytes of the log were there when it was taken, so that the log's lines
fall between the snapshots as they did in life.
"""

from __future__ import annotations

import gzip
import stat
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hangdoctor.errors import InputError
from hangdoctor.model import (
    SCHEMA,
    Header,
    Host,
    LogPosition,
    LogSource,
    Missing,
    Process,
    Processes,
    Snapshot,
)
from hangdoctor.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from io import RawIOBase

HEADER_NAME = "recording.json"
SNAPSHOTS_NAME = "snapshots.jsonl"
LOG_NAME = "server.log"
LOG_BLOCK_BYTES = 1 << 22
"""The log is read in blocks of this size, so that one of many gigabytes needs no memory."""

MAX_GAP_S = 10.0
"""Thinning never leaves a longer hole between two snapshots that were taken."""


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of a launch.

    Attributes:
        header: what holds for all of it.
        snapshots: in the order of time; empty for a bare log.
        log_path: file with the log's bytes; None where there is no log.
    """

    header: Header
    snapshots: tuple[Snapshot, ...] = ()
    log_path: Path | None = None

    def steps(self) -> Iterator[tuple[Snapshot | None, Iterable[bytes]]]:
        """Yield each snapshot with the log's new bytes up to it; last, None with the rest.

        The bytes come in blocks of at most LOG_BLOCK_BYTES and must be consumed before the next
        step. What the log holds beyond the last snapshot is given only where there is no snapshot
        at all: it was written after everything else was seen.
        """
        if self.log_path is None:
            for snapshot in self.snapshots:
                yield snapshot, ()
            return
        with self.log_path.open("rb") as log:
            read_bytes = 0
            for snapshot in self.snapshots:
                upto = snapshot.log.read_bytes if isinstance(snapshot.log, LogPosition) else 0
                yield snapshot, _blocks(log.read, max(0, upto - read_bytes))
                read_bytes = max(read_bytes, upto)
                log.seek(read_bytes)
            if not self.snapshots:
                yield None, iter(lambda: log.read(LOG_BLOCK_BYTES), b"")


def is_recording(path: Path) -> bool:
    """Tell whether a path is a directory that holds a recording."""
    try:
        return (path / HEADER_NAME).is_file()
    except OSError:  # somebody else's directory
        return False


def load(directory: Path) -> Recording:
    """Read a recording.

    A last line that was cut off (the recorder was killed) is left out; any other damage is an
    error that names the line.

    Raises:
        InputError: no recording, damaged, or of a newer schema.
    """
    header_path = directory / HEADER_NAME
    try:
        raw = header_path.read_bytes()
    except OSError as error:
        raise InputError(
            f"{directory} is not a recording: cannot read {HEADER_NAME} ({error.strerror})",
            hint="a recording is a directory that `hangdoctor watch --record DIR` wrote",
        ) from error
    try:
        schema = msgspec.json.decode(raw, type=dict).get("schema", 0)
        if not isinstance(schema, int) or schema > SCHEMA:
            raise InputError(
                f"{header_path} has schema {schema}, this hangdoctor reads up to {SCHEMA}",
                hint="pip install --upgrade hangdoctor",
            )
        header = msgspec.json.decode(raw, type=Header)
    except msgspec.DecodeError as error:
        raise InputError(
            f"{header_path} is damaged: {error}",
            hint="record it again: hangdoctor diagnose PID --record DIR",
        ) from error
    log_path = directory / LOG_NAME
    there = log_path.exists()
    if there:
        check_log(log_path)
    return Recording(
        header=header,
        snapshots=tuple(_read_snapshots(directory)),
        log_path=log_path if there else None,
    )


def check_log(path: Path) -> None:
    """Make sure that a log is a file that can be read, as often as needed and without waiting.

    Raises:
        InputError: it is not.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(f"cannot read the log {path}: it is no file", hint=f"ls -ld {path}")
        path.open("rb").close()
    except OSError as error:
        raise InputError(
            f"cannot read the log {path}: {error.strerror}", hint=f"ls -l {path}"
        ) from error


def bare_log(path: Path, *, still_running: bool = False) -> Recording:
    """Return the recording that a log alone makes: no snapshots, read from its start."""
    return Recording(
        header=Header(
            source=str(path), log=LogSource(origin=str(path)), still_running=still_running
        ),
        log_path=path,
    )


class Recorder:
    """Appends to a recording on disk while it is made; every line is flushed.

    Args:
        directory: made if needed.
        header: written at once, and again by `update`.
        own_log: the launch itself writes the recording's log; it is left as it is.

    Raises:
        InputError: the directory cannot be written, or holds another recording.
    """

    def __init__(self, directory: Path, header: Header, *, own_log: bool = False) -> None:
        self.directory = directory
        if is_recording(directory):
            raise InputError(
                f"{directory} holds a recording already", hint="name another directory"
            )
        self.failed: OSError | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._write_header(header)
            self._snapshots = (directory / SNAPSHOTS_NAME).open("ab", buffering=0)
            self._log = None if own_log else (directory / LOG_NAME).open("ab", buffering=0)
        except OSError as error:
            raise InputError(
                f"cannot record into {directory}: {error.strerror}", hint="name another directory"
            ) from error

    def update(self, header: Header) -> None:
        """Write the header again, whole or not at all."""
        if self.failed:
            return
        try:
            self._write_header(header)
        except OSError as error:
            self.failed = error

    def _write_header(self, header: Header) -> None:
        temporary = self.directory / (HEADER_NAME + ".tmp")
        temporary.write_bytes(msgspec.json.format(redact(msgspec.json.encode(header))) + b"\n")
        temporary.replace(self.directory / HEADER_NAME)

    def add(self, snapshot: Snapshot, log: bytes = b"") -> None:
        """Append a snapshot and the log's bytes up to it.

        A disk that fills up ends the recording, not the watching: the error stays in `failed`.
        """
        if self.failed:
            return
        try:
            # The log first: a snapshot never points beyond the log that is there.
            self.add_log(log)
            _write_all(self._snapshots, redact(msgspec.json.encode(snapshot)) + b"\n")
        except OSError as error:
            self.failed = error

    def add_log(self, log: bytes) -> None:
        """Append bytes of the log alone; the next snapshot points beyond them."""
        if self.failed or self._log is None:
            return
        try:
            _write_all(self._log, redact(log))
        except OSError as error:
            self.failed = error

    def close(self) -> None:
        """Close the files."""
        self._snapshots.close()
        if self._log is not None:
            self._log.close()


class Thinned(msgspec.Struct, frozen=True):
    """Which snapshots to keep: first, last, and where something changed.

    Attributes:
        kept: the last snapshot that is kept for good.
        pending: the newest snapshot; it is kept for good once something newer differs from it.
        host: the last look at the machine that is kept for good; not every snapshot has one.
        files: the same of the descriptors, what they are and whether their counters stir.
    """

    kept: Snapshot | None = None
    pending: Snapshot | None = None
    host: Host | Missing | None = None
    files: frozenset[tuple[object, ...]] | None = None


def thin(state: Thinned, new: Snapshot) -> tuple[Thinned, bool]:
    """Take in a new snapshot; tell whether the pending one must be kept for good.

    A pending snapshot is dropped where it tells nothing that its neighbours do not: same
    processes in the same states, same stacks, same log, and its neighbours at most MAX_GAP_S
    apart. Counters are cumulative, so that what they count is never lost, only dated later. Stacks,
    waits, weights, caches, descriptors, the machine, NCCL and its dumps are not looked at each
    time: a look at them goes only where the one before it or the next one tells the same, since the
    looks after it may tell nothing.
    """
    kept, pending = state.kept, state.pending
    host = pending.host if pending and pending.host is not None else state.host
    seen = _files_outline(pending) if pending else None
    files = state.files if seen is None else seen
    if pending is None or kept is None:
        return Thinned(pending, new, host, files), pending is not None
    droppable = (
        new.at_s - kept.at_s <= MAX_GAP_S
        and _outline(kept) == _outline(pending) == _outline(new)
        and pending.stacks in (None, new.stacks)
        and pending.waits in (None, new.waits)
        and pending.weights in (None, new.weights)
        and pending.caches in (None, new.caches)
        and seen in (None, state.files)
        and pending.nccl_ras in (None, new.nccl_ras)
        and pending.flight_recorder in (None, new.flight_recorder)
        and _host_outline(host) in (_host_outline(state.host), _host_outline(new.host))
    )
    if droppable:
        return Thinned(kept, new, state.host, state.files), False
    return Thinned(pending, new, host, files), True


def _outline(snapshot: Snapshot) -> object:
    """Return what must not change between two snapshots for the middle one to be dull."""
    processes: object = snapshot.processes
    if isinstance(snapshot.processes, Processes):
        processes = [_process_outline(process) for process in snapshot.processes.processes]
    read_bytes = snapshot.log.read_bytes if isinstance(snapshot.log, LogPosition) else snapshot.log
    cards: object = snapshot.gpus
    if cards is not None and hasattr(cards, "cards"):
        cards = [
            (index, getattr(card, "util_pct", None), getattr(card, "memory_used_bytes", None))
            for index, card in cards.cards.items()
        ]
    return processes, read_bytes, cards


def _host_outline(host: Host | Missing | None) -> object:
    """Return what of the machine must not be lost: why it was not seen, deaths, full memory."""
    if not isinstance(host, Host):
        return (host,)
    used, limit = host.cgroup_used_bytes, host.cgroup_limit_bytes
    free, total = host.memory_available_bytes, host.memory_total_bytes
    return (
        host.oom_kills,
        host.kernel_log,
        round(20 * used / limit) if limit and used is not None else None,
        round(20 * free / total) if total and free is not None else None,
    )


def _files_outline(snapshot: Snapshot) -> frozenset[tuple[object, ...]] | None:
    """Return which descriptors there are; None where they were not looked at.

    Where a file is read is left out: what is read is counted.
    """
    if not isinstance(snapshot.processes, Processes):
        return None
    looked = [process for process in snapshot.processes.processes if process.files is not None]
    if not looked:
        return None
    return frozenset(
        (process.pid, file.fd, file.kind, file.target, file.identity, bool(file.stirs))
        for process in looked
        for file in process.files or ()
    )


def _process_outline(process: Process) -> object:
    main = process.threads[0] if process.threads else None
    return (
        process.pid,
        process.start_ticks,
        process.title,
        process.state,
        process.tracer_pid,
        process.rss_bytes,
        main.wchan if main else None,
        len(process.threads),
    )


def _blocks(read: Callable[[int], bytes], count: int) -> Iterator[bytes]:
    while count > 0 and (block := read(min(count, LOG_BLOCK_BYTES))):
        count -= len(block)
        yield block


def _read_snapshots(directory: Path) -> Iterator[Snapshot]:
    decoder = msgspec.json.Decoder(Snapshot)
    path = directory / SNAPSHOTS_NAME
    packed = directory / (SNAPSHOTS_NAME + ".gz")
    try:
        if packed.exists():
            path = packed
            lines = gzip.decompress(packed.read_bytes()).split(b"\n")
        else:
            lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    except (OSError, EOFError, zlib.error) as error:
        # What a cut-off file still holds can be had.
        hint = (
            f"use what is left of it: cd {directory}; zcat {packed.name} >{SNAPSHOTS_NAME}; "
            f"rm {packed.name}"
            if path == packed and isinstance(error, EOFError)
            else "record it again: hangdoctor diagnose PID --record DIR"
        )
        raise InputError(f"cannot read {path}: {error}", hint=hint) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if number == len(lines):  # no newline after it: the recorder was killed here
                return
            unpack = f"gunzip {packed.name}; " if path == packed else ""
            raise InputError(
                f"{path}, line {number} is damaged: {error}",
                hint="delete that line to use the rest: "
                f"cd {directory}; {unpack}sed -i {number}d {SNAPSHOTS_NAME}",
            ) from error


def _write_all(file: RawIOBase, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) or 0 :]
