"""What hangdoctor says of real launches while they run, and that it leaves them as they are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import sglang_lab
from sglang_patches import RELATIVE_PATH

STALL_AFTER_S = 4
LIMIT_S = 280


def hangdoctor(*arguments, stdin=None, environment=None):
    return subprocess.run(
        [sys.executable, "-m", "hangdoctor", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S + 60,
        stdin=stdin if stdin is not None else subprocess.DEVNULL,
        env=environment,
        check=False,
    )


def watch(launched, *arguments):
    done = hangdoctor(
        "watch",
        "--pid-tree",
        launched.pid,
        "--format=json",
        f"--stall-after={STALL_AFTER_S}",
        f"--timeout={LIMIT_S}",
        *arguments,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def rules(verdict):
    return {finding["rule"]: finding for finding in verdict["findings"]}


def is_running(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() not in (
        psutil.STATUS_ZOMBIE,
        psutil.STATUS_STOPPED,
    )


def test_a_rank_that_blocks_in_io_is_named_and_one_that_is_stopped_or_killed_after_it(
    lab, tmp_path
):
    launched = lab.launch("hang-io")
    code, verdict = watch(launched, "--record", tmp_path / "recording")
    assert (code, verdict["state"], verdict["phase"]) == (1, "hung", "warmup")
    assert verdict["culprits"] == ["TP0"]
    assert verdict["engine"] == {"name": "sglang", "version": "0.5.9"}
    assert verdict["installation"]["path"] == str(launched.package_dir)
    changed = {file["path"] for file in verdict["installation"]["changed_files"]}
    assert "sglang/srt/models/deepseek_v2.py" in changed
    assert is_running(launched.pid)

    replay = hangdoctor("diagnose", tmp_path / "recording", "--format=json")
    again = json.loads(replay.stdout)
    for key in ("state", "phase", "culprits", "confidence", "still_s", "ranks"):
        assert again[key] == verdict[key], key

    # The log has been silent for long by now: a look of some seconds is enough.
    short = hangdoctor("diagnose", launched.pid, "--for", 8, "--stall-after", 4, "--format=json")
    assert short.returncode == 1, short.stdout
    assert json.loads(short.stdout)["culprits"] == ["TP0"]

    # A launch is dear: the same one is done for in the end.
    rank = next(
        child
        for child in psutil.Process(launched.pid).children(recursive=True)
        if "scheduler_TP1" in " ".join(child.cmdline())
    )
    os.kill(rank.pid, signal.SIGSTOP)
    done = hangdoctor("diagnose", launched.pid, "--for", 3, "--format=json", "--stall-after", 1)
    stopped = rules(json.loads(done.stdout))["rank-stopped"]
    assert stopped["ranks"] == ["TP1"]
    os.kill(rank.pid, signal.SIGCONT)

    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "hangdoctor",
            "watch",
            f"--pid-tree={launched.pid}",
            "--format=json",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as watching:
        assert "warmup" in watching.stderr.readline()  # it has looked
        os.kill(rank.pid, signal.SIGKILL)
        out, _ = watching.communicate(timeout=LIMIT_S)
    verdict = json.loads(out)
    told = (watching.returncode, verdict["state"], verdict["culprits"])
    assert told == (1, "dead", ["TP1"]), (out, launched.log_path.read_text())
    assert "TP1 was killed by SIGKILL" in verdict["title"]


def test_a_shard_that_never_delivers_is_a_stall_in_the_weights_without_a_culprit(lab):
    launches = [lab.launch(variant) for variant in ("weights-stalled", "weights-stalled-read")]
    with ThreadPoolExecutor(len(launches)) as pool:  # each does nothing but wait for half its time
        ends = list(pool.map(watch, launches))
    for launched, (code, verdict) in zip(launches, ends, strict=True):
        told = (code, verdict["state"], verdict["phase"])
        assert told == (1, "hung", "weights"), launched.command
        assert verdict["culprits"] == []
        assert {rank["rank"]: rank["phase"] for rank in verdict["ranks"]} == {
            "TP0": "weights",
            "TP1": "weights",
        }


def test_a_second_node_that_does_not_come_blames_no_rank_of_this_one(lab):
    launched = lab.launch("missing-node")
    launched.wait_for(r"Init torch distributed begin")
    code, verdict = watch(launched, "--timeout=45")
    assert verdict["phase"] == "distributed-init"
    assert verdict["state"] in ("starting", "unknown")
    assert code in (3, 4)
    assert verdict["culprits"] == []
    assert "waiting-for-other-node" in rules(verdict)


def test_a_patch_that_raises_is_dead_with_its_exception(lab, tmp_path):
    command, environment, _ = lab.prepare("v1-flag")
    done = hangdoctor(
        "watch",
        f"--stall-after={STALL_AFTER_S}",
        "--format=json",
        f"--record={tmp_path / 'recording'}",
        f"--timeout={LIMIT_S}",
        "--",
        *command,
        environment=environment,
    )
    verdict = json.loads(done.stdout)
    assert (done.returncode, verdict["state"]) == (1, "dead"), done.stderr
    assert verdict["phase"] == "warmup"
    assert "too many values to unpack (expected 2)" in done.stdout
    assert set(verdict["culprits"]) <= {"TP0", "TP1"}


def test_a_good_start_is_ready_and_runs_on(lab, tmp_path):
    command, environment, _ = lab.prepare("good-weights")
    done = hangdoctor(
        "watch",
        "--format=json",
        f"--record={tmp_path / 'recording'}",
        f"--timeout={LIMIT_S}",
        "--",
        *command,
        environment=environment,
    )
    verdict = json.loads(done.stdout)
    pid = int(done.stderr.split("pid ")[1].split(",")[0])
    try:
        assert (done.returncode, verdict["state"], verdict["culprits"]) == (0, "ready", [])
        assert is_running(pid)
        assert str(pid) in done.stderr
        assert str(tmp_path / "recording" / "server.log") in done.stderr
        assert "HUNG" not in done.stderr
        # It idles now: both ranks use a whole core, and write without end.
        idle = json.loads(hangdoctor("diagnose", pid, "--for", 6, "--format=json").stdout)
        assert idle["state"] == "ready"
        assert not rules(idle).keys() & {"eventfd-runaway", "pipe-chatter", "busy-without-progress"}
        # The file that it runs is a link of the test's: it is found, and refused.
        refused = hangdoctor("patch", "apply", "hs-dump-v2", "--pid", pid)
        model = Path(environment["PYTHONPATH"].partition(":")[0], RELATIVE_PATH)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert f"{model} is a link to" in refused.stderr
    finally:
        sglang_lab.end_session(pid)
    replay = hangdoctor("diagnose", tmp_path / "recording", "--format=json")
    assert (replay.returncode, json.loads(replay.stdout)["state"]) == (0, "ready")


def test_a_silent_compile_is_never_called_hung(lab):
    # Two of five layers, a dense one and one of experts: half of the time, and of the patience.
    launched = lab.launch(
        "compile", extra_args=["--json-model-override-args", '{"num_hidden_layers": 2}']
    )
    done = hangdoctor(
        "watch",
        "--pid-tree",
        launched.pid,
        "--events",
        "--until=ready",
        "--stall-after=10",
        f"--timeout={LIMIT_S}",
    )
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, events[-1]["state"]) == (0, "ready"), done.stderr
    assert {event["state"] for event in events} <= {"starting", "unknown", "ready"}
