"""The engine's own time-outs, counted down: only where their length and their begin were seen."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec
import pytest

from hangdoctor import engines
from hangdoctor.diagnose import diagnose
from hangdoctor.facts.fold import begin, derive, step
from hangdoctor.limits import countdown_words, countdowns
from hangdoctor.model import Installation, LogSource
from hangdoctor.render.json import document
from hangdoctor.render.text import to_text

sys.path.insert(0, str(Path(__file__).parent))
import scenarios as told  # test material beside the tests
from scenarios import Does, good_log, launch

SGLANG = engines.load("sglang")
NAMES = ("TP0", "TP1")
LOADED = [line for line in good_log(NAMES, "kv") if not line[1].startswith("TP1| Load weight end")]
LOADED_S = LOADED[-1][0]
BARRIER, LOADS = Does(stack=told.BARRIER), Does(stack=told.MMAP)
WATCHDOG = ("WatchdogRaw._watchdog_once utils/watchdog.py:147", "Thread.run threading.py:1012")
FORWARD = Does(stack=told.BATCH_FORWARD, threads=(WATCHDOG,))
REDUCES = Does(stack=told.BATCH_ALL_REDUCE, threads=(WATCHDOG,))


def barrier(tmp_path, *, seconds=LOADED_S + 100, log=LOADED, **more):
    """Return a launch whose first rank waits in the barrier after the load."""
    ranks = {"TP0": ((0, LOADS), (LOADED_S, BARRIER)), "TP1": LOADS}
    return launch(tmp_path, ranks, log=log, seconds=seconds, **more)


def warmup(tmp_path, environment, ranks=None, **more):
    """Return a launch in its first request, 60 s after that began."""
    log = good_log(NAMES, "prefill")
    recording = launch(
        tmp_path,
        ranks or {"TP0": FORWARD, "TP1": REDUCES},
        log=log,
        seconds=log[-1][0] + 60,
        launcher=told.SERVES,
        launcher_threads=[told.WARMUP_THREAD],
        **more,
    )
    here = Installation(name="sglang", version="0.5.15", path="/s", environment=environment)
    header = msgspec.structs.replace(recording.header, installation=here)
    return msgspec.structs.replace(recording, header=header)


def counted(recording):
    return {each.id: each for each in countdowns(derive(recording, SGLANG), SGLANG)}


def said(recording):
    facts = derive(recording, SGLANG)
    return to_text(facts, diagnose(facts, SGLANG))


def test_the_barrier_after_the_load_is_counted_from_the_line_of_the_rank_that_waits(tmp_path):
    recording = barrier(tmp_path)
    left = counted(recording)["post-load-barrier"]
    assert (left.ranks, left.limit_s) == (("TP0",), 480)
    assert abs(left.least_s - 380) <= 2
    assert left.most_s == left.least_s
    report = said(recording)
    assert "the wait of TP0 ends by itself in 380 s (a limit of 480 s)" in report
    assert "the log will say 'could finish the model loading, but" in report


def test_json_tells_what_is_counted(tmp_path):
    facts = derive(barrier(tmp_path), SGLANG)
    (left,) = document(facts, diagnose(facts, SGLANG))["limits"]
    assert left["limit"] == "post-load-barrier"
    assert (left["left_least_s"], left["left_most_s"]) == (380, 380)
    assert left["message"].startswith("could finish the model loading")


def test_every_look_tells_the_same_end(tmp_path):
    recording = barrier(tmp_path, seconds=LOADED_S + 200)
    facts, ends = begin(recording.header, SGLANG), set()
    for snapshot, blocks in recording.steps():
        facts = step(facts, snapshot, blocks, SGLANG)
        ends |= {
            round(bound + facts.at_s)
            for left in countdowns(facts, SGLANG)
            for bound in (left.least_s, left.most_s)
        }
    assert ends
    assert max(ends) - min(ends) <= 2


def test_one_who_comes_late_reads_the_begin_in_the_log(tmp_path):
    left = counted(barrier(tmp_path, began_s=LOADED_S + 80))["post-load-barrier"]
    assert abs(left.most_s - 380) <= 2
    assert left.least_s == left.most_s


def test_without_the_begin_only_the_latest_end_is_told(tmp_path):
    blind = barrier(tmp_path / "no", log=None, began_s=LOADED_S + 80)
    left = counted(blind)["post-load-barrier"]
    assert left.least_s is None
    assert 460 <= left.most_s <= 475
    assert "at the latest" in countdown_words(left)
    piped = barrier(tmp_path / "pipe", began_s=LOADED_S + 80)
    header = msgspec.structs.replace(piped.header, log=LogSource(origin="-"))
    left = counted(msgspec.structs.replace(piped, header=header))["post-load-barrier"]
    assert left.least_s is None


def test_another_ranks_line_is_not_when_a_rank_began_to_wait(tmp_path):
    log = [line.replace("TP0| Load weight end", "TP1| Load weight end") for _, line in LOADED]
    log = [(at_s, line) for (at_s, _), line in zip(LOADED, log, strict=True)]
    left = counted(barrier(tmp_path, log=log, began_s=LOADED_S + 80))["post-load-barrier"]
    assert left.least_s is None


def test_a_wait_that_has_only_just_begun_or_outlives_its_limit_is_not_counted(tmp_path):
    assert not counted(barrier(tmp_path / "new", seconds=LOADED_S + 8))
    assert not counted(barrier(tmp_path / "old", seconds=LOADED_S + 500))


def test_a_rank_that_loads_for_longer_than_the_others_will_wait_is_named(tmp_path):
    slow = Does(stack=told.MMAP, loads_per_s=10e6)
    recording = launch(
        tmp_path,
        {"TP0": BARRIER, "TP1": ((0, Does(stack=told.DIST)), (LOADED_S, slow))},
        log=LOADED,
        seconds=LOADED_S + 60,
        storage="nfs4",
    )
    finding = next(
        each
        for each in diagnose(derive(recording, SGLANG), SGLANG).findings
        if each.rule == "ends-by-itself"
    )
    takes_s = re.search(r", before TP1 has loaded \((\d+) s\)$", finding.title)
    assert float(takes_s[1]) == pytest.approx(940, rel=0.05)
    quick = Does(stack=told.MMAP, loads_per_s=100e6)
    recording = launch(
        tmp_path / "quick",
        {"TP0": BARRIER, "TP1": ((0, Does(stack=told.DIST)), (LOADED_S, quick))},
        log=LOADED,
        seconds=LOADED_S + 60,
        storage="nfs4",
    )
    assert "before TP1" not in said(recording)


@pytest.mark.parametrize(
    ("environment", "limit_s"),
    [({}, 600), ({"SGLANG_WARMUP_TIMEOUT": "90"}, 90), ({"SGLANG_WARMUP_TIMEOUT": "-1"}, 600)],
)
def test_the_warm_up_is_as_long_as_the_launchers_environment_says(tmp_path, environment, limit_s):
    left = counted(warmup(tmp_path, environment))["warmup-request"]
    assert left.ranks == ("launcher",)
    assert left.limit_s == limit_s
    assert abs(left.most_s - (limit_s - 60)) <= 2


def test_an_environment_that_was_not_seen_is_not_counted_with(tmp_path):
    recording = warmup(tmp_path, None)
    left = counted(recording)["warmup-request"]
    assert left.limit_s is left.least_s is left.most_s is None
    assert "SGLANG_WARMUP_TIMEOUT" in countdown_words(left)
    report = said(recording)
    assert "ends by itself after" not in report.partition("Because")[0]


def test_options_set_a_limit_and_one_that_was_not_seen_is_not_counted(tmp_path):
    def rendezvous(place, **more):
        log = [
            line
            for line in good_log(("TP0", "TP1"), "nccl")
            if more.pop("args", True) or "server_args" not in line[1]
        ]
        ranks = {"TP0": Does(stack=told.TCP_STORE), "TP1": Does(stack=told.IMPORTS)}
        return launch(tmp_path / place, ranks, log=log, seconds=log[-1][0] + 60, **more)

    assert counted(rendezvous("default"))["rendezvous-gpu"].limit_s == 600
    command = "python3 -m sglang.launch_server --model-path /m --dist-timeout 120"
    assert counted(rendezvous("set", command=command))["rendezvous-gpu"].limit_s == 120
    hidden = "python3 -m sglang.launch_server --config /etc/sglang.yaml"
    left = counted(rendezvous("hidden", command=hidden, args=False))["rendezvous-gpu"]
    assert left.limit_s is None
    assert "options" in left.unseen


def test_the_watchdog_counts_only_where_its_thread_can_run(tmp_path):
    left = counted(warmup(tmp_path / "there", {}))["watchdog"]
    assert left.limit_s == 300
    assert abs(left.least_s - 240) <= 2  # it looks every half of its time
    assert 390 <= left.most_s <= 410
    none = {"TP0": Does(stack=told.BATCH_FORWARD), "TP1": Does(stack=told.BATCH_ALL_REDUCE)}
    assert "watchdog" not in counted(warmup(tmp_path / "none", {}, none))
    own = warmup(
        tmp_path / "own", {}, command="python3 -m sglang.launch_server --watchdog-timeout 9"
    )
    assert "watchdog" not in counted(own)  # it should have ended it long ago


def test_a_server_of_disaggregated_prefill_has_another_limit(tmp_path):
    command = "python3 -m sglang.launch_server --model-path /m --disaggregation-mode prefill"
    assert "warmup-request" not in counted(warmup(tmp_path, {}, command=command))


def test_a_launch_that_is_ready_has_no_end(tmp_path):
    idle = {"TP0": Does(stack=told.IDLE_BROADCAST), "TP1": Does(stack=told.IDLE_BROADCAST)}
    log = good_log(NAMES, "")
    recording = launch(tmp_path, idle, log=log, seconds=log[-1][0] + 60, launcher=told.SERVES)
    assert not counted(recording)
