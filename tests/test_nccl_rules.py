"""What is concluded from NCCL's own counts, and what is not."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from looks import judged

from hangdoctor import engines
from hangdoctor.diagnose import diagnose
from hangdoctor.facts.fold import derive
from hangdoctor.facts.looks import next_looks
from hangdoctor.model import Missing, NcclCommunicator, NcclRank, NcclRas
from hangdoctor.recording import load

sys.path.insert(0, str(Path(__file__).parent))
import scenarios as told  # test material beside the tests
import transform
from scenarios import FIRST_RANK, Does, good_log, launch

SGLANG = engines.load("sglang")
RECORDINGS = Path(__file__).parent / "recordings"
NAMES = ("TP0", "TP1", "TP2", "TP3")
HIDDEN = Missing(reason="permission", detail="Operation not permitted")
replace = msgspec.structs.replace


def communicator(counts, name="0xab", **states):
    """Return a communicator of ranks 0.. with these numbers of AllReduce, None for no member."""
    ranks = tuple(
        NcclRank(
            number=number,
            pid=FIRST_RANK + rank,
            host="10.0.0.1",
            counts=count if isinstance(count, dict) else {"AllReduce": count},
            **states,
        )
        for number, (rank, count) in enumerate(
            (rank, count) for rank, count in enumerate(counts) if count is not None
        )
    )
    return NcclCommunicator(id=name, size=len(ranks), ranks=ranks)


def answer(*communicators, address="localhost:28028", **more):
    return NcclRas(address=address, version="2.28.9", communicators=communicators, **more)


def with_ras(recording, ras, *, every_s=5):
    """Let RAS have been asked every few seconds; `ras` is an answer, or tells it by the second."""
    told_by = ras if callable(ras) else lambda _: ras
    snapshots = tuple(
        replace(one, nccl_ras=told_by(one.at_s)) if one.at_s % every_s == 0 else one
        for one in recording.snapshots
    )
    return replace(recording, snapshots=snapshots)


def stuck(tmp_path, does, *, seconds=120, **options):
    """Return a launch of four ranks that all do the same, or each its own by name."""
    doing = does if isinstance(does, dict) else dict.fromkeys(NAMES, does)
    log = good_log(NAMES, "capture-end")
    return launch(tmp_path, doing, log=log, seconds=seconds, **options)


def verdict(recording):
    """Return the verdict, which is no surer without one of the sources.

    Stacks are none of these: a rank that is behind is cleared by its own.
    """
    full = diagnose(derive(recording, SGLANG), SGLANG)
    for section in ("waits", "gpus", "host", "nccl_ras", "log"):
        less = derive(transform.drop_section(recording, section), SGLANG)
        transform.assert_no_surer(diagnose(less, SGLANG), full, section)
    return full


def finding(found, rule):
    return next((one for one in found.findings if one.rule == rule), None)


UNSEEN = Does(unseen=HIDDEN)
CAPTURES = Does(stack=told.CAPTURE)
WAITS = Does(stack=told.CAPTURE_ALL_REDUCE)


def test_the_rank_that_launched_less_is_named_where_no_stack_can_be_seen(tmp_path):
    found = verdict(with_ras(stuck(tmp_path, UNSEEN), answer(communicator([64, 64, 60, 64]))))
    behind = finding(found, "nccl-ranks-behind")
    assert (behind.culprits, found.culprits) == (("TP2",), ("TP2",))
    assert "60 AllReduce, others 64" in behind.title


def test_nccl_is_asked_again_where_it_answered_and_by_hand_only_where_it_has_not(tmp_path):
    recording = stuck(tmp_path, dict.fromkeys(NAMES, WAITS) | {"TP2": SPINS})
    silent = diagnose(derive(recording, SGLANG), SGLANG)
    commands = {step.id: step.command for step in silent.experiments}
    assert commands["nccl-ras"] == "echo verbose status | nc -w 5 localhost 28028"
    told_it = answer(communicator([64, 64, 60, 64]), address="[::1]:20021")
    found = diagnose(derive(with_ras(recording, told_it), SGLANG), SGLANG)
    behind = finding(found, "nccl-ranks-behind")
    assert "ask NCCL again: echo verbose status | nc -w 5 ::1 20021" in behind.advice
    assert "nccl-ras" not in {step.id for step in found.experiments}


def test_counts_that_move_on_name_nobody(tmp_path):
    def moves(at_s):
        return answer(communicator([64 + at_s, 64 + at_s, 60 + at_s, 64 + at_s]))

    found = verdict(with_ras(stuck(tmp_path, UNSEEN), moves))
    assert finding(found, "nccl-ranks-behind") is None
    assert not found.culprits


def test_one_look_names_nobody(tmp_path):
    ras = answer(communicator([64, 64, 60, 64]))
    recording = with_ras(
        stuck(tmp_path, UNSEEN), lambda at_s: ras if at_s == 120 else None, every_s=1
    )
    assert finding(verdict(recording), "nccl-ranks-behind") is None


def test_a_look_without_an_answer_forgets_what_was_counted(tmp_path):
    ras = answer(communicator([64, 64, 60, 64]))
    gone = Missing(reason="timeout")
    recording = with_ras(stuck(tmp_path, UNSEEN), lambda at_s: gone if at_s == 120 else ras)
    assert finding(verdict(recording), "nccl-ranks-behind") is None


def test_counts_from_before_something_moved_name_nobody(tmp_path):
    ras = answer(communicator([64, 64, 60, 64]))
    does = ((0.0, UNSEEN), (105.0, Does(unseen=HIDDEN, reads_per_s=1 << 28)))
    recording = stuck(tmp_path, dict.fromkeys(NAMES, does))
    asked = with_ras(recording, lambda at_s: ras if at_s <= 105 else None)
    assert finding(verdict(asked), "nccl-ranks-behind") is None


def test_blame_follows_the_waits_through_communicators(tmp_path):
    first = communicator([9, 8, None, None], "0x1")
    second = communicator([None, 4, 3, None], "0x2")
    found = verdict(with_ras(stuck(tmp_path, UNSEEN), answer(first, second)))
    assert finding(found, "nccl-ranks-behind").culprits == ("TP2",)


def test_a_rank_that_waits_in_a_collective_itself_is_not_blamed(tmp_path):
    barrier = Does(stack=told.BARRIER)
    doing = dict.fromkeys(NAMES, UNSEEN) | {"TP2": barrier}
    found = verdict(with_ras(stuck(tmp_path, doing), answer(communicator([64, 64, 60, 64]))))
    behind = finding(found, "nccl-ranks-behind")
    assert (behind.verdict, behind.culprits, behind.ranks) == ("undecided", (), ("TP2",))


def test_ranks_of_which_each_is_ahead_in_something_have_diverged(tmp_path):
    counts = [{"AllReduce": 5, "AllGather": 2}] * 3 + [{"AllReduce": 4, "AllGather": 3}]
    found = verdict(with_ras(stuck(tmp_path, UNSEEN), answer(communicator(counts))))
    assert finding(found, "nccl-ranks-behind") is None
    diverged = finding(found, "nccl-ranks-diverged")
    assert set(diverged.ranks) == {"TP0", "TP3"}
    assert not found.culprits


@pytest.mark.parametrize("state", ["init", "finalize"])
def test_a_communicator_that_comes_or_goes_is_not_judged(state, tmp_path):
    ras = answer(communicator([64, 64, 60, 64], state=state))
    assert finding(verdict(with_ras(stuck(tmp_path, UNSEEN), ras)), "nccl-ranks-behind") is None


def test_text_that_names_only_who_stands_out_names_the_same_rank(tmp_path):
    rank = NcclRank(number=2, pid=FIRST_RANK + 2, host="10.0.0.1", counts={"AllReduce": 60})
    one = NcclCommunicator(id="0xab", size=4, ranks=(rank,), others={"AllReduce": 64})
    found = verdict(with_ras(stuck(tmp_path, UNSEEN), answer(one, form="text")))
    assert finding(found, "nccl-ranks-behind").culprits == ("TP2",)


def test_text_that_names_the_one_ahead_leaves_the_others(tmp_path):
    rank = NcclRank(number=2, pid=FIRST_RANK + 2, host="10.0.0.1", counts={"AllReduce": 64})
    one = NcclCommunicator(id="0xab", size=4, ranks=(rank,), others={"AllReduce": 60})
    found = verdict(with_ras(stuck(tmp_path, UNSEEN), answer(one, form="text")))
    assert finding(found, "nccl-ranks-behind").ranks == ("TP0", "TP1", "TP3")


def test_a_rank_of_another_machine_is_told_and_nobody_here_blamed(tmp_path):
    one = communicator([64, 64, 64, 64])
    far = NcclRank(number=4, host="10.0.0.2", counts={"AllReduce": 60})
    one = replace(one, size=5, ranks=(*one.ranks, far))
    found = verdict(with_ras(stuck(tmp_path, UNSEEN), answer(one)))
    behind = finding(found, "nccl-ranks-behind")
    assert (behind.culprits, behind.ranks) == ((), ())
    assert "another machine" in behind.title


def test_stacks_and_counts_agree_and_make_the_hang(tmp_path):
    doing = dict.fromkeys(NAMES, WAITS) | {"TP2": CAPTURES}
    found = verdict(with_ras(stuck(tmp_path, doing), answer(communicator([64, 64, 60, 64]))))
    assert (found.state, found.culprits) == ("hung", ("TP2",))
    assert finding(found, "nccl-ranks-behind").state == "hung"


def test_what_ras_cannot_reach_and_what_has_failed_is_told(tmp_path):
    one = communicator([5, 5, 5, 5])
    ranks = list(one.ranks)
    ranks[1] = replace(ranks[1], counts={}, state="unresponsive")
    ranks[3] = replace(ranks[3], error="Unhandled CUDA error")
    ras = answer(replace(one, ranks=tuple(ranks)))
    trouble = finding(verdict(with_ras(stuck(tmp_path, UNSEEN), ras)), "nccl-reports-trouble")
    assert trouble.ranks == ("TP1", "TP3")
    assert "TP3 reports Unhandled CUDA error" in trouble.title


SPINS = Does(stack=(*told.SYNC[:1], *told.CAPTURE), state="R", cpu_pct=100, gpu=(100, 0, 9.0))
EQUAL = answer(communicator([5, 5, 5, 5]))


def outside(tmp_path, doing, ras):
    each = {name: ((0.0, CAPTURES), (40.0, does)) for name, does in doing.items()}
    recording = stuck(tmp_path, each, seconds=200)
    return finding(verdict(with_ras(recording, ras)), "collective-outside-nccl")


def test_equal_counts_beside_spinning_cards_and_one_rank_elsewhere_are_not_nccls(tmp_path):
    doing = dict.fromkeys(NAMES, SPINS) | {"TP3": CAPTURES}
    found = outside(tmp_path, doing, EQUAL)
    assert (found.verdict, found.ranks) == ("found", ("TP0", "TP1", "TP2"))


def test_counts_that_differ_by_one_are_nccls(tmp_path):
    doing = dict.fromkeys(NAMES, SPINS) | {"TP3": CAPTURES}
    assert outside(tmp_path, doing, answer(communicator([6, 6, 6, 5]))) is None


def test_cards_that_all_spin_may_be_nccls_transport(tmp_path):
    found = outside(tmp_path, dict.fromkeys(NAMES, SPINS), EQUAL)
    assert (found.verdict, found.confidence) == ("undecided", "low")


def test_the_recording_of_a_custom_all_reduce_names_the_rank_the_card_and_that_it_is_not_nccls():
    found = verdict(load(RECORDINGS / "h200-tp2-warmup-forward-sleep-r1"))
    assert found.culprits == ("TP1",)
    assert finding(found, "gpu-spinning").title.startswith("GPU 0 spins")
    outside_nccl = finding(found, "collective-outside-nccl")
    assert (outside_nccl.verdict, outside_nccl.ranks) == ("found", ("TP0",))


def test_a_good_start_says_nothing_of_nccl():
    for snapshot, _, found in judged(load(RECORDINGS / "h200-tp2-good-cold")):
        for one in found.findings:
            assert not one.rule.startswith("nccl"), snapshot.at_s


def test_nccl_is_asked_only_where_gpus_stand_still(tmp_path):
    still = derive(stuck(tmp_path, CAPTURES), SGLANG)
    assert {"nccl_ras", "flight_recorder"} <= set(next_looks(still))
    moving = derive(stuck(tmp_path, Does(stack=told.COPY, reads_per_s=1 << 28)), SGLANG)
    without = derive(stuck(tmp_path, CAPTURES, gpus=False), SGLANG)
    for facts in (moving, without):
        assert not {"nccl_ras", "flight_recorder"} & set(next_looks(facts))
