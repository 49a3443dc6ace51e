"""What it costs to compare logs: time and memory, beside drain3, difflib, rapidfuzz and grep.

    python tests/benchmarks/log_diff.py [MEBIBYTES]

A good log (a tenth as long) and one of a server under load are made, compared and removed. drain3
and rapidfuzz are measured where they are installed; none is a dependency.
"""

# ruff: noqa: T201  # it is there to print

from __future__ import annotations

import contextlib
import difflib
import importlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from large_log import ROOT, noise

SAMPLES = ROOT / "sample_logs"
GOOD = SAMPLES / "sglang-0.5.15-tp2-good.log"
CASE = [
    SAMPLES / f"sglang-0.5.9-tp8-{name}-rebuilt.log"
    for name in ("good", "good-again", "weights-hung")
]
LINES = 100_000


def write(path, size):
    with path.open("wb") as log:
        log.write(GOOD.read_bytes())
        block = noise(0)
        for number in itertools.count(1):
            if log.tell() >= size:
                return
            log.write(block if number % 8 else noise(number * 16_000))


def measured(*command):
    """Run a command; return its seconds of the clock and of the CPU, and its memory in MiB."""
    began_s = time.perf_counter()
    with tempfile.TemporaryFile() as nowhere:  # not /dev/null: grep would stop at its first match
        process = subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=nowhere)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    took_s = time.perf_counter() - began_s
    return took_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def show(what, took_s, cpu_s, memory_mib):
    print(f"{what:<58} {took_s:7.2f} s  {cpu_s:7.2f} s CPU  {memory_mib:5.0f} MiB")


def timed(what, function, times=1):
    best_s = min(_seconds(function) for _ in range(times))
    print(f"{what:<58} {best_s * 1000:9.1f} ms")
    return best_s


def _seconds(function):
    began_s = time.process_time()
    function()
    return time.process_time() - began_s


def templates(log):
    """Compare ways to find templates, on lines of a real start and of a server under load."""
    with log.open(encoding="utf-8", errors="replace") as file:
        lines = [line.rstrip("\n") for line in itertools.islice(file, LINES)]
    from hangdoctor.logs.templates import Masker, mask

    print(f"\ntemplates of {len(lines)} lines (CPU)")
    timed("mask, line by line", lambda: [mask(line) for line in lines])
    masker = Masker()
    timed("Masker, which remembers", lambda: [masker(line) for line in lines])
    with contextlib.suppress(ImportError):
        miner = importlib.import_module("drain3").TemplateMiner()
        seconds = timed(
            "drain3 alone, a tenth of the lines",
            lambda: [miner.add_log_message(line) for line in lines[: LINES // 10]],
        )
        print(f"{'':<4}that is {seconds * 10:.1f} s for all of them")


def alignments():
    """Compare ways to align, on the templates of real logs and on long ones."""
    from hangdoctor.logs.align import common
    from hangdoctor.logs.templates import mask

    case = [
        [mask(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in (CASE[0], CASE[-1])
    ]
    long = [case[0] * 6, (case[1] + case[0]) * 4]
    for first, second in (case, long):
        print(f"\nalignment of {len(first)} with {len(second)} lines (CPU)")
        timed(
            f"longest common subsequence: {len(common(first, second))} pairs",
            lambda a=first, b=second: common(a, b),
            3,
        )
        matcher = difflib.SequenceMatcher(None, first, second, autojunk=False)
        pairs = sum(block.size for block in matcher.get_matching_blocks())
        timed(
            f"difflib: {pairs} pairs",
            lambda a=first, b=second: difflib.SequenceMatcher(
                None, a, b, autojunk=False
            ).get_matching_blocks(),
        )
        with contextlib.suppress(ImportError):
            distance = importlib.import_module("rapidfuzz.distance").LCSseq
            timed(
                f"rapidfuzz: {distance.similarity(first, second)} pairs",
                lambda a=first, b=second, d=distance: list(d.opcodes(a, b)),
                3,
            )


def main():
    sys.path.insert(0, str(ROOT))
    size = int(sys.argv[1] if len(sys.argv) > 1 else 1024) << 20
    tool = [sys.executable, "-m", "hangdoctor", "diff-logs"]
    with tempfile.TemporaryDirectory() as directory:
        good, other = Path(directory, "good.log"), Path(directory, "other.log")
        write(good, size // 10)
        write(other, size)
        print(f"{other.stat().st_size / 1e6:.0f} MB against {good.stat().st_size / 1e6:.0f} MB")
        show("hangdoctor diff-logs", *measured(*tool, good, other))
        pattern = "Load weight end|Memory pool end|fired up|Traceback|Error"
        show("grep -cE of five words, the long one only", *measured("grep", "-cE", pattern, other))
        print("\n641 and 636 lines against 217, start-up included")
        for _ in range(3):
            show("hangdoctor diff-logs", *measured(*tool, *CASE))
        show("hangdoctor --help", *measured(sys.executable, "-m", "hangdoctor", "--help"))
        templates(other)
    alignments()


if __name__ == "__main__":
    main()
