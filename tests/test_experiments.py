"""The next experiment: what it costs, what it splits, and that it can be run as it is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from hangdoctor import engines, experiments
from hangdoctor.diagnose import diagnose
from hangdoctor.facts.fold import derive
from hangdoctor.model import FileLock, HeldFile, Weights
from hangdoctor.recording import load
from hangdoctor.render.json import document
from hangdoctor.render.text import to_text
from hangdoctor.rules import RULES, rule_id

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import scenarios as told  # noqa: E402  # test material beside the tests
from scenarios import Does, good_log, launch  # noqa: E402

SGLANG = engines.load("sglang")
NAMES = ("TP0", "TP1")
LOG = good_log(NAMES, "load-end")
BEGAN_S = LOG[-1][0]
JOINS = Does(stack=told.DIST)
READS = Does(stack=told.MMAP, state="D", kernel="folio_wait_bit_common", loads_per_s=20e6)
ASLEEP = Does(stack=told.MMAP, state="D", kernel="folio_wait_bit_common")
RECORDINGS = sorted(path.parent for path in HERE.glob("recordings/*/recording.json"))
NAMES_FILLED_IN = {"ask_ras", "pid", "rank", "launch", "file", "skip", "lock", "port", "seconds"}


def steps(recording):
    return {step.id: step for step in diagnose(derive(recording, SGLANG), SGLANG).experiments}


def stalled(tmp_path, seconds=70, **more):
    doing = ((0, JOINS), (BEGAN_S, READS), (BEGAN_S + 40, ASLEEP))
    return launch(
        tmp_path,
        dict.fromkeys(NAMES, doing),
        log=LOG,
        seconds=BEGAN_S + seconds,
        storage="fuse.slow",
        **more,
    )


@pytest.mark.parametrize("each", experiments.load("sglang"), ids=lambda each: each.id)
def test_an_experiment_splits_causes_that_rules_leave_open(each):
    rules = {rule_id(rule) for rule in RULES}
    kinds = {wait.kind for wait in SGLANG.waits} | {""}
    assert set(each.after) <= rules
    assert each.after
    assert set(each.waits) <= kinds
    assert len(each.outcomes) > 1
    assert len({outcome.means for outcome in each.outcomes}) == len(each.outcomes)
    words = [each.command, each.consent, *(o.seen + o.means for o in each.outcomes)]
    assert {name for text in words for name in re.findall(r"\{(\w+)\}", text)} <= NAMES_FILLED_IN


def test_ids_are_unique_and_the_cheapest_come_first():
    found = experiments.load("sglang")
    assert len({each.id for each in found}) == len(found)
    kinds = [experiments.KINDS.index(each.kind) for each in found]
    assert kinds == sorted(kinds)


def test_a_stalled_shard_is_read_by_hand_before_anybody_restarts(tmp_path):
    found = steps(stalled(tmp_path))
    assert list(found) == ["wait", "read-shard", "no-mmap"]
    part = derive(stalled(tmp_path / "again"), SGLANG).loading.ranks[710]
    (path, file), *_ = [item for item in part.files.items() if item[1].held]
    command = found["read-shard"].command
    assert f"/proc/710/root{path} " in command
    assert f"skip={file.read_bytes >> 20} " in command
    assert "TP0" in found["read-shard"].outcomes[1][1]
    assert found["no-mmap"].takes_s is None


def test_the_time_to_wait_is_what_is_lacking_until_a_verdict(tmp_path):
    early = steps(stalled(tmp_path / "early", seconds=65))["wait"]
    later = steps(stalled(tmp_path / "later", seconds=75))["wait"]
    assert early.takes_s - later.takes_s == pytest.approx(10, abs=2)
    assert f"--for {early.takes_s:.0f}" in early.command
    assert early.command.startswith("hangdoctor diagnose 700 ")


def test_a_launch_that_is_well_needs_no_experiment(tmp_path):
    idle = dict.fromkeys(NAMES, Does(stack=told.IDLE_BROADCAST))
    log = good_log(NAMES, "")
    ready = launch(tmp_path, idle, log=log, seconds=log[-1][0] + 9, launcher=told.SERVES)
    assert not steps(ready)
    waits = {"TP0": Does(stack=told.BARRIER), "TP1": READS}
    assert not steps(launch(tmp_path / "slow", waits, log=LOG, seconds=90, storage="nfs4"))


def test_what_is_so_already_is_not_tried(tmp_path):
    stuck = {"TP0": Does(stack=told.CAPTURE_ALL_REDUCE), "TP1": Does(stack=told.CAPTURE)}
    log = good_log(NAMES, "capture-end")
    command = "python3 -m sglang.launch_server --model-path /m"

    def relaunches(place, options=""):
        recording = launch(
            tmp_path / place, stuck, log=log, seconds=log[-1][0] + 70, command=command + options
        )
        return [step.command for step in steps(recording).values() if step.kind == "relaunch"]

    assert relaunches("plain") == ["--disable-cuda-graph"]
    assert relaunches("without", " --disable-cuda-graph") == []


def test_a_lock_whose_file_is_known_is_asked_for_its_holder(tmp_path):
    path = "/root/.cache/x y/lock"
    lock = FileLock(path=path, kind="file", owner="dead", holders=())
    ranks = {"TP0": Does(stack=told.CAPTURE_ALL_REDUCE), "TP1": Does(stack=told.BATON)}
    log = good_log(NAMES, "capture-end")
    recording = launch(tmp_path, ranks, log=log, seconds=log[-1][0] + 70, locks=(lock,))
    found = steps(recording)
    assert found["lock-holder"].command == "fuser -v '/root/.cache/x y/lock'"
    assert "native-stack" not in found  # what it waits for is told


@pytest.mark.parametrize("directory", RECORDINGS, ids=lambda path: path.name)
def test_what_is_printed_of_a_recording_is_whole(directory):
    facts = derive(load(directory), SGLANG)
    found = diagnose(facts, SGLANG)
    report = to_text(facts, found)
    for step, told_of in zip(found.experiments, document(facts, found)["experiments"], strict=True):
        assert "{" not in step.command + step.consent
        assert step.command in report
        assert told_of["command"] == step.command
        assert len(told_of["outcomes"]) > 1
    assert bool(found.experiments) == (found.state in ("hung", "unknown"))


def test_the_shard_can_be_read_by_the_command_as_it_is_printed(tmp_path):
    shard = tmp_path / "model 1.safetensors"
    shard.write_bytes(bytes(3 << 20))
    recording = stalled(tmp_path / "launch")
    mine = {710: (HeldFile(str(shard), 3 << 20, 1 << 20),)}
    snapshots = tuple(
        msgspec.structs.replace(each, weights=Weights(held=mine)) if each.weights else each
        for each in recording.snapshots
    )
    command = steps(msgspec.structs.replace(recording, snapshots=snapshots))["read-shard"].command
    done = subprocess.run(
        ["sh", "-c", command.replace("/proc/710/", f"/proc/{os.getpid()}/")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"{2 << 20} bytes" in done.stderr
