"""Convert raw traces of real launches into recordings in the project's own format.

    python tests/recordings/convert.py SOURCE [SOURCE ...] --into tests/recordings

A source is a folder that a simple recorder beside the server wrote:

    server.log        stdout and stderr of the launch
    server.log.times  seconds since the start at which each line (counted by newlines) was complete
    trace.jsonl.gz    about one record a second: `t`, `lines`, `gpu`, `procs`; every third record
                      with stacks (py-spy's, in short form), every ninth of them with native frames
    cause.toml        what really happened

Some records have what NCCL's RAS answered on localhost:28028: `ras_json`, or "!" and an error.

What is changed on the way, and why:

- The sources' logs passed through a text tool that made carriage returns into newlines. The
  returns of tqdm's bars are put back; the result must have as many newlines as `server.log.times`
  has lines.
- `/root/.cache` becomes `~/.cache`.
- Frames of `sitecustomize.py` are left out, with the native frames that they called: they are the
  fault itself, put in by the test, and a diagnosis must not be able to rest on its name.
- Helper threads lose their system call, and processes that are neither rank, launcher nor
  detokenizer all threads but the main one. Workers of inductor's pools (32 for each rank) that
  never used a tick of CPU are left out. Then snapshots are thinned as a live recording is.
"""

from __future__ import annotations

import argparse
import calendar
import gzip
import json
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hangdoctor.collect import nccl_ras
from hangdoctor.model import (
    Frame,
    Gpu,
    GpuProcess,
    Gpus,
    Header,
    Io,
    LogPosition,
    LogSource,
    Missing,
    NcclRas,
    Process,
    Processes,
    ProcessStacks,
    Snapshot,
    Stacks,
    Thread,
    ThreadStack,
)
from hangdoctor.recording import HEADER_NAME, LOG_NAME, SNAPSHOTS_NAME, Thinned, thin

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib  # type: ignore[import-not-found,no-redef,unused-ignore]

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

CAUSE_NAME = "cause.toml"
LIMIT_BYTES = 300_000
"""What a case may take on disk."""

TICK_S = 0.01
"""/proc counts CPU time and start times in hundredths of a second (USER_HZ) on Linux."""

PAGE_BYTES = 4096
MIB = 1 << 20
FAULT_FILE = "sitecustomize.py"

_BAR = re.compile(rb"[^\r\n]*\d+%(?:\|| Completed \| )")
_FRAME = re.compile(r"(.*) \((.*):(\d+)\)")
_STAMP = re.compile(rb"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_RANK = re.compile(r"sglang::scheduler|-m sglang\.launch_server|sglang::detokenizer|spawn_main")
_ERRNO: dict[str, Missing] = {
    "1": Missing(reason="permission", detail="Operation not permitted"),
    "2": Missing(reason="gone", detail="No such file or directory"),
    "3": Missing(reason="gone", detail="No such process"),
    "13": Missing(reason="permission", detail="Permission denied"),
}


def convert(source: Path, into: Path) -> Path:
    """Write the recording of one source folder and return its directory.

    Raises:
        ValueError: the source contradicts itself, or the result is over LIMIT_BYTES.
    """
    case = into / source.name
    case.mkdir(parents=True, exist_ok=True)
    times = [float(line) for line in (source / "server.log.times").read_text().split()]
    log = restore_returns((source / "server.log").read_bytes(), len(times))
    log = log.replace(b"/root/.cache", b"~/.cache")
    with gzip.open(source / "trace.jsonl.gz") as trace:
        records = _without_idle_workers([json.loads(line) for line in trace])
    cause = tomllib.loads((source / CAUSE_NAME).read_text())
    created_wall_s = _created_wall_s(log, times)
    snapshots = _thinned(_snapshots(records, log, times, created_wall_s, cause))
    header = Header(
        created_wall_s=created_wall_s,
        source="launch",
        engine="sglang",
        command=tuple(records[0]["procs"][0]["cmd"].split()),
        log=LogSource(origin=LOG_NAME, from_start=True),
    )
    (case / HEADER_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(header)) + b"\n")
    (case / LOG_NAME).write_bytes(log)
    lines = b"".join(msgspec.json.encode(snapshot) + b"\n" for snapshot in snapshots)
    # mtime=0: the same input gives the same bytes.
    (case / (SNAPSHOTS_NAME + ".gz")).write_bytes(gzip.compress(lines, 9, mtime=0))
    (case / CAUSE_NAME).write_text(_cause_text(cause), encoding="utf-8")
    size = sum(file.stat().st_size for file in case.iterdir())
    if size > LIMIT_BYTES:
        raise ValueError(f"{case} takes {size} bytes, more than {LIMIT_BYTES}")
    return case


def restore_returns(log: bytes, line_count: int) -> bytes:
    r"""Put back the carriage returns of tqdm's bars.

    A bar begins each of its updates with a return and ends with a newline, so every newline before
    an update was a return.

    Raises:
        ValueError: the result has another number of newlines than the recorder counted.

    >>> restore_returns(b"a\n\n  0%|   | 0/3\n 33%|#  | 1/3\nb\n", 3)
    b'a\n\r  0%|   | 0/3\r 33%|#  | 1/3\nb\n'
    """
    lines = log.split(b"\n")
    parts = [lines[0]]
    for before, line in pairwise(lines):
        # The line before an update is empty, or an update itself.
        is_update = _BAR.match(line) and (not before or _BAR.match(before))
        parts += [b"\r" if is_update else b"\n", line]
    restored = b"".join(parts)
    newlines = restored.count(b"\n")
    if newlines != line_count:
        raise ValueError(f"{newlines} newlines, but {line_count} lines were counted")
    return restored


def _without_idle_workers(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    used = {
        process["pid"]
        for record in records
        for process in record["procs"]
        if "compile_worker" not in process["cmd"]
        or any(int(ticks) for ticks in _stat(process["stat"])[11:15])
    }
    return [
        record | {"procs": [process for process in record["procs"] if process["pid"] in used]}
        for record in records
    ]


def _created_wall_s(log: bytes, times: list[float]) -> float:
    """Return when the recording began: the log's first stamp less the second of its line."""
    for number, line in enumerate(log.split(b"\n")):
        if stamp := _STAMP.match(line):
            stamped_s = calendar.timegm(time.strptime(stamp[1].decode(), "%Y-%m-%d %H:%M:%S"))
            return round(stamped_s - times[number], 3)
    raise ValueError("the log has no time stamp")


def _snapshots(
    records: list[dict[str, Any]],
    log: bytes,
    times: list[float],
    created_wall_s: float,
    cause: dict[str, Any],
) -> Iterator[Snapshot]:
    ends = [0] + [match.end() for match in re.finditer(rb"\n", log)]
    card = "NVIDIA H200" if "H200" in cause["machine"] else ""
    first_ticks = _stat(records[0]["procs"][0]["stat"])[19]
    seen: dict[int, int | None] = {}
    for record in records:
        at_s, lines = record["t"], record["lines"]
        here = {process["pid"] for process in record["procs"]}
        seen |= dict.fromkeys(here)
        stacks = {
            process["pid"]: _process_stacks(process)
            for process in record["procs"]
            if "stacks" in process or "pyspy_err" in process
        }
        took = {"stacks": max(p.get("pyspy_s", 0.0) for p in record["procs"])} if stacks else {}
        yield Snapshot(
            at_s=at_s,
            wall_s=round(created_wall_s + at_s, 3),
            took_s=took,
            processes=Processes(
                processes=tuple(
                    process
                    for raw in record["procs"]
                    if (process := _process(raw, at_s, int(first_ticks)))
                ),
                roots=(records[0]["procs"][0]["pid"],),
                ended={pid: status for pid, status in seen.items() if pid not in here},
            ),
            stacks=Stacks(by_pid=stacks) if stacks else None,
            gpus=Gpus(
                cards={index: _gpu(index, raw, card) for index, raw in enumerate(record["gpu"])}
            ),
            nccl_ras=_nccl_ras(record.get("ras_json"), here),
            log=LogPosition(
                # The recorder counts whole lines: a bar shows up when its line ends.
                read_bytes=ends[lines],
                # An empty log was last "written" when it was opened.
                silent_s=round(max(0.0, at_s - (times[lines - 1] if lines else 0.0)), 3),
            ),
        )


def _nccl_ras(answer: str | None, pids: set[int]) -> NcclRas | Missing | None:
    if answer is None:
        return None
    if "refused" in answer:
        return nccl_ras.silent(nccl_ras.DEFAULT_ADDRESS)
    answer = answer[answer.index("{") :]  # after the lines of the handshake
    own = {pid: pid for pid in pids}
    return nccl_ras.parse_answer(answer, nccl_ras.DEFAULT_ADDRESS, own)


def _process(raw: dict[str, Any], at_s: float, first_ticks: int) -> Process | None:
    if raw["stat"].startswith("!"):  # it ended while it was being read
        return None
    stat = _stat(raw["stat"])
    comm = raw["stat"].partition("(")[2].rpartition(")")[0][:15]
    title = raw["cmd"].strip().replace("/root/.cache", "~/.cache")
    unreadable = {
        key: _missing(raw[key]) for key in ("io", "wchan", "syscall") if raw[key].startswith("!")
    }
    threads = sorted(raw["threads"], key=lambda thread: thread[0] != raw["pid"])
    if not _RANK.search(title):
        threads = threads[:1]
    return Process(
        pid=raw["pid"],
        ppid=raw["ppid"],
        start_ticks=int(stat[19]),
        age_s=round(max(0.0, at_s - (int(stat[19]) - first_ticks) * TICK_S), 2),
        title=title,
        comm=comm,
        state=stat[0],
        cpu_s=_cpu_s(stat[11], stat[12]),
        children_cpu_s=_cpu_s(stat[13], stat[14]),
        rss_bytes=int(stat[21]) * PAGE_BYTES,
        io=None if "io" in unreadable else _io(raw["io"]),
        threads=tuple(_thread(raw, thread, unreadable) for thread in threads),
        unreadable=unreadable,
    )


def _stat(text: str) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; the name may hold spaces."""
    return text.rpartition(")")[2].split()


def _cpu_s(*ticks: str | int) -> float:
    return round(sum(int(tick) for tick in ticks) * TICK_S, 2)


def _io(text: str) -> Io:
    values = {key: int(value) for key, value in (line.split(": ") for line in text.splitlines())}
    return Io(**{name: values[name] for name in Io.__struct_fields__})


def _thread(raw: dict[str, Any], thread: list[Any], unreadable: dict[str, Missing]) -> Thread:
    tid, name, state, user_ticks, system_ticks, syscall = thread
    is_main = tid == raw["pid"]
    if is_main:
        syscall = None if "syscall" in unreadable else raw["syscall"].strip()
    elif syscall and (state == "S" or syscall[0].startswith("!")):
        syscall = None
    elif syscall:
        syscall = " ".join(syscall)
    return Thread(
        tid=tid,
        name=name[:15],
        state=state,
        cpu_s=_cpu_s(user_ticks, system_ticks),
        wchan=raw["wchan"].strip() if is_main and "wchan" not in unreadable else None,
        syscall=syscall or None,
    )


def _missing(text: str) -> Missing:
    name = text.strip().lstrip("!")
    return _ERRNO.get(name, Missing(reason="failed", detail=name))


def _process_stacks(raw: dict[str, Any]) -> ProcessStacks | Missing:
    if "stacks" not in raw:
        error = raw["pyspy_err"]
        if error == "timeout":
            return Missing(reason="timeout", detail="py-spy did not answer in 20 s")
        if "get_python_versi" in error:
            # Only the tail of py-spy's message was kept; this function has one thing to say.
            return Missing(
                reason="unsupported", detail="Failed to find python version from target process"
            )
        return Missing(reason="failed", detail="py-spy failed in get_stack_trace")
    threads = sorted(raw["stacks"], key=lambda thread: thread["tid"] != raw["pid"])
    if not _RANK.search(raw["cmd"]):
        threads = threads[:1]
    frames = [_frames(thread["frames"]) for thread in threads]
    return ProcessStacks(
        threads=tuple(
            ThreadStack(
                name=thread["name"] or "",
                frames=tuple(kept),
                tid=thread["tid"],
                active=thread["active"],
                owns_gil=thread["gil"],
            )
            for thread, kept in zip(threads, frames, strict=True)
        ),
        native=any(_is_native(frame) for kept in frames for frame in kept),
    )


def _frames(texts: Iterable[str]) -> list[Frame]:
    """Return the frames of a thread, innermost first, without the fault's own."""
    kept: list[Frame] = []
    for text in texts:
        match = _FRAME.fullmatch(text)
        if match is None:
            raise ValueError(f"not a frame: {text}")
        frame = Frame(match[1], match[2].replace("/root/.cache", "~/.cache"), int(match[3]))
        if frame.path.endswith(FAULT_FILE):
            while kept and _is_native(kept[-1]):
                kept.pop()
        else:
            kept.append(frame)
    return kept


def _is_native(frame: Frame) -> bool:
    return not frame.path.endswith(".py") and not frame.path.startswith("<")


def _gpu(index: int, raw: dict[str, Any], name: str) -> Gpu:
    known = {key: value for key, value in raw.items() if not isinstance(value, str)}
    util_pct, memory_util_pct = known.get("util", (None, None))
    return Gpu(
        index=index,
        name=name,
        util_pct=util_pct,
        memory_util_pct=memory_util_pct,
        memory_used_bytes=known["mem"] * MIB if "mem" in known else None,
        power_w=known.get("power"),
        sm_clock_mhz=known.get("sm"),
        processes=(
            tuple(GpuProcess(pid, used * MIB) for pid, used in known["procs"])
            if "procs" in known
            else None
        ),
    )


def _thinned(snapshots: Iterable[Snapshot]) -> list[Snapshot]:
    state, kept = Thinned(), []
    for snapshot in snapshots:
        state_after, keep = thin(state, snapshot)
        if keep and state.pending:
            kept.append(state.pending)
        state = state_after
    return [*kept, state.pending] if state.pending else kept


def _cause_text(cause: dict[str, Any]) -> str:
    ranks = [f"TP{rank}" for rank in cause["culprit_ranks"]]
    lines = [
        "# What really happened: the ground truth of this recording.",
        f'state = "{cause["state"]}"  # at the end: ready, hung or dead',
        f'phase = "{cause["phase"]}"',
        f"culprits = {json.dumps(ranks)}",
        f'kind = "{cause["kind"]}"',
        f'engine = "{cause["engine"]}"',
        f'machine = "{cause["machine"]}"',
        f'note = """{cause["note"]}"""',
    ]
    if "stalled_since_s" in cause:
        lines.insert(
            2,
            f"stalled_since_s = {float(cause['stalled_since_s'])}  # nothing progresses from here",
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Convert the folders named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path, nargs="+")
    parser.add_argument("--into", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    for source in options.source:
        case = convert(source, options.into)
        size = sum(file.stat().st_size for file in case.iterdir())
        print(f"{case}: {size} bytes")  # noqa: T201 (a script's answer)


if __name__ == "__main__":
    main()
