"""Prints what a look at eight cards costs: `python tests/benchmarks/gpu_cost.py`. No test.

The library is the tests' own, whose calls take what they take on an H200: 5 us each, 150 for each
PCIe counter, 21 ms for a sample of PCIe throughput, which a driver with counters is not asked for.
"""

# ruff: noqa: T201  # it is there to print

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import nvml  # test material beside the tests

from hangdoctor.collect import Observer
from hangdoctor.model import Gpus

CARDS, ROUNDS = 8, 200
DUE = frozenset({"gpus"})
COUNTED = {"received": 1, "sent": 2, "linked": 3}
"""What a driver with PCIe counters says; one without is sampled every ten seconds."""


def cost_ms(counters):
    """Return the milliseconds from the request to the snapshot; of the first ones without counters,
    which sample one card each.
    """
    with tempfile.TemporaryDirectory() as place:
        os.environ |= nvml.build(Path(place), "-DREAL", "-O2")
        lines = [
            nvml.card(
                (os.getpid(), 4000), busy=100, used=5000, milliwatts=121000, limit=600000,
                throughput=50, **counters,
            )
            for _ in range(CARDS)
        ]  # fmt: skip
        (Path(place) / "cards").write_text("".join(lines), encoding="utf-8")
        with Observer([os.getpid()]) as observer:
            for _ in range(CARDS if counters else 0):
                observer.take(DUE, at_s=0, wall_s=0)
            took = []
            for _ in range(ROUNDS):
                began_s = time.perf_counter()
                seen = observer.take(DUE, at_s=0, wall_s=0).gpus
                took.append((time.perf_counter() - began_s) * 1000)
            assert isinstance(seen, Gpus)
            assert len(seen.cards) == CARDS
    return took


def main():
    """Print both."""
    for name, counters in (("PCIe counters", COUNTED), ("no PCIe counters", {})):
        took = cost_ms(counters)
        print(
            f"{CARDS} cards, {name}: {statistics.median(took):.1f} ms a look"
            f" ({min(took):.1f} to {max(took):.1f})"
        )


if __name__ == "__main__":
    main()
