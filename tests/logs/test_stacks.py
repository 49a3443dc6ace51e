"""Stacks in a log: whose they are, what they show, and what must not be taken for one."""

from __future__ import annotations

from pathlib import Path

import pytest
from logged import ARGS, FAULT, HEAD, IDLE, OPENS, REDUCES, dump

from hangdoctor.engines import load
from hangdoctor.logs.parse import ParserState, finish, parse
from hangdoctor.logs.timeline import Timeline, advance, logged_stands

SAMPLES = Path(__file__).parents[2] / "sample_logs"
SGLANG = load("sglang")


def stands(text, *, tp=2, block=1 << 20):
    data = (ARGS.format(tp=tp) + text).encode("utf-8", "surrogateescape")
    timeline, state = Timeline(), ParserState()
    for start in range(0, len(data), block):
        lines, state = parse(state, data[start : start + block], SGLANG)
        timeline = advance(timeline, lines, SGLANG)
    timeline = advance(timeline, finish(state, SGLANG), SGLANG)
    return logged_stands(timeline, SGLANG)


def innermost(standing):
    return standing.dump.frames[0].function


@pytest.mark.parametrize("block", [1 << 20, 97])
def test_each_rank_stands_where_its_own_dump_shows_it_however_the_log_is_cut(block):
    found = stands(dump(" TP0", 41, OPENS) + dump(" TP1", 42, REDUCES), block=block)
    assert {rank: innermost(stand) for rank, stand in found.items()} == {
        "TP0": "forward",
        "TP1": "all_reduce",
    }
    first = found["TP0"].dump
    assert (first.pid, first.whole, first.native) == (41, True, ("open64",))
    assert [frame.function for frame in first.frames][-1] == "<module>"
    assert (found["TP0"].same_dumps, found["TP0"].held_s, found["TP0"].after_s) == (1, None, 200.0)


def test_the_same_stack_again_is_held_since_the_first_and_another_one_moves():
    same = dump(" TP0", 41, OPENS, minute=1) + dump(" TP0", 41, OPENS, minute=6)
    stand = stands(same)["TP0"]
    assert (stand.same_dumps, stand.held_s, stand.moved) == (2, 300.0, False)
    stand = stands(same + dump(" TP0", 41, REDUCES, minute=9))["TP0"]
    assert (stand.same_dumps, stand.held_s, stand.moved) == (1, None, True)
    other_line = OPENS.replace("2744", "2745")
    looped = dump(" TP0", 41, OPENS, minute=1) + dump(" TP0", 41, other_line, minute=6)
    assert stands(looped)["TP0"].same_dumps == 2


def test_a_worker_of_a_pool_that_moves_moves_its_rank():
    def pooled(function, minute):
        work = f'Thread 99 (active): "ThreadPoolExecutor-0_0"\n    {function} (weight_utils.py:7)\n'
        return dump(" TP0", 41, OPENS + "", minute=minute).replace(IDLE, work + IDLE)

    assert stands(pooled("load_file", 1) + pooled("load_file", 6))["TP0"].same_dumps == 2
    assert stands(pooled("load_file", 1) + pooled("get_tensor", 6))["TP0"].moved


def test_the_title_in_a_dump_names_the_rank_whoever_printed_it():
    by_launcher = dump("", 41, OPENS, title="sglang::scheduler_DP0_TP1")
    assert set(stands(by_launcher)) == {"DP0 TP1"}
    untitled = "python -c from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=3)"
    assert set(stands(dump(" TP1", 42, OPENS, title=untitled))) == {"TP1"}
    assert set(stands(dump("", 42, OPENS, title=untitled), tp=1)) == {"TP0"}
    assert set(stands(dump("", 42, OPENS, title=untitled), tp=2)) == set()


@pytest.mark.parametrize("title", ["python -m sglang.launch_server --tp 1", "sglang::detokenizer"])
def test_a_dump_of_the_launcher_or_of_the_detokenizer_is_no_rank_s(title):
    text = dump("", 40, "    recv (multiprocessing/connection.py:250)\n", title=title)
    text = text.replace("run_scheduler_process (scheduler.py", "launch_server (http_server.py")
    assert stands(text, tp=1) == {}


def test_a_dump_torn_by_another_rank_s_is_left_out_and_the_other_is_not():
    whole = {rank: dump(f" {rank}", pid, inner) for rank, pid, inner in
             (("TP0", 41, OPENS), ("TP1", 42, REDUCES))}  # fmt: skip
    cut_0 = whole["TP0"].index("    run_scheduler_process")
    cut_1 = whole["TP1"].index("    run_scheduler_process")
    mixed = (
        whole["TP0"][:cut_0] + whole["TP1"][:cut_1] + whole["TP0"][cut_0:] + whole["TP1"][cut_1:]
    )
    found = stands(mixed)
    assert innermost(found["TP0"]) == "forward"
    assert (found["TP1"].dump.torn, found["TP1"].dump.frames) == (True, ())


def test_lines_of_others_between_those_of_a_dump_change_nothing():
    text = dump(" TP0", 41, OPENS)
    at = text.index("    run_scheduler_process")
    text = text[:at] + "[2026-11-29 21:01:00 TP1] Prefill stats\nsome warning (x)\n" + text[at:]
    frames = stands(text)["TP0"].dump.frames
    assert [frame.function for frame in frames] == [
        "forward", "run_scheduler_process", "run", "spawn_main", "<module>",
    ]  # fmt: skip


def test_a_dump_that_breaks_off_shows_what_there_is_of_it():
    text = dump(" TP0", 41, OPENS)
    found = stands(text[: text.index("    run (multi")])["TP0"]
    assert (innermost(found), found.dump.whole) == ("forward", False)
    assert stands(text[: text.index("Thread ")])["TP0"].dump.frames == ()


def test_a_milestone_or_a_bar_after_a_dump_makes_it_history():
    both = dump(" TP0", 41, OPENS) + dump(" TP1", 42, REDUCES)
    assert set(stands(both + "[2026-11-29 21:02:00 TP1] Load weight begin. avail mem=1 GB\n")) == {
        "TP0"
    }
    fired = "[2026-11-29 21:02:00] The server is fired up and ready to roll!\n"
    assert stands(both + fired) == {}
    bar = "Loading safetensors checkpoint shards:  33% Completed | 1/3 [00:00<00:00, 2.00it/s]\n"
    assert stands(both + bar) == {}
    begun = "[2026-11-29 21:00:01 TP1] Init torch distributed begin.\n"
    assert stands(begun + both + ARGS.format(tp=2)) == {}  # another launch


def test_a_restarted_rank_s_first_dump_is_not_its_second():
    text = dump(" TP0", 41, OPENS, minute=1) + dump(" TP0", 77, OPENS, minute=6)
    assert stands(text)["TP0"].same_dumps == 1


@pytest.mark.parametrize(
    "prefix",
    [
        "2026-11-29T20:41:51.123456789Z stderr F ",
        "sglang-1  | ",
        "Nov 29 20:41:51 node7 sglang[123]: ",
        "[pod/sglang-0/server] ",
        "\x1b[31m",
    ],
)
def test_what_a_log_collector_puts_before_each_line_changes_nothing(prefix):
    plain = dump(" TP0", 41, OPENS)
    wrapped = "".join(f"{prefix}{line}\n" for line in plain.splitlines())
    assert stands(wrapped)["TP0"].dump.frames == stands(plain)["TP0"].dump.frames


def test_faulthandler_s_main_thread_is_the_only_rank_s_or_nobody_s():
    only = stands(FAULT, tp=1)["TP0"].dump
    assert (only.tool, only.cause, only.frames[0].line) == (
        "faulthandler", "Segmentation fault", 10,
    )  # fmt: skip
    assert set(stands(FAULT, tp=2)) == {""}
    named = FAULT.replace("Thread 0x00007f0000000001 (", "Thread 0x00007f0000000001 [python] (")
    assert stands(named, tp=1)["TP0"].dump.frames == only.frames


HOSTILE = [
    "Process 41: \x1b]0;title\x07\u202e" + "x" * 100_000 + "\n",
    'Thread 41 (idle): "MainThread"\n' + "    f (a.py:1)\n" * 20_000,
    'Thread 41 (idle): "MainThread"\n    ' + "(" * 50_000 + " (a.py:1)\n",
    "    f (a.py:99999999999999999999)\n    \udcff (\udcfe.py:1)\n",
    "Process 99999999999999999999: sglang::scheduler_TP0\n",
    "Python v\n" * 1000,
    "Fatal Python error: " + "y" * 100_000 + "\n",
]


@pytest.mark.parametrize("index", range(len(HOSTILE)))
def test_hostile_text_in_a_dump_is_bounded_and_hides_no_other_dump(index):
    head = HEAD.format(minute=1, rank=" TP0", pid=41)
    found = stands(head + HOSTILE[index] + dump(" TP1", 42, REDUCES))
    assert innermost(found["TP1"]) == "all_reduce"
    assert all(len(stand.dump.frames) <= 300 for stand in found.values())
    assert all(len(stand.dump.title) <= 300 for stand in found.values())


def test_a_stack_that_a_traceback_or_a_message_quotes_is_no_dump():
    quoted = "see:\n    forward (deepseek_v2.py:2744)\nProcessing 12: sglang::scheduler_TP0\n"
    assert stands(quoted) == {}


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("watchdog-warmup-killed", {"TP0": "DeepseekV2Model.forward", "TP1": "all_reduce"}),
        ("watchdog-diverged-killed", {"TP0": "all_gather_single", "TP1": "all_reduce"}),
        ("watchdog-good", {}),
    ],
)
def test_real_watchdogs_show_where_the_ranks_stood(name, places):
    log = (SAMPLES / f"sglang-0.5.9-cpu-tp2-{name}.log").read_bytes()
    lines, state = parse(ParserState(), log, SGLANG)
    timeline = advance(Timeline(), [*lines, *finish(state, SGLANG)], SGLANG)
    found = logged_stands(timeline, SGLANG)
    assert {rank: innermost(stand) for rank, stand in found.items()} == places
