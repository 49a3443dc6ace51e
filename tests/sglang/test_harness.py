"""The harness itself: servers start, and what they share stays as it is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import sglang_lab
from sglang_patches import PATCHES, RELATIVE_PATH

from hangdoctor.patches.dumps import read_dumps

PROJECT = Path(__file__).parents[2]
GOOD = PROJECT / "sample_logs" / "sglang-0.5.9-cpu-tp2-good.log"


def test_a_patched_server_passes_the_smoke_test_and_ends_for_certain(lab):
    command, environment, port = lab.prepare("hs-dump-v2")
    smoke = [sys.executable, "-m", "hangdoctor", "smoke", "--format=json", "--timeout=240"]
    done = subprocess.run(
        [*smoke, f"--good={GOOD}", "--", *command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    checks = {check["name"]: check for check in json.loads(done.stdout)["smoke"]["checks"]}
    assert set(checks) == {"start-up", "request", "good-log", "end"}
    assert {check["outcome"] for check in checks.values()} == {"passed"}
    dumps = read_dumps(Path(environment["SGLANG_HS_DUMP_DIR"]))
    assert dumps.files
    assert dumps.all_right
    everybody = psutil.process_iter(["cmdline"])
    assert not [each for each in everybody if str(port) in (each.info["cmdline"] or ())]


@pytest.mark.parametrize("patch", sorted(PATCHES))
def test_a_patched_launch_leaves_the_environment_as_it_is(sglang_environment, tmp_path, patch):
    model_file = sglang_environment.packages / RELATIVE_PATH
    before = model_file.read_bytes()
    overlay = sglang_lab.overlay(sglang_environment, tmp_path / "packages", patch)
    patched = overlay / RELATIVE_PATH
    assert not patched.is_symlink()
    assert patched.read_bytes() != before
    assert model_file.read_bytes() == before
    compile(patched.read_bytes(), str(patched), "exec")


def test_installing_hangdoctor_beside_sglang_changes_none_of_its_packages(sglang_environment):
    def pip(*arguments):
        command = [str(sglang_environment.python), "-m", "pip", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    there = {_canonical(package["name"]) for package in pip("list", "--format", "json")}
    report = pip("install", "--dry-run", "--quiet", "--report", "-", str(PROJECT))
    added = {_canonical(package["metadata"]["name"]) for package in report["install"]}
    assert "sglang" in there
    assert "hangdoctor" in added
    assert added & there <= {"hangdoctor"}


def test_every_variant_is_explained():
    readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([a-z0-9-]+)` \|", readme, re.MULTILINE)) == set(
        sglang_lab.VARIANTS
    )


def _canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()
