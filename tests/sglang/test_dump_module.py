"""The dump module with real tensors: what it writes, and that nothing stops a forward."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tensors import values

import hangdoctor.patches
from hangdoctor.patches import COMPANION
from hangdoctor.patches.dumps import read_dumps

MODULE = Path(hangdoctor.patches.__file__).with_name(COMPANION)
SCRIPT = Path(__file__).parents[1] / "programs" / "use_dump_module.py"
A_WAIT_S = 5.0
"""Far above what a forward takes here, and below any time-out: what waits does not end at all."""


@pytest.fixture(scope="module")
def folder(sglang_environment, tmp_path_factory):
    """Where each case of use_dump_module.py left what it dumped, and what it saw."""
    made = tmp_path_factory.mktemp("cases")
    done = subprocess.run(
        [sglang_environment.python, SCRIPT, MODULE, made],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return made


@pytest.fixture
def use(folder):
    """Return what a case saw, its log without the line at the start, and its dumps' folder."""

    def answer(case):
        told = json.loads((folder / f"{case}.json").read_text())
        log = [line for line in told["log"] if "go to" not in line]
        return told["saw"], log, folder / case

    return answer


def test_a_batch_becomes_a_file_without_its_padding(use):
    _, log, place = use("good")
    assert log == []
    found = read_dumps(place)
    (file,) = found.files
    assert (found.all_right, found.doubts, file.doubts) == (True, (), ())
    assert (file.layers, file.tokens, file.requests) == ((0, 1, 3), 5, 2)
    path = place / file.name
    # Layer 0 has no residual; layer i is given 2 and the residual of the layer before, i - 1.
    assert [set(values(path, f"layer.{layer}")) for layer in (0, 1, 3)] == [{2.0}, {2.0}, {4.0}]
    assert values(path, "input_ids") == [0, 1, 2, 3, 4]
    assert values(path, "seq_lens") == [3, 2]
    assert file.metadata["request_ids"] == '["a", "b"]'


def test_no_other_mode_is_dumped_and_mixed_batches_are_told_once(use):
    _, log, place = use("modes")
    assert list(place.iterdir()) == []
    assert len(log) == 1
    assert "start without --enable-mixed-chunk" in log[0]


@pytest.mark.parametrize("case", ["captured", "compiled"])
def test_nothing_is_dumped_while_a_graph_is_captured_or_compiled(use, case):
    _, log, place = use(case)
    assert (log, list(place.iterdir())) == ([], [])


def test_a_sum_that_other_ranks_still_owe_is_left_out_and_told_once(use):
    _, log, place = use("incomplete")
    assert len(log) == 1
    assert "all-reduce is fused into the next layer" in log[0]
    files = read_dumps(place).files
    assert [file.layers for file in files] == [(0, 1), (0, 1)]
    for file in files:
        assert len(file.wrong) == 1
        assert file.wrong[0].startswith("layer 3 is missing: its all-reduce")


def test_states_that_are_scattered_over_the_group_are_left_out(use):
    _, log, _ = use("scattered")
    assert "this rank holds 2 of 5 rows" in log[0]
    assert len(log) == 1


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("fifo", "Not a directory"),
        ("gone", "No such file or directory"),
        ("full", "File too large"),
        ("reserve", "would leave less than"),
    ],
)
def test_a_dump_that_fails_is_one_line_and_the_forward_goes_on(use, case, said):
    saw, log, place = use(case)
    lost = [line for line in log if "a batch is lost" in line]
    assert len(lost) == 1
    assert said in lost[0]
    assert saw.get("took_s", 0) < A_WAIT_S
    assert not list(place.glob("**/*.tmp"))


def test_where_batches_were_lost_their_number_is_told(use):
    _, _, place = use("full")
    found = read_dumps(place)
    assert len(found.wrong) == 1
    assert "3 batches missing" in found.wrong[0]
    assert [file.metadata["lost"] for file in found.files] == ["3"]


def test_a_disk_that_never_answers_costs_batches_and_no_time(use):
    saw, log, _ = use("stuck")
    assert saw["took_s"] < A_WAIT_S
    assert 0 < saw["waiting"] < 8
    assert [line for line in log if "too slow: batches are lost" in line] == log


def test_nothing_that_a_release_hands_over_ends_the_forward(use):
    _, log, _ = use("raising")
    assert all("a batch is lost" in line or "is not dumped" in line for line in log)
    assert 0 < len(log) <= 4


def test_states_side_by_side_in_one_tensor_are_taken_apart_in_the_order_of_the_layers(
    use,
):
    saw, _, place = use("packed")
    (file,) = read_dumps(place).files
    assert values(place / file.name, "layer.3") == saw["layer 3"]


def test_one_rank_of_a_group_writes_for_the_first_model_alone(use):
    saw, log, _ = use("roles")
    assert saw == {
        "other rank": False, "first": True, "draft": False, "context parallel": False,
        "off": False, "list off": [],
    }  # fmt: skip
    assert any("under context parallelism" in line for line in log)
