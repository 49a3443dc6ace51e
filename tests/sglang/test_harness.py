"""The harness itself: servers start and end for certain, and what they share stays as it is."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from pathlib import Path

import psutil
import pytest
import sglang_lab
from sglang_patches import PATCHES, RELATIVE_PATH

PROJECT = Path(__file__).parents[2]


def test_a_good_launch_becomes_ready_and_answers_and_ends_for_certain(lab):
    launched = lab.launch("good")
    launched.wait_for(sglang_lab.READY)
    request = urllib.request.Request(
        f"http://127.0.0.1:{launched.port}/generate",
        data=json.dumps({"text": "abc", "sampling_params": {"max_new_tokens": 4}}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        assert json.load(answer)["meta_info"]["completion_tokens"] == 4
    tree = [launched.process.pid]
    tree += [child.pid for child in psutil.Process(launched.pid).children(recursive=True)]
    lab.close()
    assert not any(
        psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        for pid in tree
    )


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
