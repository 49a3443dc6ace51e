"""check-patch launches real servers: stock, and a patch that makes the ranks' collectives part."""

from __future__ import annotations

import json
import subprocess
import sys

import psutil
from sglang_patches import PATCHES

from hangdoctor.check.environment import MODEL_FILE

LIMIT_S = 400


def hangdoctor(*arguments, environment=None):
    return subprocess.run(
        [sys.executable, "-m", "hangdoctor", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment,
        check=False,
    )


def test_a_collective_on_one_rank_only_hangs_beside_stock_and_is_called_a_divergence(
    sglang_environment, tmp_path
):
    stock = (sglang_environment.packages / MODEL_FILE).read_text()
    patched = tmp_path / "deepseek_v2.py"
    patched.write_text(PATCHES["hang-collective"](stock))
    kept = tmp_path / "kept"
    done = hangdoctor(
        "check-patch",
        f"--python={sglang_environment.root}",
        f"--file={patched}",
        "--depth=launching",
        f"--record={kept}",
        "--format=json",
    )
    assert done.returncode == 1, done.stderr
    columns = {column["name"]: column for column in json.loads(done.stdout)["columns"]}
    rows = {name: {row["key"]: row for row in column["rows"]} for name, column in columns.items()}

    # Stock comes up, answers, and ends.
    assert {row["is"] for row in rows["stock"].values()} == {"same"}
    assert rows["stock"]["hidden-width"]["note"] == "64"

    # The patch hangs in the warm-up, by what was seen and by what was read.
    verdict = columns["mine"]["verdict"]
    assert (verdict["kind"], verdict["depth"], verdict["phase"]) == ("hangs", "launching", "warmup")
    assert "different collectives" in rows["mine"]["ready"]["differences"][0]["how"]
    place = verdict["places"][0]
    line = patched.read_text().splitlines()[place["line"] - 1]
    assert "tensor_model_parallel_all_gather" in line
    assert rows["mine"]["clean-end"]["is"] == "same"
    ours = [each for each in psutil.process_iter(["cmdline"]) if str(kept) in str(each.info)]
    assert ours == []
    assert (sglang_environment.packages / MODEL_FILE).read_text() == stock

    # What was kept is a recording like any other.
    again = hangdoctor("diagnose", kept / "mine", "--format=json")
    assert again.returncode == 1
    verdict = json.loads(again.stdout)
    assert (verdict["state"], verdict["phase"]) == ("hung", "warmup")
    rules = {finding["rule"]: finding for finding in verdict["findings"]}
    assert set(rules["ranks-diverged"]["ranks"]) == {"TP0", "TP1"}
    assert verdict["culprits"] in ([], ["TP0"])
