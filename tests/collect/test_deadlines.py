"""When sleeps end by themselves, on programs that really sleep."""

from __future__ import annotations

import os
import shutil
import signal
import time

import pytest

from hangdoctor.calls import Call
from hangdoctor.collect import procfs, waits
from hangdoctor.collect.deadlines import read_end
from hangdoctor.collect.look import Look
from hangdoctor.model import ProcessWaits

PATIENCE_S = 60
LONG_S = 600
NEAR_S = 30
"""Between the word of a program and its sleep, on a machine with much else to do."""
CALLS = {
    "python": {"clock_nanosleep", "select", "pselect6"},
    **{kind: {"clock_nanosleep"} for kind in ("monotonic", "realtime", "boottime", "relative")},
    "nanosleep": {"nanosleep", "clock_nanosleep"},
    "select": {"select", "pselect6"},
    "poll": {"poll", "ppoll"},
    "ppoll": {"ppoll"},
    "descriptor": {"select", "pselect6"},
    "lock": {"futex"},
    "for ever": {"poll", "ppoll"},
}
RELATIVE = ("relative", "nanosleep", "select", "poll", "ppoll")
MOMENTS = ("monotonic", "realtime", "boottime")


def look_at(pid, began_s=0.0):
    roots = {pid: procfs.read_stat("/proc", pid).start_ticks}
    return waits.read(Look(roots=roots, began_s=began_s)).by_pid


def main_wait(pid, kind, began_s=0.0):
    """Return the wait of a main thread as soon as it is in its call: it said its word before."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        found = look_at(pid, began_s).get(pid)
        for wait in found.threads if isinstance(found, ProcessWaits) else ():
            if wait.tid == pid and wait.call in CALLS[kind]:
                return wait
        time.sleep(0.05)
    raise AssertionError(f"{pid} never was in {CALLS[kind]}: {found}")


@pytest.mark.parametrize("kind", MOMENTS)
def test_a_sleep_to_a_moment_tells_it_by_whatever_clock_and_in_each_look_the_same(program, kind):
    sleeper = program("sleeps", kind, LONG_S)
    wait = main_wait(sleeper.pid, kind)
    assert 0 <= wait.ends_at_s - sleeper.said["ends_s"] + 0.1 < NEAR_S
    assert wait.lasts_s is None
    again = main_wait(sleeper.pid, kind).ends_at_s
    assert again == wait.ends_at_s if kind == "monotonic" else abs(again - wait.ends_at_s) < 0.2


def test_the_moment_is_told_in_the_recordings_own_time(program):
    sleeper = program("sleeps", "monotonic", LONG_S)
    began_s = sleeper.said["ends_s"] - LONG_S
    assert LONG_S - 0.1 <= main_wait(sleeper.pid, "monotonic", began_s).ends_at_s < LONG_S + NEAR_S


@pytest.mark.parametrize("kind", RELATIVE)
def test_a_sleep_for_a_while_tells_only_how_long_that_is(program, kind):
    wait = main_wait(program("sleeps", kind, LONG_S).pid, kind)
    assert (wait.ends_at_s, wait.lasts_s) == (None, LONG_S)


@pytest.mark.parametrize("kind", ["relative", "nanosleep", "poll"])
def test_a_sleep_that_was_stopped_and_goes_on_tells_its_length_as_before(program, kind):
    pid = program("sleeps", kind, LONG_S).pid
    line = main_wait(pid, kind).line
    os.kill(pid, signal.SIGSTOP)
    while procfs.read_stat("/proc", pid).state != "T":
        time.sleep(0.01)
    os.kill(pid, signal.SIGCONT)
    until_s = time.monotonic() + PATIENCE_S
    while (wait := main_wait(pid, kind)).line == line and time.monotonic() < until_s:
        time.sleep(0.01)
    assert wait.line != line  # it is another call, by its number
    assert (wait.ends_at_s, wait.lasts_s) == (None, LONG_S)


def test_pythons_own_sleep_tells_its_end_or_its_length(program):
    wait = main_wait(program("sleeps", "python", LONG_S).pid, "python")
    assert (wait.ends_at_s is None) != (wait.lasts_s is None)


@pytest.mark.parametrize("kind", ["descriptor", "lock", "for ever"])
def test_who_waits_for_more_than_time_has_no_end(program, kind):
    wait = main_wait(program("sleeps", kind, LONG_S).pid, kind)
    assert (wait.ends_at_s, wait.lasts_s) == (None, None)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.skipif(not shutil.which("unshare"), reason="needs unshare")
def test_a_clock_of_another_namespace_is_not_counted_by(program):
    before = ("unshare", "--time", "--monotonic", "100000", "--fork", "--kill-child")
    launch = program("sleeps", "monotonic", LONG_S, before=before)
    (inside,) = procfs.descendants(procfs.scan("/proc"), [launch.pid])[1:]
    wait = main_wait(inside, "monotonic")
    assert (wait.ends_at_s, wait.lasts_s) == (None, None)


@pytest.mark.parametrize(
    ("name", "arguments", "raw"),
    [
        ("clock_nanosleep", (1, 1, 64, 0, 0, 0), b""),  # its memory may not be read
        ("clock_nanosleep", (2, 1, 64, 0, 0, 0), bytes(16)),  # CPU time: it goes as it pleases
        ("clock_nanosleep", (1, 1, 64, 0, 0, 0), b"\xff" * 16),
        ("nanosleep", (0, 0, 0, 0, 0, 0), b""),
    ],
)
def test_what_does_not_tell_the_end_of_a_sleep_makes_none_up(name, arguments, raw):
    call = Call(name, arguments, 0)
    assert read_end(call, lambda _, __: raw, proc="/proc", pid=os.getpid()) == (None, None)
