"""Work that a progress bar counts: items done and to do, how long each took, what is left."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hangdoctor import engines
from hangdoctor.counts import counts
from hangdoctor.diagnose import diagnose
from hangdoctor.facts.fold import derive
from hangdoctor.recording import bare_log
from hangdoctor.render.json import document

sys.path.insert(0, str(Path(__file__).parent))
import scenarios as told  # test material beside the tests
from scenarios import Does, good_log, launch

SGLANG = engines.load("sglang")
LOG = good_log(("TP0", "TP1"), "capture-end")
BEGAN_S = LOG[-1][0]
SIZES = (BEGAN_S, "TP0| Capture cuda graph bs [1, 2, 4, 8, 16, 24]")
CAPTURES = Does(stack=told.CAPTURE)
TOOK_S = {24: 43, 16: 2, 8: 3, 4: 2}


def bar(bs, done, seconds, total=6):
    clock = f"{seconds // 60:02}:{seconds % 60:02}"
    left = f"{done}/{total} [{clock}<01:26, 43.26s/it]"
    return f"Capturing batches (bs={bs} avail_mem=68.45 GB):  9%|▉ | {left}"


def captures(tmp_path, upto, *, after_s=1, listed=True):
    """Return a launch that has captured so many sizes, and has been at the next one for a while."""
    lines = [*LOG, *([SIZES] if listed else [])]
    at_s = BEGAN_S
    for done, (size, took_s) in enumerate([*TOOK_S.items(), (2, 0)][: upto + 1]):
        lines.append((at_s, bar(size, done, int(at_s - BEGAN_S))))
        at_s += took_s if done < upto else after_s
    return launch(tmp_path, {"TP0": CAPTURES, "TP1": CAPTURES}, log=lines, seconds=at_s)


def count_of(recording):
    (found,) = counts(derive(recording, SGLANG), SGLANG)
    return found


def test_sizes_done_and_to_do_and_how_long_each_took_are_told(tmp_path):
    found = count_of(captures(tmp_path, 3))
    assert (found.done, found.total, found.item) == (3, 6, "bs=4")
    assert found.took == (("bs=24", 43.0), ("bs=16", 2.0), ("bs=8", 3.0))
    assert found.left == ("bs=2", "bs=1")
    assert found.item_s == pytest.approx(1, abs=1)


def test_the_first_size_which_compiles_does_not_tell_how_long_the_others_take(tmp_path):
    now_s, least_s, most_s = count_of(captures(tmp_path / "more", 3)).left_s
    assert 5 <= now_s <= 9
    assert least_s <= 7 <= most_s <= 12
    now_s, least_s, most_s = count_of(captures(tmp_path / "one", 1)).left_s
    assert (least_s, most_s) == (0, 5 * 43)
    assert count_of(captures(tmp_path / "none", 0)).left_s is None


def test_a_size_that_takes_many_times_as_long_as_the_others_tells_no_end(tmp_path):
    found = count_of(captures(tmp_path, 3, after_s=30))
    assert found.left_s is None
    assert found.item_s == pytest.approx(30, abs=1)


def test_without_the_list_the_bar_itself_names_what_was_done(tmp_path):
    found = count_of(captures(tmp_path, 3, listed=False))
    assert [item for item, _ in found.took] == ["bs=24", "bs=16", "bs=8"]
    assert found.left == ()


def test_a_bar_that_is_full_or_behind_the_launch_is_no_work(tmp_path):
    full = [*LOG, (BEGAN_S, bar(1, 6, 60))]
    assert not counts(
        derive(launch(tmp_path / "full", {"TP0": CAPTURES}, log=full, seconds=60), SGLANG), SGLANG
    )
    log = good_log(("TP0",), "")
    index = next(i for i, (_, line) in enumerate(log) if "graph end" in line)
    log.insert(index, (log[index][0], bar(4, 3, 5)))
    idle = {"TP0": Does(stack=told.RECEIVE)}
    behind = launch(tmp_path / "behind", idle, log=log, seconds=log[-1][0] + 5)
    assert not counts(derive(behind, SGLANG), SGLANG)


def test_the_report_and_json_tell_the_count(tmp_path):
    facts = derive(captures(tmp_path, 3), SGLANG)
    found = diagnose(facts, SGLANG)
    finding = next(each for each in found.findings if each.rule == "work-counted")
    assert finding.title.startswith("graphs of batch sizes: 3 of 6 done, bs=4 in progress for")
    (work,) = document(facts, found)["counts"]
    assert (work["done"], work["total"], work["item"]) == (3, 6, "bs=4")
    assert work["took_s"][0] == ["bs=24", 43.0]


def test_a_log_alone_tells_all_but_how_long_the_next_one_takes(tmp_path):
    recording = captures(tmp_path, 3)
    found = count_of(bare_log(recording.log_path))
    assert found.item_s is None
    assert found.took[1] == ("bs=16", 2.0)


def allocates(tmp_path, *, grows_per_s, seconds=30, began_s=0.0, then=()):
    """Return a launch whose ranks say that they allocate 120 GB each, and do so."""
    log = good_log(("TP0", "TP1"), "capture")
    since_s = log[-1][0]
    line = "Allocating 120.00 GB host memory for hierarchical KV cache."
    log += [(since_s, f"{name}| {line}") for name in ("TP0", "TP1")]
    log += [(since_s + after_s, text) for after_s, text in then]
    pins = Does(stack=told.HOST_KV, cpu_pct=100, state="R", grows_per_s=grows_per_s)
    doing = ((0.0, Does(stack=told.MMAP)), (since_s, pins))
    return launch(
        tmp_path,
        {"TP0": doing, "TP1": doing},
        log=log,
        seconds=since_s + seconds,
        began_s=since_s + began_s if began_s else 0.0,
    )


def memory_words(recording):
    found = diagnose(derive(recording, SGLANG), SGLANG)
    return {
        finding.ranks[0]: finding.title
        for finding in found.findings
        if finding.rule == "host-memory-allocated"
    }


def test_host_memory_that_is_faulted_in_tells_its_rate_and_its_end(tmp_path):
    words = memory_words(allocates(tmp_path, grows_per_s=2e9))
    assert set(words) == {"TP0", "TP1"}
    assert "TP0 allocates 120.0 GB of host memory for the hierarchical cache: " in words["TP0"]
    assert ", 2.0 GB/s; the rest takes about 30 s (" in words["TP0"]


def test_who_comes_late_is_told_the_rate_and_no_end(tmp_path):
    words = memory_words(allocates(tmp_path, grows_per_s=2e9, began_s=10.0))["TP0"]
    assert "at least 40.0 GB are there, 2.0 GB/s" in words
    assert "the rest" not in words


def test_host_memory_that_does_not_come_is_said_to_stand_still(tmp_path):
    assert memory_words(allocates(tmp_path, grows_per_s=0))["TP1"].endswith("and nothing comes")


def test_a_rank_that_has_gone_on_allocates_no_more(tmp_path):
    then = ((20, "TP0| Tree cache initialized: source=default impl=HiRadixCache"),)
    assert set(memory_words(allocates(tmp_path, grows_per_s=2e9, then=then))) == {"TP1"}
