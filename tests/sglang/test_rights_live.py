"""Real launches that hang, looked at with fewer rights and from other namespaces.

A launch is dear, so each test looks at one launch in several ways, at the same time.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import restricted

LIMIT_S = 200
PATIENT = ("--for=8", "--stall-after=3", "--format=json")


@pytest.fixture
def places():
    """Make directories that everybody can enter, for one look each."""
    made = []

    def make():
        made.append(Path(tempfile.mkdtemp(prefix="hangdoctor-rights-")))
        made[-1].chmod(0o755)
        return made[-1]

    yield make
    for place in made:
        shutil.rmtree(place, ignore_errors=True)


class Look:
    """A `hangdoctor diagnose` that runs, and what it says."""

    def __init__(self, place, pid, *arguments, log=None, **restrictions):
        stdin = log.open("rb") if log else subprocess.DEVNULL
        self._process = subprocess.Popen(
            restricted.hangdoctor(
                place, "diagnose", pid, *PATIENT, *(["--log=-"] if log else []), *arguments,
                **restrictions,
            ),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        if log:
            stdin.close()

    def verdict(self):
        out, err = self._process.communicate(timeout=LIMIT_S)
        assert "Traceback" not in err
        assert out, err
        verdict = json.loads(out)
        verdict["why"] = {each["what"]: each for each in verdict["missing"]}
        verdict["code"] = self._process.returncode
        return verdict


def family(pid):
    return {one.pid: one for one in psutil.Process(pid).children(recursive=True)}


def rank_of(pid, rank):
    for one in family(pid).values():
        with contextlib.suppress(psutil.Error):
            if f"scheduler_{rank}" in " ".join(one.cmdline()):
                return one
    return None


def assert_runs(pids):
    for pid in pids:
        assert psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)


def assert_refused(verdict, *whats):
    for what in whats:
        assert verdict["why"][what]["reason"] == "permission", (what, verdict["why"].keys())
        assert verdict["why"][what]["hint"], what


def test_a_hang_in_the_warmup_is_told_as_far_as_the_rights_go(lab, places):
    launched = lab.launch("hang-io")
    launched.wait_for(r"GET /model_info")
    pids = [launched.pid, *family(launched.pid)]
    nobody = {"user": restricted.NOBODY}
    if not restricted.IS_ROOT:  # then only what needs no root
        look = Look(places(), launched.pid, deny_tracing=True)
        assert look.verdict()["phase"] == "warmup"
        assert_runs(pids)
        return
    looks = {
        "with the log": Look(places(), launched.pid, log=launched.log_path, **nobody),
        "without the log": Look(places(), launched.pid, **nobody),
        "no py-spy": Look(places(), launched.pid, py_spy=False),
        "denied": Look(places(), launched.pid, deny_tracing=True, hide=pids),
    }
    looks = {name: look.verdict() for name, look in looks.items()}
    assert_runs(pids)

    stranger = looks["with the log"]
    assert (stranger["state"], stranger["phase"], stranger["code"]) == ("unknown", "warmup", 3)
    assert set(stranger["culprits"]) <= {"TP0"}
    assert_refused(stranger, "stacks of TP0", "stacks of TP1", "io of TP0", "syscall of TP1")
    assert "sudo" in stranger["why"]["stacks of TP0"]["hint"]

    # Nothing tells the phase then, and a wrong one must not be said.
    stranger = looks["without the log"]
    assert (stranger["state"], stranger["phase"], stranger["code"]) == ("unknown", None, 3)
    assert stranger["culprits"] == []
    assert_refused(stranger, "log", "stacks of TP0", "io of TP0")

    bare = looks["no py-spy"]
    assert (bare["phase"], bare["state"]) == ("warmup", "unknown")
    assert set(bare["culprits"]) <= {"TP0"}
    assert bare["why"]["stacks"]["reason"] == "not-installed"
    assert "pip install py-spy" in bare["why"]["stacks"]["hint"]

    denied = looks["denied"]
    assert (denied["phase"], denied["state"]) == ("warmup", "unknown")
    assert set(denied["culprits"]) <= {"TP0"}
    assert_refused(denied, "stacks of TP0", "stacks of TP1", "syscall of TP0")
    assert "io of TP0" not in denied["why"]


@pytest.mark.skipif(not restricted.IS_ROOT, reason="another PID namespace needs root to look in")
def test_a_hang_in_the_weights_is_told_from_outside_and_inside_its_namespaces(lab, places):
    launched = lab.launch(
        "weights-stalled",
        before=[
            shutil.which("unshare"),
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ],
    )
    launched.wait_for(r"TP1\] Load weight begin")
    launched.wait_for(r"TP0\] Load weight begin")
    pids = [launched.pid, *family(launched.pid)]
    launcher = psutil.Process(launched.pid).children()[0].pid
    looks = {
        "outside": Look(places(), launcher),
        # As `kubectl debug --target` gives it: the target's processes, and none of its files.
        "inside": Look(places(), 1, pid_of=launcher, other_root=True),
        "stranger": Look(places(), launcher, log=launched.log_path, user=restricted.NOBODY),
    }
    looks = {name: look.verdict() for name, look in looks.items()}
    assert_runs(pids)
    for name in ("outside", "inside"):
        seen = looks[name]
        assert seen["phase"] == "weights", name
        assert seen["state"] in ("starting", "unknown", "hung"), name
        assert seen["culprits"] == [], name
        assert [rank["rank"] for rank in seen["ranks"]] == ["TP0", "TP1"], name
        assert all(rank["place"] for rank in seen["ranks"]), name
        assert seen["engine"]["version"] == "0.5.9", name
        assert seen["installation"]["path"] == str(launched.package_dir), name
        assert "log" not in seen["why"], name
    assert {rank["pid"] for rank in looks["inside"]["ranks"]}.isdisjoint(pids)
    stranger = looks["stranger"]
    assert (stranger["state"], stranger["phase"]) == ("unknown", "weights")
    assert stranger["culprits"] == []
    assert_refused(stranger, "stacks of TP0", "stacks of TP1")


def test_a_rank_that_lacks_a_line_is_suspected_by_the_log_alone(lab, places):
    launched = lab.launch("good")
    while (rank := rank_of(launched.pid, "TP1")) is None:
        assert launched.process.poll() is None
        time.sleep(0.05)  # between two looks, which take a core otherwise; it imports for seconds
    rank.send_signal(signal.SIGSTOP)
    launched.wait_for(r"TP0\] Init torch distributed begin")
    log = launched.log_path
    looks = [
        Look(places(), launched.pid, log=log, user=restricted.NOBODY),
        Look(places(), launched.pid, log=log, py_spy=False),
    ]
    for seen in (look.verdict() for look in looks):
        assert seen["phase"] == "start"  # the culprit's own: it was stopped while it imported
        assert seen["culprits"] == ["TP1"]
        assert "rank-stopped" in {finding["rule"] for finding in seen["findings"]}
        if restricted.IS_ROOT:
            assert seen["why"]
    assert rank.status() == psutil.STATUS_STOPPED  # nobody has woken it
    alone = subprocess.run(
        [sys.executable, "-m", "hangdoctor", "diagnose", "--log=-", "--format=json"],
        input=log.read_bytes(),  # TP0 waits for TP1 there: it has not met it
        capture_output=True,
        check=False,
    )
    assert json.loads(alone.stdout)["culprits"] == ["TP1"]
