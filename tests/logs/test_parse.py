from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hangdoctor.engines import load
from hangdoctor.logs.parse import (
    TEXT_LIMIT,
    LogLine,
    ParserState,
    finish,
    parse,
)
from hangdoctor.logs.timeline import Timeline, advance, read_timeline

SGLANG = load("sglang")
DIRECTORY = Path(__file__).parents[2] / "sample_logs"
GOOD = (DIRECTORY / "sglang-0.5.15-tp2-good.log").read_bytes()
CRASH = (DIRECTORY / "sglang-0.5.9-cpu-tp2-shard-damaged.log").read_bytes()
PREFIXED = b"[2026-11-29 21:04:27 TP1] Load weight begin. avail mem=138.28 GB"
SHARDS = "Multi-thread loading shards:  {}% Completed | {}/55 [00:00<00:00, 422.32it/s]"


def _parse(*blocks: bytes) -> list[LogLine]:
    state, lines = ParserState(), []
    for block in blocks:
        new, state = parse(state, block, SGLANG)
        lines += new
    return lines + finish(state, SGLANG)


def _one(log: bytes) -> LogLine:
    (line,) = _parse(log)
    return line


def _messages(lines: list[LogLine]) -> list[LogLine]:
    return [line for line in lines if line.bar is None]


def test_a_line_gives_its_rank_its_time_and_its_text():
    line = _one(PREFIXED + b"\n")
    assert (line.number, line.rank) == (1, "TP1")
    assert line.text == "Load weight begin. avail mem=138.28 GB"
    assert line.time_s == 1795986267.0


def test_milliseconds_in_a_stamp_are_read():
    line = _one(b"[2026-11-29 21:04:27.250 DP1 PP0 TP3 EP1] text\n")
    assert (line.rank, line.time_s) == ("DP1 PP0 TP3 EP1", 1795986267.25)


def test_a_stamp_that_is_no_date_is_no_time():
    assert _one(b"[2026-13-45 21:04:27 TP1] text\n").time_s is None


@pytest.mark.parametrize(
    "wrapped",
    [
        b"2026-11-29T20:41:51.123456789Z stdout F %s\n",
        b"2026-11-29T20:41:51.123456789Z %s\n",
        b"2026-11-29T20:41:51.123456789+01:00 stderr F %s\n",
        b"[pod/sglang-0/server] %s\n",
        b"[pod/sglang-0/server] 2026-11-29T20:41:51.123456789Z %s\n",
        b"sglang-1  | %s\n",
        b"[sglang]     | %s\n",
        b"(WorkerDict pid=2782, ip=10.1.4.2) %s\n",
        b"2026-11-29T20:41:51.123456789Z \x1b[36m(Worker pid=7)\x1b[0m %s\n",
        b"\x1b[36msglang-1  | \x1b[0m%s\n",
        b"Nov 29 20:41:51 node7 sglang[123]: %s\n",
        b"Nov  9 20:41:51 node7 python3: %s\n",
        b"2026-11-29T20:41:51+0000 node7 sglang[123]: %s\n",
        b"0: %s\n",
        b"[2]: %s\n",
        b"\x1b[1;33m%s\x1b[0m\n",
        b"%s\r\n",
        b"%s",
        b"\0\0\0%s\n",
    ],
)
def test_a_message_is_found_behind_what_collectors_and_terminals_put_around_it(wrapped):
    assert _one(wrapped % PREFIXED) == _one(PREFIXED + b"\n")


@pytest.mark.parametrize("wrapped", [b"2026-11-29T20:41:51.1Z stdout F %s\n", b"x-1  | %s\n"])
def test_a_bar_is_found_behind_what_collectors_put_before_it(wrapped):
    assert _one(wrapped % SHARDS.format(78, 43).encode()).bar == ("weight-shards", 43, 55)


def test_lines_of_dockers_json_file_are_unpacked_and_those_cut_in_two_joined():
    def logged(text: str) -> bytes:
        return json.dumps(
            {"log": text, "stream": "stderr", "time": "2026-11-29T20:41:51Z"}
        ).encode()

    whole = PREFIXED.decode()
    log = logged(whole[:20]) + b"\n" + logged(whole[20:] + "\n") + b"\n" + logged("next\n") + b"\n"
    first, second = _parse(log)
    assert (first.number, first.rank, first.text) == (2, "TP1", whole[26:])
    assert second.text == "next"
    assert _one(b'{"log": "not docker"').text == '{"log": "not docker"'


def test_lines_that_the_container_runtime_cut_are_joined():
    log = b"2026-11-29T20:41:51.1Z stdout P %s\n2026-11-29T20:41:51.1Z stdout F %s\n"
    assert _one(log % (PREFIXED[:30], PREFIXED[30:])).text == _one(PREFIXED).text
    assert _parse(b"2026-11-29T20:41:51.1Z stdout P " + PREFIXED)[0].rank == "TP1"


def test_a_bar_that_the_next_message_is_glued_to_gives_both():
    log = SHARDS.format(0, 0).encode() + PREFIXED + b"\n"
    bar, message = _parse(log)
    assert bar.bar == ("weight-shards", 0, 55)
    assert (message.rank, message.number) == ("TP1", 1)


def test_two_messages_on_one_line_are_two():
    assert [line.rank for line in _parse(PREFIXED + PREFIXED.replace(b"TP1", b"TP0"))] == [
        "TP1",
        "TP0",
    ]


def test_thousands_of_updates_of_a_bar_on_one_line_are_two_lines_not_thousands():
    log = "\r".join(SHARDS.format(1, done) for done in range(56)).encode() * 40 + b"\n"
    lines = _parse(log)
    assert len(lines) == 2
    assert lines[-1].bar == ("weight-shards", 55, 55)


def test_a_bar_on_a_line_that_never_ends_is_told_while_it_grows():
    state = ParserState()
    for done in (0, 7, 8):
        text = f"\r{SHARDS.format(1, done)}".encode()
        lines, state = parse(state, text, SGLANG)
        assert lines[-1].bar == ("weight-shards", done, 55)
        assert len(state.tail) < 200


def test_a_bar_whose_total_is_cut_is_not_told_with_a_wrong_one():
    text = SHARDS.format(1, 12).encode()
    lines, state = parse(ParserState(), text[: text.index(b"/55") + 2], SGLANG)
    assert lines == []
    lines, state = parse(state, text[text.index(b"/55") + 2 :], SGLANG)
    assert lines[0].bar == ("weight-shards", 12, 55)


def test_lines_of_a_traceback_belong_to_the_rank_that_raised_it():
    lines = _parse(CRASH)
    start = next(i for i, line in enumerate(lines) if "hit an exception" in line.text)
    end = next(i for i, line in enumerate(lines) if "Received sigquit" in line.text)
    assert {line.rank for line in lines[start:end]} == {"TP0"}
    assert lines[end - 1].text.startswith("safetensors._safetensors_rust.SafetensorError")
    assert lines[end].rank == lines[start - 1].rank == ""


def test_what_is_no_text_is_read_without_an_error():
    for log in (b"\xff\xfe\xfa", bytes(range(256)) * 100, gzip.compress(GOOD), b"\x1b[", b"\r\r\n"):
        for line in _parse(log):
            assert line.text.strip()
            assert not set(line.text) & {"\0", "\x1b", "\r", "\n"}


def test_invalid_utf8_is_replaced_and_the_rest_of_the_line_kept():
    assert _one(b"[2026-11-29 21:04:27 TP1] a\xffb\n").text == "a\ufffdb"


def test_a_character_cut_by_the_edge_of_a_block_is_whole_again():
    raw = "[2026-11-29 21:04:27 TP1] é█\n".encode()
    for cut in range(len(raw)):
        assert _messages(_parse(raw[:cut], raw[cut:]))[0].text == "é█"


def test_a_line_of_megabytes_keeps_its_head_and_its_newest_bar():
    middle = b"x" * 5_000_000
    bar = SHARDS.format(78, 43).encode()
    first, *_ = _parse(PREFIXED + middle + b"\n")
    assert first.rank == "TP1"
    assert len(first.text) <= TEXT_LIMIT
    state = ParserState()
    for _ in range(50):
        lines, state = parse(state, middle[:100_000], SGLANG)
        assert lines == []
        assert len(state.tail) <= TEXT_LIMIT
    lines, state = parse(state, bar, SGLANG)
    assert lines[0].bar == ("weight-shards", 43, 55)


def test_noise_is_dropped_but_counted_and_shown_where_it_is_the_last_line():
    noise = b"[2026-11-29 21:04:27 TP0] Decode batch, #running-req: 1, gen throughput: 80\n"
    lines, state = parse(ParserState(), noise * 1000 + PREFIXED + b"\n" + noise * 10, SGLANG)
    assert [line.number for line in lines] == [1001]
    assert state.number == 1011
    (last,) = finish(state, SGLANG)
    assert (last.number, last.text[:12]) == (1011, "Decode batch")


def test_finishing_changes_nothing_so_that_it_can_be_used_to_peek():
    _, state = parse(ParserState(), GOOD + PREFIXED, SGLANG)
    assert finish(state, SGLANG) == finish(state, SGLANG)
    _, whole = parse(state, b"\n", SGLANG)
    assert whole.number == state.number + 1


def test_a_state_can_be_written_down_and_read_back():
    _, state = parse(ParserState(), GOOD[:5000], SGLANG)
    assert msgspec.json.decode(msgspec.json.encode(state), type=ParserState) == state


@pytest.mark.parametrize("log", [GOOD, CRASH], ids=["good", "crash"])
@pytest.mark.parametrize("size", [1, 7, 64, 1000, 4096])
def test_a_log_says_the_same_however_it_is_cut_into_blocks(log, size):
    blocks = [log[start : start + size] for start in range(0, len(log), size)]
    assert _messages(_parse(*blocks)) == _messages(_parse(log))
    assert advance(Timeline(), _parse(*blocks), SGLANG) == read_timeline(log, SGLANG)


_PIECES = st.sampled_from(
    [
        PREFIXED,
        b"\n",
        b"\r\n",
        b"\r",
        SHARDS.format(1, 1).encode(),
        SHARDS.format(2, 20).encode(),
        b"[2026-11-29 21:04:27 TP0] Decode batch, #running-req: 1\n",
        b"[2026-11-29 21:04:28 TP0] Scheduler hit an exception: Traceback (most recent call ...\n",
        b'  File "x.py", line 1, in f\n',
        b"ValueError: too many values to unpack (expected 2)\n",
        "█ é".encode(),
        b"\x1b[31m",
        b"\0",
        b"\xff",
        b"2026-11-29T20:41:51.1Z stdout P ",
        b"2026-11-29T20:41:51.1Z stdout F ",
        b'{"log":"x\\n"}',
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(_PIECES, max_size=30), st.lists(st.integers(0, 3000), max_size=8))
def test_any_log_says_the_same_however_it_is_cut_into_blocks(pieces, cuts):
    log = b"".join(pieces)
    edges = sorted({0, len(log), *(cut for cut in cuts if cut < len(log))})
    blocks = [log[start:end] for start, end in pairwise(edges)]
    assert _messages(_parse(*blocks)) == _messages(_parse(log))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=2000))
def test_any_bytes_are_read_without_an_error_and_without_control_characters(log):
    for line in _parse(log):
        assert line.text
        assert not any(ord(char) < 32 and char != "\t" for char in line.text)


NOISE = b"[2026-11-29 21:04:27 TP1] Decode batch, #running-req: 1"
ACCESS = b'[2026-11-29 21:04:27] INFO:     10.0.0.1:80 - "POST /generate HTTP/1.1" 200 OK'
PIECES = st.sampled_from(
    [NOISE, ACCESS, PREFIXED, SHARDS.format(3, 2).encode(), b"text", b"\r", b""]
)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(PIECES, max_size=3), st.sampled_from([b"\n", b"\r\n"])), max_size=30
    ),
    st.booleans(),
)
def test_skipping_what_means_nothing_gives_what_reading_every_line_and_dropping_it_gives(
    lines, end
):
    """The fast path beside the plain one: with carriage returns of every kind, in any mixture."""
    whole = [b"".join(pieces) + ending for pieces, ending in lines]
    log = b"".join(whole) + (b"" if end else b"\n")
    meaningless = set()
    for number, raw in enumerate(log.replace(b"\r\n", b"\n").split(b"\n")[:-1], start=1):
        if b"\r" not in raw.rstrip(b"\r") and any(
            literal.encode() in raw for literal in SGLANG.skip
        ):
            meaningless.add(number)
    quick, _ = parse(ParserState(), log, SGLANG)
    plain, _ = parse(ParserState(), log, msgspec.structs.replace(SGLANG, skip=()))
    assert [(line.number, line.text) for line in quick] == [
        (line.number, line.text) for line in plain if line.number not in meaningless
    ]
