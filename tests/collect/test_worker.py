from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest

from hangdoctor.collect import COLLECTORS, Observer, worker
from hangdoctor.collect.look import Look
from hangdoctor.model import Host

ROOT = Path(__file__).parents[2]


def ended(pidfd):
    """Tell that a process has ended, waiting for it."""
    ready, _, _ = select.select([pidfd], [], [], 60)
    os.close(pidfd)
    return bool(ready)


def test_a_worker_answers_again_and_again_in_one_process():
    one = worker.Worker("host", COLLECTORS["host"])
    first, _ = worker.ask_all({one: Look()})[one]
    pid = one._process.pid
    second, took_s = worker.ask_all({one: Look()})[one]
    assert isinstance(first, Host)
    assert isinstance(second, Host)
    assert one._process.pid == pid
    assert took_s > 0
    one.close()


def test_a_worker_that_dies_is_reported_and_replaced():
    one = worker.Worker("host", COLLECTORS["host"])
    worker.ask_all({one: Look()})
    os.kill(one._process.pid, signal.SIGKILL)
    missing, _ = worker.ask_all({one: Look()})[one]
    assert missing.reason == "failed"
    assert "-9" in missing.detail
    assert isinstance(worker.ask_all({one: Look()})[one][0], Host)
    one.close()


def test_a_worker_that_cannot_even_start_says_its_last_line():
    one = worker.Worker("no-such-collector", COLLECTORS["host"])
    missing, _ = worker.ask_all({one: Look()})[one]
    assert missing.reason == "failed"
    assert "KeyError: 'no-such-collector'" in missing.detail
    one.close()


def test_an_error_in_a_collector_is_an_answer_and_the_worker_lives_on():
    one = worker.Worker("processes", COLLECTORS["processes"])
    missing, _ = worker.ask_all({one: Look(proc="/no/such/proc")})[one]
    assert missing.reason == "failed"
    assert "/no/such/proc" in missing.detail
    pid = one._process.pid
    worker.ask_all({one: Look()})
    assert one._process.pid == pid
    one.close()


def test_a_stopped_worker_is_killed_at_its_deadline():
    one = worker.Worker("host", COLLECTORS["host"])
    worker.ask_all({one: Look()})
    pidfd = os.pidfd_open(one._process.pid)
    os.kill(one._process.pid, signal.SIGSTOP)
    one.job = msgspec.structs.replace(one.job, deadline_s=0.1)
    missing, took_s = worker.ask_all({one: Look()})[one]
    assert missing.reason == "timeout"
    assert took_s >= 0.1
    assert ended(pidfd)
    one.close()


def test_a_worker_whose_predecessors_do_not_end_is_not_started_again():
    class Unkillable:
        pid = 1

        def poll(self):
            return None

    one = worker.Worker("host", COLLECTORS["host"])
    one._mine = [Unkillable()] * worker.MOST_ABANDONED
    missing, _ = worker.ask_all({one: Look()})[one]
    assert missing.reason == "timeout"
    assert one._process is None


def test_an_interrupted_question_does_not_answer_the_next_one(monkeypatch):
    one = worker.Worker("host", COLLECTORS["host"])

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(worker, "_read", interrupt)
        with pytest.raises(KeyboardInterrupt):
            worker.ask_all({one: Look()})
    assert isinstance(worker.ask_all({one: Look()})[one][0], Host)
    one.close()


OBSERVE = """
    import sys, time
    from hangdoctor.collect import Observer
    with Observer([]) as observer:
        observer.take(frozenset({"host"}), at_s=0, wall_s=0)
        print(observer._workers["host"]._process.pid, flush=True)
        sys.stdin.read()
"""


def observing():
    """Start an observer of its own, and return it with its worker's pid and pidfd."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OBSERVE)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    pid = int(process.stdout.readline())
    return process, pid, os.pidfd_open(pid)


def test_workers_end_with_an_observer_that_is_killed():
    process, _, pidfd = observing()
    process.kill()
    process.communicate()
    assert ended(pidfd)


def test_a_worker_that_is_stopped_ends_with_an_observer_that_is_killed():
    process, pid, pidfd = observing()
    os.kill(pid, signal.SIGSTOP)
    process.kill()
    process.communicate()
    assert ended(pidfd)


def test_workers_end_when_the_observer_is_closed():
    process, _, pidfd = observing()
    process.communicate()
    assert process.returncode == 0
    assert ended(pidfd)


def test_a_worker_has_a_session_of_its_own_and_none_of_our_descriptors(tmp_path):
    with (tmp_path / "ours").open("w") as ours, Observer([]) as observer:
        os.set_inheritable(ours.fileno(), True)
        observer.take(frozenset({"host"}), at_s=0, wall_s=0)
        pid = observer._workers["host"]._process.pid
        assert os.getsid(pid) == pid
        targets = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
    assert str(tmp_path / "ours") not in targets
