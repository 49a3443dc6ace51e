"""The verdict on every recording, and how it follows what is changed in the recording."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import msgspec
import pytest

from hangdoctor import engines
from hangdoctor.diagnose import diagnose
from hangdoctor.facts.fold import begin, derive, step
from hangdoctor.frames import is_at_any, matches
from hangdoctor.logs.timeline import phase_durations
from hangdoctor.model import SECTIONS, ProcessStacks, Stacks
from hangdoctor.recording import load

CASES = Path(__file__).parent / "recordings"
sys.path.insert(0, str(CASES))
import transform  # noqa: E402  # test material beside the recordings

SGLANG = engines.load("sglang")
NAMES = sorted(path.parent.name for path in CASES.glob("*/recording.json"))
STATES = {
    name: msgspec.toml.decode((CASES / name / "cause.toml").read_bytes())["state"] for name in NAMES
}
HUNG = [name for name in NAMES if STATES[name] == "hung"]
GOOD = [name for name in NAMES if STATES[name] == "ready"]
DEAD = [name for name in NAMES if STATES[name] == "dead"]
HUNG_AFTER_S = 40.0
"""Default of --stall-after, 20 s, twice."""
LOOK_S = 12.0
"""How far apart looks can be: stillness is seen from the first look after it began."""


def truth_of(name):
    return msgspec.toml.decode((CASES / name / "cause.toml").read_bytes())


@functools.cache
def case(name):
    """Return a recording and its verdict: most tests set one beside what became of it."""
    recording = load(CASES / name)
    return recording, verdict(recording)


def verdict(recording):
    return diagnose(derive(recording, SGLANG), SGLANG)


def check(recording, *, phase, culprits, still_s, name=""):
    """Assert phase and culprits; and `hung` where and only where the stillness allows it."""
    found = verdict(recording)
    assert found.phase == phase, name
    assert list(found.culprits) == culprits, name
    if still_s >= HUNG_AFTER_S + LOOK_S:
        assert found.state == "hung", name
    elif still_s < HUNG_AFTER_S:
        assert found.state in ("starting", "unknown"), name
    return found


def still_for(recording, name, factor=1.0):
    return recording.snapshots[-1].at_s - factor * truth_of(name)["stalled_since_s"]


@pytest.mark.parametrize("name", HUNG)
def test_a_stalled_launch_gets_its_phase_its_culprit_and_hung_only_after_long_enough(name):
    recording, truth = case(name)[0], truth_of(name)
    check(
        recording,
        phase=truth["phase"],
        culprits=truth["culprits"],
        still_s=still_for(recording, name),
    )


@pytest.mark.parametrize("name", GOOD)
def test_a_good_start_is_ready_with_nobody_to_blame(name):
    _, found = case(name)
    assert (found.state, found.phase, found.culprits) == ("ready", "ready", ())


@pytest.mark.parametrize("name", DEAD)
def test_a_launch_whose_rank_died_is_dead_at_once(name):
    (_, found), truth = case(name), truth_of(name)
    assert (found.state, found.phase) == ("dead", truth["phase"])
    assert list(found.culprits) == truth["culprits"]


@pytest.mark.parametrize("factor", [1.0, 3.0])
@pytest.mark.parametrize("name", NAMES)
def test_no_launch_is_called_hung_before_it_hangs(name, factor, tmp_path):
    recording = transform.scale_time(case(name)[0], factor, tmp_path)
    stalled_since_s = factor * truth_of(name).get("stalled_since_s", 1e9)
    facts = begin(recording.header, SGLANG)
    for snapshot, blocks in recording.steps():
        facts = step(facts, snapshot, blocks, SGLANG)
        found = diagnose(facts, SGLANG)
        if snapshot.at_s < stalled_since_s:
            assert found.state in ("starting", "slow", "ready", "unknown"), snapshot.at_s
        if snapshot.at_s < stalled_since_s + HUNG_AFTER_S:
            assert found.state != "hung", snapshot.at_s


@pytest.mark.parametrize("name", GOOD)
def test_a_good_start_that_is_met_at_any_moment_is_never_called_hung(name):
    recording = case(name)[0]
    for begun in range(0, len(recording.snapshots), 20):
        late = msgspec.structs.replace(recording, snapshots=recording.snapshots[begun:])
        facts = begin(late.header, SGLANG)
        for snapshot, blocks in late.steps():
            facts = step(facts, snapshot, blocks, SGLANG)
            if facts.watched_s > 60:
                break
            assert diagnose(facts, SGLANG).state not in ("hung", "dead"), (begun, snapshot.at_s)


@pytest.mark.parametrize("name", HUNG)
def test_the_culprit_follows_the_ranks_names(name, tmp_path):
    other = {"TP0": "TP1", "TP1": "TP0"}
    recording = transform.permute_ranks(case(name)[0], other, tmp_path)
    truth = truth_of(name)
    check(
        recording,
        phase=truth["phase"],
        culprits=[other[culprit] for culprit in truth["culprits"]],
        still_s=still_for(recording, name),
    )


@pytest.mark.parametrize("name", HUNG)
def test_seven_waiting_ranks_blame_the_same_one(name, tmp_path):
    truth = truth_of(name)
    waiting = next(rank for rank in ("TP0", "TP1") if rank not in truth["culprits"])
    copies = [f"TP{index}" for index in range(2, 8)]
    recording = transform.multiply_rank(case(name)[0], waiting, copies, tmp_path)
    found = check(
        recording,
        phase=truth["phase"],
        culprits=truth["culprits"],
        still_s=still_for(recording, name),
    )
    assert {"TP7", *truth["culprits"]} <= {rank for each in found.findings for rank in each.ranks}


@pytest.mark.parametrize("name", HUNG)
def test_the_verdict_rests_on_no_name_of_the_fault(name, tmp_path):
    recording, truth = transform.rename_fault(case(name)[0], tmp_path), truth_of(name)
    check(
        recording,
        phase=truth["phase"],
        culprits=truth["culprits"],
        still_s=still_for(recording, name),
    )


@pytest.mark.parametrize("name", HUNG)
def test_three_times_as_slow_gets_the_same_phase_and_culprit(name, tmp_path):
    recording, truth = transform.scale_time(case(name)[0], 3.0, tmp_path), truth_of(name)
    check(
        recording,
        phase=truth["phase"],
        culprits=truth["culprits"],
        still_s=still_for(recording, name, 3.0),
    )


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_a_section_less_makes_no_verdict_surer(name, section):
    recording, full = case(name)
    transform.assert_no_surer(verdict(transform.drop_section(recording, section)), full, section)


@pytest.mark.parametrize("name", NAMES)
def test_a_snapshot_less_makes_no_verdict_surer(name):
    recording, full = case(name)
    count = len(recording.snapshots)
    if name in DEAD:
        count -= 1  # the watching ended with the look that saw the death: without it, nobody died
    for index in {*range(0, count, max(1, count // 8)), *range(count - 4, count)}:
        transform.assert_no_surer(verdict(transform.drop_snapshot(recording, index)), full, index)


@pytest.mark.parametrize("name", NAMES)
def test_a_log_without_its_head_makes_no_verdict_surer(name, tmp_path):
    recording, full = case(name)
    size = recording.log_path.stat().st_size
    for part in (0.1, 0.5, 0.9, 1.0):
        cut = transform.cut_log_head(recording, int(size * part), tmp_path / str(part))
        transform.assert_no_surer(verdict(cut), full, part)


def test_a_frame_is_at_one_of_some_places_where_it_matches_one():
    frames = {
        frame
        for name in NAMES
        for snapshot in case(name)[0].snapshots
        if isinstance(snapshot.stacks, Stacks)
        for stacks in snapshot.stacks.by_pid.values()
        if isinstance(stacks, ProcessStacks)
        for thread in stacks.threads
        for frame in thread.frames
    }
    tables = {wait.frames for wait in SGLANG.waits} | {phase.frames for phase in SGLANG.phases}
    at = [(frame, table) for frame in frames for table in tables if is_at_any(frame, table)]
    assert len({table for _, table in at}) > 5
    assert at == [
        (frame, table)
        for frame in frames
        for table in tables
        if any(matches(frame, place) for place in table)
    ]


def test_what_is_normal_here_replaces_what_is_normal_anywhere():
    recording = load(CASES / "h200-tp2-good-warm")
    good = derive(recording, SGLANG).timeline
    longest_s = phase_durations(good)
    assert list(longest_s) == [
        "start",
        "distributed-init",
        "weights",
        "kv-cache",
        "graph-capture",
        "server",
        "warmup",
    ]
    assert longest_s["weights"] < 10
    slow = load(CASES / "h200-tp2-graph-spin-r1")  # silent, but compilers work below TP1
    header = msgspec.structs.replace(slow.header, normal_s=longest_s)
    slow = msgspec.structs.replace(slow, header=header)
    assert [verdict(each).state for each in (load(CASES / "h200-tp2-graph-spin-r1"), slow)] == [
        "starting",
        "slow",
    ]
