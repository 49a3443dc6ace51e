from __future__ import annotations

import contextlib
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
from hangdoctor.keeper import send

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


@contextlib.contextmanager
def kept(script, log, **options):
    """Keep a shell script, which says a word through the FIFO $0; give it and the word."""
    fifo = log.with_suffix(".fifo")
    os.mkfifo(fifo)
    with launch.keeping(**options) as keeper:
        started = keeper.start(["sh", "-c", script, str(fifo)], log)
        yield keeper, started, fifo.read_text().split()


def is_gone(pid):
    stat = procfs.read_stat("/proc", pid)
    return stat is None or stat.state == "Z"


def test_a_kept_command_writes_on_its_file_and_its_status_is_told(tmp_path):
    with launch.keeping() as keeper:
        script = "echo out; echo err >&2; pwd; echo $WORD; exit 3"
        (tmp_path / "here").mkdir()
        started = keeper.start(
            ["sh", "-c", script],
            tmp_path / "log",
            environment={"WORD": "caf\udce9"},
            cwd=tmp_path / "here",
        )
        while started.poll() is None:
            os.sched_yield()
        assert started.poll() == 3
        assert keeper.end().status == 3
    said = (tmp_path / "log").read_bytes()
    assert said == b"out\nerr\n%s\ncaf\xe9\n" % str(tmp_path / "here").encode()


DAEMON = "(setsid sh -c 'setsid sleep 600 & echo $! >$0' $0 &)"


def test_what_left_the_group_the_session_and_its_parent_is_ended_too(tmp_path):
    with kept(f"{DAEMON}; sleep 600", tmp_path / "log") as (keeper, started, (daemon,)):
        assert procfs.read_stat("/proc", int(daemon)).session != started.pid
        ended = keeper.end()
        assert (ended.left, ended.killed, ended.lost) == ((), 0, False)
        assert started.poll() == ended.status == -signal.SIGTERM
        assert is_gone(int(daemon))


def test_a_command_that_ends_leaves_nothing_either(tmp_path):
    with kept(DAEMON, tmp_path / "log") as (keeper, started, (daemon,)):
        while started.poll() is None:
            os.sched_yield()
        assert not is_gone(int(daemon))
        assert keeper.end().status == 0
        assert is_gone(int(daemon))


def test_what_a_wrapper_leaves_behind_is_told_to_end_before_it_is_killed(tmp_path):
    # The shell dies of the signal and passes it on to nobody.
    script = "sh -c 'trap \"echo in order; exit\" TERM; echo x >$0; sleep 600 & wait' $0 & wait"
    with kept(script, tmp_path / "log") as (keeper, _, _):
        assert keeper.end().killed == 0
    assert (tmp_path / "log").read_text() == "in order\n"


def test_what_becomes_another_program_after_it_was_told_is_told_again(tmp_path):
    # As a shell that forks: its child catches the signal for it, and runs a program that never
    # heard of it.
    script = "sh -c 'trap \"exec sleep 600\" TERM; sleep 600 & echo x >$0; wait' $0 & wait"
    with kept(script, tmp_path / "log") as (keeper, _, _):
        assert keeper.end().killed == 0


@pytest.mark.parametrize("stopped", [False, True])
def test_a_command_that_ignores_sigterm_or_is_stopped_is_ended_for_certain(tmp_path, stopped):
    script = "trap '' TERM; echo x >$0; while :; do sleep 600; done"
    with kept(script, tmp_path / "log") as (keeper, started, _):
        if stopped:
            os.kill(started.pid, signal.SIGSTOP)
        ended = keeper.end(grace_s=0.2)
        assert (ended.status, ended.left) == (-signal.SIGKILL, ())
        assert ended.killed >= 1
        assert keeper.end() == ended


def test_a_process_in_state_d_that_can_be_killed_is_ended(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    command = [sys.executable, str(PROGRAMS / "uninterruptible.py"), str(fifo), str(tmp_path / "f")]
    with launch.keeping() as keeper:
        started = keeper.start(command, tmp_path / "log")
        fifo.read_text()
        while procfs.read_stat("/proc", started.pid).state != "D":
            os.sched_yield()
        assert keeper.end(grace_s=0.2).left == ()


def test_what_could_not_be_ended_is_named_with_what_holds_it():
    left = launch.Left(pid=12, name="python", state="D", kernel="nfs_wait")
    assert launch.what_is_left(launch.Ended(status=None, left=(left,))) == [
        "python (pid 12) could not be ended: state D in nfs_wait"
    ]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_all_ends_when_we_are_killed_also_where_the_pipe_stays_open(tmp_path, number):
    code = """
        import os, subprocess, sys, time
        from pathlib import Path
        from hangdoctor import launch
        with launch.keeping(grace_s=0.2) as keeper:
            started = keeper.start(["sh", "-c", sys.argv[2], sys.argv[3]], Path(sys.argv[1]))
            pipe = keeper._process.stdin.fileno()
            holder = subprocess.Popen(["sleep", "600"], pass_fds=(pipe,))
            print(keeper._process.pid, holder.pid, flush=True)
            time.sleep(600)
    """
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = f"trap '' TERM; {DAEMON}; sleep 600"
    us = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), tmp_path / "log", script, fifo],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    keeper, holder = map(int, us.stdout.readline().split())
    daemon = int(fifo.read_text())
    pidfds = [os.pidfd_open(pid) for pid in (keeper, daemon)]
    us.send_signal(number)
    us.wait()
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], 60)[0]
        os.close(pidfd)
    assert is_gone(daemon)
    os.kill(holder, signal.SIGKILL)
    us.stdout.close()


def test_the_command_ends_also_where_its_keeper_is_killed_and_that_is_said(tmp_path):
    script = "(sleep 600 & echo $! >$0; wait) & wait"
    with kept(script, tmp_path / "log") as (keeper, started, (child,)):
        os.kill(keeper._process.pid, signal.SIGKILL)
        ended = keeper.end()
        assert ended.lost
        assert "was killed" in launch.what_is_left(ended)[0]
        assert is_gone(started.pid)
        assert is_gone(int(child))


def test_a_pid_that_another_process_got_is_not_signalled(tmp_path):
    with kept("echo x >$0; sleep 600", tmp_path / "log") as (_, started, _):
        send(started.pid, started.start_ticks - 1, signal.SIGKILL)
        assert not is_gone(started.pid)
        send(started.pid, started.start_ticks, signal.SIGKILL)
        while started.poll() is None:
            os.sched_yield()


def test_a_command_that_cannot_be_kept_is_an_input_error_as_one_that_cannot_start(tmp_path):
    with launch.keeping() as keeper:
        with pytest.raises(InputError, match="cannot start no-such-command: No such file"):
            keeper.start(["no-such-command"], tmp_path / "log")
        with pytest.raises(InputError, match="cannot write the log"):
            keeper.start(["true"], tmp_path / "no" / "log")
        with pytest.raises(InputError, match="no command"):
            keeper.start([], tmp_path / "log")


def wait_for(pid):
    """Wait until a child of ours has ended, and leave it to be waited for."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
