"""How long a rank is in its phase: by the log's stamps, and by what was seen."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from looks import judged

from hangdoctor import engines
from hangdoctor.commands.sources import longest_phases
from hangdoctor.diagnose import diagnose
from hangdoctor.facts.fold import derive, step
from hangdoctor.recording import bare_log
from hangdoctor.render.json import document
from hangdoctor.render.text import to_text

sys.path.insert(0, str(Path(__file__).parent))
import scenarios as told  # test material beside the tests
from scenarios import Does, good_log, launch

SGLANG = engines.load("sglang")
BEGAN_S = next(at_s for at_s, line in good_log(["TP0"], "load-end") if "Load weight begin" in line)
LOADS = ((0, Does(stack=told.DIST)), (BEGAN_S, Does(stack=told.MMAP, reads_per_s=1e8)))


def derived(tmp_path, log, **more):
    return derive(launch(tmp_path, {"TP0": LOADS}, log=log, **more), SGLANG)


def test_a_phase_that_began_while_we_watched_is_as_old_as_its_line(tmp_path):
    log = good_log(["TP0"], "load-end")
    (rank,) = derived(tmp_path, log, seconds=90).ranks
    assert rank.phase == "weights"
    assert abs(rank.in_phase_s - (90 - BEGAN_S)) <= 1
    later = derived(tmp_path / "later", log, seconds=120).ranks[0]
    assert later.in_phase_s == rank.in_phase_s + 30


def test_one_that_began_before_we_came_is_dated_by_the_log(tmp_path):
    log = good_log(["TP0"], "load-end")
    whole = derived(tmp_path / "whole", log, seconds=300).ranks[0]
    late = derived(tmp_path / "late", log, seconds=300, began_s=280).ranks[0]
    assert abs(whole.in_phase_s - late.in_phase_s) <= 1
    assert late.in_phase_s > 200


def test_without_a_log_it_is_at_least_what_we_saw(tmp_path):
    (rank,) = derived(tmp_path, None, seconds=300, began_s=280).ranks
    assert rank.in_phase_s == 20


def test_lines_without_a_stamp_make_no_phase_younger(tmp_path):
    log = good_log(["TP0"], "load-end")
    quiet = derived(tmp_path / "quiet", log, seconds=100).ranks[0]
    chatty = derived(
        tmp_path / "chatty", [*log, (80.0, "warnings.warn("), (99.0, "  warn(")], seconds=100
    ).ranks[0]
    assert chatty.in_phase_s == quiet.in_phase_s


def test_json_tells_it_of_each_rank_that_has_a_process(tmp_path):
    facts = derived(tmp_path, good_log(["TP0"], "load-end"), seconds=90)
    (rank,) = document(facts, diagnose(facts, SGLANG))["ranks"]
    assert rank["in_phase_s"] == round(facts.ranks[0].in_phase_s, 1)
    gone = msgspec.structs.replace(facts, tracks={})
    assert step(gone, None, (), SGLANG).ranks[0].in_phase_s is None


def test_what_is_normal_is_told_with_who_says_so(tmp_path):
    recording = launch(tmp_path, {"TP0": LOADS}, log=good_log(["TP0"], "load-end"), seconds=90)
    facts = derive(recording, SGLANG)
    found = diagnose(facts, SGLANG)
    normal = document(facts, found)["normal"]
    assert abs(normal["in_phase_s"] - (90 - BEGAN_S)) <= 1
    assert (normal["longest_s"], normal["by"], normal["overdue"]) == (3600, "public reports", False)
    assert f"{normal['in_phase_s']:.0f} s in weights, up to 60 min is normal, by public" in to_text(
        facts, found
    )
    header = msgspec.structs.replace(recording.header, normal_s={"weights": 20.0})
    facts = derive(msgspec.structs.replace(recording, header=header), SGLANG)
    found = diagnose(facts, SGLANG)
    normal = document(facts, found)["normal"]
    assert (normal["longest_s"], normal["by"], normal["overdue"]) == (50, "good logs", True)
    assert found.state == "slow"
    assert "longer than the 50 s that are normal, by good logs" in to_text(facts, found)


def test_a_ready_launch_and_a_bare_log_are_in_no_phase_that_could_be_overdue(tmp_path):
    idle = {"TP0": Does(stack=told.RECEIVE)}
    log = good_log(["TP0"], "")
    ready = launch(tmp_path, idle, log=log, seconds=log[-1][0] + 5, launcher=told.SERVES)
    for recording in (ready, bare_log(ready.log_path)):
        assert diagnose(derive(recording, SGLANG), SGLANG).normal is None


def test_a_recording_of_a_good_start_says_what_is_normal_as_its_log_does():
    recording = Path(__file__).parent / "recordings" / "h200-tp2-good-warm"
    by_log = longest_phases([recording / "server.log"], "sglang")
    assert longest_phases([recording], "sglang") == by_log
    assert by_log["weights"] < 10


def test_a_launch_is_as_far_as_its_last_rank_one_that_still_imports_too(tmp_path):
    ranks = {
        "TP0": ((0, Does(stack=told.IMPORTS)), (10, Does(stack=told.DIST, maps_per_s=9e6))),
        "TP1": ((0, Does(stack=told.IMPORTS)), (30, Does(stack=told.DIST, maps_per_s=9e6))),
    }
    recording = launch(tmp_path, ranks, log=good_log(tuple(ranks), "args"), seconds=45)
    phases = {snapshot.at_s: found.phase for snapshot, _, found in judged(recording)}
    assert {phases[at_s] for at_s in range(3, 29)} == {"start"}
    assert phases[40] == "distributed-init"
