"""Reads what PyTorch's Flight Recorder wrote: one file a rank, pickled or JSON.

A dump is data of the target, and unpickling runs what a pickle asks for. So the only pickles that
are read here are those made of dicts, lists, tuples, text, numbers, booleans and None; a name of
anything else ends the reading. Files have a limit in size, and the worker one in memory.

The format is that of `FlightRecorder.hpp` of PyTorch 2.3 to 2.9 (versions 2.0 to 2.10).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import re
import resource
import stat
import time
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from hangdoctor.collect import procfs
from hangdoctor.collect.look import Job, Look
from hangdoctor.model import (
    CollectiveEntry,
    CollectiveGroup,
    FlightRecorder,
    FlightRecorderDump,
    Frame,
    Missing,
)
from hangdoctor.units import duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

MOST_BYTES = 256 << 20
"""Of one file. 2000 entries with their frames take 4 MB."""
MOST_MEMORY_BYTES = 4 << 30
"""Of the worker's address space: a pickle of a few bytes can ask for a table of any size."""
MOST_PENDING = 1000
"""Entries a rank that are kept though they did not complete, the oldest first."""
LAST_COMPLETED = 2
"""Completed entries that are kept of each group, the newest."""
MOST_FRAMES = 8
DEADLINE_S = 20.0
SKEW_S = 3600.0
"""The clock of a file server may be off by so much: a file's own stamp that is this near to the
launch's start decides nothing. The stamps of its entries are the machine's own."""
STEP_S = 5.0
"""The machine's clock may be set by so much while a launch runs."""

SAME_SHAPE = frozenset(
    {"all_reduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base"}
)
"""Operations whose inputs must be alike on all ranks."""

ENVIRONMENT = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Variables that name the files without the rank's number, the newer name first."""

_NUMBERED = re.compile(r"(?:.*\D)?(\d{1,6})(?:\.(?:json|pickle|pkl|pt))?")


class Paths(msgspec.Struct, frozen=True, kw_only=True):
    """A request to read the files and directories that the user names."""

    paths: tuple[str, ...]


class RefusedPickleError(pickle.UnpicklingError):
    """A pickle asked for more than plain data."""


def read(look: Look) -> FlightRecorder | Missing:
    """Read the dumps that the launch's own environment names, as far as this launch wrote them.

    What an earlier one has left there is said to be left out.
    """
    _limit_memory()
    starts = {pid: one.start_ticks for pid in _pids(look) if (one := _stat(look.proc, pid))}
    if not starts:
        return FlightRecorder()
    began_s = time.time() - max(procfs.age_s(ticks) for ticks in starts.values())
    places: dict[tuple[int, int, str], str] = {}  # hundreds of processes have the same ones
    for pid in starts:
        root = f"{look.proc}/{pid}/root"
        with contextlib.suppress(OSError):
            status = os.stat(root)
            for prefix in _prefixes(procfs.read_environ(look.proc, pid)):
                places.setdefault((status.st_dev, status.st_ino, prefix), root + prefix)
    near: dict[tuple[int, int], str] = {}
    older: dict[str, list[float]] = {}
    for prefix in places.values():
        for path in _with_prefix(prefix):
            with contextlib.suppress(OSError):
                status = os.stat(path)
                if status.st_mtime >= began_s - SKEW_S:
                    near.setdefault((status.st_dev, status.st_ino), path)
                else:
                    older.setdefault(prefix, []).append(began_s - status.st_mtime)
    found = _read_all(near.values(), began_s=began_s)
    for prefix, ages_s in older.items():
        count = "a file was" if len(ages_s) == 1 else f"{len(ages_s)} files were"
        found.unusable[f"{prefix}*"] = _anothers(f"{count} written {duration(min(ages_s))}")
    return found


def read_paths(request: Paths) -> FlightRecorder | Missing:
    """Read the dumps that the user names: files, and directories of files."""
    _limit_memory()
    files: list[str] = []
    for path in request.paths:
        if os.path.isdir(path):
            try:
                names = sorted(os.listdir(path))
            except OSError as error:
                return _unreadable(error)
            files += [os.path.join(path, name) for name in names if _NUMBERED.fullmatch(name)]
        else:
            files.append(path)
    return _read_all(files)


def looks_like_dump(path: str) -> bool:
    """Tell whether a file may be a dump of one rank, by its name and its first bytes."""
    if not _NUMBERED.fullmatch(os.path.basename(path)):
        return False
    try:
        return _is_dump(_read_file(path, 1 << 16)[0])
    except OSError:
        return False


def holds_dumps(directory: str) -> bool:
    """Tell whether a directory holds at least one file that may be a dump."""
    try:
        names = os.listdir(directory)
    except OSError:
        return False
    return any(looks_like_dump(os.path.join(directory, name)) for name in names)


def parse_dump(
    data: bytes, rank: int, file: str, written_wall_s: float | None
) -> FlightRecorderDump | Missing:
    """Return one rank's dump, or a Missing that says why it cannot be used."""
    try:
        raw = msgspec.convert(_load(data), _RawDump, strict=False)
        return _dump(raw, rank, file, written_wall_s)
    except RefusedPickleError as error:
        return Missing(
            reason="failed",
            detail=f"refused: {error}",
            hint="a dump of the Flight Recorder holds plain data only: find out who wrote this",
        )
    except MemoryError:
        return Missing(reason="failed", detail="it asks for more memory than a dump needs")
    except RecursionError:
        return Missing(reason="failed", detail="it is nested too deep for a dump")
    except Exception as error:  # noqa: BLE001  # unpickling hostile bytes can raise anything
        return Missing(
            reason="failed", detail=f"no dump of the Flight Recorder: {type(error).__name__}"
        )


class _PlainUnpickler(pickle.Unpickler):
    """Builds plain data and refuses everything that has a name, so that nothing can be called."""

    def find_class(self, module: str, name: str) -> Any:
        raise RefusedPickleError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:  # noqa: ARG002  # pickle's interface
        raise RefusedPickleError("it refers to something outside itself")


class _RawFrame(msgspec.Struct):
    name: str = ""
    filename: str = ""
    line: int = 0


class _RawEntry(msgspec.Struct):
    process_group: tuple[str, str]
    profiling_name: str
    state: Literal["scheduled", "started", "completed"]
    record_id: int = 0
    pg_id: int = -1
    collective_seq_id: int = 0
    p2p_seq_id: int = 0
    is_p2p: bool = False
    time_created_ns: int | None = None
    input_sizes: list[list[int]] = []
    input_dtypes: list[str] = []
    retired: bool = False
    frames: list[_RawFrame] = []


class _RawGroup(msgspec.Struct):
    name: str
    ranks: str | list[int]
    desc: str = ""


class _RawStatus(msgspec.Struct):
    last_enqueued_collective: int = -1
    last_completed_collective: int = -1


class _RawDump(msgspec.Struct):
    version: str
    pg_config: dict[str, _RawGroup]
    entries: list[_RawEntry] = []
    pg_status: dict[str, _RawStatus] = {}


def _load(data: bytes) -> Any:
    if data[:1] == b"{":
        return msgspec.json.decode(data)
    return _PlainUnpickler(io.BytesIO(data)).load()


def _dump(
    raw: _RawDump, rank: int, file: str, written_wall_s: float | None
) -> FlightRecorderDump | Missing:
    groups: dict[str, CollectiveGroup] = {}
    status = _status_by_group(raw)
    for key, group in raw.pg_config.items():
        ranks = _ranks(group.ranks)
        if rank not in ranks:
            return Missing(
                reason="failed",
                detail=f"its groups have no rank {rank}, which the file's name says it is of",
            )
        told = status.get(key)
        groups[key] = CollectiveGroup(
            name=key,
            ranks=ranks,
            description=group.desc,
            enqueued=told.last_enqueued_collective if told else None,
            completed=told.last_completed_collective if told else None,
        )
    return FlightRecorderDump(
        rank=rank,
        file=file,
        version=raw.version,
        written_wall_s=written_wall_s,
        groups=tuple(groups.values()),
        entries=tuple(_kept(sorted(raw.entries, key=lambda entry: entry.record_id))),
    )


def _status_by_group(raw: _RawDump) -> dict[str, _RawStatus]:
    """Return the status of each group by its name; the dump numbers them in its own way.

    Entries tell number and name of their group. For the others: numbers are given in the order in
    which the groups were made, and so are PyTorch's own names, which are numbers too; where a dump
    has as many of these as of those, and the entries do not contradict, they pair off in order.
    """
    known = {entry.pg_id: entry.process_group[0] for entry in raw.entries}
    numbers = sorted(int(number) for number in raw.pg_status if number.isdecimal())
    names = sorted((name for name in raw.pg_config if name.isdecimal()), key=int)
    if len(numbers) == len(names) == len(raw.pg_config) == len(raw.pg_status):
        paired = dict(zip(numbers, names, strict=True))
        if all(paired.get(number) == name for number, name in known.items()):
            known = paired
    return {name: raw.pg_status[str(pg)] for pg, name in known.items() if str(pg) in raw.pg_status}


def _kept(entries: Sequence[_RawEntry]) -> Iterator[CollectiveEntry]:
    left: dict[str, int] = {}
    last: set[int] = set()
    for entry in reversed(entries):
        group = entry.process_group[0]
        if entry.state == "completed" and left.setdefault(group, LAST_COMPLETED) > 0:
            left[group] -= 1
            last.add(id(entry))
    pending = 0
    for entry in entries:
        if entry.state != "completed":
            pending += 1
        if (entry.state != "completed" and pending <= MOST_PENDING) or id(entry) in last:
            yield _entry(entry)


def _entry(raw: _RawEntry) -> CollectiveEntry:
    op = raw.profiling_name.partition(":")[2] or raw.profiling_name
    shape = ""
    if op in SAME_SHAPE:
        sizes = ["x".join(map(str, each)) for each in raw.input_sizes]
        shape = " ".join([*sizes, *raw.input_dtypes])
    return CollectiveEntry(
        record_id=raw.record_id,
        group=raw.process_group[0],
        seq=raw.p2p_seq_id if raw.is_p2p else raw.collective_seq_id,
        op=op,
        state=raw.state,
        is_p2p=raw.is_p2p,
        created_wall_s=None if raw.time_created_ns is None else raw.time_created_ns / 1e9,
        shape=shape,
        gave_up=raw.retired and raw.state != "completed",
        frames=tuple(
            Frame(frame.name, frame.filename, frame.line) for frame in raw.frames[:MOST_FRAMES]
        ),
    )


def _ranks(told: str | list[int]) -> tuple[int, ...]:
    """Return the members of a group; dumps tell them as text, "[0, 1]"."""
    return tuple(map(int, re.findall(r"\d+", told)) if isinstance(told, str) else told)


def _read_all(files: Iterable[str], *, began_s: float | None = None) -> FlightRecorder:
    """Read files, and leave out those of before a launch that began at a time."""
    dumps: dict[int, FlightRecorderDump] = {}
    unusable: dict[str, Missing] = {}
    for path in files:
        match = _NUMBERED.fullmatch(os.path.basename(path))
        name = os.fsencode(path).decode(errors="replace")
        try:
            data, written_wall_s = _read_file(path, MOST_BYTES + 1)
        except OSError as error:
            unusable[name] = _unreadable(error)
            continue
        if match is None or not _is_dump(data):
            continue
        if len(data) > MOST_BYTES:
            unusable[name] = Missing(
                reason="failed", detail=f"larger than {MOST_BYTES >> 20} MB: no dump is"
            )
            continue
        dump = parse_dump(data, int(match[1]), name, written_wall_s)
        if isinstance(dump, Missing):
            unusable[name] = dump
        elif began_s is not None and (before := _before(dump, began_s)):
            unusable[name] = before
        elif (other := dumps.get(dump.rank)) is None or _age(other) <= _age(dump):
            dumps[dump.rank] = dump  # the newer of two
    return _of_one_job(dumps, unusable)


def _before(dump: FlightRecorderDump, began_s: float) -> Missing | None:
    """Return why a dump is not of a launch that began at a time; None if it may be.

    Its entries tell. An earlier launch can write its dump when this one runs already: PyTorch does
    it minutes after a collective got stuck.
    """
    made = [entry.created_wall_s for entry in dump.entries if entry.created_wall_s is not None]
    if made:
        late_s = began_s - STEP_S - max(made)
        return _anothers(f"its newest entry was made {duration(late_s)}") if late_s > 0 else None
    late_s = began_s - (dump.written_wall_s or began_s)
    return (
        _anothers(f"no entry of it tells a time, and it was written {duration(late_s)}")
        if (late_s > 0)
        else None
    )


def _anothers(what: str) -> Missing:
    return Missing(
        reason="inapplicable",
        detail=f"{what} before this launch began: of an earlier launch",
        hint="if it is of this launch, name the file: hangdoctor diagnose PID FILE",
    )


def _of_one_job(
    dumps: dict[int, FlightRecorderDump], unusable: dict[str, Missing]
) -> FlightRecorder:
    """Leave out what a larger job, or an earlier one, has left in the same place."""
    if not dumps:
        return FlightRecorder(unusable=unusable)
    newest = max(dumps.values(), key=_age)
    world = max((group.ranks for group in newest.groups), key=len, default=(newest.rank,))
    for rank in [rank for rank in dumps if rank not in world]:
        unusable[dumps.pop(rank).file] = Missing(
            reason="inapplicable", detail=f"of another job: {newest.file} has no rank {rank}"
        )
    return FlightRecorder(dumps=dict(sorted(dumps.items())), unusable=unusable)


def _age(dump: FlightRecorderDump) -> float:
    return dump.written_wall_s or 0.0


def _read_file(path: str, most_bytes: int) -> tuple[bytes, float]:
    """Return the first bytes of a regular file, and its time stamp.

    Raises:
        OSError: it cannot be read, or is none: a FIFO would keep us waiting.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no file")
        blocks = []
        while most_bytes > 0 and (block := os.read(fd, min(most_bytes, 1 << 22))):
            blocks.append(block)
            most_bytes -= len(block)
        return b"".join(blocks), status.st_mtime
    finally:
        os.close(fd)


def _is_dump(head: bytes) -> bool:
    """Tell whether bytes may be a dump: a pickle, or JSON with the key that each dump has."""
    if head[:1] == b"{":
        return b'"pg_config"' in head[: 1 << 16] or b'"entries"' in head[: 1 << 16]
    return head[:1] == b"\x80" and 2 <= int.from_bytes(head[1:2], "big") <= 5


def _pids(look: Look) -> list[int]:
    return list(look.roots | look.known)


def _stat(proc: str, pid: int) -> procfs.Stat | None:
    try:
        return procfs.read_stat(proc, pid)
    except OSError:
        return None


def _prefixes(environ: dict[str, str]) -> Iterator[str]:
    """Yield where a process's dumps go, without the rank's number.

    By default the user's cache in newer PyTorch, /tmp in older ones.
    """
    yield from (environ[name] for name in ENVIRONMENT if environ.get(name, "").startswith("/"))
    cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '')}/.cache"
    if cache.startswith("/"):
        yield f"{cache}/torch/comm_lib_trace_rank_"
    yield "/tmp/nccl_trace_rank_"  # noqa: S108  # PyTorch's own choice


def _with_prefix(prefix: str) -> list[str]:
    directory, _, begin = prefix.rpartition("/")
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    return [
        f"{directory}/{name}"
        for name in sorted(names)
        if name.startswith(begin) and _NUMBERED.fullmatch(name[len(begin) :])
    ]


def _unreadable(error: OSError) -> Missing:
    refused = error.errno in (errno.EACCES, errno.EPERM)
    return Missing(
        reason="permission" if refused else "failed",
        detail=error.strerror or str(error),
        hint="run hangdoctor as the user who owns the dumps" if refused else "",
    )


def _limit_memory() -> None:
    """Limit this worker's memory; where the limit is lower already it stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY or soft > MOST_MEMORY_BYTES:
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY_BYTES, hard))


JOB = Job(
    read=read,
    request=Look,
    reply=FlightRecorder | Missing,
    deadline_s=DEADLINE_S,
    fills="the Flight Recorder's dumps",
)
PATHS_JOB = Job(
    read=read_paths,
    request=Paths,
    reply=FlightRecorder | Missing,
    deadline_s=3 * DEADLINE_S,
    fills="the Flight Recorder's dumps",
)
"""For `python -m hangdoctor.collect dump_files`."""
