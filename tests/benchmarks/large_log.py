"""What it costs to read a log of a gigabyte: time and memory.

    python tests/benchmarks/large_log.py [MEBIBYTES]

The log is made, measured and removed: a sample's start-up, then what a server under load writes
(batches and access lines, 97 of 100), warnings that repeat with other numbers, and bars.
"""

# ruff: noqa: T201  # it is there to print

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "sample_logs" / "sglang-0.5.15-tp2-weights-hung.log"
STAMP = "[2026-03-01 12:{:02}:{:02} TP{}] "


def noise(number):
    """Return about 2 MB of lines that tell nothing."""
    lines = []
    for at in range(number, number + 16_000):
        stamp = STAMP.format(at // 60 % 60, at % 60, at % 2)
        if at % 100 == 0:
            lines.append(f"{stamp}WARNING: cache miss for block {at}, {at * 7 % 1000} ms\n")
        elif at % 100 == 1:
            lines.append(f"Loading: {at % 97}% done\rLoading: {at % 97 + 1}% done\r\n")
        elif at % 2:
            lines.append(
                f"{stamp}Decode batch, #running-req: {at % 64}, #token: {at}, token usage: 0.12, "
                f"cuda graph: True, gen throughput (token/s): {at % 5000}.21, #queue-req: 0\n"
            )
        else:
            lines.append(
                f"{stamp[:-6]}] INFO:     10.0.{at % 256}.7:{at % 60000} - "
                '"POST /generate HTTP/1.1" 200 OK\n'
            )
    return "".join(lines).encode()


def main():
    size = int(sys.argv[1] if len(sys.argv) > 1 else 1024) << 20
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        log.write(SAMPLE.read_bytes())
        block = noise(0)
        for number in itertools.count(1):
            if log.tell() >= size:
                break
            log.write(block if number % 8 else noise(number * 16_000))
        log.flush()
        began_s = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "hangdoctor", "diagnose", log.name, "--format=json"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        verdict = json.loads(process.stdout.read())
        _, _, usage = os.wait4(process.pid, 0)
        took_s = time.perf_counter() - began_s
        print(
            f"{log.tell() / 2**20:.0f} MiB in {took_s:.1f} s "
            f"({log.tell() / 1e6 / took_s:.0f} MB/s), "
            f"{usage.ru_maxrss / 1024:.0f} MiB of memory at most; "
            f"{verdict['state']} in {verdict['phase']}, culprits {verdict['culprits']}"
        )


if __name__ == "__main__":
    main()
