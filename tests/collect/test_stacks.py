from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from hangdoctor.collect import Observer, procfs, stacks
from hangdoctor.collect.look import Look
from hangdoctor.model import Missing, ProcessStacks, Stacks

PATIENCE_S = 60  # ends a test that would never end, and times nothing
PTRACE_SEIZE, PTRACE_DETACH = 0x4206, 17


def dump(*pids, native=False):
    roots = {pid: procfs.read_stat("/proc", pid).start_ticks for pid in pids}
    found = stacks.read(Look(roots=roots, native=native))
    assert isinstance(found, Stacks)
    return found.by_pid


def functions(stack, thread=0):
    assert isinstance(stack, ProcessStacks), stack
    return [frame.function for frame in stack.threads[thread].frames]


def until(condition):
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "it never came to that"
        os.sched_yield()


def settled(pid, *frames, innermost=None):
    """Dump until threads are where they wait: a program has a way to go between word and wait.

    Args:
        pid: of the program.
        frames: a function that must be on the stack of each thread, the main thread first.
        innermost: the function in which all threads but the main one must be.
    """
    found = []

    def is_there():
        found[:] = [dump(pid)[pid]]
        threads = found[0].threads if isinstance(found[0], ProcessStacks) else ()
        there = len(threads) >= len(frames) and all(
            frame in functions(found[0], index) for index, frame in enumerate(frames)
        )
        others = [thread.frames[0].function for thread in threads[1:] if thread.frames]
        return there and (innermost is None or set(others) == {innermost})

    until(is_there)
    return found[0]


def tid_of(pid):
    """Python 3.10 and older do not tell py-spy which thread of the system a thread is."""
    return pid if sys.version_info >= (3, 11) else None


def test_all_ranks_are_dumped_and_each_is_where_it_waits(program):
    target = program("barrier")
    waiting, elsewhere = target.said["ranks"]
    found = dump(target.pid)
    assert functions(found[waiting])[0] == "barrier"
    assert "rank_one_is_elsewhere" in functions(found[elsewhere])
    frame = found[waiting].threads[0].frames[0]
    assert frame.path.endswith("/tests/programs/barrier.py")
    assert frame.line > 0


def test_the_main_thread_comes_first_whatever_its_name(program):
    target = program("locks")
    stack = settled(target.pid, "<module>", "take", "take", innermost="take")
    assert stack.threads[0].tid == tid_of(target.pid)
    assert {thread.name for thread in stack.threads[1:]} == {"A-then-B", "B-then-A"}


def test_a_process_that_waits_for_a_fifo_shows_the_code_that_opens_it(program, tmp_path):
    target = program("open_fifo", tmp_path / "shard")
    stack = settled(target.pid, "load_shard")
    assert stack.threads[0].tid == tid_of(target.pid)


def test_a_thread_that_spins_natively_holds_the_gil(program):
    target = program("native_spin")
    until(lambda: procfs.read_stat("/proc", target.pid).cpu_s > 0.1)
    (thread,) = dump(target.pid)[target.pid].threads
    assert (thread.active, thread.owns_gil) == (True, True)


def test_a_stopped_process_is_dumped_and_stays_stopped(program):
    target = program("barrier")
    os.kill(target.pid, signal.SIGSTOP)
    until(lambda: procfs.read_stat("/proc", target.pid).state == "T")
    for native in (False, True):
        stack = dump(target.pid, native=native)[target.pid]
        assert functions(stack)[0] == "barrier"
        assert stack.native is False
    assert procfs.read_stat("/proc", target.pid).state == "T"


def test_a_process_in_state_d_is_dumped_without_being_stopped_even_when_native_is_asked(
    program, tmp_path
):
    target = program("uninterruptible", tmp_path / "never")
    until(lambda: procfs.read_stat("/proc", target.pid).state == "D")
    stack = dump(target.pid, native=True)[target.pid]
    assert isinstance(stack, ProcessStacks)
    assert stack.native is False
    assert not stacks.stoppable("/proc", target.pid)


def test_native_frames_are_taken_where_they_are_asked_for_and_the_target_runs_on(program):
    target = program("poll")
    stack = dump(target.pid, native=True)[target.pid]
    assert stack.native is True
    before = procfs.read_stat("/proc", target.pid).cpu_s
    until(lambda: procfs.read_stat("/proc", target.pid).cpu_s > before)
    assert procfs.read_stat("/proc", target.pid).state in "RS"


def test_a_traced_process_is_dumped_without_being_stopped(program):
    target = program("barrier")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    assert libc.ptrace(PTRACE_SEIZE, target.pid, None, None) == 0, os.strerror(ctypes.get_errno())
    assert not stacks.stoppable("/proc", target.pid)
    stack = dump(target.pid, native=True)[target.pid]
    assert functions(stack)[0] == "barrier"


def test_a_zombie_is_gone_and_not_an_error_of_py_spy(program):
    family = program("family")
    missing = dump(family.said["dead"])[family.said["dead"]]
    assert missing.reason == "gone"
    assert "parent" in missing.detail


def test_a_root_that_is_not_python_is_unsupported():
    with subprocess.Popen(["sleep", "600"]) as process:
        missing = dump(process.pid)[process.pid]
        process.kill()
    assert missing == Missing(reason="unsupported", detail="sleep is not Python")


def test_compilers_and_helpers_below_a_rank_are_left_out(program):
    target = program("helpers")
    assert set(dump(target.pid)) == {target.pid}


def test_without_py_spy_the_section_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = stacks.read(Look())
    assert missing.reason == "not-installed"
    assert "pip install py-spy" in missing.hint


def test_py_spy_is_found_beside_a_package_installed_into_a_folder(tmp_path):
    package = Path(stacks.__file__).parents[1]
    shutil.copytree(package, tmp_path / "hangdoctor")
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "py-spy"
    script.symlink_to(stacks.find_py_spy())
    code = (
        "import sys; from hangdoctor.collect import stacks; sys.executable = '/nowhere/python'; "
        "print(stacks.find_py_spy())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(tmp_path), "PATH": "/nowhere"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(script)


def test_a_debugger_that_hangs_is_ended_and_the_target_is_left_running(
    program, monkeypatch, tmp_path
):
    tool = tmp_path / "py-spy"
    tool.write_text("#!/bin/sh\ntrap '' TERM\nexec 3<>$0.fifo; read word <&3\n")
    tool.chmod(0o755)
    os.mkfifo(f"{tool}.fifo")
    monkeypatch.setattr(stacks, "DUMP_DEADLINE_S", 0.2)
    target = program("sleep")
    missing = stacks.dump(str(tool), "/proc", target.pid)
    assert missing.reason == "timeout"
    assert stacks._gave_up("/proc", target.pid, native=True).reason == "timeout"


def test_a_target_that_a_debugger_left_stopped_is_reported_with_the_way_out(program, monkeypatch):
    monkeypatch.setattr(stacks, "_GRACE_S", 0.1)
    target = program("sleep")
    os.kill(target.pid, signal.SIGSTOP)
    until(lambda: procfs.read_stat("/proc", target.pid).state == "T")
    missing = stacks._gave_up("/proc", target.pid, native=True)
    assert (missing.reason, missing.hint) == ("failed", f"kill -CONT {target.pid}")


def test_a_race_with_a_starting_interpreter_is_tried_once_more(program, tmp_path):
    tool = tmp_path / "py-spy"
    tool.write_text(
        '#!/bin/sh\n[ -e $0.again ] && echo "[]" && exit\n: > $0.again\n'
        'echo "Error: Failed to copy PyCodeObject" >&2; exit 1\n'
    )
    tool.chmod(0o755)
    target = program("sleep")
    assert stacks.dump(str(tool), "/proc", target.pid) == ProcessStacks(threads=())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Error: Failed to find python version from target process", "unsupported"),
        ("Permission Denied: Try running again with elevated permissions", "permission"),
        ("Error: Failed to get process executable name.\n (os error 13)", "permission"),
        ("Error: Failed to suspend process\nEPERM: Operation not permitted", "permission"),
        ("Error: something new", "failed"),
    ],
)
def test_what_py_spy_says_gets_a_reason(text, reason):
    missing = stacks.explain(text, "/proc", os.getpid())
    assert missing.reason == reason
    assert reason != "permission" or missing.hint


def test_old_pythons_tell_no_thread_ids_and_the_main_thread_is_known_by_its_name():
    threads = [
        {"thread_name": "worker", "os_thread_id": None, "frames": []},
        {"thread_name": "MainThread", "os_thread_id": None, "frames": []},
    ]
    parsed = stacks.parse_dump(msgspec.json.encode(threads), frozenset({7}), native=False)
    assert [thread.name for thread in parsed.threads] == ["MainThread", "worker"]
    assert parsed.threads[0].tid is None


def test_a_process_in_a_pid_namespace_of_its_own_is_dumped_from_outside(program):
    as_root = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    target = program("barrier", before=("unshare", *as_root, "-mp", "--fork", "--mount-proc"))
    with Observer([target.pid]) as observer:
        snapshot = observer.take(frozenset({"stacks", "processes"}), at_s=0, wall_s=0)
    waiting = snapshot.processes.processes[1]
    assert waiting.inner_pid == 1
    stack = snapshot.stacks.by_pid[waiting.pid]
    assert functions(stack)[0] == "barrier"
    assert stack.threads[0].tid == tid_of(1)
    assert snapshot.stacks.by_pid[target.pid].reason == "unsupported"


def test_dumping_does_not_stop_a_busy_target(program):
    target = program("eventfd_loop")
    until(lambda: procfs.parse_io(procfs.read(f"/proc/{target.pid}/io")).syscw > 1000)
    before = procfs.parse_io(procfs.read(f"/proc/{target.pid}/io")).syscw
    assert isinstance(dump(target.pid)[target.pid], ProcessStacks)
    after = procfs.parse_io(procfs.read(f"/proc/{target.pid}/io")).syscw
    assert after > before
