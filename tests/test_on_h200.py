"""Real SGLang with real NCCL on one H200 and on two: each look at each recording.

On one, NCCL takes each of two or eight ranks for a host of its own (NCCL_HOSTID) and goes over
loopback, so that they may share a card. On two, launches side by side share both cards. Looks that
follow one another closely are left out.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from looks import judged

from hangdoctor import engines
from hangdoctor.recording import load

RECORDINGS = Path(__file__).parent / "recordings"
SGLANG = engines.load("sglang")
CASES = sorted(
    str(path.parent.relative_to(RECORDINGS))
    for folder in ("one_card", "two_cards")
    for path in RECORDINGS.glob(f"{folder}/*/cause.toml")
)
HUNG_AFTER_S = 40.0
LOOK_S = 16.0
"""Between two looks that were kept, and as much again: stillness is seen from the second on."""


@pytest.fixture(scope="module", params=CASES)
def case(request):
    """Return what really happened, and what is said at each look."""
    recording = load(RECORDINGS / request.param)
    truth = msgspec.toml.decode((RECORDINGS / request.param / "cause.toml").read_bytes())
    return truth, [(snapshot.at_s, found) for snapshot, _, found in judged(recording)]


def test_it_is_not_called_hung_before_it_is_and_not_withdrawn_after(case):
    truth, said = case
    since_s = truth.get("stalled_since_s", 1e9)
    for at_s, found in said:
        if at_s < since_s + HUNG_AFTER_S:
            assert found.state != "hung", at_s
        elif truth["state"] == "hung" and at_s >= since_s + HUNG_AFTER_S + LOOK_S:
            assert found.state == "hung", at_s
            assert list(found.culprits) == truth["culprits"], at_s


def test_in_the_end_state_phase_and_culprit_are_what_they_were(case):
    truth, said = case
    found = said[-1][1]
    assert (found.state, found.phase) == (truth["state"], truth["phase"])
    assert list(found.culprits) == truth["culprits"]


def test_a_hang_stands_for_a_hundred_seconds_and_more(case):
    truth, said = case
    if truth["state"] == "hung":
        assert said[-1][0] - truth["stalled_since_s"] > 100


def test_who_ended_and_who_lost_it_are_told_while_the_loser_still_lives():
    *_, (_, _, found) = judged(load(RECORDINGS / "two_cards" / "pool-exit-seen-r1"))
    assert found.title == (
        "TP1 ended without a word (exit status 1), and TP0 lost its connection to it"
    )
    advice = [step for finding in found.findings for step in finding.advice]
    assert sum("end it" in step for step in dict.fromkeys(advice)) == 1


def test_a_rank_that_waits_to_load_a_kernel_is_not_said_to_compile():
    *_, (_, _, found) = judged(load(RECORDINGS / "two_cards" / "forward-sleep-r1"))
    assert "compile-running" not in {finding.rule for finding in found.findings}
