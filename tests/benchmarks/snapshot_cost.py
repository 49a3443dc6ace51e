"""Prints what looking costs: `python tests/benchmarks/snapshot_cost.py`. A script, not a test.

Eight processes of sixty threads each, the main threads asleep, then at work, beside what psutil and
`py-spy dump` one after the other need for the same; and what a target that is at work loses where
it is watched every second.
"""

# ruff: noqa: T201  # it is there to print

from __future__ import annotations

import mmap
import os
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import psutil

from hangdoctor.collect import Observer, procfs, stacks

PROGRAM = Path(__file__).parents[1] / "programs" / "threads.py"
PROCESSES, THREADS, ROUNDS = 8, 60, 20
WATCH_S, PAIRS = 5.0, 8


@contextmanager
def targets(count, counter=None):
    """Run processes that have announced that they are there."""
    with tempfile.TemporaryDirectory() as place:
        fifo = Path(place) / "fifo"
        os.mkfifo(fifo)
        words = os.open(fifo, os.O_RDWR)
        command = [sys.executable, str(PROGRAM), str(fifo), str(THREADS - 1)]
        command += [str(counter)] if counter else []
        running = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
        try:
            heard = b""
            while heard.count(b"\n") < count:
                select.select([words], [], [], 60)
                heard += os.read(words, 4096)
            yield [one.pid for one in running]
        finally:
            for one in running:
                os.killpg(one.pid, signal.SIGKILL)
                one.wait()
            os.close(words)


def cost_ms(observer, due):
    """Return the milliseconds from the request to the snapshot, after a first one that warms up."""
    observer.take(due, at_s=0, wall_s=0)
    took = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        observer.take(due, at_s=0, wall_s=0)
        took.append((time.perf_counter() - began_s) * 1000)
    return spread(took)


def others_ms(look, rounds=ROUNDS):
    """Return the milliseconds of another way to look."""
    took = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        look()
        took.append((time.perf_counter() - began_s) * 1000)
    return spread(took)


def look_with_psutil(pids):
    """Return what psutil tells of the same: state, CPU, I/O, threads, descriptors, connections."""
    for pid in pids:
        process = psutil.Process(pid)
        with process.oneshot():
            process.as_dict(("status", "cpu_times", "io_counters", "num_fds", "cmdline"))
            process.threads()
            process.net_connections("all")


def dump_in_sequence(pids):
    """Dump the stacks as one does by hand."""
    for pid in pids:
        command = [stacks.find_py_spy(), "dump", "--nonblocking", "--json", "--pid", str(pid)]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def spread(numbers):
    """Return the median, the least and the most."""
    return f"{statistics.median(numbers):7.1f} (min {min(numbers):.1f}, max {max(numbers):.1f})"


def count_in(counter, pid, seconds, observer):
    """Return how far the target counts: in a second, and in a second of its own CPU time.

    The second number does not suffer from what else the machine does.
    """
    with counter.open("rb") as file, mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ) as shared:

        def now():
            return struct.unpack("=Q", shared[:8])[0], procfs.read_stat("/proc", pid).cpu_s

        began_s, (first, first_cpu_s) = time.perf_counter(), now()
        looks = 0
        while (passed_s := time.perf_counter() - began_s) < seconds:
            if observer and passed_s >= looks:
                due = {"processes", "host", "gpus"} | ({"files"} if looks % 5 == 0 else set())
                due |= {"waits"} if looks % 5 == 0 else set()
                observer.take(frozenset(due), at_s=passed_s, wall_s=0)
                looks += 1
            left_s = seconds - passed_s
            time.sleep(max(0.0, min(left_s, looks - passed_s) if observer else left_s))
        last, last_cpu_s = now()
        counted = last - first
        return counted / (time.perf_counter() - began_s), counted / (last_cpu_s - first_cpu_s)


def busy_s(observer):
    """Return the CPU seconds of the observer and its workers so far."""
    workers = [worker._process.pid for worker in observer._workers.values()]
    return sum(procfs.read_stat("/proc", pid).cpu_s for pid in (os.getpid(), *workers))


def main():
    cheap = frozenset({"processes", "host", "gpus"})
    with tempfile.TemporaryDirectory() as place:
        counter = Path(place) / "counter"
        counter.write_bytes(bytes(8))
        for words, file in (("asleep", None), ("at work", counter)):
            with targets(PROCESSES, file) as pids, Observer(pids) as observer:
                print(f"{PROCESSES} processes x {THREADS} threads, main threads {words} [ms]")
                print("  processes, host, gpus ", cost_ms(observer, cheap))
                print("  the same with files   ", cost_ms(observer, cheap | {"files"}))
                print("  and waits, with peers ", cost_ms(observer, cheap | {"files", "waits"}))
                everything = cheap | {"files", "waits", "stacks"}
                print("  the same with stacks  ", cost_ms(observer, everything))
                print(
                    "  psutil                ", others_ms(lambda pids=pids: look_with_psutil(pids))
                )
                print("  py-spy in sequence    ", others_ms(lambda p=pids: dump_in_sequence(p), 5))
        with targets(1, counter) as pids, Observer(pids) as observer:
            observer.take(cheap, at_s=0, wall_s=0)
            before_s, watched, in_cpu = busy_s(observer), [], []
            for _ in range(PAIRS):
                alone, alone_cpu = count_in(counter, pids[0], WATCH_S, None)
                beside, beside_cpu = count_in(counter, pids[0], WATCH_S, observer)
                watched.append(100 * beside / alone)
                in_cpu.append(100 * beside_cpu / alone_cpu)
            share = 100 * (busy_s(observer) - before_s) / (PAIRS * WATCH_S)
            print("a target at work, watched once a second, keeps of its throughput [%]")
            print(f"  by the clock           {spread(watched)}")
            print(f"  by its own CPU time    {spread(in_cpu)}")
            print(f"the observer and its workers need {share:.2f} % of one CPU")
    print(f"load average at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")


if __name__ == "__main__":
    main()
