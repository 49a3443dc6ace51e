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
STRETCH_S, PAIRS = 2, 60


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


class Counter:
    """How far a target has counted, and how much CPU it has used for that."""

    def __init__(self, path, pid):
        self._pid = pid
        with path.open("rb") as file:
            self._shared = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)

    def read(self):
        """Return the time, the count and the CPU seconds of the target."""
        cpu_ns = int(procfs.read(f"/proc/{self._pid}/schedstat").split()[0])
        return time.perf_counter(), struct.unpack("=Q", self._shared[:8])[0], cpu_ns / 1e9


def rates(counter, seconds, look):
    """Return how far the target counts in a second, and in a second of its own CPU time.

    The second number does not suffer from what else the machine does. `look` is called once a
    second, and may do nothing.
    """
    began_s, first, first_cpu_s = counter.read()
    for number in range(seconds):
        look()
        time.sleep(max(0.0, began_s + number + 1 - time.perf_counter()))
    ended_s, last, last_cpu_s = counter.read()
    return (last - first) / (ended_s - began_s), (last - first) / (last_cpu_s - first_cpu_s)


def compare(counter, observer):
    """Return what is left of the target's rates where it is watched, in percent, of each pair.

    A pair is two stretches of some seconds beside each other, alone and watched in turn, so that
    what else changes on the machine falls on both.
    """
    looks = 0

    def look():
        nonlocal looks
        due = {"processes", "host", "gpus"} | ({"files", "waits"} if looks % 5 == 0 else set())
        observer.take(frozenset(due), at_s=looks, wall_s=0)
        looks += 1

    pairs = []
    for number in range(PAIRS):
        ways = [look, lambda: None] if number % 2 else [lambda: None, look]
        of = {way is look: rates(counter, STRETCH_S, way) for way in ways}
        pairs.append([100 * of[True][kind] / of[False][kind] for kind in (0, 1)])
    return [[pair[kind] for pair in pairs] for kind in (0, 1)]


def interval(numbers):
    """Return the median, and between what it is in 19 cases of 20, by the order of the numbers."""
    numbers = sorted(numbers)
    middle, off = len(numbers) / 2, 0.98 * len(numbers) ** 0.5
    low, high = numbers[int(middle - off)], numbers[min(len(numbers) - 1, int(middle + off))]
    return f"{statistics.median(numbers):7.2f} ({low:.2f} to {high:.2f}; {len(numbers)} pairs)"


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
            before_s = busy_s(observer)
            by_clock, by_cpu = compare(Counter(counter, pids[0]), observer)
            share = 100 * (busy_s(observer) - before_s) / (PAIRS * STRETCH_S)
            print("a target at work, watched once a second, keeps of its throughput [%]")
            print(f"  by the clock           {interval(by_clock)}")
            print(f"  by its own CPU time    {interval(by_cpu)}")
            print(f"the observer and its workers need {share:.2f} % of one CPU")
    print(f"load average at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")


if __name__ == "__main__":
    main()
