"""Verdicts that rest on the stacks a log holds, and what must not become one."""

from __future__ import annotations

from pathlib import Path

import pytest
from logged import FAULT, OPENS, REDUCES, SAYS, dump

from hangdoctor import engines
from hangdoctor.diagnose import diagnose
from hangdoctor.facts.fold import derive
from hangdoctor.recording import bare_log

SAMPLES = Path(__file__).parents[1] / "sample_logs"
SGLANG = engines.load("sglang")
GATHERS = "    all_gather (torch/distributed/distributed_c10d.py:4394)\n"
SYNCHRONIZES = "    synchronize (torch/cuda/streams.py:105)\n"
READS = (
    "    safetensors_weights_iterator (model_loader/weight_utils.py:730)\n"
    "    load_model (model_runner.py:9)\n"
)
SIGQUIT = "[2026-11-29 21:59:00] SIGQUIT received. signum=None, frame=None. It usually means\n"


def sample(name):
    return (SAMPLES / f"sglang-0.5.9-cpu-tp2-{name}.log").read_text(encoding="utf-8")


IN_WARMUP = (
    sample("watchdog-warmup-killed").partition("Scheduler debug info")[0].rpartition("\n")[0]
)
LOADS = sample("watchdog-weights-hung")
IN_LOAD = LOADS[: LOADS.index("Pyspy dump", LOADS.rindex("Load weight begin"))].rpartition("\n")[0]
READY = sample("watchdog-good")


def verdict(text, tmp_path, *, running=False):
    path = tmp_path / "server.log"
    path.write_text(text, encoding="utf-8")
    return diagnose(derive(bare_log(path, still_running=running), SGLANG), SGLANG)


def rule(found, name):
    return next((finding for finding in found.findings if finding.rule == name), None)


def both(*minutes, first=OPENS, second=REDUCES, soft=True):
    return "\n" + "".join(
        dump(" TP0", 41, first, minute=minute, soft=soft)
        + dump(" TP1", 42, second, minute=minute, soft=soft)
        for minute in minutes
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("watchdog-warmup-killed", ("dead", "warmup", ("TP0",), "medium")),
        ("watchdog-diverged-killed", ("dead", "warmup", (), "medium")),
        ("watchdog-warmup-hung", ("hung", "warmup", ("TP0",), "medium")),
        ("watchdog-weights-hung", ("unknown", "weights", (), "low")),
        ("watchdog-good", ("ready", "ready", (), "medium")),
    ],
)
def test_real_logs_with_stacks_tell_state_phase_and_rank(name, expected, tmp_path):
    found = verdict(sample(name), tmp_path)
    assert (found.state, found.phase, found.culprits, found.confidence) == expected


def test_the_rank_that_the_others_wait_for_is_named_with_the_call_it_is_in(tmp_path):
    found = verdict(sample("watchdog-warmup-killed"), tmp_path)
    assert found.findings[0].rule == "waiting-for-rank-elsewhere"
    assert "which is in open64 at DeepseekV2Model.forward" in found.title
    assert "the watchdog saw no forward end for 8 s and ended the launch" in found.title
    assert found.findings[0].because[0].log_line == 104


def test_one_dump_of_each_is_less_sure_than_two_that_are_the_same(tmp_path):
    once = verdict(IN_WARMUP + both(1), tmp_path)
    assert (once.state, once.culprits, once.confidence) == ("hung", ("TP0",), "medium")
    assert rule(once, "waiting-for-rank-elsewhere").needs == ("a second dump of TP0 and TP1",)
    twice = verdict(IN_WARMUP + both(1, 3), tmp_path)
    assert (twice.state, twice.culprits, twice.confidence) == ("hung", ("TP0",), "high")
    assert "no forward end for 320 s" in twice.title


def test_a_dump_long_after_the_first_is_of_another_stall(tmp_path):
    """Meanwhile forwards have ended: the watchdog would have spoken again."""
    again = verdict(IN_WARMUP + both(1, 16), tmp_path)
    assert (again.state, again.confidence) == ("hung", "medium")
    assert "no forward end for 200 s" in again.title


def test_two_dumps_that_differ_are_of_a_rank_that_moves(tmp_path):
    text = IN_WARMUP + both(1) + both(3, first=READS)
    found = verdict(text, tmp_path)
    assert found.state == "unknown"
    assert "still moves" in rule(found, "waiting-for-rank-elsewhere").title


def test_ranks_in_different_collectives_have_diverged_and_nobody_is_blamed(tmp_path):
    found = verdict(IN_WARMUP + both(1, 3, first=GATHERS), tmp_path)
    assert (found.state, found.findings[0].rule, found.culprits) == ("hung", "ranks-diverged", ())


@pytest.mark.parametrize(
    ("stack", "name"),
    [(REDUCES, "all-ranks-in-same-wait"), (SYNCHRONIZES, "all-ranks-wait-for-their-gpus")],
)
def test_ranks_that_all_stand_in_the_same_place_are_hung_without_a_culprit(stack, name, tmp_path):
    found = verdict(IN_WARMUP + both(1, 6, first=stack, second=stack), tmp_path)
    assert (found.state, found.findings[0].rule, found.culprits) == ("hung", name, ())


def test_a_rank_without_a_dump_is_suspected_and_no_more(tmp_path):
    found = verdict(IN_WARMUP + "\n" + dump(" TP1", 42, REDUCES), tmp_path)
    assert (found.state, found.confidence) == ("unknown", "low")
    assert "by elimination" in found.title
    assert "a stack of TP0" in rule(found, "waiting-for-rank-elsewhere").needs


def test_a_hang_that_is_proved_blames_nobody_whose_stack_the_log_lacks(tmp_path):
    """A rank that idles has no batch, and its watchdog does not speak."""
    found = verdict(IN_WARMUP + "\n" + dump(" TP1", 42, REDUCES, soft=False), tmp_path)
    assert (found.state, found.culprits) == ("hung", ())


def test_the_soft_watchdog_proves_nothing_of_a_load_that_may_only_be_slow(tmp_path):
    """It counts forwards, and there are none before the load has ended."""
    for minutes in ((1,), (1, 6), (1, 6, 11, 16, 21, 26)):
        found = verdict(IN_LOAD + both(*minutes, first=READS, second=READS), tmp_path)
        assert (found.state, found.phase) == ("unknown", "weights")
    waits = verdict(IN_LOAD + both(1, 6, first=READS), tmp_path)
    assert (waits.state, waits.confidence) == ("unknown", "low")


def test_a_short_count_of_the_soft_watchdog_is_not_enough(tmp_path):
    short = both(1).replace("watchdog_timeout=200", "watchdog_timeout=9")
    found = verdict(IN_WARMUP + short, tmp_path)
    assert (found.state, found.confidence) == ("unknown", "low")
    assert (
        "40 s without a forward, seen so far: 9 s"
        in rule(found, "waiting-for-rank-elsewhere").needs
    )


@pytest.mark.parametrize(
    "stack",
    [
        "    _communicate (subprocess.py:2108)\n    run_ninja (flashinfer/jit/cpp_ext.py:9)\n",
        "    acquire (filelock/_api.py:9)\n    forward (deepseek_v2.py:2744)\n",
    ],
)
def test_a_first_forward_that_compiles_may_only_be_slow(stack, tmp_path):
    found = verdict(IN_WARMUP + both(1, 3, first=stack), tmp_path)
    assert (found.state, found.confidence) == ("unknown", "low")
    ended = verdict(IN_WARMUP + both(1, first=stack, soft=False) + SIGQUIT, tmp_path)
    assert (ended.state, ended.culprits) == ("dead", ("TP0",))


def test_each_watchdog_that_gave_up_is_told_once_with_its_rank(tmp_path):
    found = verdict(sample("watchdog-warmup-killed"), tmp_path)
    says = "Scheduler watchdog timeout (self.watchdog_timeout=8.0, self.soft=False)"
    given_up = [item.text for item in rule(found, "wait-given-up").because]
    assert given_up == [f"TP0: {says}", f"TP1: {says}"]
    (ended,) = rule(found, "launch-ended").because
    assert ended.text.startswith("last line of launch: SIGQUIT received")
    again = verdict(IN_WARMUP + both(1, 3, 5, soft=False), tmp_path)
    told = [item.text.partition(":")[0] for item in rule(again, "wait-given-up").because]
    assert told == ["TP0", "TP1"]


def test_dumps_of_different_times_are_less_sure(tmp_path):
    text = IN_WARMUP + "\n"
    text += "".join(dump(" TP0", 41, OPENS, minute=minute) for minute in (1, 3))
    text += "".join(dump(" TP1", 42, REDUCES, minute=minute) for minute in (30, 32))
    found = verdict(text, tmp_path)
    assert (found.state, found.confidence) == ("hung", "medium")


def test_a_watchdog_of_the_detokenizer_says_nothing_of_the_ranks(tmp_path):
    said = SAYS.format(minute=1, rank="", soft=True).replace("Scheduler", "DetokenizerManager")
    for text in (IN_WARMUP, IN_LOAD):
        found = verdict(f"{text}\n{said}", tmp_path)
        assert found.state == "unknown"
        assert rule(found, "wait-given-up") is None


def test_a_server_that_was_ready_is_hung_by_the_watchdog_that_ends_it_alone(tmp_path):
    assert verdict(READY + both(1, 3), tmp_path).state == "ready"
    ending = verdict(READY + both(1, soft=False), tmp_path)
    assert (ending.state, ending.culprits) == ("hung", ("TP0",))
    ended = verdict(READY + both(1, soft=False) + SIGQUIT, tmp_path)
    assert (ended.state, ended.culprits) == ("dead", ("TP0",))
    assert "and ended the launch" in ended.title


def test_a_launch_that_somebody_ended_after_it_hung_is_dead_of_its_hang(tmp_path):
    sigterm = "[2026-11-29 21:59:00] SIGTERM received. signum=<Signals.SIGTERM: 15> frame=None.\n"
    found = verdict(IN_WARMUP + both(1, 3) + sigterm, tmp_path)
    assert (found.state, found.culprits) == ("dead", ("TP0",))
    assert found.title.endswith("no forward end for 320 s, then the launch was ended")


@pytest.mark.parametrize("number", ["1.2.3", "9" * 400, "", "x"])
def test_a_watchdog_whose_number_is_none_proves_nothing(number, tmp_path):
    text = both(1, soft=False).replace("watchdog_timeout=200", f"watchdog_timeout={number}")
    assert verdict(IN_WARMUP + text, tmp_path).state == "unknown"


def test_an_exception_comes_before_what_the_stacks_show(tmp_path):
    raised = (
        "[2026-11-29 21:00:30 TP1] Scheduler hit an exception: Traceback (most recent call last):\n"
        "ValueError: too many values\n"
    )
    found = verdict(IN_WARMUP + "\n" + raised + both(1, soft=False) + SIGQUIT, tmp_path)
    assert (found.state, found.culprits) == ("dead", ("TP1",))
    assert "too many values" in found.title


def test_a_fault_that_ended_a_process_is_named_with_its_place(tmp_path):
    for tail in ("", "\n" + dump(" TP1", 42, REDUCES)):
        found = verdict(f"{IN_WARMUP}\n{FAULT}{tail}{SIGQUIT}", tmp_path)
        ended = rule(found, "launch-ended")
        assert (found.state, ended.culprits) == ("dead", ())
        assert ended.title.endswith(
            ": Fatal Python error: Segmentation fault, at load_model "
            "(model_executor/model_runner.py:10)"
        )


def test_a_log_that_still_grows_is_judged_by_its_stacks_too(tmp_path):
    found = verdict(IN_WARMUP + both(1, 3), tmp_path, running=True)
    assert (found.state, found.culprits, found.confidence) == ("hung", ("TP0",), "high")


def test_less_of_the_dumps_makes_no_verdict_surer(tmp_path):
    text = IN_WARMUP + both(1, 3)
    order = ("low", "medium", "high")
    full = verdict(text, tmp_path)
    lines = text.splitlines(keepends=True)
    begin = IN_WARMUP.count("\n")
    for end in range(begin, len(lines), 7):
        less = verdict("".join(lines[:end]), tmp_path)
        assert less.state in ("unknown", full.state)
        assert set(less.culprits) <= {"TP0"}
        assert order.index(less.confidence) <= order.index(full.confidence)
