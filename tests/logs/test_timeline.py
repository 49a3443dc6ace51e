from __future__ import annotations

import msgspec
import pytest

from hangdoctor.engines import load
from hangdoctor.launches import expected_ranks
from hangdoctor.logs.parse import ParserState, parse
from hangdoctor.logs.timeline import (
    SIGNS_KEPT,
    Launch,
    Timeline,
    advance,
    detect_engine,
    lacking,
    phase_of,
    read_timeline,
)

SGLANG = load("sglang")
ARGS = "server_args=ServerArgs(model_path='/models/x', tp_size=2, pp_size=1, dp_size=1, nnodes=1)"
THROUGH_CAPTURE = (
    "Init torch distributed begin.",
    "Init torch distributed ends. elapsed=1.00 s, mem usage=1.01 GB",
    "Load weight begin. avail mem=138.28 GB",
    "Load weight end. elapsed=0.36 s, type=X, avail mem=138.13 GB, mem usage=0.15 GB.",
    "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 10, KV size: 68.99 GB",
    "Memory pool end. avail mem=69.03 GB",
    "Capture target decode CUDA graph begin. backend=full, bs=[1, 2], avail mem=68.45 GB",
    "Capture target decode CUDA graph end. elapsed=48.67 s, mem usage=0.07 GB.",
)


def _log(*lines: tuple[str, str] | str) -> bytes:
    text = ""
    for second, line in enumerate(lines):
        rank, message = line if isinstance(line, tuple) else ("", line)
        text += f"[2026-11-29 21:00:{second % 60:02}{' ' + rank if rank else ''}] {message}\n"
    return text.encode()


def _read(*lines: tuple[str, str] | str) -> Timeline:
    return read_timeline(_log(*lines), SGLANG)


def _phases_after_each_line(rank: str, *lines: str) -> list[str]:
    timeline, state, phases = Timeline(), ParserState(), []
    for line in lines:
        parsed, state = parse(state, _log((rank, line)), SGLANG)
        timeline = advance(timeline, parsed, SGLANG)
        phases.append(phase_of(timeline, rank))
    return phases


def test_after_each_milestone_a_rank_is_in_the_phase_whose_code_it_runs_next():
    assert _phases_after_each_line("TP0", *THROUGH_CAPTURE) == [
        "distributed-init",
        "weights",
        "weights",
        "weights",
        "kv-cache",
        "graph-capture",
        "graph-capture",
        "server",
    ]


def test_a_launch_line_lifts_every_rank_even_one_that_printed_nothing():
    timeline = _read(ARGS, "INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C)")
    assert phase_of(timeline, "TP0") == phase_of(timeline, "TP1") == "warmup"
    assert lacking(timeline) == {}


def test_weights_committed_and_a_cache_sized_after_capture_take_no_rank_back():
    after = [
        "Post-capture KV sizing: KV cache allocated. dtype: torch.bfloat16, #tokens: 10",
        "Load weight end. Committed real weights after CUDA graph capture in 12.34 s",
    ]
    assert _phases_after_each_line("TP0", *THROUGH_CAPTURE, *after)[-3:] == ["server"] * 3


def test_a_second_model_takes_a_rank_back_to_its_weights_and_is_counted():
    lines = [("TP0", line) for line in (*THROUGH_CAPTURE, *THROUGH_CAPTURE[2:4])]
    lines += [("TP1", line) for line in (*THROUGH_CAPTURE, THROUGH_CAPTURE[2])]
    timeline = _read(ARGS, *lines)
    assert phase_of(timeline, "TP0") == phase_of(timeline, "TP1") == "weights"
    assert timeline.ranks["TP0"].counts["weights-end"] == 2
    assert lacking(timeline) == {"TP1": ("weights-end",)}


def test_serving_after_ready_takes_nothing_back_and_repeats_no_milestone():
    serve = ("TP0", "Prefill batch, #new-seq: 1, #new-token: 6, #cached-token: 0")
    timeline = _read(ARGS, "The server is fired up and ready to roll!", *[serve] * 500)
    assert phase_of(timeline, "TP0") == "ready"
    assert len(timeline.ranks["TP0"].milestones) == 1
    assert timeline.ranks["TP0"].lines == 500


def test_the_only_rank_of_a_launch_is_called_tp0_though_its_lines_name_no_rank():
    timeline = _read(ARGS.replace("tp_size=2", "tp_size=1"), *THROUGH_CAPTURE)
    assert expected_ranks(timeline.launch.sizes) == ("TP0",)
    assert phase_of(timeline, "TP0") == "server"
    assert timeline.ranks["TP0"].last.text.startswith("Capture target decode CUDA graph end")


def test_a_rank_that_lacks_what_others_have_is_named_with_what_it_lacks():
    lines = [("TP1", line) for line in THROUGH_CAPTURE[:4]]
    lines += [("TP0", line) for line in THROUGH_CAPTURE[:3]]
    assert lacking(_read(ARGS, *lines)) == {"TP0": ("weights-end",)}


def test_an_expected_rank_that_never_printed_lacks_all():
    timeline = _read(ARGS, ("TP0", THROUGH_CAPTURE[0]))
    assert lacking(timeline) == {"TP1": ("dist-init-begin",)}


def test_a_rank_that_came_past_a_milestone_for_all_without_a_line_prints_none_and_lacks_none():
    timeline = _read(ARGS, *[("TP0", line) for line in THROUGH_CAPTURE[:4]])
    assert lacking(timeline) == {}
    assert phase_of(timeline, "TP1") == "weights"


def test_what_only_the_first_rank_prints_is_lacked_by_nobody():
    lines = [("TP0", THROUGH_CAPTURE[0]), ("TP1", THROUGH_CAPTURE[0])]
    assert lacking(_read(ARGS, *lines, ("TP0", "sglang is using nccl==2.28.9"))) == {}


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ({"tp": 1}, ["TP0"]),
        ({"tp": 4}, ["TP0", "TP1", "TP2", "TP3"]),
        ({"tp": 2, "pp": 2}, ["PP0 TP0", "PP0 TP1", "PP1 TP0", "PP1 TP1"]),
        ({"tp": 2, "dp": 2}, ["DP0 TP0", "DP0 TP1", "DP1 TP0", "DP1 TP1"]),
        ({"tp": 1, "dp": 2}, ["DP0", "DP1"]),
        ({"tp": 4, "dp": 2, "dp_attention": 1}, ["DP0 TP0", "DP0 TP1", "DP1 TP2", "DP1 TP3"]),
        ({"tp": 4, "nnodes": 2, "node_rank": 1}, ["TP2", "TP3"]),
        ({"tp": 2, "pp": 2, "nnodes": 2, "node_rank": 1}, ["PP1 TP0", "PP1 TP1"]),
        ({"tp": 2, "ep": 2}, ["TP0 EP0", "TP1 EP1"]),
        ({}, []),
    ],
)
def test_the_ranks_of_this_node_are_named_as_the_engine_deals_them_out(sizes, names):
    assert list(expected_ranks(sizes)) == names


def test_a_second_launch_in_the_file_starts_the_timeline_over():
    first = _log(ARGS, *[("TP0", line) for line in THROUGH_CAPTURE], "Exit code: -9")
    second = _log(ARGS, ("TP0", THROUGH_CAPTURE[0]))
    timeline = read_timeline(first + second, SGLANG)
    assert (timeline.launches, timeline.first_line, timeline.lines) == (2, 11, 12)
    assert phase_of(timeline, "TP0") == "distributed-init"
    assert timeline.signs == ()


def test_arguments_that_an_embedded_engine_prints_twice_are_one_launch():
    assert _read(ARGS, "No chat template found", ARGS, ("TP0", THROUGH_CAPTURE[0])).launches == 1


def test_a_log_without_its_head_still_tells_the_phases():
    timeline = _read(*[("TP1", line) for line in THROUGH_CAPTURE[3:6]])
    assert phase_of(timeline, "TP1") == "graph-capture"
    assert expected_ranks(timeline.launch.sizes) == ()
    assert timeline.launch == Launch()


def test_a_bar_keeps_where_it_last_advanced_and_begins_anew_for_a_second_model():
    def bar(done):
        return f"Multi-thread loading shards:   0% Completed | {done}/4 [00:00<?, ?it/s]\n".encode()

    log = _log(ARGS) + bar(0) + bar(2) + bar(2) + bar(2)
    found = read_timeline(log, SGLANG).bars["weight-shards"]
    assert (found.done, found.total, found.number, found.runs) == (2, 4, 3, 1)
    again = read_timeline(log + bar(4) + bar(0), SGLANG).bars["weight-shards"]
    assert (again.done, again.runs, again.number) == (0, 2, 7)


def test_the_blamed_ranks_of_a_barrier_are_read_from_its_own_message():
    timeline = _read(
        ("TP0", "[Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 480000 ms"),
        "Rank 2 scheduler is dead. Please check if there are relevant logs.",
    )
    assert [(sign.id, sign.blamed) for sign in timeline.signs] == [
        ("monitored-barrier-many", (1, 3)),
        ("rank-dead", (2,)),
    ]


def test_signs_are_bounded_and_the_newest_of_each_is_kept():
    heartbeat = "Gracefully exiting... Remaining number of requests {}. Remaining requests []."
    timeline = _read(*[heartbeat.format(number) for number in range(1000)])
    kept = [*range(SIGNS_KEPT), 999]
    assert [sign.text for sign in timeline.signs] == [heartbeat.format(number) for number in kept]


def test_no_number_of_warnings_hides_the_exception_after_them():
    session = "Entering DeepGEMM JIT Pre-Compile session. It may take a long time."
    warning = "Health check failed. Server couldn't get a response from detokenizer for last 20 s."
    failure = "Scheduler hit an exception: Traceback (most recent call last):"
    quit_line = "SIGQUIT received. signum=None, frame=None. It usually means one child failed."
    log = _log(*[session] * 25, warning, ("TP1", failure), quit_line, session, warning)
    timeline = read_timeline(log, SGLANG)
    numbers = [*range(1, SIGNS_KEPT + 1), 27, 28, 29, 30]
    assert [sign.number for sign in timeline.signs] == numbers
    kinds = ["exception", "fatal", "warning", "warning"]
    assert [sign.kind for sign in timeline.signs][SIGNS_KEPT:] == kinds
    state, stepwise = ParserState(), Timeline()
    for line in log.splitlines(keepends=True):
        lines, state = parse(state, line, SGLANG)
        stepwise = advance(stepwise, lines, SGLANG)
    assert stepwise.signs == timeline.signs


def test_no_new_lines_cost_nothing_and_change_nothing():
    timeline = _read(ARGS)
    assert advance(timeline, [], SGLANG) is timeline


def test_a_timeline_can_be_written_down_and_read_back():
    timeline = _read(ARGS, *[("TP0", line) for line in THROUGH_CAPTURE])
    raw = msgspec.json.encode(timeline)
    assert msgspec.json.decode(raw, type=dict)["lines"] == 9


def test_an_unknown_log_belongs_to_no_engine():
    assert detect_engine(b"INFO 11-29 21:04:27 something else\n\xff\x00") is None
    assert detect_engine(b"") is None
    assert detect_engine(_log(("TP0", THROUGH_CAPTURE[2]))) == "sglang"
