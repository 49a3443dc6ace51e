"""`watch` in a real terminal: what stands on its screen, and how it is left behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pyte
import pytest

from hangdoctor.collect import procfs

ROOT = Path(__file__).parents[1]
TITLES = ("sglang::scheduler_TP0", "sglang::scheduler_TP1", "sglang::detokenizer")
LIMIT_S = 120
IN_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Makes stdin the terminal that controls us: its Ctrl-C and its hang-up are ours."""
RESTING = {pyte.modes.DECAWM, pyte.modes.DECTCEM}
"""Lines wrap, and the cursor can be seen."""


class Terminal:
    """A terminal of our own that hangdoctor runs in, and what stands on its screen."""

    def __init__(self, columns, rows, *arguments, environment=None, **streams):
        self.screen = pyte.HistoryScreen(columns, rows, history=5000)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.ours, self.theirs = pty.openpty()
        self.resize(columns, rows)
        self.before = termios.tcgetattr(self.theirs)
        given = {"stdin": self.theirs, "stdout": self.theirs, "stderr": self.theirs} | streams
        inherited = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_A_TERMINAL, sys.executable, "-m", "hangdoctor", *arguments],
            cwd=ROOT,
            env=inherited | {"TERM": "xterm-256color"} | (environment or {}),
            start_new_session=True,
            **given,
        )

    def resize(self, columns, rows):
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, size)  # the kernel sends SIGWINCH
        self.screen.resize(rows, columns)

    @property
    def text(self):
        """Return what is on the screen, without blanks at the ends of lines and of the screen."""
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    @property
    def all_text(self):
        """Return what has scrolled away, and what is on the screen."""
        columns = self.screen.columns
        gone = [
            "".join(line[column].data for column in range(columns)).rstrip()
            for line in self.screen.history.top
        ]
        return "\n".join([*gone, self.text])

    def read_on(self, seconds=LIMIT_S):
        """Take in what is written next; False where nothing comes, or nobody has the other end."""
        ready, _, _ = select.select([self.ours], [], [], seconds)
        try:
            data = os.read(self.ours, 65536) if ready else b""
        except OSError:  # EIO
            data = b""
        self.raw += data
        self._stream.feed(data)
        return bool(data)

    def until(self, pattern):
        """Read on until a regular expression matches the screen; return the match."""
        until_s = time.monotonic() + LIMIT_S
        while not (match := re.search(pattern, self.text, re.MULTILINE)):
            alive = self.read_on() and time.monotonic() < until_s
            assert alive, f"no {pattern!r} on\n{self.text}"
        return match

    def end(self):
        """Read on to its end; return its exit status."""
        status = self.process.poll()
        while status is None:
            self.read_on(0.1)
            status = self.process.poll()
        while self.read_on(0):
            pass
        return status

    def assert_restored(self):
        """The cursor can be seen, lines wrap, no other screen, and the settings are as before."""
        assert self.screen.mode & RESTING == RESTING
        assert not re.search(rb"\x1b\[\?(?:25|47|1047|1049)", self.raw)
        assert termios.tcgetattr(self.theirs) == self.before
        assert self.screen.cursor.x == 0

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for fd in (self.ours, self.theirs):
            with contextlib.suppress(OSError):
                os.close(fd)


@pytest.fixture(autouse=True)
def _temporary_files_end_with_the_test(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def terminal():
    """Run hangdoctor in a terminal; end it, and what it has started."""
    opened = []

    def start(*arguments, columns=80, rows=24, **more):
        opened.append(Terminal(columns, rows, *map(str, arguments), **more))
        return opened[-1]

    yield start
    for one in opened:
        one.close()
        for pid in re.findall(r"started pid (\d+)", one.all_text):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(pid), signal.SIGKILL)


@pytest.fixture
def launcher(program):
    return program("launch_server", *TITLES)


def lives(pid):
    stat = procfs.read_stat("/proc", pid)
    return stat is not None and stat.state in "RS"


def wait_for_a_snapshot(recording):
    snapshots = recording / "snapshots.jsonl"
    until_s = time.monotonic() + LIMIT_S
    while not (snapshots.exists() and snapshots.stat().st_size) and time.monotonic() < until_s:
        time.sleep(0.05)  # between two looks at a file; nothing rests on its length


VIEW = r"^watching .*; Ctrl-C"
REPORT = r"^(UNKNOWN|STARTING|HUNG|DEAD|READY)\b.*\n(  .*\n)+\nRanks$"


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (160, 50)])
def test_the_view_shows_verdict_ranks_and_log_and_goes_when_the_report_comes(
    launcher, terminal, columns, rows
):
    watched = terminal(
        "watch", "--pid-tree", launcher.pid, "--until=forever", columns=columns, rows=rows
    )
    watched.until(VIEW)
    lines = watched.text.splitlines()
    for rank in ("TP0", "TP1"):
        assert any(line.split()[:1] == [rank] for line in lines)
    assert watched.text.count("RANK  ") == 1
    assert any(line.startswith("Log  ") for line in lines)
    os.write(watched.ours, b"\x03")
    assert watched.end() == 130
    assert re.search(REPORT, watched.all_text, re.MULTILINE)
    assert "RANK  " not in watched.all_text
    assert "^C" not in watched.all_text
    watched.assert_restored()
    assert lives(launcher.pid)


def test_each_look_is_drawn_over_the_one_before_and_what_changes_stays_above(launcher, terminal):
    watched = terminal("watch", "--pid-tree", launcher.pid, "--until=forever", "--interval=0.2")
    seconds = 0
    for _ in range(3):
        seconds = watched.until(rf"watched for (?!{seconds} )(\d+) s")[1]
        assert len(re.findall(VIEW, watched.all_text, re.MULTILINE)) == 1
    assert re.search(r"^ +\d+\.\d s  \w+ in ", watched.all_text, re.MULTILINE)


def test_the_lines_of_a_command_scroll_above_the_view(terminal):
    script = (
        'n=0; while sleep 0.05; do n=$((n+1)); echo "line $n of 100% [red]it[/] $(tput bel)"; done'
    )
    watched = terminal("watch", "--until=forever", "--", "bash", "-c", script)
    watched.until(r"(?s)  \| line \d\d+ of .*watching bash")
    os.write(watched.ours, b"\x03")
    assert watched.end() == 130
    numbers = re.findall(r"^  \| line (\d+) of 100% \[red\]it\[/\]", watched.all_text, re.MULTILINE)
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    assert "RANK  " not in watched.all_text
    pid = int(re.search(r"started pid (\d+)", watched.all_text)[1])
    assert f"kill -TERM -- -{pid}" in watched.all_text
    assert lives(pid)
    watched.assert_restored()


def test_a_terminal_that_is_resized_gets_the_view_in_its_new_size(launcher, terminal):
    watched = terminal(
        "watch",
        "--pid-tree",
        launcher.pid,
        "--until=forever",
        "--interval=30",
        columns=160,
        rows=50,
    )
    watched.until(VIEW)
    for columns, rows in ((80, 24), (100, 30), (40, 12), (20, 4)):
        watched.resize(columns, rows)  # between two looks: it does not wait for the next
        watched.raw = b""
        assert watched.read_on()
        drawn = pyte.Screen(columns, rows)
        pyte.ByteStream(drawn).feed(watched.raw)
        lines = [line.rstrip() for line in drawn.display]
        assert sum(bool(line) for line in lines) <= rows
        assert any(line.startswith(("UNKNOWN", "STARTING")) for line in lines)
        heads = [line for line in lines if "RANK" in line]
        assert len(heads) <= 1


def test_text_of_the_target_cannot_move_the_cursor_out_of_the_view(program, terminal):
    hostile = "\x1b[2J\x1b[Hgone\u202e\x9b31m\x07"
    launcher = program("launch_server", f"sglang::scheduler_TP0 {hostile}", *TITLES[1:])
    script = "printf '\\033[2J\\033[Hgone\\033]0;x\\007\\r\\n'; exec sleep 600"
    for arguments in (["--pid-tree", launcher.pid], ["--", "bash", "-c", script]):
        watched = terminal("watch", "--until=forever", *arguments)
        watched.until(VIEW)
        ours = rb"\x1b\[(?:\?7[lh]|[0-9;]*m|\d*A|B|K|2K|J)"
        left = re.sub(ours, b"", watched.raw).replace(b"\r\n", b"").replace(b"\r", b"")
        assert not set(left) & {*range(32), 127}
        os.write(watched.ours, b"\x03")
        watched.end()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_takes_the_view_away_gives_the_verdict_so_far_and_leaves_the_command(
    terminal, number
):
    watched = terminal("watch", "--until=forever", "--", "sleep", "600")
    watched.until(VIEW)
    pid = int(re.search(r"started pid (\d+)", watched.all_text)[1])
    watched.process.send_signal(number)
    assert watched.end() == -number
    assert "UNKNOWN" in watched.text
    assert f"pid {pid} runs on" in watched.text
    assert not re.search(VIEW, watched.all_text, re.MULTILINE)
    watched.assert_restored()
    assert lives(pid)


def test_a_kill_leaves_the_terminal_as_it_was_and_the_command_running(terminal):
    watched = terminal("watch", "--until=forever", "--", "sleep", "600")
    watched.until(VIEW)
    pid = int(re.search(r"started pid (\d+)", watched.all_text)[1])
    watched.process.kill()
    assert watched.end() == -signal.SIGKILL
    assert watched.screen.mode & RESTING == RESTING
    assert not re.search(rb"\x1b\[\?(?:25|47|1047|1049)", watched.raw)
    assert termios.tcgetattr(watched.theirs) == watched.before
    assert lives(pid)


def test_a_terminal_that_hangs_up_ends_the_watching_and_not_the_command(terminal, tmp_path):
    watched = terminal(
        "watch", "--until=forever", "--record", tmp_path / "recording", "--", "sleep", "600"
    )
    watched.until(VIEW)
    pid = int(re.search(r"started pid (\d+)", watched.all_text)[1])
    os.close(watched.theirs)
    os.close(watched.ours)
    assert watched.process.wait(LIMIT_S) == -signal.SIGHUP
    assert lives(pid)
    done = subprocess.run(
        [sys.executable, "-m", "hangdoctor", "diagnose", str(tmp_path / "recording")],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 3, done.stderr  # what was seen is whole, and decides nothing
    os.killpg(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"TERM": ""}], ids=str
)
def test_without_a_terminal_that_can_do_it_there_are_plain_lines(launcher, terminal, environment):
    watched = terminal("watch", "--pid-tree", launcher.pid, "--timeout=2", environment=environment)
    assert watched.end() in (3, 4)
    assert b"\x1b" not in watched.raw
    assert re.search(r"^ +\d+\.\d s  \w+ in ", watched.all_text, re.MULTILINE)
    assert re.search(REPORT, watched.all_text, re.MULTILINE)


@pytest.mark.parametrize("form", [["--events"], ["--format=json"]])
def test_json_is_never_mixed_with_a_view(launcher, terminal, form):
    watched = terminal("watch", "--pid-tree", launcher.pid, "--timeout=2", *form)
    assert watched.end() in (3, 4)
    assert b"\x1b" not in watched.raw


def test_a_stdout_that_is_kept_gets_the_report_alone_and_the_terminal_plain_lines(
    launcher, terminal, tmp_path
):
    with (tmp_path / "out").open("wb") as out:
        watched = terminal("watch", "--pid-tree", launcher.pid, "--timeout=2", stdout=out)
        assert watched.end() in (3, 4)
    assert b"\x1b" not in watched.raw
    assert re.search(REPORT, (tmp_path / "out").read_text(), re.MULTILINE)


def test_a_stderr_that_is_kept_gets_the_talk_and_the_terminal_the_view(terminal, tmp_path):
    script = "echo one; exec sleep 600"
    with (tmp_path / "err").open("wb") as err:
        watched = terminal("watch", "--until=forever", "--", "bash", "-c", script, stderr=err)
        watched.until(VIEW)
        os.write(watched.ours, b"\x03")
        assert watched.end() == 130
    talk = (tmp_path / "err").read_text()
    os.killpg(int(re.search(r"started pid (\d+)", talk)[1]), signal.SIGKILL)
    assert "  | one" in talk
    assert "\x1b" not in talk
    assert "  | one" not in watched.all_text
    assert watched.all_text.count("UNKNOWN in start") == 1  # the report's: the view is gone
    watched.assert_restored()


def test_after_a_stop_the_view_goes_on_below_what_the_shell_wrote(launcher, terminal):
    watched = terminal("watch", "--pid-tree", launcher.pid, "--until=forever", "--interval=0.2")
    watched.until(VIEW)
    watched.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, watched.process.pid, os.WSTOPPED | os.WNOWAIT)
    while watched.read_on(0):
        pass
    os.write(watched.theirs, b"\r\n[1]+  Stopped\r\n$ fg\r\n")
    watched.process.send_signal(signal.SIGCONT)
    watched.until(r"(?s)\$ fg\n.*^watching .*; Ctrl-C")
    assert "Stopped" in watched.text


def test_ctrl_c_gives_the_verdict_so_far_of_a_single_look_too(launcher, terminal, tmp_path):
    recording = tmp_path / "recording"
    watched = terminal("diagnose", launcher.pid, "--for=600", "--record", recording)
    wait_for_a_snapshot(recording)
    os.write(watched.ours, b"\x03")
    assert watched.end() == 130
    assert re.search(r"^(?:UNKNOWN|STARTING) in ", watched.all_text, re.MULTILINE)
    assert "Traceback" not in watched.all_text
    assert lives(launcher.pid)


@pytest.mark.parametrize("name", ["diagnose", "watch"])
def test_a_ctrl_c_before_anything_was_seen_is_one_line_with_a_hint_and_130(launcher, name):
    code = (
        "import sys; from hangdoctor.live import Live\n"
        "def look(self): raise KeyboardInterrupt\n"
        "Live.look = look\n"
        "from hangdoctor.__main__ import main; main()"
    )
    where = {"diagnose": [], "watch": ["--pid-tree"]}[name]
    done = subprocess.run(
        [sys.executable, "-c", code, name, *where, str(launcher.pid)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout) == (130, "")
    first, hint = done.stderr.splitlines()
    assert first == "hangdoctor: interrupted before anything was seen"
    assert hint.startswith("  ")


def test_a_sigterm_gives_the_verdict_so_far_of_a_single_look(launcher, tmp_path):
    recording = tmp_path / "recording"
    process = subprocess.Popen(
        [sys.executable, "-m", "hangdoctor", "diagnose", str(launcher.pid), "--for=600",
         "--record", str(recording)],
        stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    wait_for_a_snapshot(recording)
    process.terminate()
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == -signal.SIGTERM
    assert out.startswith(("UNKNOWN in ", "STARTING in "))
    assert lives(launcher.pid)
