"""Threads that spin: which loop it is, and that what polls in good health is none."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
import restricted
from looks import AS_RANK, Watch, has_used, judged, told_by

from hangdoctor import engines
from hangdoctor.busy import Busy, find_loop, is_runaway
from hangdoctor.collect import Observer
from hangdoctor.diagnose import diagnose
from hangdoctor.facts.fold import derive
from hangdoctor.model import OpenFile
from hangdoctor.recording import load
from hangdoctor.rules.loops import loop_words

sys.path.insert(0, str(Path(__file__).parent))
import scenarios as told  # test material beside the tests
from scenarios import Does, good_log, launch

SGLANG = engines.load("sglang")
RECORDINGS = Path(__file__).parent / "recordings"
LOG = good_log(("TP0", "TP1"), "load-end")
WAITS = Does(stack=told.BARRIER)
LOOPS = ("eventfd-runaway", "pipe-chatter", "busy-without-progress")
replace = msgspec.structs.replace


def verdict(recording):
    return diagnose(derive(recording, SGLANG), SGLANG)


def spins(tmp_path, seconds=100, **does):
    rank = Does(stack=told.LOADING, state="R", cpu_pct=100, **does)
    return launch(tmp_path, {"TP0": rank, "TP1": WAITS}, log=LOG, seconds=seconds)


@pytest.mark.parametrize("name", ["h200-tp2-load-eventfd-r0", "h200-tp2-load-eventfd-live"])
def test_the_eventfd_loop_of_a_recording_is_its_cause(name):
    found = verdict(load(RECORDINGS / name))
    (culprit,) = found.culprits
    loop = told_by(found, "eventfd-runaway")
    assert (loop.verdict, loop.culprits) == ("found", (culprit,))
    assert f"for {culprit}, which writes to and reads from an eventfd" in found.title


def test_a_loop_that_only_writes_is_told_from_one_that_reads_its_own(tmp_path):
    only = verdict(spins(tmp_path / "a", writes=600_000, own_reads=False))
    assert "TP0, which writes to an eventfd 600,000 times a second" in only.title
    own = verdict(spins(tmp_path / "b", writes=600_000))
    assert "TP0, which writes to and reads from an eventfd" in own.title
    assert (only.state, only.culprits, own.state) == ("hung", ("TP0",), "hung")


def test_small_writes_of_another_size_are_chatter_on_a_pipe(tmp_path):
    found = verdict(spins(tmp_path, writes=300_000, bytes_per_write=1))
    chatter = told_by(found, "pipe-chatter")
    assert "TP0 makes 300,000 small writes or reads a second on a pipe" in chatter.title
    assert chatter.verdict == "undecided"
    assert told_by(found, "eventfd-runaway") is None


@pytest.mark.parametrize(
    "healthy",
    [
        {"writes": 16_256},
        {"writes": 150_000, "sleeps": 140_000},
        {"writes": 600_000, "reads_per_s": 90 << 20},
    ],
    ids=["a flood over ZMQ", "threads that wake each other", "beside a load"],
)
def test_a_healthy_rate_of_writes_is_no_loop(healthy, tmp_path):
    found = verdict(spins(tmp_path, **healthy))
    assert told_by(found, "eventfd-runaway") is None


@pytest.mark.parametrize("stack", [told.IDLE_BROADCAST, told.RECEIVE, told.ON_IDLE])
def test_an_idle_server_has_no_loop_that_is_a_fault_with_and_without_its_log(stack, tmp_path):
    idle = Does(stacks=(stack, told.RECEIVE), state="R", cpu_pct=100, writes=400_000)
    for log in (good_log(("TP0", "TP1"), ""), None):
        recording = launch(
            tmp_path / str(bool(log)),
            {"TP0": idle, "TP1": idle},
            log=log,
            seconds=3700,
            began_s=3600,
            launcher=told.SERVES,
        )
        for _, _, found in judged(recording):
            rules = {finding.rule for finding in found.findings}
            assert not rules & set(LOOPS)


def busy(tid=1, **counters):
    return Busy(tid=tid, name="t", cpu_pct=99.0, system_pct=0.0, **counters)


def test_two_threads_that_answer_each_other_are_no_runaway_loop():
    one = busy(1, write_calls_per_s=90e3, bytes_per_write=8.0, read_calls_per_s=60e3)
    other = busy(2, write_calls_per_s=60e3, bytes_per_write=8.0, read_calls_per_s=90e3)
    assert find_loop((one, other), {}, None).kind == "chatter"
    assert find_loop((one,), {}, None).kind == "eventfd-own"


def test_the_eventfd_that_stirs_is_named_by_the_number_that_processes_share():
    files = [
        OpenFile(7, "eventfd", "anon_inode:[eventfd]", position=0, identity=40, stirs=False),
        OpenFile(9, "eventfd", "anon_inode:[eventfd]", position=3, identity=41, stirs=True),
    ]
    one = busy(write_calls_per_s=9e5, bytes_per_write=8.0, read_calls_per_s=0.0)
    assert find_loop((one,), {}, files).files == ("descriptor 9, number 41 in all processes",)


def test_a_full_eventfd_that_refuses_each_write_is_a_runaway_too():
    assert is_runaway(busy(write_calls_per_s=5e5, bytes_per_write=0.0))
    assert not is_runaway(busy(write_calls_per_s=5e5, bytes_per_write=121.0))
    assert not is_runaway(busy())


# --- On real processes ----------------------------------------------------------------------------

KINDS = {
    "eventfd_own": "eventfd-own",
    "pipe": "pipe",
    "send": "calls",
    "python_spin": "python",
    "native_spin": "native",
    "poll": None,
    "work": None,
}


def loop_of(program, how, rank_of=lambda started: started.pid):
    started = program("loops", how, before=AS_RANK)
    with Observer([started.pid]) as observer:
        watch = Watch(observer)
        watch.look("files", "stacks")
        for _ in range(3):
            has_used(rank_of(started), 0.2 if how != "poll" else 0.01)
            found = watch.look("files", "stacks")
    return watch.facts.rank("TP0"), found


@pytest.mark.parametrize("how", KINDS)
def test_a_real_loop_is_told_by_its_kind(how, program):
    rank, _ = loop_of(program, how)
    assert (rank.loop.kind if rank.loop else None) == KINDS[how]
    if how == "eventfd_own":
        assert rank.loop.files[0].startswith("descriptor ")
        assert rank.loop.thread.sleeps_per_s < 1000


def test_a_real_loop_that_only_writes_to_an_eventfd_is_told(program):
    started = program("eventfd_loop", before=AS_RANK)
    with Observer([started.pid]) as observer:
        watch = Watch(observer)
        watch.look("files")
        for _ in range(2):
            has_used(started.pid, 0.2)
            watch.look("files")
    rank = watch.facts.rank("TP0")
    assert rank.loop.kind == "eventfd"
    assert rank.runaway_s > 0
    if hasattr(os, "eventfd"):
        assert rank.loop.files[0].startswith(f"descriptor {started.said['fd']}")


def test_real_threads_that_wake_each_other_over_eventfds_are_no_loop(program):
    rank, found = loop_of(program, "eventfd_answers")
    assert rank.runaway_s is None
    assert rank.loop is None or rank.loop.kind in ("chatter", "calls")
    assert told_by(found, "eventfd-runaway") is None


def test_a_real_loop_on_an_eventfd_names_who_shares_it(program):
    started = program("ranks", "eventfd", "notify", "sleep")
    with Observer([started.pid]) as observer:
        watch = Watch(observer)
        watch.look("files")
        for _ in range(2):
            has_used(started.said["ranks"][0], 0.2)
            watch.look("files")
    (file,) = watch.facts.rank("TP0").loop.files
    assert re.fullmatch(
        r"descriptor \d+, number \d+ in all processes, which TP1 has open too \(descriptor \d+\)",
        file,
    )


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 only")
def test_with_consent_the_calls_of_a_loop_that_no_counter_shows_are_told(program):
    started = program("loops", "send", before=AS_RANK)
    with Observer([started.pid], peek=True) as observer:
        watch = Watch(observer)
        watch.look("waits")
        caught = set()
        while caught != {"sendto", "recvfrom"}:  # in few peeks only one of them may be seen
            has_used(started.pid, 0.2)
            watch.look("waits")
            rank = watch.facts.rank("TP0")
            caught = set(rank.loop.caught_in) if rank.loop else set()
    assert "that no counter shows (" + ", ".join(rank.loop.caught_in) in loop_words(rank)
    assert "(unix socket, other end at TP0) in " in rank.caught_in
    assert watch.facts.tracks[started.pid].process.tracer_pid == 0


@pytest.mark.skipif(not restricted.IS_ROOT, reason="hiding files of /proc takes root")
def test_without_tracing_a_loop_is_still_told_by_its_counters(program):
    started = program("loops", "eventfd_own", before=AS_RANK)
    with tempfile.TemporaryDirectory(prefix="hangdoctor-rights-") as place:
        Path(place).chmod(0o755)
        command = restricted.hangdoctor(
            place, "diagnose", started.pid, "--for=8", "--stall-after=1", "--format=json",
            deny_tracing=True, hide=[started.pid],
        )  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    found = json.loads(done.stdout)
    (loop,) = [each for each in found["findings"] if each["rule"] == "eventfd-runaway"]
    assert "TP0 writes to and reads from an eventfd" in loop["title"]
    assert "syscall of TP0" in {each["what"] for each in found["missing"]}
    assert found["state"] != "hung"


@pytest.mark.skipif(not restricted.IS_ROOT, reason="only root can become another user")
def test_another_users_loop_is_unknown_and_its_counters_missing(program):
    started = program("loops", "eventfd_own", before=AS_RANK)
    with tempfile.TemporaryDirectory(prefix="hangdoctor-rights-") as place:
        Path(place).chmod(0o755)
        options = ("--for=4", "--stall-after=1", "--format=json")
        done = subprocess.run(
            restricted.hangdoctor(place, "diagnose", started.pid, *options, user=restricted.NOBODY),
            capture_output=True,
            text=True,
            check=False,
        )
    assert "Traceback" not in done.stderr
    found = json.loads(done.stdout)
    assert found["state"] in ("unknown", "starting")
    assert "eventfd-runaway" not in {each["rule"] for each in found["findings"]}
    assert "io of TP0" in {each["what"] for each in found["missing"]}
