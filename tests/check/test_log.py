"""What the log of a failed launch says of the patch that it ran with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from variants import HEALTHY, PATH, STOCK, patched

from hangdoctor.commands.check_patch import check_patch

LOGS = Path(__file__).parents[2] / "sample_logs"


@pytest.fixture
def said(tmp_path, capsys):
    """`said(log) -> the cell of the log`, of a patch that adds to the layer loop and to a class."""
    stock = tmp_path / "lib" / "python3.11" / "site-packages" / PATH
    stock.parent.mkdir(parents=True)
    stock.write_text(STOCK)
    mine = tmp_path / "mine.py"
    mine.write_text(patched(**HEALTHY["comment"], end="marked = 1", init="self.mark = 1"))

    def say(log):
        code = check_patch(
            depth="reading", python=tmp_path, file=mine, patch=None, log=str(LOGS / log),
            record=None, strict=False, output="json",
        )  # fmt: skip
        assert code == 0
        stock, mine_too = json.loads(capsys.readouterr().out)["columns"]
        (of_stock,) = [row for row in stock["rows"] if row["key"] == "log"]
        assert of_stock["is"] == "not checked"
        (cell,) = [row for row in mine_too["rows"] if row["key"] == "log"]
        return cell

    return say


@pytest.mark.parametrize(
    "log",
    ["sglang-0.5.9-tp8-weights-hung-rebuilt.log", "sglang-0.5.9-cpu-tp2-load-barrier-timeout.log"],
)
def test_a_patch_that_has_not_run_is_not_to_blame_and_what_is_looked_at_instead_is_said(said, log):
    cell = said(log)
    assert cell["is"] == "not checked"
    assert "no forward has run" in cell["why"]
    assert "`Load weight end`" in cell["why"]
    text = patched(**HEALTHY["comment"], end="marked = 1", init="self.mark = 1").splitlines()
    line = 1 + text.index("        self.mark = 1")
    assert f"may have run: {line} of {PATH}" in cell["why"]


def test_where_a_forward_may_have_run_the_patch_may_be_part_of_it(said):
    cell = said("sglang-0.5.9-cpu-tp2-warmup-hung.log")
    assert cell["is"] == "not checked"
    assert "may be part of it" in cell["why"]


def test_a_launch_that_came_to_ready_is_the_same(said):
    assert said("sglang-0.5.9-cpu-tp2-good.log")["is"] == "same"
