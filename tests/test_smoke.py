"""The smoke test on small real servers: its exit codes, and that nothing is left of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import psutil
import pytest
from nvml import card, on_cards

from hangdoctor.checks import Check
from hangdoctor.render.junit import checks_to_junit

SERVER = Path(__file__).parent / "programs" / "completions.py"
LIMIT_S = 120


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def smoke(*options, command, tmp_path, **environment):
    return subprocess.run(
        [sys.executable, "-m", "hangdoctor", "smoke", "--format=json", *options, "--", *command],
        env=os.environ | {"TMPDIR": str(tmp_path)} | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def server(answers, port):
    return [sys.executable, str(SERVER), answers, "--port", str(port)]


def running(port):
    """Return what was started with this port in its command line."""
    everybody = psutil.process_iter(["cmdline"])
    return [each for each in everybody if str(port) in (each.info["cmdline"] or ())]


def test_a_good_server_passes_past_any_proxy_and_nothing_is_left(port, tmp_path):
    proxy = {"http_proxy": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    done = smoke(command=server("good", port), tmp_path=tmp_path, **proxy)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["state"], told["smoke"]["result"]) == ("ready", "passed")
    assert running(port) == []
    assert not list(tmp_path.glob("hangdoctor-*"))


@pytest.mark.parametrize("answers", ["empty", "html", "error", "silent"])
def test_a_wrong_answer_or_none_fails_and_the_log_is_kept(answers, port, tmp_path):
    options = ("--request-timeout=2", f"--junit={tmp_path / 'junit.xml'}")
    done = smoke(*options, command=server(answers, port), tmp_path=tmp_path)
    assert done.returncode == 1, done.stderr
    assert Path(json.loads(done.stdout)["smoke"]["log"]).exists()
    assert ET.parse(tmp_path / "junit.xml").getroot().get("failures") == "1"  # noqa: S314  # ours
    assert running(port) == []


@pytest.fixture
def tenant():
    """Another process on the cards."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


def memory_check(done):
    checks = json.loads(done.stdout)["smoke"]["checks"]
    return next(check for check in checks if check["name"] == "gpu-memory")


def test_memory_that_another_process_took_of_the_card_meanwhile_is_not_left_behind(
    port, tmp_path, tenant
):
    cards = on_cards(
        tmp_path,
        before=[card(used=615)],
        held=[card(("SERVER", 40000), used=40624)],
        after=[card((tenant, 40000), used=40624)],
    )
    done = smoke(command=server("good", port), tmp_path=tmp_path, **cards)
    assert done.returncode == 0, done.stdout
    check = memory_check(done)
    assert check["outcome"] == "passed"
    assert f"39.1 GiB more of GPU 0 are of sleep (pid {tenant}), which is not" in check["said"]


def test_memory_left_behind_fails_beside_that_of_others_and_what_cannot_be_told(
    port, tmp_path, tenant
):
    cards = on_cards(
        tmp_path,
        before=[card(used=615) * 3],
        held=[card(("SERVER", 40000), used=40624) * 3],
        after=[
            card((tenant, 40000), used=40624),
            card(("SERVER", 30000), used=30624),  # which is no more
            card(used=20624, sealed=1),
        ],
    )
    done = smoke(command=server("good", port), tmp_path=tmp_path, **cards)
    assert done.returncode == 1, done.stdout
    check = memory_check(done)
    assert (check["outcome"], check["kind"]) == ("failed", "left")
    left, untold, decides, others = check["said"].split("; ")
    assert "of the launch holds 29.3 GiB of GPU 1" in left
    assert "GPU 2 holds 19.5 GiB of which it cannot be told" in untold
    assert "nvidia-smi" in decides
    assert "GPU 0 are of sleep" in others


def test_a_port_in_use_is_refused_with_its_holder(port, tmp_path):
    with socket.create_server(("127.0.0.1", port)):
        done = smoke(command=server("good", port), tmp_path=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"is in use by pid {os.getpid()}" in done.stderr


def test_reports_that_cannot_be_written_change_no_verdict(port, tmp_path):
    options = ("--junit=/dev/null/junit.xml",)
    summary = {"GITHUB_STEP_SUMMARY": "/dev/null/summary"}
    done = smoke(*options, command=server("good", port), tmp_path=tmp_path, **summary)
    assert done.returncode == 0
    assert "cannot write the JUnit report" in done.stderr
    assert "cannot write the summary" in done.stderr


def test_a_command_that_dies_is_1(port, tmp_path):
    done = smoke(command=["sh", "-c", f"exit 3 # --port {port}"], tmp_path=tmp_path)
    assert (done.returncode, json.loads(done.stdout)["state"]) == (1, "dead")


def test_a_server_on_ipv6_that_wants_a_key_is_asked_with_it(port, tmp_path):
    command = [*server("good", port), "--host", "::1", "--api-key", "secret"]
    done = smoke(command=command, tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["smoke"]
    assert told["url"] == f"http://[::1]:{port}"
    assert "secret" not in done.stdout + done.stderr


def test_a_command_of_which_nothing_is_known_is_3_and_nothing_is_left(port, tmp_path):
    command = ["sh", "-c", f"sleep 600 # --port {port}"]
    done = smoke("--timeout=2", command=command, tmp_path=tmp_path)
    told = json.loads(done.stdout)["smoke"]
    assert (done.returncode, told["result"]) == (3, "undecided")
    details = told["checks"][0]["details"]
    assert f"1. read what it said, which is no line of sglang's start: cat {told['log']}" in details
    assert running(port) == []


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_however_it_is_interrupted_nothing_is_left(port, tmp_path, how, code):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    junit = tmp_path / "junit.xml"
    command = [sys.executable, "-m", "hangdoctor", "smoke", f"--junit={junit}"]
    command += ["--", *server("silent", port)]
    with subprocess.Popen(
        command,
        env=os.environ | {"TMPDIR": str(tmp_path), "SERVER_ANNOUNCES": str(fifo)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as asking:
        pid = int(fifo.read_text())  # it was asked, and will not answer
        asking.send_signal(how)
        assert asking.wait(LIMIT_S) == code
    if code == 130:
        case = ET.parse(junit).getroot().find(".//testcase[@name='request']/error")  # noqa: S314
        assert case.attrib == {
            "message": "interrupted before it was answered",
            "type": "interrupted",
        }
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(LIMIT_S)
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_one_that_is_interrupted_before_it_is_ready_says_so_in_the_junit_report(port, tmp_path):
    fifo, junit = tmp_path / "fifo", tmp_path / "junit.xml"
    os.mkfifo(fifo)
    command = [sys.executable, "-m", "hangdoctor", "smoke", f"--junit={junit}", "--"]
    with subprocess.Popen(
        [*command, "sh", "-c", f"echo > {fifo}; sleep 600 # --port {port}"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as starting:
        fifo.read_text()
        starting.send_signal(signal.SIGTERM)
        assert starting.wait(LIMIT_S) == -signal.SIGTERM
    error = ET.parse(junit).getroot().find(".//testcase[@name='start-up']/error")  # noqa: S314
    assert error.get("type") == "interrupted"
    assert error.get("message").startswith("interrupted")
    assert running(port) == []


def test_junit_of_hostile_text_is_xml():
    check = Check("a", "failed", '\x00\x1b]0;x\ud800\uffff<&"', details="]]>\x0b\n\x85")
    assert ET.fromstring(checks_to_junit("s", (check,), "\x07")).get("failures") == "1"  # noqa: S314
