"""Watches real SGLang servers that are ready and idle: `python tests/benchmarks/idle_server.py 10`.

For so many minutes, at TP of 1 and of 2 side by side, a look a second. Prints every rule that any
look had a finding of, how often, and what the ranks' busiest threads did. Nothing may be a fault:
it ends with 1 if a look said anything but ready, or named a loop.
"""

# ruff: noqa: T201, E402  # it is there to print; the lab lies beside it, in no package

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "sglang"))
import sglang_lab  # test material beside the benchmarks

from hangdoctor import engines
from hangdoctor.diagnose import diagnose
from hangdoctor.live import Live
from hangdoctor.model import Header

LOOPS = ("eventfd-runaway", "pipe-chatter", "busy-without-progress")
SGLANG = engines.load("sglang")


def watch(launched, minutes, into):
    """Look every second, and count what is said."""
    header = Header(source=str(launched.pid), engine="sglang")
    said = Counter()
    until_s = time.monotonic() + 60 * minutes
    with Live([launched.pid], SGLANG, header, log=launched.log_path) as live:
        for facts in live.looks():
            found = diagnose(facts, SGLANG)
            said[f"state {found.state}"] += 1
            for finding in found.findings:
                said[f"{finding.rule} {finding.verdict}"] += 1
            for rank in facts.ranks:
                said[f"{rank.name} loop {rank.loop.kind if rank.loop else None}"] += 1
                track = facts.track(rank)
                for busy in track.busy[:1] if track else ():
                    if busy.write_calls_per_s is not None:
                        most = into.setdefault("most writes/s", busy)
                        if busy.write_calls_per_s > most.write_calls_per_s:
                            into["most writes/s"] = busy
            if time.monotonic() >= until_s:
                break
    into["said"] = said


def main():
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    with tempfile.TemporaryDirectory() as place:
        lab = sglang_lab.Lab(sglang_lab.environment(), Path(place))
        try:
            launches = {tp: lab.launch("good", tp=tp) for tp in (1, 2)}
            for launched in launches.values():
                launched.wait_for(sglang_lab.READY, limit_s=600)
            results = {tp: {} for tp in launches}
            watching = [
                threading.Thread(target=watch, args=(launched, minutes, results[tp]))
                for tp, launched in launches.items()
            ]
            for one in watching:
                one.start()
            for one in watching:
                one.join()
        finally:
            lab.close()
    bad = 0
    for tp, result in results.items():
        print(f"TP={tp}, idle for {minutes:g} min; most writes: {result.get('most writes/s')}")
        for what, count in sorted(result["said"].items()):
            print(f"  {count:5} x {what}")
            bad += count if what.startswith(LOOPS) else 0
            bad += count if what.startswith("state") and what != "state ready" else 0
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
