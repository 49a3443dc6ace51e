"""Real logs, one a row: the release, how far it came, and who lacks what."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from hangdoctor.engines import PHASES, load
from hangdoctor.launches import expected_ranks
from hangdoctor.logs.timeline import (
    detect_engine,
    lacking,
    phase_of,
    read_timeline,
)

DIRECTORY = Path(__file__).parents[2] / "sample_logs"
SGLANG = load("sglang")
WEIGHTS = ("weights-begin", "weights-end")

# file: phase of each rank, what ranks lack, signs
CASES = {
    "sglang-0.5.9-cpu-tp1-sigterm": (["ready"], {}, ["sigterm", "gracefully-exiting"]),
    "sglang-0.5.9-cpu-tp2-good": (["ready", "ready"], {}, []),
    "sglang-0.5.9-cpu-tp2-flags-good": (["ready", "ready"], {}, []),
    "sglang-0.5.9-cpu-tp4-good": (["ready"] * 4, {}, []),
    "sglang-0.5.9-cpu-tp2-weights-hung": (["weights", "weights"], {}, []),
    "sglang-0.5.9-cpu-tp2-scheduler-hung": (["server", "graph-capture"], {}, []),
    "sglang-0.5.9-cpu-tp2-warmup-hung": (["warmup", "warmup"], {}, []),
    # Rebuilt, not recorded: see rebuilt.py.
    "sglang-0.5.9-tp8-good-rebuilt": (["ready"] * 8, {}, ["deepgemm-session"]),
    "sglang-0.5.9-tp8-good-again-rebuilt": (["ready"] * 8, {}, ["deepgemm-session"]),
    "sglang-0.5.9-tp8-weights-hung-rebuilt": (["weights"] * 8, {"TP5": ("weights-end",)}, []),
    "sglang-0.5.9-cpu-tp2-node-missing": (["distributed-init"], {}, []),
    "sglang-0.5.9-cpu-tp2-rank-killed": (
        ["weights", "weights"],
        {"TP1": WEIGHTS},
        ["scheduler-exception", "load-barrier", "child-failed"],
    ),
    "sglang-0.5.9-cpu-tp2-load-barrier-timeout": (
        ["weights", "weights"],
        {"TP1": WEIGHTS},
        [
            "monitored-barrier-many",
            "monitored-barrier-many",
            "scheduler-exception",
            "load-barrier",
            "child-failed",
        ],
    ),
    "sglang-0.5.9-cpu-tp2-shard-damaged": (
        ["weights", "weights"],
        {},
        ["scheduler-exception", "child-failed"],
    ),
    "sglang-0.5.9-cpu-tp2-watchdog-warmup-killed": (
        ["warmup"] * 2,
        {},
        [
            "watchdog-debug-info",
            "watchdog-debug-info",
            "pyspy-dump",
            "watchdog",
            "pyspy-dump",
            "watchdog",
            "sigquit",
        ],
    ),
    "sglang-0.5.9-cpu-tp2-watchdog-diverged-killed": (
        ["warmup"] * 2,
        {},
        [
            "watchdog-debug-info",
            "watchdog-debug-info",
            "pyspy-dump",
            "watchdog",
            "pyspy-dump",
            "watchdog",
            "sigquit",
        ],
    ),
    "sglang-0.5.9-cpu-tp2-watchdog-warmup-hung": (
        ["warmup"] * 2,
        {},
        [
            "pyspy-dump",
            "other-watchdog",
            "watchdog-debug-info",
            "watchdog-debug-info",
            "pyspy-dump",
            "soft-watchdog",
            "pyspy-dump",
            "soft-watchdog",
            "watchdog-debug-info",
            "watchdog-debug-info",
            "pyspy-dump",
            "soft-watchdog",
            "pyspy-dump",
            "soft-watchdog",
        ],
    ),
    "sglang-0.5.9-cpu-tp2-watchdog-weights-hung": (
        ["weights"] * 2,
        {},
        [
            "pyspy-dump",
            "other-watchdog",
            "pyspy-dump",
            "other-watchdog",
            "pyspy-dump",
            "soft-watchdog",
            "pyspy-dump",
            "soft-watchdog",
            "pyspy-dump",
            "other-watchdog",
            "pyspy-dump",
            "soft-watchdog",
            "pyspy-dump",
            "soft-watchdog",
        ],
    ),
    "sglang-0.5.9-cpu-tp2-watchdog-good": (
        ["ready"] * 2,
        {},
        [
            "pyspy-dump",
            "other-watchdog",
            "pyspy-dump",
            "other-watchdog",
            "pyspy-dump",
            "other-watchdog",
            "pyspy-dump",
            "other-watchdog",
            "pyspy-dump",
            "other-watchdog",
            "pyspy-dump",
            "other-watchdog",
        ],
    ),
    "sglang-0.5.15-tp1-good": (["ready"], {}, []),
    "sglang-0.5.15-tp2-good": (["ready", "ready"], {}, []),
    "sglang-0.5.15-tp2-distributed-init-hung": (
        ["distributed-init", "start"],
        {"TP1": ("dist-init-begin",)},
        [],
    ),
    "sglang-0.5.15-tp2-weights-hung": (["weights", "weights"], {"TP1": WEIGHTS}, []),
    "sglang-0.5.15-tp2-graph-capture-hung": (["graph-capture", "graph-capture"], {}, []),
    "sglang-0.5.15-tp2-warmup-hung": (["warmup", "warmup"], {}, []),
    "sglang-0.5.23-cpu-tp2-good": (["ready", "ready"], {}, []),
    "sglang-0.5.23-cpu-tp2-distributed-init-hung": (
        ["distributed-init", "distributed-init"],
        {},
        [],
    ),
}


def _timeline(name):
    return read_timeline((DIRECTORY / f"{name}.log").read_bytes(), SGLANG)


def test_every_sample_log_is_in_the_table():
    assert {path.stem for path in DIRECTORY.glob("*.log")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_sample_log_is_recognised_and_tells_how_far_each_rank_came(name):
    phases, lacks, signs = CASES[name]
    timeline = _timeline(name)
    ranks = expected_ranks(timeline.launch.sizes)
    assert detect_engine((DIRECTORY / f"{name}.log").read_bytes()) == "sglang"
    assert [phase_of(timeline, rank) for rank in ranks] == phases
    assert lacking(timeline) == lacks
    assert [sign.id for sign in timeline.signs] == signs
    assert timeline.launch.on_cpu is ("-cpu-" in name)
    assert timeline.launch.model.startswith("/models/")
    assert timeline.launches == 1
    if "node-missing" not in name:  # of two ranks on two nodes, this one has one
        assert len(ranks) == timeline.launch.sizes["tp"] == int(re.search(r"tp(\d)", name)[1])


@pytest.mark.parametrize("name", CASES)
def test_milestones_come_in_the_order_of_the_phases(name):
    timeline = _timeline(name)
    for rank in timeline.ranks.values():
        order = [PHASES.index(reached.phase) for reached in rank.milestones]
        assert order == sorted(order)
        assert [reached.number for reached in rank.milestones] == sorted(
            reached.number for reached in rank.milestones
        )


@pytest.mark.parametrize("name", [name for name in CASES if "good" in name])
def test_a_good_log_reaches_every_milestone_of_its_release(name):
    timeline = _timeline(name)
    launch = {"args", "http-process", "http-started", "model-info", "ready"}
    assert launch <= set(timeline.ranks[""].counts)
    each = {
        "dist-init-begin",
        "dist-init-end",
        "weights-begin",
        "weights-end",
        "kv-cache-allocated",
        "memory-pool-end",
    }
    if "-cpu-" not in name:
        each |= {"capture-begin", "capture-end"}
    if "0.5.9" not in name:
        each |= {"tree-cache"}
    for rank in expected_ranks(timeline.launch.sizes):
        assert each <= set(timeline.ranks[rank].counts)
    first = expected_ranks(timeline.launch.sizes)[0]
    assert {"scheduler-built", "warmup-prefill"} <= set(timeline.ranks[first].counts)
    assert all(bar.done == bar.total for bar in timeline.bars.values())
    assert "weight-shards" in timeline.bars


def test_the_last_exception_of_a_traceback_is_kept_with_the_rank_that_printed_it():
    timeline = _timeline("sglang-0.5.9-cpu-tp2-shard-damaged")
    assert timeline.ranks["TP0"].exception == (
        "safetensors._safetensors_rust.SafetensorError: Error while deserializing header: "
        "incomplete metadata, file not fully covered"
    )
    assert timeline.ranks["TP1"].exception == ""


def test_a_barrier_that_timed_out_names_the_rank_that_did_not_come():
    timeline = _timeline("sglang-0.5.9-cpu-tp2-load-barrier-timeout")
    assert [sign.blamed for sign in timeline.signs[:2]] == [(1,), (1,)]
    waited_s = timeline.signs[2].time_s - timeline.ranks["TP0"].milestones[-1].time_s
    assert 480 <= waited_s <= 490


def test_no_sample_log_holds_anything_of_the_machine_that_made_it():
    for path in DIRECTORY.glob("*.log"):
        assert not re.search(rb"/root|/work|/tmp/|/home/|/opt/", path.read_bytes()), path.name


def test_logs_that_are_rebuilt_and_not_recorded_say_so_and_are_what_their_maker_makes():
    rebuilt = runpy.run_path(str(Path(__file__).with_name("rebuilt.py")))
    names = {path.name for path in DIRECTORY.glob("*.log") if "rebuilt" in path.name}
    assert names == set(rebuilt["FILES"])
    for name in names:
        assert (DIRECTORY / name).read_bytes() == rebuilt["text"](name).encode()
        assert name in (DIRECTORY / "README.md").read_text(encoding="utf-8")
