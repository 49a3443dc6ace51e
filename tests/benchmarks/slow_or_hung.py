"""Tells slow from hung on real launches: `python tests/benchmarks/slow_or_hung.py [CASE ...]`.

Real SGLang on the CPU, two ranks, watched once a second at the default settings: weights from slow
storage (FUSE: needs root and /dev/fuse), storage that stops and comes back, ranks that sleep and go
on, real hangs, and time-outs that end one. Prints a table of what was measured against what is
wanted, as Markdown, and ends with 1 where a figure is not met. `--side-by-side N` launches run at
once (3), `--record DIR` keeps a recording of each.
"""

# ruff: noqa: T201, E402  # it is there to print; the lab lies beside it, in no package

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "sglang"))
import sglang_lab  # test material beside the benchmarks

from hangdoctor import engines
from hangdoctor.diagnose import diagnose
from hangdoctor.endpoint import free_port
from hangdoctor.limits import countdowns
from hangdoctor.live import Live
from hangdoctor.loads import report
from hangdoctor.model import Header

SGLANG = engines.load("sglang")
LIMIT_S = 420.0
WATCH_HANG_S = 150.0
"""A real hang is watched for so long."""
RATE_OFF, LEFT_OFF = 0.15, 0.30
"""How far the rate, and the time that is left, may be off."""
SAID_WITHIN_S = 60.0
"""After the last sign of life a hang must be called one."""
ASKED_AFTER_S = 20.0
"""After the load began, and after its rate changed, so long goes by before it is asked."""


@dataclass(frozen=True)
class Case:
    """One launch.

    Attributes:
        variant: of sglang_lab.VARIANTS.
        what: for the table.
        rates: bytes a second, each from the moment that so much of the checkpoint has come.
        stop_share: so much of it comes, and then nothing for stop_s.
        hangs: it never goes on; else it must come up.
        limit: id of the time-out that ends it; arguments, environment: which make that short.
    """

    variant: str
    what: str
    rates: tuple[tuple[float, float], ...] = ()
    stop_share: float | None = None
    stop_s: float = 100.0
    hangs: bool = False
    limit: str = ""
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


CASES = {
    "mapped-slower": Case(
        "slow-storage", "mapped shards, 6 MB/s, then 2 MB/s", ((0, 6e6), (0.6, 2e6))
    ),
    "mapped-faster": Case(
        "slow-storage", "mapped shards, 3 MB/s, then 6 MB/s", ((0, 3e6), (0.4, 6e6))
    ),
    "read-slower": Case(
        "slow-storage-read", "shards read whole, 6 MB/s, then 2 MB/s", ((0, 6e6), (0.6, 2e6))
    ),
    "stops": Case("slow-storage", "storage stops for 100 s, and goes on", ((0, 6e6),), 0.5),
    "stops-read": Case(
        "slow-storage-read", "the same, shards read whole", ((0, 6e6),), stop_share=0.5
    ),
    "late-load": Case("late-load", "TP1 sleeps 120 s before its load"),
    "late-rendezvous": Case("late-rendezvous", "TP1 sleeps 120 s before the rendezvous"),
    "late-start": Case("late-start", "TP1 starts 40 s late"),
    "compile": Case("compile", "a cold compile in graph capture"),
    "hang-io": Case("hang-io", "TP0 opens a FIFO that nobody reads", hangs=True),
    "hang-collective": Case(
        "hang-collective", "the ranks are in different collectives", hangs=True
    ),
    "hang-shard": Case("weights-stalled", "a shard that never opens", hangs=True),
    "limit-rendezvous": Case(
        "missing-node",
        "a node that never comes, --dist-timeout 60",
        limit="rendezvous-cpu",
        arguments=("--dist-timeout", "60"),
    ),
    "limit-warmup": Case(
        "hang-io",
        "the same FIFO, SGLANG_WARMUP_TIMEOUT=60",
        limit="warmup-request",
        environment={"SGLANG_WARMUP_TIMEOUT": "60"},
    ),
    "limit-watchdog": Case(
        "hang-io",
        "the same FIFO, --watchdog-timeout 40",
        limit="watchdog",
        arguments=("--watchdog-timeout", "40"),
    ),
    "hang-init": Case("scheduler-init-stuck", "both schedulers sleep for ever", hangs=True),
}


@dataclass
class Look:
    """What one look said, and what was true then."""

    at_s: float
    state: str
    confidence: str
    kernel_state: str
    rate: float | None
    left_s: tuple[float, float, float] | None
    moved_at_s: float
    served: int
    left: tuple[float | None, float | None] | None
    limit_over: bool


class Storage:
    """Sets the rate of the slow file system as the case goes on, and knows what has been served."""

    def __init__(self, case: Case, launched: sglang_lab.Launched, total: int) -> None:
        self.case, self.path, self.total = case, launched.rate_path, total
        self.changed_at_s: list[float] = []
        self.stopped_at_s: float | None = None
        self.resumed_at_s: float | None = None
        if case.rates:
            self._set(case.rates[0][1])

    def served(self) -> int:
        path = self.path.with_suffix(".served")
        text = path.read_text(encoding="ascii") if path.exists() else ""
        return int(text or 0)

    def served_at_s(self) -> float:
        path = self.path.with_suffix(".served")
        return path.stat().st_mtime if path.exists() else 0.0

    def step(self) -> None:
        share, now_s = self.served() / self.total, time.time()
        done = len(self.changed_at_s)
        if done + 1 < len(self.case.rates) and share >= self.case.rates[done + 1][0]:
            self._set(self.case.rates[done + 1][1])
            self.changed_at_s.append(now_s)
        stop = self.case.stop_share
        if stop is not None and self.stopped_at_s is None and share >= stop:
            self._set(0)
            self.stopped_at_s = now_s
        elif (
            self.stopped_at_s
            and not self.resumed_at_s
            and now_s - self.stopped_at_s >= self.case.stop_s
        ):
            self._set(self.case.rates[-1][1])
            self.resumed_at_s = now_s

    def _set(self, rate: float) -> None:
        self.path.write_text(f"{rate:.0f}", encoding="ascii")


def run(name: str, record: Path | None) -> list[dict[str, object]]:
    """Watch one launch to its end; return the rows of the table."""
    case = CASES[name]
    looks: list[Look] = []
    with tempfile.TemporaryDirectory() as place:
        lab = sglang_lab.Lab(sglang_lab.environment(), Path(place))
        try:
            total = sum(
                path.stat().st_size for path in lab.environment.large_model.glob("*.safetensors")
            )
            # Side by side they would choose the same one for the ranks' rendezvous.
            port = str(free_port())
            os.environ.update(case.environment)
            arguments = ("--nccl-port", port, *case.arguments)
            launched = lab.launch(case.variant, extra_args=arguments)
            storage = Storage(case, launched, total)
            header = Header(source=str(launched.pid), engine="sglang")
            began_s = time.time()
            message = next((e.message for e in SGLANG.limits if e.id == case.limit), "")
            into = record / name if record else None
            with Live([launched.pid], SGLANG, header, log=launched.log_path, record=into) as live:
                for facts in live.looks():
                    storage.step()
                    found = diagnose(facts, SGLANG)
                    load = report(facts, SGLANG)
                    ranks = [rank for rank in load.ranks if rank.left_s] if load else []
                    slowest = max(ranks, key=lambda rank: rank.left_s, default=None)
                    moved_s = max(launched.log_path.stat().st_mtime, storage.served_at_s())
                    looks.append(
                        Look(
                            at_s=time.time(),
                            state=found.state,
                            confidence=found.confidence,
                            kernel_state="".join(sorted({r.state or "?" for r in facts.ranks})),
                            rate=slowest.pace.per_s if slowest and slowest.pace else None,
                            left_s=slowest.left_s if slowest else None,
                            moved_at_s=moved_s,
                            served=storage.served(),
                            left=None,
                            limit_over=False,
                        )
                    )
                    limits = {each.id: each for each in countdowns(facts, SGLANG)}
                    counted = limits.get(case.limit)
                    looks[-1].left = (counted.least_s, counted.most_s) if counted else None
                    if message and message in launched.log():
                        looks[-1].limit_over = True
                        break
                    late = time.time() - began_s > LIMIT_S
                    hung = case.hangs and time.time() - moved_s > WATCH_HANG_S
                    if late or hung or found.state in ("ready", "dead"):
                        break
        finally:
            lab.close()
    return rows_of(case, looks, storage)


def rows_of(case: Case, looks: list[Look], storage: Storage) -> list[dict[str, object]]:
    """Return what was measured, against what is wanted."""
    rows = []

    def row(wanted: str, measured: str, *, met: bool) -> None:
        rows.append({"what": case.what, "wanted": wanted, "measured": measured, "met": met})

    hung = [look for look in looks if look.state == "hung"]
    if case.limit:
        first = next((e for e in looks if e.left and e.left[1] is not None), None)
        if first is None or first.left is None or not looks[-1].limit_over:
            row("ends by itself when it was said to", "nothing was said, or it did not", met=False)
            return rows
        least_s, most_s = first.left
        after_s = looks[-1].at_s - first.at_s
        said = (
            f"{least_s:.0f} to {most_s:.0f} s" if least_s is not None else f"{most_s:.0f} s at most"
        )
        row(
            "ends by itself when it was said to",
            f"said {said}, ended after {after_s:.0f} s",
            met=(least_s or 0.0) - 5 <= after_s <= (most_s or 0.0) + 5,
        )
        return rows
    if case.rates and case.stop_share is None:
        began_s = next(look.moved_at_s for look in looks if look.served)
        done_s = storage_done_s(looks)
        for number, (_, rate) in enumerate(case.rates):
            from_s = began_s if number == 0 else storage.changed_at_s[number - 1]
            look = next((e for e in looks if e.at_s >= from_s + ASKED_AFTER_S), looks[-1])
            last = number == len(case.rates) - 1
            left_s = done_s - look.at_s if last else (storage.total - look.served) / rate
            after = "the load began" if number == 0 else "the change"
            if look.rate is None or look.left_s is None:
                row(f"rate and time left, 20 s after {after}", "none was told", met=False)
                continue
            off = look.rate / rate - 1
            row(
                f"rate within 15 %, 20 s after {after}",
                f"{look.rate / 1e6:.1f} of {rate / 1e6:.0f} MB/s ({off:+.0%})",
                met=abs(off) <= RATE_OFF,
            )
            now_s, least_s, most_s = look.left_s
            off = now_s / left_s - 1
            row(
                f"time left within 30 %, 20 s after {after}",
                f"{now_s:.0f} s ({least_s:.0f} to {most_s:.0f}), true {left_s:.0f} s ({off:+.0%})",
                met=abs(off) <= LEFT_OFF,
            )
    if case.stop_share is not None and storage.stopped_at_s:
        stopped = [e for e in hung if e.at_s < (storage.resumed_at_s or 1e12)]
        first = stopped[0] if stopped else None
        last_s = max(e.moved_at_s for e in looks if e.at_s < (storage.resumed_at_s or 1e12))
        said_s = first.at_s - last_s if first else None
        slow = "".join(sorted({e.kernel_state for e in looks if e.served and e.rate}))
        row(
            "hung within 60 s of the last byte, in the state that it reads in",
            f"{said_s:.0f} s, in state {first.kernel_state} (while it read: {slow})"
            if first and said_s is not None
            else "never",
            met=said_s is not None and said_s <= SAID_WITHIN_S and "D" in first.kernel_state,
        )
        back_s = storage.resumed_at_s or 0.0
        still = [e.at_s for e in hung if e.at_s >= back_s]
        gone_s = (max(still) - back_s if still else 0.0) if storage.resumed_at_s else None
        row(
            "withdrawn when it goes on",
            f"after {gone_s:.0f} s at most" if gone_s is not None else "it never went on",
            met=gone_s is not None and gone_s <= 5,
        )
    elif case.hangs:
        last_s = max(look.moved_at_s for look in looks)
        first = next((e for e in hung if e.at_s > last_s), None)
        said_s = first.at_s - last_s if first else None
        row(
            "hung within 60 s of the last line",
            f"{said_s:.0f} s, confidence {first.confidence}" if first else "never",
            met=said_s is not None and said_s <= SAID_WITHIN_S,
        )
    if not case.hangs:
        sure = [look for look in hung if look.confidence == "high"]
        words = f"{len(hung)} of {len(looks)} looks hung, {len(sure)} of them sure"
        if case.stop_share is None:
            row("never hung", words, met=not hung)
        else:
            row("never hung for sure", words, met=not sure)
        if hung and case.stop_share is None:
            moved = [e for e in looks if e.at_s >= hung[-1].at_s and e.state != "hung"]
            resumed_s = next(
                (e.moved_at_s for e in looks if e.moved_at_s > hung[0].at_s), hung[-1].at_s
            )
            gone_s = max(0.0, moved[0].at_s - resumed_s) if moved else None
            row(
                "withdrawn when it goes on",
                "never" if gone_s is None else f"after {gone_s:.1f} s",
                met=gone_s is not None and gone_s <= 5,
            )
        row("comes up", looks[-1].state, met=looks[-1].state == "ready")
    return rows


def storage_done_s(looks: list[Look]) -> float:
    """Return when the last byte was served."""
    most = max(look.served for look in looks)
    return next(look.at_s for look in looks if look.served == most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--side-by-side", type=int, default=3)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run(options.one, options.record)))
        return
    names = options.cases or list(CASES)
    keep = ["--record", str(options.record)] if options.record else []

    def watched(name: str) -> list[dict[str, object]]:
        command = [sys.executable, __file__, "--one", name, *keep]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            what = CASES[name].what
            return [{"what": what, "wanted": "a run", "measured": "it failed", "met": False}]
        return list(json.loads(done.stdout))

    with ThreadPoolExecutor(options.side_by_side) as pool:
        rows = [row for part in pool.map(watched, names) for row in part]
    print("| launch | wanted | measured | |\n|---|---|---|---|")
    last = ""
    for row in rows:
        what = row["what"] if row["what"] != last else ""
        last = str(row["what"])
        print(f"| {what} | {row['wanted']} | {row['measured']} | {'yes' if row['met'] else 'NO'} |")
    sys.exit(not all(row["met"] for row in rows))


if __name__ == "__main__":
    main()
