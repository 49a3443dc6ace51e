"""Make a case for the tests out of a recording that `--record` made of a launch with a fault.

    python tests/recordings/adopt.py [--every S] RECORDING tests/recordings/CASE [OLD=NEW ...]

With --every, one look of each S seconds is kept, one with stacks where there is one. Leaves out the
frames of the fault itself (sitecustomize.py) with the native ones above them, and of processes that
are neither rank nor launcher the idle ones and all threads but the main one.
OLD=NEW replaces paths of the machine. cause.toml is written by hand.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import msgspec

from hangdoctor import engines
from hangdoctor.frames import is_python
from hangdoctor.model import Processes, ProcessStacks, Stacks
from hangdoctor.recording import HEADER_NAME, LOG_NAME, SNAPSHOTS_NAME, load

FAULT = "sitecustomize.py"
replace = msgspec.structs.replace


def replace_syscall(thread):
    return replace(thread, syscall=None)


def adopt(source, case, paths, every_s=0.0):
    recording = load(source)
    case.mkdir(parents=True)
    sglang = engines.load("sglang")
    busy = _busy(recording.snapshots)
    looks = _thinned(recording.snapshots, every_s)
    snapshots = [_snapshot(each, busy, sglang) for each in looks]
    lines = b"".join(_neutral(msgspec.json.encode(each), paths) + b"\n" for each in snapshots)
    (case / (SNAPSHOTS_NAME + ".gz")).write_bytes(gzip.compress(lines, 9, mtime=0))
    header = replace(
        recording.header,
        log=replace(recording.header.log, origin=LOG_NAME),
        source=case.name,
    )
    (case / HEADER_NAME).write_bytes(
        _neutral(msgspec.json.format(msgspec.json.encode(header)), paths)
    )
    # The log keeps its length: snapshots point into it.
    (case / LOG_NAME).write_bytes(_same_length(recording.log_path.read_bytes(), paths))


def _thinned(snapshots, every_s):
    """Keep one look of each so many seconds, one with stacks where there is one."""
    if not every_s:
        return snapshots
    kept = {}
    for snapshot in snapshots:
        window = int(snapshot.at_s / every_s)
        if window not in kept or (kept[window].stacks is None and snapshot.stacks is not None):
            kept[window] = snapshot
    looks = list(kept.values())
    return looks if not snapshots or looks[-1] is snapshots[-1] else [*looks, snapshots[-1]]


def _busy(snapshots):
    """Return the pids that used CPU after they were first seen; pools of idle workers do not."""
    first, busy = {}, set()
    for snapshot in snapshots:
        if isinstance(snapshot.processes, Processes):
            for process in snapshot.processes.processes:
                if process.cpu_s > first.setdefault(process.pid, process.cpu_s) + 0.1:
                    busy.add(process.pid)
    # Whose CPU a parent that is kept takes over at its end must be known to have been used before.
    for snapshot in snapshots:
        if isinstance(snapshot.processes, Processes):
            busy |= {each.pid for each in snapshot.processes.processes if each.ppid in busy}
    return busy


def _snapshot(snapshot, busy, sglang):
    processes, stacks = snapshot.processes, snapshot.stacks
    if isinstance(processes, Processes):
        kept = tuple(
            _process(process, sglang)
            for process in processes.processes
            if process.pid in busy or _of_the_launch(process, sglang)
        )
        processes = replace(processes, processes=kept)
    if isinstance(stacks, Stacks):
        stacks = Stacks(
            by_pid={
                pid: replace(
                    stack, threads=tuple(_without_fault(thread) for thread in stack.threads)
                )
                if isinstance(stack, ProcessStacks)
                else stack
                for pid, stack in stacks.by_pid.items()
            }
        )
    return replace(snapshot, processes=processes, stacks=stacks)


def _of_the_launch(process, sglang):
    role = engines.role_of(sglang, process.title)
    return role is not None and not role.helper


def _process(process, sglang):
    if _of_the_launch(process, sglang):
        helpers = tuple(
            replace_syscall(thread) if thread.state == "S" else thread
            for thread in process.threads[1:]
        )
        return replace(process, threads=(*process.threads[:1], *helpers))
    return replace(process, threads=process.threads[:1], files=None)


def _without_fault(thread):
    python = [frame for frame in thread.frames if is_python(frame)]
    frames = thread.frames
    if python and python[0].path.endswith(FAULT):  # what it called, native, is the fault's too
        frames = frames[frames.index(python[0]) :]
    return replace(thread, frames=tuple(f for f in frames if not f.path.endswith(FAULT)))


def _neutral(data, paths):
    for old, new in paths:
        data = data.replace(old, new)
    return data


def _same_length(data, paths):
    for old, new in paths:
        data = data.replace(old, new[: len(old)].ljust(len(old), b"_"))
    return data


if __name__ == "__main__":
    asked = argparse.ArgumentParser()
    asked.add_argument("--every", type=float, default=0.0)
    asked.add_argument("recording", type=Path)
    asked.add_argument("case", type=Path)
    asked.add_argument("paths", nargs="*")
    told = asked.parse_args()
    pairs = [tuple(part.encode() for part in each.split("=", 1)) for each in told.paths]
    adopt(told.recording, told.case, pairs, told.every)
