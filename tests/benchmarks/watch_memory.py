"""Prints the memory of a long watch: `python tests/benchmarks/watch_memory.py [HOURS]`.

No clock: a look a second at eight ranks of sixty threads is made up, as it would be in so many
hours of a launch that loads, compiles and then serves under load, and is folded as `watch` does it
(thinned, recorded, rules run each minute). Prints the resident memory every ten minutes of that
time, and what it was before the first look. The workers that look at a real launch are not part of
it; they keep nothing.
"""

# ruff: noqa: T201  # it is there to print

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import msgspec

from hangdoctor import engines
from hangdoctor.diagnose import diagnose
from hangdoctor.facts.fold import begin, step
from hangdoctor.model import (
    Frame,
    Header,
    Host,
    HotThread,
    Io,
    LogPosition,
    OpenFile,
    Process,
    Processes,
    ProcessStacks,
    Snapshot,
    Stacks,
    Thread,
    ThreadStack,
)
from hangdoctor.recording import Recorder, Thinned, thin

RANKS, THREADS, DEPTH = 8, 60, 25
SGLANG = engines.load("sglang")


def rss_mib():
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / (1 << 20)


def rank(number, second):
    """Return a rank whose every counter moves."""
    pid = 1000 + number
    io = Io(second * 9000, second * 800, second * 90, second * 8000, second << 20, 0)
    hot = HotThread(system_s=second / 9, queue_s=second / 7, sleeps=second * 90, preempted=0, io=io)
    threads = tuple(
        Thread(
            tid=pid + 100 * index,
            name="sglang::schedul",
            state="S" if (second + index) % 3 else "R",
            cpu_s=second * (0.9 if index < 3 else 0.001),
            wchan="futex_do_wait",
            syscall="202 0x7f3a5c000b60 0x189 0x0 0x0 0x0 0xffffffff 0x7ffd 0x7f3a",
            hot=hot if index < 3 else None,
        )
        for index in range(THREADS)
    )
    files = tuple(
        OpenFile(fd, "eventfd", "anon_inode:[eventfd]", position=second % 2, identity=fd)
        for fd in range(40)
    )
    return Process(
        pid=pid,
        ppid=700,
        start_ticks=1000,
        title=f"sglang::scheduler_TP{number}",
        comm="sglang::schedul",
        state=threads[0].state,
        cpu_s=second * 2.7,
        children_cpu_s=second * 0.1,
        rss_bytes=(4 << 30) + second * 4096,
        rss_file_bytes=1 << 30,
        io=io,
        threads=threads,
        files=files if second % 5 == 0 else None,
    )


def compiler(number, second):
    """Return a compiler of this second only, as a build passes through thousands of them."""
    pid = 100_000 + 8 * second + number
    title = f"/usr/lib/gcc/cc1plus -quiet kernel_{second}_{number}.cpp " + "-I/usr/include " * 20
    return Process(
        pid=pid, ppid=1000 + number, start_ticks=100 * second, title=title, comm="cc1plus",
        state="R", cpu_s=0.4, threads=(Thread(pid, "cc1plus", "R", 0.4),),
    )  # fmt: skip


def stacks(second):
    """Return a dump in which the ranks stand somewhere else each time."""
    by_pid = {}
    for number in range(RANKS):
        threads = tuple(
            ThreadStack(
                name="MainThread" if index == 0 else f"Thread-{index}",
                tid=1000 + number + 100 * index,
                active=index < 3,
                owns_gil=index == 0,
                frames=tuple(
                    Frame(
                        f"function_{(second * 7 + depth) % 997}", f"/site/package_{depth}.py", depth
                    )
                    for depth in range(DEPTH)
                ),
            )
            for index in range(THREADS)
        )
        by_pid[1000 + number] = ProcessStacks(threads=threads)
    return Stacks(by_pid=by_pid)


def look(second, log_bytes):
    """Return what a look in this second would have seen."""
    launcher = Process(
        pid=700, ppid=1, start_ticks=900, title="python -m sglang.launch_server --tp 8",
        comm="python", state="S", cpu_s=10.0, threads=(Thread(700, "python", "S", 10.0),),
    )  # fmt: skip
    family = [launcher, *(rank(number, second) for number in range(RANKS))]
    if 300 <= second < 900:
        family += [compiler(number, second) for number in range(RANKS)]
    ended = {100_000 + 8 * before: 0 for before in range(max(300, second - 200), min(second, 900))}
    return Snapshot(
        at_s=float(second),
        wall_s=1.79e9 + second,
        processes=Processes(processes=tuple(family), roots=(700,), ended=ended),
        stacks=stacks(second) if second % 10 == 0 else None,
        host=Host(load_1m=8.0, oom_kills=0, kernel_log=()) if second % 10 == 0 else None,
        log=LogPosition(read_bytes=log_bytes, silent_s=0.0),
    )


def main():
    hours = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    with tempfile.TemporaryDirectory() as place:
        recorder = Recorder(Path(place) / "recording", Header(engine="sglang"))
        base = facts = begin(Header(engine="sglang"), SGLANG)
        state, heard, log_bytes = Thinned(), [], 0
        began_s, most_mib = time.monotonic(), 0.0
        print(f"before the first look: {rss_mib():.1f} MiB")
        for second in range(int(3600 * hours)):
            line = f"[2026-11-29 21:04:27 TP{second % 8}] request {second}: {second * 7919}\n"
            log_bytes += len(line)
            snapshot = look(second, log_bytes)
            # As Live.look: what is kept is folded for good, the newest on top of it.
            state, keep = thin(state, snapshot)
            if keep and state.kept is not None:
                recorder.add(state.kept, b"".join(heard))
                base = step(base, state.kept, heard, SGLANG)
            heard = [line.encode()] if keep else [*heard, line.encode()]
            facts = step(base, snapshot, heard, SGLANG)
            most_mib = max(most_mib, rss_mib())
            if second % 60 == 0:
                diagnose(facts, SGLANG)
            if second % 600 == 599:
                print(f"after {(second + 1) / 60:4.0f} min: {rss_mib():.1f} MiB", flush=True)
        kept = (Path(place) / "recording" / "snapshots.jsonl").stat().st_size
        recorder.close()
        size = len(msgspec.json.encode(facts))
    print(f"most: {most_mib:.1f} MiB; the facts are {size / 1e6:.2f} MB as JSON")
    print(f"the recording has {kept / 1e6:.0f} MB; took {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
