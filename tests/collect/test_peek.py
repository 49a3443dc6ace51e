"""Looks at the registers of threads that really run, and that these are none the worse for it."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import restricted
from looks import has_used

from hangdoctor.collect import peek as peeking
from hangdoctor.collect import procfs, waits
from hangdoctor.collect.look import Look
from hangdoctor.collect.peek import PEEKS, peek
from hangdoctor.model import Missing

ROOT = Path(__file__).parents[2]
SIGNALS = 300
PATIENCE_S = 60
"""A machine with more to do than CPUs lets a thread wait for its stop for longer than we do."""
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 only")


def peek_in_time(pid):
    return peek("/proc", pid, pid, stop_within_s=PATIENCE_S)


def state_of(pid):
    status = procfs.parse_status(procfs.read(f"/proc/{pid}/status"))
    return status["State"][0], status["TracerPid"]


def wait_for_state(pid, wanted):
    until_s = time.monotonic() + 60
    while state_of(pid) != wanted:
        assert time.monotonic() < until_s, state_of(pid)
        os.sched_yield()


def look_at(program, **options):
    roots = {program.pid: procfs.read_stat("/proc", program.pid).start_ticks}
    return waits.read(Look(roots=roots, **options)).by_pid[program.pid]


def test_the_call_and_descriptor_of_a_running_thread_are_told(program):
    loop = program("eventfd_loop")
    has_used(loop.pid, 0.05)  # it is in its loop
    found = peek_in_time(loop.pid)
    assert (found.tid, found.peeks) == (loop.pid, PEEKS)
    assert found.calls[0].call == "write"
    if hasattr(os, "eventfd"):
        assert found.calls[0].fd == loop.said["fd"]


def test_a_spin_in_no_call_is_caught_in_none(program):
    spin = program("loops", "native_spin")
    has_used(spin.pid, 0.05)  # it is in its loop
    assert peek_in_time(spin.pid).calls == ()


def test_a_target_gets_every_signal_and_its_calls_come_back_whole(program):
    target = program("signals")
    heard = []

    def send():
        for _ in range(SIGNALS):
            os.kill(target.pid, signal.SIGUSR1)
            heard.append(target.hear())

    sender = threading.Thread(target=send)
    sender.start()
    peeks = 0
    while sender.is_alive():
        found = peek_in_time(target.pid)
        peeks += found.peeks if found else 0
    assert [said["signals"] for said in heard] == list(range(1, SIGNALS + 1))
    assert {said["odd"] for said in heard} == {0}
    assert peeks > 0
    assert state_of(target.pid)[1] == "0"


@pytest.mark.parametrize("how", ["stopped", "asleep", "traced"])
def test_a_thread_that_is_stopped_asleep_or_traced_is_left_alone(how, program):
    target = program("sleep" if how == "asleep" else "eventfd_loop")
    if how == "stopped":
        os.kill(target.pid, signal.SIGSTOP)
        wait_for_state(target.pid, ("T", "0"))
    if how == "asleep":
        wait_for_state(target.pid, ("S", "0"))
    if how == "traced":
        with held_by_a_peeker(target):
            before = state_of(target.pid)
            assert before[0] == "t"
            assert peek("/proc", target.pid, target.pid) is None
            assert state_of(target.pid) == before
        return
    before = state_of(target.pid)
    assert peek("/proc", target.pid, target.pid) is None
    assert state_of(target.pid) == before


@contextlib.contextmanager
def held_by_a_peeker(target):
    """Have a peeker stop the target and stay there, and kill it at the end."""
    code = f"""
        import time
        from hangdoctor.collect import peek
        ptrace = peek._Libc.ptrace

        def stays(libc, request, tid, data=0):
            if request == peek._DETACH:
                print("stopped", flush=True)
                time.sleep(600)
            ptrace(libc, request, tid, data)

        peek._Libc.ptrace = stays
        peek.peek("/proc", {target.pid}, {target.pid}, stop_within_s={PATIENCE_S})
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as peeker:
        try:
            assert peeker.stdout.readline() == b"stopped\n"
            yield
        finally:
            peeker.kill()


def test_a_killed_peeker_leaves_its_target_running(program):
    target = program("eventfd_loop")
    with held_by_a_peeker(target):
        state, tracer = state_of(target.pid)
        assert (state, tracer != "0") == ("t", True)
    wait_for_state(target.pid, ("R", "0"))
    has_used(target.pid, 0.05)


def test_a_thread_that_does_not_come_to_its_stop_is_let_go_of(program, tmp_path, monkeypatch):
    monkeypatch.setattr(peeking, "_may_be_stopped", lambda *_: True)  # it was at work just before
    target = program("uninterruptible", tmp_path / "held")
    wait_for_state(target.pid, ("D", "0"))
    assert peek("/proc", target.pid, target.pid) is None
    wait_for_state(target.pid, ("D", "0"))


def test_a_thread_that_has_ended_is_none():
    assert peek("/proc", 1 << 22, 1 << 22) is None


def peeked(loop):
    """Look until it was caught: beside other tests it may get less than half a core at first."""
    while not (found := look_at(loop, peek=True)).peek or not found.peek.calls:
        has_used(loop.pid, 0.1)
    return found


def test_only_a_look_that_may_peek_does_so_and_names_what_the_descriptor_leads_to(program):
    loop = program("loops", "send")
    found = peeked(loop)
    (call, *_) = found.peek.calls
    assert call.call in ("sendto", "recvfrom")
    assert call.objects[0].kind == "unix"
    assert look_at(loop).peek is None


def test_what_a_busy_loop_over_epoll_watches_is_told_with_and_without_a_peek(program):
    loop = program("loops", "epoll")
    found = peeked(loop)
    (call, *_) = [each for each in found.peek.calls if each.call.startswith("epoll")]
    (watched,) = found.epolls
    assert watched.fd == call.fd
    assert [each.kind for each in watched.objects] == ["eventfd"]
    assert watched.objects[0].identity == call.objects[0].identity is not None


def test_where_tracing_is_refused_the_registers_are_missing(program):
    loop = program("eventfd_loop")
    code = f"""
        from hangdoctor.collect.peek import peek
        print(peek("/proc", {loop.pid}, {loop.pid}).reason)
    """
    options = '{"deny_tracing": true}'
    done = subprocess.run(
        [sys.executable, restricted.__file__, options, sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "permission", done.stderr


def test_another_machine_has_no_registers_that_we_read(monkeypatch):
    monkeypatch.setattr(peeking, "_MACHINE", "aarch64")
    found = peek("/proc", os.getpid(), os.getpid())
    assert isinstance(found, Missing)
    assert found.reason == "unsupported"
