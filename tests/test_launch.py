from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hangdoctor import launch
from hangdoctor.collect import procfs
from hangdoctor.errors import InputError

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "tests" / "programs"


def test_the_output_of_a_command_is_in_the_file_and_its_status_is_told(tmp_path):
    started = launch.start(["sh", "-c", "echo out; echo err >&2; exit 3"], tmp_path / "log")
    wait_for(started.pid)
    assert started.poll() == 3
    assert (tmp_path / "log").read_text() == "out\nerr\n"


def test_the_command_has_an_empty_stdin_a_session_of_its_own_and_unbuffered_output(tmp_path):
    script = "import os, sys; print(sys.stdin.read() == '', os.getsid(0) == os.getpid(),"
    script += " os.environ['PYTHONUNBUFFERED'])"
    started = launch.start([sys.executable, "-c", script], tmp_path / "log")
    wait_for(started.pid)
    started.poll()
    assert (tmp_path / "log").read_text() == "True True 1\n"


def test_the_command_gets_none_of_our_descriptors(tmp_path):
    with (tmp_path / "ours").open("w") as ours:
        os.set_inheritable(ours.fileno(), True)
        started = launch.start(["sh", "-c", "ls -l /proc/self/fd"], tmp_path / "log")
        wait_for(started.pid)
    started.poll()
    assert str(tmp_path / "ours") not in (tmp_path / "log").read_text()


def test_a_log_that_is_there_is_written_on(tmp_path):
    (tmp_path / "log").write_text("before\n")
    started = launch.start(["echo", "after"], tmp_path / "log")
    wait_for(started.pid)
    started.poll()
    assert (tmp_path / "log").read_text() == "before\nafter\n"


def test_a_command_that_does_not_exist_or_may_not_run_is_an_input_error(tmp_path):
    (tmp_path / "data").write_text("no program")
    with pytest.raises(InputError, match="cannot start no-such-command: No such file") as caught:
        launch.start(["no-such-command"], tmp_path / "log")
    assert caught.value.hint
    with pytest.raises(InputError, match="Permission denied"):
        launch.start([str(tmp_path / "data")], tmp_path / "log")
    (tmp_path / "data").chmod(0o755)
    with pytest.raises(InputError, match="Exec format error"):
        launch.start([str(tmp_path / "data")], tmp_path / "log")
    with pytest.raises(InputError, match="no command"):
        launch.start([], tmp_path / "log")


def test_a_log_that_cannot_be_written_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="cannot write the log"):
        launch.start(["true"], tmp_path / "no" / "log")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_command_lives_on_whatever_ends_us(tmp_path, number):
    code = """
        import sys, time
        from pathlib import Path
        from hangdoctor import launch
        script = "read word <$0; echo $word; exec sleep 600"
        started = launch.start(["sh", "-c", script, sys.argv[2]], Path(sys.argv[1]))
        print(started.pid, flush=True)
        time.sleep(600)
    """
    os.mkfifo(tmp_path / "word")
    us = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), tmp_path / "log", tmp_path / "word"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    pid = int(us.stdout.readline())
    os.killpg(us.pid, number)
    us.communicate()
    (tmp_path / "word").write_text("alive\n")
    while (tmp_path / "log").read_text() != "alive\n":
        os.sched_yield()
    os.killpg(pid, signal.SIGKILL)


def test_ending_ends_children_in_sessions_of_their_own_too(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = "(setsid sleep 600 & echo $! >$0; wait) & (trap '' TERM; sleep 600) & wait"
    started = launch.start(["sh", "-c", script, str(fifo)], tmp_path / "log")
    other = int(fifo.read_text())
    pidfd = os.pidfd_open(other)
    assert launch.end(started, grace_s=0.2) == ()
    assert select.select([pidfd], [], [], 60)[0]
    os.close(pidfd)
    assert started.poll() == -signal.SIGTERM
    left = [stat for stat in procfs.scan("/proc").values() if stat.session == started.pid]
    assert {stat.state for stat in left} <= {"Z"}  # whoever is init here has yet to wait for them


def test_a_command_that_ignores_sigterm_or_is_stopped_is_ended_for_certain(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    started = launch.start(
        ["sh", "-c", "trap '' TERM; echo x >$0; sleep 600", fifo], tmp_path / "l"
    )
    fifo.read_text()
    os.kill(started.pid, signal.SIGSTOP)
    assert launch.end(started, grace_s=0.2) == ()
    assert started.poll() == -signal.SIGKILL


def test_a_process_in_state_d_that_can_be_killed_is_ended(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    command = [sys.executable, str(PROGRAMS / "uninterruptible.py"), str(fifo), str(tmp_path / "f")]
    started = launch.start(command, tmp_path / "log")
    fifo.read_text()
    while procfs.read_stat("/proc", started.pid).state != "D":
        os.sched_yield()
    assert launch.end(started, grace_s=0.2) == ()


def test_what_has_ended_already_is_ended_again_without_harm(tmp_path):
    started = launch.start(["true"], tmp_path / "log")
    wait_for(started.pid)
    assert launch.end(started) == ()
    assert launch.end(started) == ()
    assert started.poll() == 0


def wait_for(pid):
    """Wait until a child of ours has ended, and leave it to be waited for."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
