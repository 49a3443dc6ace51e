"""The command line as scripts rely on it: exit codes, what is on stdout, and bad input."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from command_line import run_here

from hangdoctor import cli, engines
from hangdoctor.collect import procfs
from hangdoctor.commands.late_log import with_log
from hangdoctor.recording import load

ROOT = Path(__file__).parents[1]
RECORDINGS = ROOT / "tests" / "recordings"
SAMPLES = ROOT / "sample_logs"
HUNG = RECORDINGS / "h200-tp2-load-sleep-r1"
GOOD = RECORDINGS / "h200-tp2-good-cold"
SHORT = RECORDINGS / "h200-tp2-graph-spin-r1"
UNDECIDED = SAMPLES / "sglang-0.5.15-tp2-weights-hung.log"
GOOD_LOG = SAMPLES / "sglang-0.5.9-cpu-tp2-good.log"
TITLES = ("sglang::scheduler_TP0", "sglang::scheduler_TP1", "sglang::detokenizer")
LIMIT_S = 120
HOSTILE = "\x1b[2Jgone\u202egnp\x9b31m\u2066\x07"
KEYS = {
    "schema", "version", "source", "engine", "state", "phase", "culprits", "still_s",
    "confidence", "ranks", "gpus", "findings", "missing",
}  # fmt: skip
RANK_KEYS = {"rank", "pid", "phase", "moving", "waits_for", "why"}
FINDING_KEYS = {"rule", "verdict", "title", "ranks", "because", "needs", "advice"}
# A world of one's own where that is needed: other tests' launches are not to be seen from it.
NAMESPACES = ["unshare", *([] if os.geteuid() == 0 else ["-Ur"])]


def command(*arguments):
    return [sys.executable, "-m", "hangdoctor", *map(os.fspath, map(_text, arguments))]


def _text(argument):
    return argument if isinstance(argument, bytes | Path) else str(argument)


def hangdoctor(*arguments, before=(), **options):
    options.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.run(
        [*before, *command(*arguments)],
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=LIMIT_S,
        check=False,
        cwd=ROOT,
        **options,
    )


def shell(script, *arguments, **options):
    """Run a shell script in which "$@" is hangdoctor with arguments."""
    given = ["bash", "-o", "pipefail", "-c", script, "bash", *command(*arguments)]
    process = subprocess.Popen(
        given,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        **options,
    )
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        end_group(process.pid)
    return subprocess.CompletedProcess(given, process.returncode, out, err)


def assert_complaint(done, code, *words):
    """Nothing on stdout, one line with a hint below it, and no traceback."""
    assert done.returncode == code, done
    assert done.stdout == ""
    first, hint, *more = done.stderr.splitlines()
    assert first.startswith("hangdoctor: ")
    assert hint.startswith("  ")
    assert not more, done.stderr
    assert "fault of hangdoctor's own" not in done.stderr
    for word in words:
        assert word in done.stderr
    assert_harmless(done.stderr)


def assert_harmless(text):
    """Hold nothing that a terminal would obey, and nothing that turns text around."""
    assert not set(text) & {chr(code) for code in (*range(10), *range(11, 32), *range(127, 160))}
    assert not set(text) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f")


@pytest.fixture(autouse=True)
def _temporary_files_end_with_the_test(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # the log of a command outlives hangdoctor


@pytest.fixture
def watcher():
    """Start `hangdoctor watch`, read its talk line by line, and end it and its command."""
    running = []

    def start(*arguments, **options):
        process = subprocess.Popen(
            command("watch", *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
            **options,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


class Pupil:
    """A command that answers when it is spoken to: it is proof of life."""

    def __init__(self, directory):
        self.ask, self.answer = directory / "ask", directory / "answer"
        for fifo in (self.ask, self.answer):
            os.mkfifo(fifo)
        script = 'exec 3<>"$0"; while read -u3 it; do [ $it = end ] && exit; echo "$it" >"$1"; done'
        self.command = ("bash", "-c", script, str(self.ask), str(self.answer))
        self._out = os.open(self.answer, os.O_RDONLY | os.O_NONBLOCK)

    def say(self, word):
        """Say a word; False where nobody is there to hear it."""
        try:
            ask = os.open(self.ask, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return False
        os.write(ask, word)
        os.close(ask)
        return True

    def answers(self):
        if not self.say(b"alive\n"):
            return False
        ready, _, _ = select.select([self._out], [], [], LIMIT_S)
        return bool(ready) and os.read(self._out, 100) == b"alive\n"

    def close(self):
        self.say(b"end\n")
        os.close(self._out)


@pytest.fixture
def pupil(tmp_path):
    one = Pupil(tmp_path)
    yield one
    one.close()


def started_pid(process):
    """Read the talk up to the first verdict; return the command's pid."""
    pid = None
    for line in process.stderr:
        if "started pid" in line:
            pid = int(line.split("started pid ")[1].split(",")[0])
        if " s  " in line:
            return pid
    raise AssertionError("it ended before its first look")


def end_group(pid):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


# Arguments


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["--pid-tree"], ["--pid-tree=auto"]),
        (["--pid-tree", "12"], ["--pid-tree", "12"]),
        (["--pid-tree=12"], ["--pid-tree=12"]),
        (["--pid-tree", "--log", "F"], ["--pid-tree=auto", "--log", "F"]),
        (["--pid-tree", "--help"], ["--pid-tree=auto", "--help"]),
        (["--pid-tree", "--", "x"], ["--pid-tree=auto", "--", "x"]),
        (["--", "x", "--pid-tree"], ["--", "x", "--pid-tree"]),
    ],
)
def test_pid_tree_takes_a_value_or_none(given, read):
    assert cli.give_pid_tree_a_value(given) == read


def test_pid_tree_beside_help_shows_the_help():
    done = hangdoctor("watch", "--pid-tree", "--help")
    assert done.returncode == 0
    assert "--kill-on-exit" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("form", [["--pid-tree", "{}"], ["--pid-tree={}"]])
def test_pid_tree_with_a_pid_watches_that_launch(program, form):
    launcher = program("launch_server", *TITLES)
    form = [part.format(launcher.pid) for part in form]
    done = hangdoctor("watch", *form, "--timeout=1", "--format=json")
    assert done.returncode in (3, 4), done.stderr
    assert json.loads(done.stdout)["source"] == str(launcher.pid)


def test_pid_tree_without_a_pid_finds_the_launch_and_several_are_listed(tmp_path):
    # Both in one world of processes that holds nothing else.
    script = """
        mkfifo "$0/one" "$0/two"
        "$1" tests/programs/launch_server.py "$0/one" sglang::scheduler_TP0 &
        read line <"$0/one"
        cp sample_logs/sglang-0.5.9-cpu-tp2-good.log "$0/server.log"  # now: older, it is another's
        "$1" -m hangdoctor watch --pid-tree --log "$0/server.log"
        echo "code $?"
        "$1" tests/programs/launch_server.py "$0/two" sglang::scheduler_TP1 &
        read line <"$0/two"
        "$1" -m hangdoctor watch --pid-tree
        echo "code $?"
        "$1" -m hangdoctor diagnose
        echo "code $?"
        "$1" -m hangdoctor watch
        echo "code $?"
    """
    done = subprocess.run(
        [*NAMESPACES, "-pf", "--mount-proc", "bash", "-c", script, tmp_path, sys.executable],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        cwd=ROOT,
    )
    codes = [line for line in done.stdout.splitlines() if line.startswith("code")]
    assert codes == ["code 0", "code 2", "code 2", "code 2"], done.stderr
    assert "READY" in done.stdout
    assert done.stderr.count("there are several launches") == 3
    assert done.stderr.count("1 rank (TP0)") == done.stderr.count("1 rank (TP1)") == 3
    assert "Traceback" not in done.stderr


def test_what_follows_two_dashes_belongs_to_the_command(tmp_path):
    recording = tmp_path / "recording"
    done = hangdoctor(
        "watch", "--record", recording, "--", "echo", "--log", "z", "--pid-tree", "--format=json"
    )
    assert (done.returncode, done.stdout.split()[0]) == (1, "DEAD")
    assert (recording / "server.log").read_text() == "--log z --pid-tree --format=json\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["watch", "16987"],
        ["watch", "--pid-tree", "--", "true"],
        ["watch", "--pid-tree", "1", "--", "true"],
        ["watch", "--log", "F", "--", "true"],
        ["watch", "--kill-on-exit", "--pid-tree", "1"],
        ["watch", "--pid-tree=two"],
        ["watch", "--until=later", "--", "true"],
        ["watch", "--interval=inf", "--", "true"],
        ["watch", "--stall-after=nan", "--", "true"],
        ["watch", "--", "no-such-command"],
        ["diagnose", "--for=1e999", "1"],
        ["diagnose", "-5"],
        ["diagnose", "--", "-5"],
        ["diagnose", "\u00b2"],
        ["diagnose", ""],
        ["diagnose", str(HUNG), "--engine", "no-such-engine"],
        ["diagnose", str(HUNG), "--format", "xml"],
        ["diagnose", str(HUNG), str(GOOD)],
        ["diagnose", str(HUNG), "--record", "somewhere"],
        ["diagnose", str(GOOD_LOG), "--record", "somewhere"],
        ["diagnose", f"no-{HOSTILE}"],
        ["diagnose", str(HUNG), "--engine", HOSTILE],
        ["diagnose", f"--{HOSTILE}"],
        ["diagnose", "--for"],
        ["diagnose", "--log"],
        ["watch", "--until"],
        ["watch", "python", "-m", "sglang.launch_server"],
        ["watch", "--", ""],
        ["smoke", "--url", "http://host:port", "--", "true"],
        ["smoke", "--", "true", "--port", "many"],
        ["check-patch", "--file", "A", "--patch", "B"],
        ["check-patch", "--depth", "reading", "--", "true"],
        ["check-patch", "--record", "somewhere"],
        ["check-patch", "--file", "no-such-file"],
        ["explain", "no-such-rule"],
        ["explain", "rank-died", "rank-stopped"],
        ["explain", HOSTILE],
        ["preflight", "two"],
        ["preflight", "1", "2"],
        ["preflight", "--format", "xml"],
        ["preflight", HOSTILE],
        ["no-such-command"],
        ["diagnos"],
        ["help"],
    ],
)
def test_wrong_usage_is_one_line_with_a_hint_and_2(arguments):
    assert_complaint(run_here(*arguments), 2)


# Exit codes and streams


@pytest.mark.parametrize(
    ("arguments", "code", "state"),
    [
        ([GOOD], 0, "ready"),
        ([SHORT], 0, "starting"),
        ([HUNG], 1, "hung"),
        ([SAMPLES / "sglang-0.5.9-cpu-tp2-rank-killed.log"], 1, "dead"),
        ([UNDECIDED], 3, "unknown"),
    ],
)
def test_the_exit_code_of_diagnose_is_its_verdict(arguments, code, state):
    done = hangdoctor("diagnose", *arguments, "--format=json")
    assert (done.returncode, json.loads(done.stdout)["state"]) == (code, state)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("script", "code", "state"),
    [
        ("cat {good}; exec sleep 600", 0, "ready"),
        ("exit 3", 1, "dead"),
        ("kill -KILL $$", 1, "dead"),
        ("exec sleep 600", 3, "unknown"),
        ("w=w; while sleep 0.1; do w=$w$w; echo ${{w::99}}; done", 4, "starting"),
    ],
)
def test_the_exit_code_of_watch_is_its_verdict(script, code, state):
    done = hangdoctor(
        "watch", "--format=json", "--timeout=3", "--kill-on-exit", "--",
        "bash", "-c", script.format(good=GOOD_LOG),
    )  # fmt: skip
    assert (done.returncode, json.loads(done.stdout)["state"]) == (code, state), done.stderr


def test_the_json_is_one_document_with_the_keys_that_scripts_rely_on():
    verdict = json.loads(hangdoctor("diagnose", HUNG, "--format=json").stdout)
    assert set(verdict) >= KEYS
    assert verdict["engine"].keys() >= {"name", "version"}
    assert all(rank.keys() >= RANK_KEYS for rank in verdict["ranks"])
    assert all(card.keys() >= {"index", "ranks", "reading"} for card in verdict["gpus"])
    assert all(finding.keys() >= FINDING_KEYS for finding in verdict["findings"])
    assert (verdict["schema"], verdict["state"], verdict["phase"]) == (1, "hung", "weights")
    assert verdict["culprits"] == ["TP1"]


def test_events_are_json_lines_and_nothing_else_is_on_stdout(tmp_path):
    script = f"cat {GOOD_LOG}; exec sleep 600"
    done = hangdoctor(
        "watch", "--events", "--format=json", "--timeout=30", "--kill-on-exit", "--record",
        tmp_path / "recording", "--", "bash", "-c", f"read line <{tmp_path / 'go'}; {script}",
        before=["bash", "-c", 'mkfifo "$0"; (echo go >"$0") & exec "$@"', str(tmp_path / "go")],
    )  # fmt: skip
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert events[-1]["state"] == "ready"
    assert done.returncode == 0
    assert all({"at_s", "state", "phase", "culprits"} <= event.keys() for event in events)


@pytest.mark.parametrize("fault", ["ValueError('x')", "SystemError('\\x1b[2J')", "OSError(5, 'x')"])
def test_an_exception_of_our_own_is_2_and_never_1(fault):
    code = (
        "import hangdoctor.commands.diagnose as c\n"
        f"def fail(*a, **k): raise {fault}\n"
        "c.judge = fail\n"
        "from hangdoctor.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "diagnose", HUNG],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert_complaint_of_our_own(done)


def assert_complaint_of_our_own(done):
    assert (done.returncode, done.stdout) == (2, ""), done
    assert "fault of hangdoctor's own" in done.stderr
    assert "Traceback" not in done.stderr
    assert_harmless(done.stderr)


def test_an_exception_of_our_own_while_watching_is_2_and_the_command_lives(pupil):
    code = (
        "import hangdoctor.commands.watch as c\n"
        "def fail(*a, **k): raise ValueError('x')\n"
        "c.judge = fail\n"
        "from hangdoctor.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "watch", "--", *pupil.command],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    pid = int(done.stderr.split("started pid ")[1].split(",")[0])
    try:
        assert_complaint_of_our_own(done)
        assert pupil.answers()
    finally:
        end_group(pid)


def test_an_installation_that_is_broken_is_2_with_the_command_that_mends_it(tmp_path):
    (tmp_path / "typer.py").write_text("raise ImportError('no click')")
    done = hangdoctor("--version", env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert_complaint(done, 2, "no click", "pip install")


def test_a_reader_that_leaves_early_changes_no_exit_code():
    # The pipe is smaller than what is said.
    done = shell('"$@" | head -c 20', "diagnose", HUNG, "--format=json")
    assert (done.returncode, done.stderr) == (1, "")
    done = shell('exec 3>&1; "$@" | exec 1>&-', "diagnose", HUNG, "--format=json")
    assert (done.returncode, done.stderr) == (1, "")


def test_events_that_nobody_reads_any_more_end_the_watching(pupil):
    done = shell('"$@" | head -n 1', "watch", "--events", "--until=forever", "--", *pupil.command)
    assert json.loads(done.stdout)["state"] == "unknown"
    assert done.returncode == 3
    assert pupil.answers()


def test_closed_streams_are_no_fault():
    assert shell('"$@" >&-', "diagnose", HUNG).returncode == 1
    assert shell('"$@" 2>&-', "diagnose", HUNG).returncode == 1
    assert shell('"$@" <&- >&- 2>&-', "diagnose", HUNG).returncode == 1
    assert_complaint(shell('"$@" <&-', "diagnose", "--log", "-"), 3, "empty")


def test_a_full_stdout_is_2():
    assert_complaint(shell('"$@" >/dev/full', "diagnose", HUNG), 2, "No space left on device")
    assert shell('"$@" 2>/dev/full', "diagnose", HUNG).returncode == 1


def test_a_terminal_gets_no_escapes_with_no_color_and_no_letters_it_lacks():
    environment = os.environ | {
        "NO_COLOR": "1",
        "TERM": "xterm-256color",
        "PYTHONIOENCODING": "ascii",
    }
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command("diagnose", HUNG), stdout=theirs, stderr=theirs, stdin=theirs, env=environment,
        cwd=ROOT,
    )  # fmt: skip
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # EIO: the other end has closed
        while block := os.read(ours, 4096):
            said += block
    os.close(ours)
    assert process.wait(LIMIT_S) == 1
    assert said.startswith(b"HUNG in weights: TP1")
    assert b"\x1b" not in said


def shown_of(err):
    return [line.removeprefix("  | ") for line in err.splitlines() if line.startswith("  | ")]


def test_the_lines_of_a_command_are_shown_beside_what_changes():
    done = hangdoctor("watch", "--", "printf", f"one\\n{HOSTILE}\\n0%%\\r50%%\\r\\nlast")
    assert done.returncode == 1
    one, hostile, bar, last = shown_of(done.stderr)
    assert (one, bar, last) == ("one", "50%", "last")
    assert "gone" in hostile
    assert_harmless(done.stderr)
    assert any("DEAD" in line for line in done.stderr.splitlines() if not line.startswith("  | "))
    assert done.stdout.startswith("DEAD")


def test_a_flood_of_lines_is_shortened_to_its_newest():
    done = hangdoctor("watch", "--", "seq", "100000")
    shown = shown_of(done.stderr)
    assert shown[-200:] == [str(number) for number in range(99801, 100001)]
    assert any("lines are left out here" in line for line in shown)
    assert len(shown) < 100000


@pytest.mark.parametrize("form", ["--events", "--format=json"])
def test_a_program_that_reads_the_answer_is_not_shown_the_lines(form):
    done = hangdoctor("watch", form, "--", "echo", "one")
    assert shown_of(done.stderr) == []


# What becomes of the command


def test_ctrl_c_gives_the_verdict_so_far_and_130_and_the_command_lives_on(watcher, pupil):
    process = watcher("--", *pupil.command)
    pid = started_pid(process)
    try:
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130
        assert out.startswith("UNKNOWN in start")
        assert f"pid {pid} runs on" in err
        assert f"kill -TERM -- -{pid}" in err
        assert "Traceback" not in err
        assert pupil.answers()
    finally:
        end_group(pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_the_command_lives_on_when_hangdoctor_is_killed(watcher, pupil, number):
    process = watcher("--", *pupil.command)
    pid = started_pid(process)
    try:
        os.killpg(process.pid, number)
        process.communicate(timeout=LIMIT_S)
        assert process.returncode == -number
        assert pupil.answers()
    finally:
        end_group(pid)


def test_kill_on_exit_ends_the_command_and_says_so(watcher, pupil):
    process = watcher("--kill-on-exit", "--", *pupil.command)
    pid = started_pid(process)
    try:
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130
        assert f"pid {pid} was ended" in err
        assert not pupil.answers()
        assert procfs.read_stat("/proc", pid) is None
    finally:
        end_group(pid)


# Processes


@pytest.mark.parametrize("pid", ["0", "-5", "99999999999999999999", str(2**31 - 1)])
def test_a_pid_that_cannot_be_is_said_not_to_exist(pid):
    assert_complaint_with_list(hangdoctor("watch", f"--pid-tree={pid}"), "there is no process")
    if pid != "-5":
        assert_complaint_with_list(hangdoctor("diagnose", pid), "there is no process")


def test_a_process_of_no_launch_is_named_and_left_alone(program):
    sleeper = program("sleep")
    done = hangdoctor("diagnose", sleeper.pid)
    assert_complaint_with_list(done, f"PID {sleeper.pid} belongs to no launch", "sleep.py")
    assert procfs.read_stat("/proc", sleeper.pid).state in "SR"


def assert_complaint_with_list(done, *words):
    """As a complaint, but launches of others on this machine may be listed below it."""
    assert (done.returncode, done.stdout) == (2, ""), done
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) >= 2
    for word in words:
        assert word in done.stderr
    assert_harmless(done.stderr)


def test_a_process_that_has_ended_is_said_to_have_ended(program):
    family = program("family")
    dead = hangdoctor("diagnose", family.said["dead"])
    assert_complaint_with_list(dead, f"PID {family.said['dead']}", "has ended", str(family.pid))
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert_complaint_with_list(hangdoctor("diagnose", gone.pid), "there is no process")


def test_a_launch_that_ends_while_it_is_looked_at_is_dead(program, watcher):
    launcher = program("launch_server", *TITLES)
    process = watcher("--pid-tree", launcher.pid, "--format=json")
    started_pid(process)
    os.killpg(launcher.pid, signal.SIGKILL)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, json.loads(out)["state"]) == (1, "dead"), err


def test_a_title_cannot_reach_the_terminal(program):
    hostile = program("launch_server", f"sglang::scheduler_TP0 {HOSTILE}\nREADY", *TITLES[1:])
    for output in ("text", "json"):
        done = hangdoctor("diagnose", hostile.pid, "--for=1", "--format", output)
        assert done.returncode in (0, 3), done.stderr
        assert_harmless(done.stdout + done.stderr)
        assert "\nREADY" not in done.stdout
    title = f"\n{HOSTILE}\nhangdoctor: READY"
    other = subprocess.Popen([title, "600"], executable=shutil.which("sleep"))
    try:
        done = hangdoctor("diagnose", other.pid)
        assert_complaint_with_list(done, "belongs to no launch")
        assert "\nhangdoctor: READY" not in done.stderr
    finally:
        other.kill()
        other.wait()


# Logs


def verdict_of(*arguments, **options):
    run = hangdoctor if options else run_here
    done = run("diagnose", *arguments, "--format=json", **options)
    assert done.returncode in (0, 1, 3), done.stderr
    verdict = json.loads(done.stdout)
    return {key: verdict[key] for key in ("state", "phase", "culprits", "engine")}


def test_a_log_reads_the_same_with_any_line_ends_and_cut_anywhere(tmp_path):
    whole = UNDECIDED.read_bytes()
    expected = verdict_of(UNDECIDED)
    character = "\u00e9".encode()
    for name, data in {
        "crlf": whole.replace(b"\n", b"\r\n"),
        "unterminated": whole.rstrip(b"\n"),
        "cut": whole + b"[2026-01-01 00:00:00] caf" + character[:1],
        "nul": b"\0" * 100 + whole,
        "bom": b"\xef\xbb\xbf" + whole,
    }.items():
        log = tmp_path / name
        log.write_bytes(data)
        assert verdict_of(log) == expected, name


def test_stillness_that_is_suspicious_is_the_recordings_own_unless_it_is_given():
    assert verdict_of(HUNG)["state"] == "hung"
    done = run_here("diagnose", HUNG, "--stall-after=600", "--format=json")
    assert json.loads(done.stdout)["state"] == "starting", done.stderr
    help_text = run_here("diagnose", "--help").stdout
    assert "A recording has its own" in " ".join(help_text.replace("\u2502", " ").split())


def test_the_last_line_of_a_launch_that_is_alive_counts_without_its_newline(tmp_path):
    lines = GOOD_LOG.read_bytes().splitlines(keepends=True)
    last = next(index for index, line in enumerate(lines) if b"fired up and ready" in line)
    log = tmp_path / "log"
    log.write_bytes(b"".join(lines[: last + 1]).rstrip(b"\n"))
    verdict = verdict_of(log, "--still-running")
    assert verdict["state"] == "ready"
    log.write_bytes(b"".join(lines[: last + 1]))
    assert verdict_of(log, "--still-running") == verdict


def test_a_log_comes_from_stdin_a_pipe_or_a_file_alike(tmp_path):
    expected = verdict_of(UNDECIDED)
    with UNDECIDED.open() as stdin:
        assert verdict_of("--log", "-", stdin=stdin) == expected
    with UNDECIDED.open() as stdin:
        assert verdict_of("-", stdin=stdin) == expected
    done = shell(f'"$@" <(cat {UNDECIDED})', "diagnose", "--format=json")
    assert json.loads(done.stdout)["phase"] == expected["phase"]
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    done = shell(f'(cat {UNDECIDED} >{fifo}) & "$@"', "diagnose", fifo, "--format=json")
    assert json.loads(done.stdout)["phase"] == expected["phase"]


def test_a_log_can_be_given_beside_a_recording_also_from_stdin(tmp_path):
    recording = tmp_path / "recording"
    shutil.copytree(HUNG, recording)
    log = tmp_path / "log"
    (recording / "server.log").rename(log)
    expected = verdict_of(HUNG)
    assert verdict_of(recording, log) == expected
    with log.open() as stdin:
        assert verdict_of(recording, "--log", "-", stdin=stdin) == expected


@pytest.mark.parametrize("hours", [0, -7, 5.5])
def test_a_log_beside_a_recording_is_dated_by_its_stamps_whatever_their_zone(tmp_path, hours):
    text = (HUNG / "server.log").read_text()

    def moved(match):
        at = datetime.fromisoformat(match[0]) + timedelta(hours=hours)
        return str(at)

    log = tmp_path / "log"
    log.write_text(re.sub(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d", moved, text))
    given = load(HUNG)
    bare = msgspec.structs.replace(given, log_path=None)
    dated = with_log(bare, log, engines.load("sglang"))
    for real, told in zip(given.snapshots, dated.snapshots, strict=True):
        # A line without a stamp goes with the one before it: never later than it was.
        assert told.log.read_bytes >= real.log.read_bytes
        assert told.log.silent_s is None or told.log.silent_s >= real.log.silent_s - 2
    told, real = dated.snapshots[-1].log, given.snapshots[-1].log
    assert told.silent_s == pytest.approx(real.silent_s, abs=2)
    assert len({each.log.read_bytes for each in dated.snapshots}) > 3
    assert dated.snapshots[-1].log.read_bytes == log.stat().st_size


def test_a_log_without_stamps_counts_as_written_at_the_last_moment(tmp_path):
    log = tmp_path / "log"
    log.write_text("one\ntwo\n")
    bare = msgspec.structs.replace(load(HUNG), log_path=None)
    dated = with_log(bare, log, engines.load("sglang"))
    assert [each.log.read_bytes for each in dated.snapshots[:-1]] == [0] * (
        len(dated.snapshots) - 1
    )
    assert dated.snapshots[-1].log.read_bytes == 8


def test_a_log_that_is_rotated_is_followed(program, watcher, tmp_path):
    launcher = program("launch_server", *TITLES)
    lines = GOOD_LOG.read_bytes().splitlines(keepends=True)
    log = tmp_path / "log"
    log.write_bytes(b"".join(lines[: len(lines) // 2]))
    process = watcher("--pid-tree", launcher.pid, "--log", log, "--timeout=60")
    started_pid(process)
    log.rename(tmp_path / "log.1")
    (tmp_path / "new").write_bytes(b"".join(lines[len(lines) // 2 :]))
    (tmp_path / "new").rename(log)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out.split("\n")[0]) == (0, "READY"), err


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ["empty"]),
        (b" \n\n", ["empty"]),
        (bytes(range(256)) * 1000, ["not recognised", "--engine sglang"]),
        (b"Dec 01 kernel: Linux version 6.1\nsystemd[1]: Started.\n", ["not recognised"]),
    ],
    ids=["empty", "blank", "binary", "other"],
)
def test_a_log_that_tells_nothing_is_3(tmp_path, data, words):
    log = tmp_path / "log"
    log.write_bytes(data)
    assert_complaint(run_here("diagnose", log), 3, *words)
    if data:
        done = run_here("diagnose", log, "--engine=sglang")
        assert done.returncode == 3
        assert_harmless(done.stdout + done.stderr)


def test_a_pipe_that_nobody_writes_is_not_waited_for_without_end(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert_complaint(hangdoctor("diagnose", fifo), 3, "nobody writes")


@pytest.mark.parametrize("log", ["/dev/zero", "/dev/null", "/dev", "/no/such/log"])
def test_what_is_no_log_is_an_error_with_a_hint(log):
    assert_complaint(run_here("diagnose", "--log", log, "--engine=sglang"), 2)
    assert_complaint(run_here("diagnose", HUNG, "--log", log), 2)


def test_a_log_line_cannot_reach_the_terminal(tmp_path):
    log = tmp_path / "log"
    text = UNDECIDED.read_text()
    log.write_text(text + f"[2026-01-01 00:00:00 TP0] {HOSTILE}\n[2026-01-01 00:00:00] {HOSTILE}\n")
    for output in ("text", "json"):
        done = hangdoctor("diagnose", log, "--format", output)
        assert done.returncode == 3
        assert_harmless(done.stdout + done.stderr)


def test_a_name_of_any_bytes_can_be_read_and_is_shown(tmp_path, program):
    log = tmp_path / os.fsdecode(b"caf\xe9\x1b[2J\n.log")
    log.write_bytes(UNDECIDED.read_bytes())
    for output in ("text", "json"):
        done = hangdoctor("diagnose", log, "--format", output)
        assert done.returncode == 3, done.stderr
        assert_harmless(done.stdout + done.stderr)
    with log.open("ab") as stdout:
        launcher = program("launch_server", *TITLES, stdout=stdout, stderr=stdout)
    recording = tmp_path / "recording"
    done = hangdoctor(
        "diagnose", launcher.pid, "--for=6", "--stall-after=1", "--record", recording,
        "--format=json",
    )  # fmt: skip
    assert done.returncode in (0, 1, 3), done.stderr
    assert "failed" not in {missing["reason"] for missing in json.loads(done.stdout)["missing"]}
    assert hangdoctor("diagnose", recording).returncode == done.returncode


# Recordings


@pytest.fixture
def recording(tmp_path):
    """A copy of a recording whose snapshots are not packed, as one is while it is made."""
    copy = tmp_path / "recording"
    shutil.copytree(HUNG, copy)
    packed = copy / "snapshots.jsonl.gz"
    (copy / "snapshots.jsonl").write_bytes(gzip.decompress(packed.read_bytes()))
    packed.unlink()
    return copy


def test_a_damaged_line_in_the_middle_is_named_with_the_command_that_drops_it(recording):
    path = recording / "snapshots.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[4] = b'{"at_s": \xff\x00'
    path.write_bytes(b"\n".join(lines))
    done = run_here("diagnose", recording)
    assert_complaint(done, 2, "line 5 is damaged", "sed -i 5d")
    subprocess.run(done.stderr.splitlines()[1].split(": ", 1)[1], shell=True, check=True)  # noqa: S602
    assert run_here("diagnose", recording).returncode == 1


def test_a_recorder_that_was_killed_in_its_last_line_left_a_good_recording(recording):
    path = recording / "snapshots.jsonl"
    path.write_bytes(path.read_bytes()[:-300])
    assert verdict_of(recording)["culprits"] == ["TP1"]


def test_what_a_cut_off_packed_recording_still_holds_can_be_had(recording):
    packed = recording / "snapshots.jsonl.gz"
    (recording / "snapshots.jsonl").unlink()
    packed.write_bytes((HUNG / packed.name).read_bytes()[:-1000])
    done = run_here("diagnose", recording)
    assert_complaint(done, 2, "zcat")
    hint = done.stderr.splitlines()[1].split(": ", 1)[1]
    subprocess.run(hint, shell=True, check=False, stderr=subprocess.DEVNULL)  # noqa: S602
    assert verdict_of(recording)["phase"] == "weights"


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"\xff\x00no", "damaged"),
        (b"[1]", "damaged"),
        (b"", "damaged"),
        (b'{"schema": 99}', "pip install --upgrade hangdoctor"),
        (b'{"schema": "1"}', "schema"),
        (b'{"schema": 1, "source": 3}', "damaged"),
    ],
)
def test_a_header_that_is_damaged_or_newer_is_2(recording, header, words):
    (recording / "recording.json").write_bytes(header)
    assert_complaint(run_here("diagnose", recording), 2, words)


def test_a_directory_that_is_no_recording_is_2(tmp_path):
    assert_complaint(run_here("diagnose", tmp_path), 2, "is not a recording")


def test_a_recording_without_anything_in_it_is_3(recording):
    for name in ("snapshots.jsonl", "server.log"):
        (recording / name).unlink()
    assert_complaint(run_here("diagnose", recording), 3, "neither a snapshot nor a log")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_recording_whose_log_is_no_file_is_2(recording, make):
    (recording / "server.log").unlink()
    make(recording / "server.log")
    assert_complaint(run_here("diagnose", recording), 2, "cannot read the log")


def test_a_recording_is_never_written_over(program, recording, tmp_path):
    launcher = program("launch_server", *TITLES)
    before = {path.name: path.read_bytes() for path in recording.iterdir()}
    assert_complaint(hangdoctor("diagnose", launcher.pid, "--record", recording), 2, "already")
    done = hangdoctor("watch", "--record", recording, "--", "touch", tmp_path / "ran")
    assert_complaint(done, 2, "already")
    assert not (tmp_path / "ran").exists()
    assert {path.name: path.read_bytes() for path in recording.iterdir()} == before


@pytest.mark.parametrize("place", ["/proc/nowhere", "/dev/null/x", str(GOOD_LOG)])
def test_a_place_that_cannot_be_written_is_2_before_anything_is_started(program, tmp_path, place):
    done = hangdoctor("watch", "--record", place, "--", "touch", tmp_path / "ran")
    assert_complaint(done, 2, "cannot record into")
    assert not (tmp_path / "ran").exists()
    launcher = program("launch_server", *TITLES)
    assert_complaint(hangdoctor("diagnose", launcher.pid, "--record", place), 2, "cannot record")
    assert procfs.read_stat("/proc", launcher.pid).state in "SR"


def on_small_disk(place, fill_bytes):
    """Return what runs a command beside a file system of 64 KiB that is filled so far."""
    place.mkdir()
    script = (
        f'mount -t tmpfs -o size=64k none "$0" && head -c {fill_bytes} /dev/zero >"$0/fill"; '
        'exec "$@"'
    )
    return [*NAMESPACES, "-m", "bash", "-c", script, str(place)]


def test_a_disk_that_fills_up_ends_the_recording_and_not_the_verdict(program, tmp_path):
    launcher = program("launch_server", *TITLES)
    log = shutil.copyfile(GOOD_LOG, tmp_path / "server.log")  # now: older, it is another launch's
    done = hangdoctor(
        "diagnose", launcher.pid, "--for=3", "--record", tmp_path / "disk" / "recording",
        "--format=json", "--log", log, before=on_small_disk(tmp_path / "disk", 14 * 4096),
    )  # fmt: skip
    assert (done.returncode, json.loads(done.stdout)["state"]) == (0, "ready"), done.stderr
    assert "the recording is incomplete: No space left on device" in done.stderr
    assert procfs.read_stat("/proc", launcher.pid).state in "SR"


def test_a_disk_that_is_full_is_2_before_anything_is_started(program, tmp_path):
    place = tmp_path / "disk" / "recording"
    full = on_small_disk(tmp_path / "disk", 1 << 20)
    done = hangdoctor("watch", "--record", place, "--", "touch", tmp_path / "ran", before=full)
    assert_complaint(drop_noise(done), 2, "cannot record into", "No space left on device")
    assert not (tmp_path / "ran").exists()
    launcher = program("launch_server", *TITLES)
    done = hangdoctor("diagnose", launcher.pid, "--record", place, before=full)
    assert_complaint(drop_noise(done), 2, "cannot record into", "No space left on device")


def drop_noise(done):
    """Take away what `head` says of the full disk."""
    lines = done.stderr.splitlines(keepends=True)
    done.stderr = "".join(line for line in lines if not line.startswith("head:"))
    return done


def test_no_directory_that_can_be_written_is_needed_to_look(program):
    launcher = program("launch_server", *TITLES)
    script = (
        "for place in /tmp /var/tmp /dev/shm; do mount --bind -o ro $place $place"
        ' && mount -o remount,bind,ro $place; done; cd /; PYTHONPATH=$0 exec "$@"'
    )
    done = hangdoctor(
        "diagnose", launcher.pid, "--for=1", "--format=json",
        before=[*NAMESPACES, "-m", "bash", "-c", script, str(ROOT)],
    )  # fmt: skip
    assert done.returncode in (0, 3), done.stderr
    missing = msgspec.json.decode(done.stdout)["missing"]
    assert "failed" not in {each["reason"] for each in missing}, missing
