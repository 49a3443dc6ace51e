"""What is said with fewer rights, on launches in name only: no traceback, and what is missing."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

import pytest
import restricted

from hangdoctor.collect import procfs

TITLES = ("sglang::scheduler_TP0", "sglang::scheduler_TP1", "sglang::detokenizer")
SAMPLES = restricted.ROOT / "sample_logs"
LOG = SAMPLES / "sglang-0.5.15-tp2-weights-hung.log"
LIMIT_S = 120


@pytest.fixture
def place():
    """A directory that everybody can enter; a test's own is closed to others."""
    with tempfile.TemporaryDirectory(prefix="hangdoctor-rights-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def look(place, launcher, *arguments, **restrictions):
    # Through a pipe: as a file it would be older than the launch, and so another launch's.
    done = subprocess.run(
        restricted.hangdoctor(
            place, "diagnose", launcher.pid, "--for=2", "--stall-after=1", "--format=json",
            "--log=-", *arguments, **restrictions,
        ),
        input=LOG.read_text(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert done.stdout, done.stderr
    verdict = json.loads(done.stdout)
    for child in (launcher.pid, *launcher.said["children"]):
        assert procfs.read_stat("/proc", child).state in "SR"
    missing = {each["what"]: (each["reason"], each["hint"]) for each in verdict["missing"]}
    return verdict, missing


def test_another_users_launch_is_told_by_its_log_and_the_right_is_named(program, place):
    launcher = program("launch_server", *TITLES)
    verdict, missing = look(place, launcher, user=restricted.NOBODY)
    assert verdict["phase"] == "weights"
    assert set(verdict["culprits"]) <= {"TP1"}
    assert [rank["rank"] for rank in verdict["ranks"]] == ["TP0", "TP1"]
    if restricted.IS_ROOT:
        assert (verdict["state"], verdict["culprits"]) == ("unknown", ["TP1"])
        for what in ("stacks of TP0", "stacks of TP1", "io of TP0", "syscall of TP0"):
            assert missing[what][0] == "permission", what
            assert "sudo" in missing[what][1]
        assert "I/O counters" in json.dumps(verdict["findings"])


def test_without_py_spy_its_installation_is_the_hint(program, place):
    launcher = program("launch_server", *TITLES)
    verdict, missing = look(place, launcher, py_spy=False)
    assert verdict["phase"] == "weights"
    if restricted.IS_ROOT:
        assert missing["stacks"] == ("not-installed", missing["stacks"][1])
        assert "pip install py-spy" in missing["stacks"][1]


def test_with_tracing_denied_the_stacks_are_missing_and_all_else_is_there(program, place):
    launcher = program("launch_server", *TITLES)
    pids = (launcher.pid, *launcher.said["children"])
    verdict, missing = look(place, launcher, deny_tracing=True, hide=pids)
    assert verdict["phase"] == "weights"
    if restricted.IS_ROOT:
        assert verdict["state"] in ("unknown", "starting")
        assert missing["stacks of TP0"][0] == missing["syscall of TP0"][0] == "permission"
        assert missing["stacks of TP0"][1]
        assert "io of TP0" not in missing


def test_a_log_that_may_not_be_read_is_2_and_named(program, place, tmp_path):
    launcher = program("launch_server", *TITLES)
    log = tmp_path / "log"
    log.write_bytes(LOG.read_bytes())
    log.chmod(0)
    if not restricted.IS_ROOT:
        done = subprocess.run(
            restricted.hangdoctor(place, "diagnose", "--log", log),
            capture_output=True, text=True, check=False, timeout=LIMIT_S,
        )  # fmt: skip
        assert done.returncode == 2
        return
    for source in ([], [launcher.pid]):
        done = subprocess.run(
            restricted.hangdoctor(
                place, "diagnose", *source, "--log", log, user=restricted.NOBODY
            ),
            capture_output=True, text=True, check=False, timeout=LIMIT_S,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert "cannot read" in done.stderr
        assert "Permission denied" in done.stderr
        assert "ls -l" in done.stderr


def test_another_users_process_that_is_no_launch_is_named(program, place):
    sleeper = program("sleep")
    done = subprocess.run(
        restricted.hangdoctor(place, "diagnose", sleeper.pid, user=restricted.NOBODY),
        capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 2
    assert f"PID {sleeper.pid} belongs to no launch" in done.stderr
    assert "Traceback" not in done.stderr
