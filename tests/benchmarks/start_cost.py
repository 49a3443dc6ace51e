"""What being watched costs a start: `python tests/benchmarks/start_cost.py [PAIRS]`.

Real SGLang on the CPU at TP=2, alone and with `hangdoctor watch` beside it in turn, by default
eight of each; a pair changes places from one to the next, so that what else changes on the
machine falls on both. Prints the seconds to "ready to roll" and what is lost of it, median and
95 % interval.
"""

# ruff: noqa: T201, E402  # it is there to print; the lab lies beside it, in no package

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "sglang"))
import sglang_lab  # test material beside the benchmarks
from snapshot_cost import interval

PAIRS = 8


def start_s(environment, place, *, watched):
    """Return how long a start took, in seconds."""
    lab = sglang_lab.Lab(environment, place)
    try:
        began_s = time.monotonic()
        launched = lab.launch("good", tp=2)
        watch = None
        if watched:
            command = [sys.executable, "-m", "hangdoctor", "watch", "--pid-tree", str(launched.pid)]
            watch = subprocess.Popen(
                [*command, "--log", str(launched.log_path), "--events"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        launched.wait_for(sglang_lab.READY, limit_s=600)
        took_s = time.monotonic() - began_s
        if watch is not None and watch.wait(60) != 0:
            raise SystemExit(f"the watch of a good start ended with {watch.returncode}")
    finally:
        lab.close()
    return took_s


def main():
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else PAIRS
    environment = sglang_lab.environment()
    took = {False: [], True: []}
    with tempfile.TemporaryDirectory() as place:
        start_s(environment, Path(place), watched=False)  # reads the packages from the disk
        for number in range(pairs):
            for watched in (False, True) if number % 2 else (True, False):
                took[watched].append(start_s(environment, Path(place), watched=watched))
                print("watched" if watched else "alone  ", f"{took[watched][-1]:.2f} s", flush=True)
    both = zip(took[False], took[True], strict=True)
    lost = [100 * (watched_s / alone_s - 1) for alone_s, watched_s in both]
    for watched, words in ((False, "alone"), (True, "watched")):
        print(f"{words:8}", interval(took[watched]), "s")
    print("lost    ", interval(lost), "%")


if __name__ == "__main__":
    main()
