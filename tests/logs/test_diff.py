"""Where logs part: by properties that hold for any good log, and by real logs of known outcome."""

from __future__ import annotations

import random
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hangdoctor.engines import load
from hangdoctor.logs.diff import compare
from hangdoctor.logs.summary import STREAM_LIMIT, summarize
from hangdoctor.render.logdiff_answer import answer, headline, next_steps
from hangdoctor.render.logdiff_html import to_html
from hangdoctor.render.logdiff_json import to_json
from hangdoctor.render.logdiff_markdown import to_markdown
from hangdoctor.render.logdiff_text import to_text

DIRECTORY = Path(__file__).parents[2] / "sample_logs"
SGLANG = load("sglang")
GOOD = sorted(path.stem for path in DIRECTORY.glob("*good*.log"))
H200 = "sglang-0.5.15-tp2-good"
OLD, NEW = "sglang-0.5.9-cpu-tp2-good", "sglang-0.5.23-cpu-tp2-good"
REBUILT = "sglang-0.5.9-tp8-{}-rebuilt"


def _bytes(name):
    return (DIRECTORY / f"{name}.log").read_bytes()


def _lines(name):
    """Return a log's lines as editors count them: a carriage return ends none."""
    return [line + b"\n" for line in _bytes(name).split(b"\n")[:-1]]


def _summary(log, name="log"):
    return summarize(name, [_bytes(log) if isinstance(log, str) else log], SGLANG)


def _compare(*logs):
    *good, other = [_summary(log, f"log {index}") for index, log in enumerate(logs)]
    return compare(good, other, SGLANG)


def _rank(diff, name):
    return next(rank for rank in diff.ranks if rank.rank == name)


def _all_milestones(log):
    timeline = _summary(log).timeline
    found = [
        (reached.number, reached.id)
        for each in timeline.ranks.values()
        for reached in each.milestones
    ]
    return sorted(found)


def _said(diff):
    return " ".join(answer(diff))


# Properties


@pytest.mark.parametrize("name", GOOD)
def test_a_log_against_itself_has_no_difference(name):
    diff = _compare(name, name)
    assert diff.outcome == "reaches-all"
    assert diff.first_missing is None
    assert not any((diff.arguments, diff.values, diff.lines, diff.later, diff.only_here))
    assert not any(rank.missing or rank.passed_over or rank.reordered for rank in diff.ranks)
    assert all(rank.reached == rank.expected for rank in diff.ranks)
    assert all(phase.ratio in (None, 1.0) and not phase.slow for phase in diff.phases)


@pytest.mark.parametrize("name", GOOD)
def test_a_good_log_cut_after_one_milestone_first_lacks_the_next_one(name):
    lines = _lines(name)
    for (number, _), (following, milestone) in pairwise(_all_milestones(name)):
        if following == number:
            continue
        diff = _compare(name, b"".join(lines[:number]))
        assert diff.outcome == "stops"
        assert (diff.first_missing.number, diff.first_missing.id) == (following, milestone)


@pytest.mark.parametrize("name", [H200, OLD, NEW])
def test_a_good_log_without_the_milestones_of_one_rank_from_some_place_on_names_that_rank(name):
    lines = _lines(name)
    timeline = _summary(name).timeline
    for reached in timeline.ranks["TP1"].milestones:
        cut = [
            line
            for number, line in enumerate(lines, start=1)
            if b"fired up" not in line
            and b"INFO:" not in line
            and b"Engine startup" not in line
            and not (number >= reached.number and b" TP1]" in line)
        ]
        diff = _compare(name, b"".join(cut))
        assert _rank(diff, "TP1").missing[0].id == reached.id
        assert not [step for step in _rank(diff, "TP0").missing if step.each_rank]
        assert headline(diff) == f"STOPS in {reached.phase}: TP1"


@pytest.mark.parametrize("name", [H200, OLD])
def test_ranks_that_are_interleaved_otherwise_make_no_difference(name):
    """Lines of one rank keep their order, and milestones of the launch their place."""
    lines = _lines(name)
    ranked = [index for index, line in enumerate(lines) if re.match(rb"\[\S+ \S+ TP\d\]", line)]
    shuffler = random.Random(1)  # noqa: S311
    queues = {
        rank: [lines[index] for index in ranked if rank in lines[index]]
        for rank in (b" TP0]", b" TP1]")
    }
    for index in ranked:
        if b"Prefill" in lines[index]:
            continue
        rank = shuffler.choice([rank for rank, queue in queues.items() if queue])
        lines[index] = queues[rank].pop(0)
    diff = _compare(name, b"".join(lines))
    assert diff.outcome == "reaches-all"
    assert not any(rank.reordered or rank.missing for rank in diff.ranks)


WRAPPERS = {
    "kubernetes": lambda line: b"2026-11-29T20:41:51.123456789Z stdout F " + line,
    "journald": lambda line: b"Nov 29 20:41:51 node7 sglang[123]: " + line,
    "compose": lambda line: b"sglang-1  | " + line,
    "crlf": lambda line: line.rstrip(b"\n") + b"\r\n",
    "colours": lambda line: b"\x1b[32m" + line.rstrip(b"\n") + b"\x1b[0m\n",
}


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
def test_what_a_log_collector_adds_makes_no_difference(wrapper):
    wrapped = b"".join(wrapper(line) for line in _lines(OLD))
    diff = _compare(OLD, wrapped)
    assert diff.outcome == "reaches-all"
    assert not [line for line in diff.lines if line.severity == "error"]
    assert [rank.reached for rank in diff.ranks] == [rank.expected for rank in diff.ranks]


@st.composite
def _damaged(draw):
    lines = _bytes(draw(st.sampled_from(["sglang-0.5.15-tp2-weights-hung", H200, OLD]))).splitlines(
        keepends=True
    )
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["cut", "repeat", "swap", "corrupt", "glue", "drop", "insert"]))
        i = draw(st.integers(0, max(0, len(lines) - 1)))
        j = draw(st.integers(0, max(0, len(lines) - 1)))
        if not lines:
            break
        if kind == "cut":
            lines = lines[min(i, j) : max(i, j)]
        elif kind == "repeat":
            lines[i:i] = lines[min(i, j) : max(i, j)]
        elif kind == "swap":
            lines[i], lines[j] = lines[j], lines[i]
        elif kind == "corrupt":
            lines[i] = draw(st.binary(max_size=60)) + lines[i][draw(st.integers(0, 60)) :]
        elif kind == "glue":
            lines[i] = lines[i].rstrip(b"\n")
        elif kind == "drop":
            del lines[i]
        else:
            lines.insert(i, draw(st.binary(max_size=80)) + b"\n")
    return b"".join(lines)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_damaged(), st.integers(40, 200))
def test_a_damaged_log_breaks_nothing_in_any_form(other, width):
    diff = _compare(H200, other)
    assert headline(diff)
    options = {"context": 2, "everything": width % 2 == 0, "ranks": ()}
    text = to_text(diff, SGLANG, width=width, **options)
    for page in (
        text,
        to_json(diff, SGLANG, **options),
        to_html(diff, SGLANG, **options),
        to_markdown(diff, SGLANG, **options),
    ):
        assert not set(page) & {
            chr(code) for code in (*range(10), *range(11, 32), *range(127, 160))
        }


def test_a_start_that_repeats_lines_without_end_is_kept_in_bounds():
    lines = _lines(OLD)
    flood = [
        b"[2026-11-29 22:51:02 TP%d] waiting for %s, attempt %d\n"
        % (number % 2, bytes([97 + number % 7]) * (number % 50), number)
        for number in range(60_000)
    ]
    cut = next(index for index, line in enumerate(lines) if b"Load weight begin" in line)
    diff = _compare(OLD, b"".join([*lines[:cut], *flood]))
    assert diff.first_missing.id == "weights-begin"
    assert diff.other.cut
    assert all(len(stream) <= STREAM_LIMIT for stream in diff.other.streams.values())


# Real logs


@pytest.mark.parametrize(
    ("good", "other", "phase", "first", "culprits"),
    [
        (H200, "sglang-0.5.15-tp2-distributed-init-hung", "distributed-init",
         "dist-init-begin", "TP1"),
        (H200, "sglang-0.5.15-tp2-weights-hung", "weights", "weights-begin", "TP1"),
        (H200, "sglang-0.5.15-tp2-graph-capture-hung", "graph-capture", "capture-begin", ""),
        (H200, "sglang-0.5.15-tp2-warmup-hung", "warmup", "warmup-prefill", ""),
        (OLD, "sglang-0.5.9-cpu-tp2-weights-hung", "weights", "weights-end", ""),
        (OLD, "sglang-0.5.9-cpu-tp2-scheduler-hung", "server", "http-process", ""),
        (OLD, "sglang-0.5.9-cpu-tp2-warmup-hung", "warmup", "warmup-prefill", ""),
        (OLD, "sglang-0.5.9-cpu-tp2-node-missing", "distributed-init", "dist-init-end", ""),
        (NEW, "sglang-0.5.23-cpu-tp2-distributed-init-hung", "distributed-init",
         "dist-init-end", ""),
    ],
)  # fmt: skip
def test_a_hung_start_stops_where_it_hung(good, other, phase, first, culprits):
    diff = _compare(good, other)
    assert (diff.outcome, diff.phase, diff.first_missing.id) == ("stops", phase, first)
    assert headline(diff) == f"STOPS in {phase}" + (f": {culprits}" if culprits else "")
    assert diff.same_release is True
    assert not diff.values


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("sglang-0.5.9-cpu-tp2-shard-damaged", "SafetensorError"),
        ("sglang-0.5.9-cpu-tp2-load-barrier-timeout", "Rank 1 failed to pass monitoredBarrier"),
        ("sglang-0.5.9-cpu-tp2-rank-killed", "didn't finish loading"),
    ],
)
def test_a_start_that_failed_is_said_to_with_the_line_that_says_why(other, words):
    diff = _compare(OLD, other)
    assert diff.outcome == "fails"
    assert headline(diff).startswith("FAILS in weights")
    assert words in answer(diff)[0]
    assert f"line {diff.failure.number} " in answer(diff)[0]
    assert next_steps(diff, SGLANG)[0].command.startswith("sed -n ")


@pytest.mark.parametrize(
    ("good", "other"),
    [
        (OLD, "sglang-0.5.9-cpu-tp4-good"),  # more ranks
        ("sglang-0.5.9-cpu-tp4-good", OLD),
        ("sglang-0.5.15-tp1-good", H200),  # one rank without a name
        (H200, "sglang-0.5.15-tp1-good"),
        (OLD, NEW),  # another release
        (NEW, OLD),
        (OLD, "sglang-0.5.9-cpu-tp1-sigterm"),  # it was ready before somebody ended it
        (OLD, "sglang-0.5.9-cpu-tp2-flags-good"),
        (H200, OLD),  # without graphs and without GPUs
        (REBUILT.format("good"), REBUILT.format("good-again")),
    ],
)
def test_good_starts_of_other_sizes_releases_and_machines_lack_nothing(good, other):
    diff = _compare(good, other)
    assert (diff.outcome, diff.first_missing) == ("reaches-all", None)
    assert not any(rank.missing or rank.reordered for rank in diff.ranks)


@pytest.mark.parametrize(
    ("good", "other", "first", "passed"),
    [
        # 0.5.23 prints "Init parallel ends." before that; the older one never does.
        (OLD, "sglang-0.5.23-cpu-tp2-distributed-init-hung", "dist-init-end", set()),
        (NEW, "sglang-0.5.9-cpu-tp2-weights-hung", "weights-end", {"parallel-groups-end"}),
        (NEW, "sglang-0.5.9-cpu-tp2-scheduler-hung", "http-process", {"tree-cache"}),
        ("sglang-0.5.9-cpu-tp4-good", "sglang-0.5.9-cpu-tp2-weights-hung", "weights-end", set()),
        (H200, "sglang-0.5.9-cpu-tp2-scheduler-hung", "http-process", {"capture-begin"}),
    ],
)
def test_what_the_other_release_or_machine_never_prints_is_not_missing(good, other, first, passed):
    diff = _compare(good, other)
    assert diff.first_missing.id == first
    assert not passed & {step.id for rank in diff.ranks for step in rank.missing}


def test_the_case_that_started_it():
    diff = _compare(*map(REBUILT.format, ("good", "good-again", "weights-hung")))
    assert [summary.timeline.lines for summary in (*diff.good, diff.other)] == [641, 636, 217]
    assert headline(diff) == "STOPS in weights: TP5"
    said = _said(diff)
    assert "TP5 lacks 'Load weight end.'" in said
    assert "the other 7 ranks have it" in said
    assert "64 of 64" in said
    assert "no rank has come to a forward" in said
    assert diff.forward_ran is False
    for rank in diff.ranks[1:]:
        missing = {step.id for step in rank.missing}
        assert ("weights-end" in missing) is (rank.rank == "TP5")
        assert {"kv-cache-allocated", "memory-pool-end", "capture-begin"} <= missing
    assert not any(each for each in diff.arguments if not each.volatile)
    assert not diff.lines
    assert any(tip.what.startswith("TP5 first") for tip in next_steps(diff, SGLANG))


def test_a_forward_is_not_ruled_out_once_a_rank_has_come_near_it_or_where_the_head_is_lost():
    lines = _lines(H200)

    def upto(words):
        return next(index for index, line in enumerate(lines, start=1) if words in line)

    assert _compare(H200, b"".join(lines[: upto(b"KV Cache is")])).forward_ran is False
    assert _compare(H200, b"".join(lines[: upto(b"Memory pool end")])).forward_ran is True
    headless = b"".join(lines[upto(b"server_args") : upto(b"Load weight end")])
    assert _compare(H200, headless).forward_ran is None


@pytest.mark.parametrize("name", [H200, OLD, NEW])
def test_a_log_whose_head_is_lost_is_not_blamed_for_what_it_would_have_said_there(name):
    lines = _lines(name)
    for cut in range(30, len(lines) - 30, 7):
        diff = _compare(name, b"".join(lines[cut:]))
        assert diff.outcome == "reaches-all"
    stop = next(i for i, line in enumerate(lines) if b"TP1] Memory pool end" in line)
    begin = next(i for i, line in enumerate(lines) if b"Init" in line and b"begin" in line) + 4
    diff = _compare(name, b"".join(lines[begin:stop]))
    assert not {"args", "dist-init-begin"} & {
        step.id for rank in diff.ranks for step in rank.missing
    }
    assert _rank(diff, "TP1").missing[0].id == "memory-pool-end"
    assert "head of the log is lost" in _said(diff)
    assert diff.forward_ran is None


def test_a_second_model_that_only_the_good_launch_has_is_not_missing():
    lines = _lines(H200)
    begin, end = (
        next(i for i, line in enumerate(lines) if words in line)
        for words in (b"TP1] Load weight begin", b"TP1] Capture target decode CUDA graph end")
    )
    twice = lines[: end + 1] + lines[begin : end + 1] + lines[end + 1 :]
    drafting = b"".join(twice).replace(
        b"speculative_algorithm=None", b"speculative_algorithm='EAGLE'"
    )
    stopped = b"".join(lines[: end + 1])
    for other, lacks in (
        (stopped, False),
        (stopped.replace(b"speculative_algorithm=None", b"speculative_algorithm='EAGLE'"), True),
    ):
        missing = {(step.id, step.nth) for step in _rank(_compare(drafting, other), "TP1").missing}
        assert (("weights-end", 2) in missing) is lacks


# What it says of arguments, values, phases, lines


def _changed(name, *replacements, upto=None):
    log = _bytes(name)
    for old, new in replacements:
        assert re.search(old, log), old
        log = re.sub(old, new, log)
    return log if upto is None else log[: log.index(upto)]


def test_a_changed_argument_is_named_with_both_values_and_volatile_ones_come_last():
    diff = _compare(OLD, "sglang-0.5.9-cpu-tp2-flags-good")
    assert [(each.name, each.good, each.other) for each in diff.arguments if not each.volatile] == [
        ("chunked_prefill_size", ("4096",), "64"),
        ("schedule_policy", ("'fcfs'",), "'lof'"),
    ]
    assert diff.arguments[-1].volatile


def test_an_argument_is_no_difference_where_one_of_the_good_logs_has_that_value():
    flags = "sglang-0.5.9-cpu-tp2-flags-good"
    assert not [each for each in _compare(OLD, flags, flags).arguments if not each.volatile]
    assert [each.name for each in _compare(OLD, OLD, flags).arguments][:1] == [
        "chunked_prefill_size"
    ]


def test_memory_that_one_rank_has_less_of_is_named_and_noise_is_not():
    other = _changed(
        H200,
        (
            rb"TP1\] Load weight begin. avail mem=138.28",
            rb"TP1] Load weight begin. avail mem=71.02",
        ),
        (
            rb"TP0\] Load weight begin. avail mem=138.28",
            rb"TP0] Load weight begin. avail mem=138.11",
        ),
    )
    (value,) = _compare(H200, other).values
    assert (value.where, value.key, value.good) == (
        "Load weight begin.",
        "avail mem",
        ("138.28 GB",),
    )
    assert value.other == {"TP1": "71.02 GB"}


def test_other_words_and_counts_in_a_milestone_are_named():
    other = _changed(
        H200,
        (rb"#tokens: 10716828", rb"#tokens: 812345"),
        (rb"dtype: torch.bfloat16", rb"dtype: torch.float8_e4m3fn"),
        (rb"nccl==2.28.9", rb"nccl==2.27.5"),
    )
    found = {(each.key, *each.good, *each.other.values()) for each in _compare(H200, other).values}
    assert ("#tokens", "10716828", "812345", "812345") in found
    assert ("dtype", "torch.bfloat16", "torch.float8_e4m3fn", "torch.float8_e4m3fn") in found
    assert ("nccl", "2.28.9", "2.27.5") in found


def test_a_backend_that_was_chosen_otherwise_is_one_changed_line():
    other = _changed(REBUILT.format("good"), (rb"Use fa3 backend", rb"Use triton backend"))
    (line,) = _compare(REBUILT.format("good"), other).lines
    assert line.kind == "changed"
    assert "fa3" in line.good_line.text
    assert "triton" in line.line.text


def test_new_lines_are_ranked_errors_first_and_a_traceback_is_one_of_them_not_its_frames():
    other = _changed(
        H200,
        (
            rb"(\[[^\]]*TP1\]) Load weight begin",
            b"\n".join(
                (
                    rb"\1 Something quite unheard of has been seen",
                    rb"\1 Scheduler hit an exception: Traceback (most recent call last):",
                    rb'  File "x.py", line 3, in f',
                    rb"    g()",
                    rb"ValueError: no",
                    rb"\1 It may fail",
                    rb"\1 Load weight begin",
                )
            ),
        ),
    )
    new = [line for line in _compare(H200, other).lines if line.kind == "new"]
    assert [line.severity for line in new] == ["error", "error", "warning", "note"]
    assert not any("File" in line.template or "g()" in line.template for line in new)
    assert all(line.ranks == ("TP1",) for line in new)


def test_a_line_that_one_rank_does_not_print_is_named_with_that_rank():
    log = _bytes(H200)
    other = re.sub(rb"\[[^\]]*TP1\] tilelang not installed[^\n]*\n", b"", log)
    (line,) = _compare(H200, other).lines
    assert (line.kind, line.ranks) == ("missing", ("TP1",))
    assert line.template.startswith("tilelang not installed")


def test_lines_after_the_place_that_a_log_comes_to_are_counted_and_not_listed():
    diff = _compare(H200, "sglang-0.5.15-tp2-weights-hung")
    assert not diff.lines
    assert diff.later > 10


def test_a_phase_is_slow_against_the_longest_of_all_good_logs():
    def stretched(seconds):
        return _changed(H200, (rb"20:43:(2[6-9]|[345])", rb"20:%d:\1" % (43 + seconds // 60)))

    slow = {phase.phase for phase in _compare(H200, stretched(240)).phases if phase.slow}
    assert slow == {"distributed-init"}
    assert not any(phase.slow for phase in _compare(H200, stretched(240), stretched(240)).phases)
    diff = _compare(H200, stretched(240))
    assert diff.outcome == "reaches-all"
    assert "distributed-init took" in _said(diff)


def test_a_warning_that_repeats_far_more_often_is_said():
    other = _changed(H200, (rb"(\[[^\]]*TP1\] tilelang not installed[^\n]*\n)", rb"\1" * 60))
    (line,) = _compare(H200, other).lines
    assert (line.kind, line.good_count) == ("more", 2)
    assert line.count == 61


def test_milestones_in_another_order_are_named():
    log = _lines(H200)
    first, second = (
        next(i for i, line in enumerate(log) if words in line)
        for words in (b"TP1] KV Cache is", b"TP1] Memory pool end")
    )
    log[first], log[second] = log[second], log[first]
    diff = _compare(H200, b"".join(log))
    assert len(_rank(diff, "TP1").reordered) == 1
    assert not _rank(diff, "TP0").reordered


# Several launches


def test_of_several_launches_in_a_file_the_last_one_is_compared():
    diff = _compare(H200, _bytes(H200) + _bytes("sglang-0.5.15-tp2-weights-hung"))
    assert diff.other.timeline.launches == 2
    assert headline(diff) == "STOPS in weights: TP1"
    assert not [line for line in diff.lines if line.kind == "missing"]
    text = to_text(diff, SGLANG, width=80, context=3, everything=False, ranks=())
    assert "2 launches" in text
    again = _compare(H200, _bytes("sglang-0.5.15-tp2-weights-hung") + _bytes(H200))
    assert again.outcome == "reaches-all"


def test_what_a_server_says_while_it_serves_is_no_difference_of_the_start_but_its_end_is():
    served = b"".join(
        b'[2026-11-29 20:44:00] INFO:     10.0.0.1:%d - "POST /generate HTTP/1.1" 200 OK\n'
        b"[2026-11-29 20:44:00 TP0] Prefill batch, #new-seq: %d\n"
        b"[2026-11-29 20:44:00 TP0] some talk about request %d\n" % (n, n, n)
        for n in range(50)
    )
    assert not _compare(H200, _bytes(H200) + served).lines
    dead = served + (
        b"[2026-11-29 20:45:00 TP1] Scheduler watchdog timeout (self.watchdog_timeout=300, "
        b"self.soft=False)\n[2026-11-29 20:45:05] SIGQUIT received. signum=3, frame=None.\n"
    )
    diff = _compare(H200, _bytes(H200) + dead)
    assert (diff.outcome, diff.first_missing) == ("fails", None)
    assert headline(diff) == "FAILS after it was ready"


# Tails of reported cases, in lines of one's own


BEGIN = "Init torch distributed begin."
INIT = (BEGIN, "Init torch distributed ends. elapsed=15.00 s, mem usage=1.01 GB")
LOADING = (*INIT, "Load weight begin. avail mem=93.52 GB")
LOADED = (*LOADING, "Load weight end. elapsed=9 s, type=X, avail mem=9 GB, mem usage=9 GB.")
CASES = {
    # Two nodes: the second one never comes; custom all-reduce is the last word of each rank.
    "across-nodes": (
        (BEGIN, "Custom allreduce is disabled because this process group spans across nodes."),
        "nccl-version",
    ),
    # Slow storage: the bar creeps.
    "slow-shards": (LOADING, "weights-end"),
    # All ranks have loaded, and wait in the barrier after it.
    "after-load": (LOADED, "kv-cache-allocated"),
    # An exception in capture is hidden: the bar stands at 0.
    "hidden-exception": (
        (
            *LOADED,
            "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 10240, KV size: 0.94 GB",
            "Memory pool end. avail mem=22.59 GB",
            "Capture target decode CUDA graph begin. backend=full, avail mem=3.66 GB",
            "Registering 0 cuda graph addresses",
        ),
        "capture-end",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_tails_of_reported_cases(case):
    said, first = CASES[case]
    args = next(line for line in _bytes(H200).splitlines() if b"server_args=" in line)
    log = [args] + [
        f"[2026-12-01 10:00:{second:02} TP{rank}] {text}".encode()
        for second, text in enumerate(said)
        for rank in (0, 1)
    ]
    if case == "slow-shards":
        log.append(b"Multi-thread loading shards:   8% Completed | 5/64 [02:29<36:52, 37.50s/it]")
    diff = _compare(H200, b"\n".join(log))
    assert diff.first_missing.id == first
    assert headline(diff) == f"STOPS in {diff.phase}"
    if case == "slow-shards":
        assert "5 of 64" in _said(diff)


# Text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_text_fits_its_width_but_for_commands(width):
    for other in ("sglang-0.5.9-cpu-tp2-shard-damaged", NEW, "sglang-0.5.9-cpu-tp2-weights-hung"):
        diff = _compare(OLD, other)
        for everything in (False, True):
            text = to_text(diff, SGLANG, width=width, context=3, everything=everything, ranks=())
            wide = [line for line in text.splitlines() if len(line) > width]
            assert not [line for line in wide if "hangdoctor " not in line and " " in line.strip()]
