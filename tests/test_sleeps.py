"""A rank that sleeps and wakes by itself is not hung; one that sleeps for days, or polls, is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hangdoctor.commands.talk import Talk
from hangdoctor.render.json import document
from hangdoctor.render.live import view
from hangdoctor.render.text import to_text
from hangdoctor.sleeps import wakes_at_s
from hangdoctor.waits import same_wait

sys.path.insert(0, str(Path(__file__).parent))
import scenarios as told  # test material beside the tests
from looks import judged, told_by
from scenarios import Does, good_log, launch

from hangdoctor.model import ThreadWait

NAMES = ("TP0", "TP1")
LOAD = good_log(NAMES, "load-end")
SINCE_S = LOAD[-1][0]
JOINS = Does(stack=told.TCP_STORE)
GOES_ON = Does(stack=told.MMAP, loads_per_s=50e6, reads_per_s=50e6)
STANDS = Does(stack=told.LOADING, kernel="futex_wait_queue")
DAYS_S = 1e6


def sleeps(**how):
    return Does(stack=told.LOADING, kernel="hrtimer_nanosleep", **how)


def looks(tmp_path, *does, seconds, log=LOAD, waits=told.BARRIER, **more):
    """Yield what is said by the time since TP1 does the first of these instead of its load."""
    ranks = {
        "TP0": ((0, JOINS), (SINCE_S, Does(stack=waits))),
        "TP1": ((0, JOINS), *((SINCE_S + from_s, one) for from_s, one in does)),
    }
    seconds += SINCE_S
    recording = launch(tmp_path, ranks, log=log, seconds=seconds, storage="ext4", **more)
    for snapshot, facts, found in judged(recording):
        yield snapshot.at_s - SINCE_S, facts, found


def states(*given, **options):
    """Return the state, and how sure it is, by the time."""
    return {at_s: (found.state, found.confidence) for at_s, _, found in looks(*given, **options)}


def hung_since(said):
    return min((at_s for at_s, (state, _) in said.items() if state == "hung"), default=None)


def test_who_wakes_by_itself_in_time_is_named_with_when_and_never_hung(tmp_path):
    does = ((0, sleeps(until_s=SINCE_S + 120)), (120, GOES_ON))
    for at_s, facts, found in looks(tmp_path, *does, seconds=130):
        assert found.state != "hung", at_s
        if at_s != 71:
            continue
        assert (found.state, found.culprits) == ("unknown", ("TP1",))
        rule = told_by(found, "waiting-for-rank-elsewhere")
        assert "which sleeps at ModelRunner.load_model" in rule.title
        assert rule.title.endswith("and wakes by itself in 49 s")
        assert rule.needs == ("what TP1 does when it wakes, by itself in 49 s",)
        text = to_text(facts, found)
        assert "state S, sleep, which ends by itself in 49 s, CPU" in text
        assert "wait until TP1 wakes" in text
        assert "does not come back from it" not in text
        assert "diagnose 700 --for 94" in text  # until it wakes, and is still for long enough
        drawn = view(facts, found, 200, 40).renderables
        assert any("and wakes by itself in 49 s" in str(line) for line in drawn)
        rank = document(facts, found)["ranks"][1]
        assert (rank["wakes_least_s"], rank["wakes_most_s"]) == (49, 49)
    assert found.state == "starting"


def test_of_a_sleep_whose_begin_was_not_seen_the_latest_end_is_told(tmp_path):
    does = ((0, sleeps(for_s=120)), (120, GOES_ON))
    for at_s, facts, found in looks(tmp_path, *does, seconds=130):
        assert found.state != "hung", at_s
        if at_s == 71:
            assert "and wakes by itself in 5" in found.title
            assert found.title.endswith("s at the latest")
            rank = document(facts, found)["ranks"][1]
            assert rank["wakes_least_s"] == 0
            assert 49 <= rank["wakes_most_s"] <= 54


@pytest.mark.parametrize(
    ("how", "sure"), [({"until_s": DAYS_S}, "high"), ({"for_s": DAYS_S}, "medium")]
)
def test_who_sleeps_for_days_is_hung_after_40_seconds(how, sure, tmp_path):
    # Of one whose begin may lie before all looks nobody knows how much of it is left.
    does = looks(tmp_path, (0, sleeps(**how)), seconds=60)
    hung = [(at_s, found) for at_s, _, found in does if found.state == "hung"]
    at_s, found = hung[0]
    assert at_s <= 45
    assert (found.culprits, found.confidence) == (("TP1",), sure)
    assert "which sleeps at ModelRunner.load_model" in found.title
    assert ("for 12 days more" if sure == "high" else "in 12 days at the latest") in found.title
    shown = told_by(found, "waiting-for-rank-elsewhere").because
    assert any("which ends by itself in 12 days" in each.text for each in shown)


def test_a_sleep_whose_end_is_not_known_is_judged_as_any_other_wait(tmp_path):
    blind = states(tmp_path, (0, STANDS), seconds=60)
    assert 40 <= hung_since(blind) <= 45


def test_who_wakes_and_stands_still_is_hung_40_seconds_later(tmp_path):
    does = ((0, sleeps(until_s=SINCE_S + 60)), (60, STANDS))
    said = states(tmp_path, *does, seconds=120)
    assert 100 <= hung_since(said) <= 105


@pytest.mark.parametrize(("naps_s", "at_most_s"), [(0.5, 46), (30, 76)])
def test_who_sleeps_again_and_again_without_progress_is_hung(naps_s, at_most_s, tmp_path):
    does = looks(tmp_path, (0, sleeps(naps_s=naps_s)), seconds=120)
    hung = {at_s: found for at_s, _, found in does if found.state == "hung"}
    assert 40 <= min(hung) <= at_most_s
    assert set(range(int(min(hung)) + 1, 121)) <= {round(at_s) for at_s in hung}  # and stays so
    if naps_s > 1:
        assert "woke by itself and sleeps again at" in hung[min(hung)].title


def test_who_retries_after_ever_longer_sleeps_is_not_hung_before_they_repeat(tmp_path):
    until_s, does = 0, []
    for length_s in (1, 2, 4, 8, 16, 32, 32, 32):
        does.append((until_s, sleeps(until_s=SINCE_S + until_s + length_s)))
        until_s += length_s
    said = states(tmp_path, *does, seconds=until_s)
    assert 63 + 40 <= hung_since(said) <= 63 + 46


def test_progress_between_two_sleeps_lets_the_second_count_as_the_first(tmp_path):
    does = (
        (0, sleeps(until_s=SINCE_S + 60)),
        (60, GOES_ON),
        (70, sleeps(until_s=SINCE_S + 170)),
        (170, GOES_ON),
    )
    said = states(tmp_path, *does, seconds=180)
    assert hung_since(said) is None


def test_who_wakes_after_the_others_have_given_up_is_hung(tmp_path):
    log = [line for line in good_log(NAMES, "kv") if "TP1| Load weight end" not in line[1]]
    does = ((0, sleeps(until_s=SINCE_S + 900)),)
    found = [found for _, _, found in looks(tmp_path, *does, seconds=100, log=log)][-1]
    assert (found.state, found.culprits) == ("hung", ("TP1",))
    assert "longer than TP0 waits" in found.title


def alone(into, seconds, until_s):
    log = good_log(("TP0",), "load-end")
    since_s = log[-1][0]
    ranks = {"TP0": ((0, JOINS), (since_s, sleeps(until_s=since_s + until_s)))}
    return launch(into, ranks, log=log, seconds=since_s + seconds, storage="ext4")


@pytest.mark.parametrize(("until_s", "state"), [(100, "unknown"), (DAYS_S, "hung")])
def test_a_launch_of_one_rank_that_sleeps_is_judged_by_when_it_wakes(until_s, state, tmp_path):
    *_, (_, _, found) = judged(alone(tmp_path, 60, until_s))
    assert (found.state, found.culprits) == (state, ("TP0",))
    assert "TP0 sleeps at ModelRunner.load_model" in found.title


def test_hung_that_is_withdrawn_as_the_sleeps_end_comes_near_tells_of_no_move(tmp_path):
    lines = []
    talk = Talk(events=False, started=None, say=lines.append)
    for _, facts, found in judged(alone(tmp_path, 80, 1860)):
        talk.tell(facts, found)
    (line,) = (line for line in lines if "hung is withdrawn" in line)
    assert "it moves again" not in line


def test_a_select_without_descriptors_that_slept_anew_is_another_sleep():
    before = ThreadWait(tid=7, call="pselect6", line="270 0x0", timed=True, lasts_s=30, switches=4)
    assert same_wait(before, before)
    after = ThreadWait(tid=7, call="pselect6", line="270 0x0", timed=True, lasts_s=30, switches=5)
    assert not same_wait(before, after)


def test_a_sleep_for_a_while_did_not_begin_before_its_process():
    wait = ThreadWait(tid=7, call="nanosleep", lasts_s=3600)
    assert wakes_at_s(wait, 50.0, began_s=-250.0) == (3350.0, 3650.0)
    assert wakes_at_s(wait, 50.0, began_s=None) == (50.0, 3650.0)
    assert wakes_at_s(ThreadWait(tid=7, call="futex", timed=True), 50.0, began_s=0.0) is None
