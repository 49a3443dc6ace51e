"""The view of a launch that is watched, of recordings and of launches that were told about."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from hangdoctor import engines
from hangdoctor.diagnose import diagnose
from hangdoctor.facts.fold import begin, derive, step
from hangdoctor.recording import load
from hangdoctor.render.live import view

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "recordings")]
import scenarios as told  # noqa: E402  # test material beside the tests
import transform  # noqa: E402
from scenarios import Does, good_log, launch  # noqa: E402

SGLANG = engines.load("sglang")
RECORDINGS = TESTS / "recordings"
NAMES = sorted(path.parent.name for path in RECORDINGS.glob("*/recording.json"))
HUNG = RECORDINGS / "h200-tp2-load-sleep-r1"
SIZES = [(80, 24), (160, 50), (200, 24), (80, 100)]
SMALL = [(80, 19), (79, 10), (40, 10), (40, 3), (20, 5), (8, 2), (1, 1)]
HOSTILE = "\x1b[2Jgone\u202egnp\x9b31m\u2066\x07 [bold red]loud[/] [link=http://x]x"


def draw(facts, width, height, *, color=None):
    drawn = view(facts, diagnose(facts, SGLANG), width, height)
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=color)
    with console.capture() as written:
        console.print(drawn)
    lines = written.get().splitlines()
    assert all(line.cell_len <= width for line in drawn.renderables)
    assert len(lines) == len(drawn.renderables) <= height
    return lines


def shown(recording, width, height):
    return draw(derive(recording, SGLANG), width, height)


def named_in(text):
    """Return the ranks that a text names, those within a range too."""
    found = set()
    for first, last in re.findall(r"TP(\d+)(?:-TP(\d+))?", text):
        found |= {f"TP{number}" for number in range(int(first), int(last or first) + 1)}
    return found


def row_of(lines, name):
    below = lines[next(number for number, line in enumerate(lines) if line.startswith("  RANK")) :]
    return next(line for line in below if line[2:].split(" ")[0] == name)


@pytest.mark.parametrize("name", NAMES)
def test_each_look_at_each_recording_fits_and_shows_verdict_culprits_and_every_rank(name):
    recording = load(RECORDINGS / name)
    facts = begin(recording.header, SGLANG)
    last = len(recording.snapshots) - 1
    for number, (snapshot, blocks) in enumerate(recording.steps()):
        facts = step(facts, snapshot, blocks, SGLANG)
        if number % 10 and number != last:
            continue
        found = diagnose(facts, SGLANG)
        for width, height in SIZES:
            lines = draw(facts, width, height)
            assert lines[0].startswith(found.state.upper())
            assert set(found.culprits) <= named_in(lines[0])
            assert {rank.name for rank in facts.ranks} <= named_in("\n".join(lines))
            for culprit in found.culprits:
                assert row_of(lines, culprit).startswith("> ")
    for width, height in SMALL:
        assert draw(facts, width, height)[0].startswith(found.state.upper()[:width])


def test_a_hung_launch_in_a_small_terminal():
    lines = shown(load(HUNG), 80, 24)
    assert "\n".join(lines) == (
        """\
HUNG in weights: TP1                                           confidence medium
  TP0 waits in post-load barrier for TP1, which is at ModelRunner.initialize
  (model_runner.py:702)
  the wait of TP0 ends by itself in 393 s (a limit of 480 s): the ranks that
  wait end, and the launch with them
  nothing moved for 86 s, watched for 158 s, log silent for 87 s, sglang

Next  1. read the code at ModelRunner.initialize (model_runner.py:702): TP1 does
      not come back from it
      2. look again: py-spy dump --nonblocking --pid 787

  RANK         PID  PHASE    FOR   MOVES        DOES
  TP0          786  weights  90 s  still 86 s   waits in post-load barrier
> TP1          787  weights  90 s  still 86 s   ModelRunner.initialize
                                                (model_runner.py:702)
  launcher     680                 still 128 s  waits for the ranks' ready me...
  detokenizer  788                 idle         waits for tokens to decode

  GPU  RANKS  READING  BUSY  MEMORY   POWER
  0    TP0    idle     0 %   2.3 GiB  123 W
> 1    TP1    idle     0 %   2.1 GiB  124 W

Log  silent for 87 s, TP0: Load weight end. elapsed=0.35 s, type=DeepseekV3Fo...
     last milestone: weights-end of TP0, 87 s ago"""
    )


def test_a_large_terminal_has_room_for_the_stack_the_kernel_and_the_last_line_of_the_culprit():
    lines = shown(load(HUNG), 160, 50)
    after = lines[lines.index(row_of(lines, "TP1")) + 1 :]
    assert after[0].startswith("    stack: ModelRunner.initialize (model_runner.py:702) < ")
    assert any("state S in hrtimer_nanosleep" in line for line in after[:4])
    assert any("log: Ignore import error" in line for line in after[:4])


def many(tmp_path, count, does, **others):
    names = [f"TP{number}" for number in range(count)]
    ranks = dict.fromkeys(names, does) | others
    log = good_log(names, "load-end")
    return derive(launch(tmp_path, ranks, log=log, seconds=90), SGLANG)


@pytest.mark.parametrize("count", [8, 64])
@pytest.mark.parametrize("size", SIZES)
def test_of_many_ranks_equal_ones_share_a_line_and_the_one_that_differs_has_its_own(
    count, size, tmp_path
):
    waits = Does(stack=told.BARRIER)
    lines = draw(many(tmp_path, count, waits, TP5=Does(stack=told.MMAP)), *size)
    others = next(line for line in lines if f"({count - 1})" in line and "still" in line)
    assert named_in(others) == {f"TP{n}" for n in range(count) if n != 5}
    assert row_of(lines, "TP5").startswith("> TP5")
    assert sum(line.startswith("> ") for line in lines) == 2  # the rank and its card


def test_a_title_of_many_ranks_names_them_as_ranges(tmp_path):
    facts = many(tmp_path, 64, Does(stack=told.BARRIER), TP37=Does(stack=told.MMAP))
    title = diagnose(facts, SGLANG).title
    assert title.startswith("TP0-TP36 and TP38-TP63 wait in ")
    assert "for TP37, which is at" in title


def test_ranks_that_move_by_the_same_at_other_speeds_share_a_line_with_the_range(tmp_path):
    names = [f"TP{number}" for number in range(8)]
    ranks = {
        name: Does(stack=told.MMAP, reads_per_s=(number + 10) * 1e6)
        for number, name in enumerate(names)
    }
    recording = launch(tmp_path, ranks, log=good_log(names, "load-end"), seconds=60)
    row = next(line for line in shown(recording, 160, 50) if "TP0-TP7 (8)" in line)
    assert "moves" in row
    assert "reads 10.0-17.0 MB/s from disk" in row


def test_ranks_that_all_differ_have_a_line_each_where_there_is_room_and_none_is_ever_lost(tmp_path):
    stacks = [told.MMAP, told.BARRIER, told.DIST, told.REPACK, told.COPY, told.FORWARD, told.HUB]
    names = [f"TP{number}" for number in range(len(stacks))]
    ranks = {name: Does(stack=stack) for name, stack in zip(names, stacks, strict=True)}
    recording = launch(tmp_path, ranks, log=good_log(names, "load-end"), seconds=90)
    lines = shown(recording, 80, 24)
    assert all(row_of(lines, name) for name in names)
    facts = derive(recording, SGLANG)
    for height in range(8, 24):
        assert set(names) <= named_in("\n".join(draw(facts, 80, height)))


def test_copies_of_a_rank_join_its_line_and_the_culprit_stays_alone(tmp_path):
    copies = [f"TP{number}" for number in range(2, 8)]
    recording = transform.multiply_rank(load(HUNG), "TP0", copies, tmp_path)
    lines = shown(recording, 80, 24)
    assert any(line.startswith("  TP0, TP2-TP7 (7)") for line in lines)
    assert row_of(lines, "TP1").startswith("> TP1")


def test_of_many_cards_equal_ones_share_a_line_and_one_with_less_memory_has_its_own(tmp_path):
    fills = Does(stack=told.MMAP, gpu_grows_per_s=1e9, reads_per_s=1e9)
    facts = many(tmp_path, 8, fills, TP3=Does(stack=told.MMAP, reads_per_s=1e9))
    lines = draw(facts, 80, 24)
    heading = next(number for number, line in enumerate(lines) if "READING" in line)
    full, less = sorted(lines[heading + 1 : heading + 3])
    assert full.startswith("  0-2, 4-7 (7)")
    assert less.startswith("  3 ")


def test_a_launcher_that_died_is_shown_in_the_smallest_terminal_too(tmp_path):
    facts = many(tmp_path, 2, Does(stack=told.BARRIER))
    dead = {
        pid: msgspec.structs.replace(track, present=False, exit_status=-9)
        if track.role == "launcher"
        else track
        for pid, track in facts.tracks.items()
    }
    lines = draw(msgspec.structs.replace(facts, tracks=dead), 80, 24)
    assert "killed by signal 9" in row_of(lines, "launcher")


def test_the_running_bar_shows_how_far_it_is_and_since_when(tmp_path):
    loads = Does(stack=told.MMAP, reads_per_s=1e8)
    bar = "Loading safetensors checkpoint shards:  33% Completed | 1/3 [00:00<00:00, 10.00it/s]"
    log = [*good_log(["TP0"], "load-end"), (50.0, bar)]
    lines = shown(launch(tmp_path, {"TP0": loads}, log=log, seconds=80), 80, 24)
    line = next(line for line in lines if line.startswith("weight-shards"))
    assert re.search(r"\[#+-+\] 1/3, last \d+ s ago", line)


def test_nothing_of_the_target_reaches_the_terminal_raw_nor_as_markup(tmp_path):
    log = [*good_log(["TP0"], "load-end"), (50.0, f"TP0| {HOSTILE}")]
    stack = (f"{HOSTILE} {HOSTILE}.py:3", *told.MMAP)
    recording = launch(tmp_path, {"TP0": Does(stack=stack)}, log=log, seconds=60)
    for size in (*SIZES, *SMALL):
        text = "\n".join(shown(recording, *size))
        assert not set(text) & {chr(n) for n in (*range(10), *range(11, 32), *range(127, 160))}
        assert not set(text) & set("\u202a\u202e\u2066\u2069")
    assert "[bold red]loud[/]" in " ".join(shown(recording, 160, 50))


def test_wide_characters_count_as_two_cells(tmp_path):
    log = [*good_log(["TP0"], "load-end"), (50.0, "TP0| " + "\u91cd\u307f" * 200)]
    recording = launch(tmp_path, {"TP0": Does(stack=told.MMAP)}, log=log, seconds=60)
    for size in (*SIZES, *SMALL):
        shown(recording, *size)


def test_colours_repeat_what_words_and_marks_say():
    facts = derive(load(HUNG), SGLANG)
    plain, coloured = draw(facts, 80, 24), draw(facts, 80, 24, color="standard")
    assert "\x1b[1;31mHUNG" in coloured[0]
    assert [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in coloured] == plain
    ready = derive(load(RECORDINGS / "h200-tp2-good-cold"), SGLANG)
    assert "\x1b[1;32mREADY" in draw(ready, 80, 24, color="standard")[0]
    unknown = derive(load(RECORDINGS / "h200-tp2-warmup-forward-sleep-r1"), SGLANG)
    assert "\x1b[1;33mUNKNOWN" in draw(unknown, 80, 24, color="standard")[0]


def test_before_any_look_there_is_a_view_too():
    facts = begin(load(HUNG).header, SGLANG)
    assert draw(facts, 80, 24)[0].startswith("UNKNOWN")
