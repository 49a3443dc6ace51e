"""What is said of waits on launches in name only that really block."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import pytest
import restricted
from looks import Watch, told_by

from hangdoctor.blocked import blocked_threads, lock_circle
from hangdoctor.collect import Observer
from hangdoctor.model import (
    Frame,
    Process,
    ProcessStacks,
    ProcessWaits,
    Thread,
    ThreadStack,
    ThreadWait,
    WaitObject,
)
from hangdoctor.tracks import see_process, see_stacks, see_waits

LIMIT_S = 120


def diagnose(pid, *before, rank_s=8):
    done = subprocess.run(
        [
            *(before or (sys.executable, "-m", "hangdoctor")),
            *("diagnose", str(pid), f"--for={rank_s}", "--stall-after=2", "--format=json"),
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stdout, done.stderr
    verdict = json.loads(done.stdout)
    return verdict, {finding["rule"]: finding for finding in verdict["findings"]}


def blocked(verdict):
    return {rank["rank"]: rank["blocked_in"] for rank in verdict["ranks"]}


def test_a_rank_that_reads_from_another_is_drawn_as_waiting_for_it(program):
    launch = program("ranks", "unix", "recv", "sleep")
    verdict, found = diagnose(launch.pid)
    assert blocked(verdict)["TP0"] == "read from TP1 (unix socket)"
    (link,) = verdict["waits"]
    assert (link["waiter"], link["target"]) == ("TP0", "TP1")
    waiting = found["waiting-for-rank-elsewhere"]
    assert (waiting["culprits"], waiting["verdict"]) == (["TP1"], "undecided")  # of no phase


def test_a_rank_that_reads_from_a_server_thread_of_another_blames_nobody(program):
    launch = program("ranks", "unix", "recv", "serve")
    verdict, found = diagnose(launch.pid)
    assert blocked(verdict)["TP0"] == "read from TP1 (unix socket)"
    assert verdict["waits"] == []
    assert "waiting-for-rank-elsewhere" not in found


def test_a_rank_that_sleeps_is_shown_with_when_it_wakes_by_itself(program):
    launch = program("ranks", "unix", "doze", "sleep")
    verdict, _ = diagnose(launch.pid, rank_s=3)
    rank = verdict["ranks"][0]
    assert rank["blocked_in"].startswith("sleep, which ends by itself in ")
    assert 400 < rank["wakes_most_s"] <= 600
    other = verdict["ranks"][1]
    assert (other["wakes_least_s"], other["wakes_most_s"]) == (None, None)


def test_a_wait_for_a_shared_eventfd_is_drawn_as_one_that_others_may_end_too(program):
    launch = program("ranks", "eventfd", "recv", "sleep")
    verdict, found = diagnose(launch.pid)
    assert blocked(verdict)["TP0"].startswith("read on eventfd number ")
    assert blocked(verdict)["TP0"].endswith(", shared with TP1")
    (link,) = verdict["waits"]
    assert (link["waiter"], link["target"], link["sure"]) == ("TP0", "TP1", False)
    assert "waiting-for-rank-elsewhere" not in found


def test_the_fifo_that_a_rank_opens_is_named_with_what_to_do(program, tmp_path):
    path = tmp_path / "shard"
    os.mkfifo(path)
    launch = program("ranks", "unix", "fifo", "sleep", path)
    verdict, found = diagnose(launch.pid)
    assert blocked(verdict)["TP0"] == f"open of FIFO {path}, which nobody else has open"
    assert str(path) in " ".join(found["all-ranks-stand-still"]["advice"])


def test_a_connection_that_nobody_accepts_is_named(program):
    launch = program("ranks", "backlog", "recv", "sleep")
    verdict, found = diagnose(launch.pid)
    assert "has not accepted" in blocked(verdict)["TP0"]
    assert found["connection-unanswered"]["ranks"] == ["TP0"]


def test_how_silent_a_connection_is_stands_beside_it(program):
    launch = program("ranks", "tcp", "recv", "sleep")
    _, found = diagnose(launch.pid)
    texts = [each["text"] for each in found["waiting-for-rank-elsewhere"]["because"]]
    (linked,) = [text for text in texts if text.startswith("TP0 is blocked in read from TP1 (TCP ")]
    assert re.search(r", for \d+ s \(nothing received for \d+ s, nothing sent for \d+ s\)$", linked)


def test_a_connection_that_no_longer_gets_an_answer_is_one_that_tcp_sends_on_again():
    def seen(retransmits):
        end = WaitObject(kind="tcp", fd=3, state="established", retransmits=retransmits)
        wait = ThreadWait(tid=7, call="recvfrom", line="45 0x3", objects=(end,), count=1)
        return blocked_threads(folded((wait,)), 9.0, str)[0].unanswered

    assert (seen(2), seen(6)) == (False, True)


def test_a_native_thread_that_no_dump_lists_is_shown_by_its_call(program):
    launch = program("ranks", "unix", "sleep", "native")
    _, found = diagnose(launch.pid)
    texts = [each["text"] for each in found["all-ranks-stand-still"]["because"]]
    native = [text for text in texts if text.startswith("native threads of TP1: ")]
    assert native
    assert "read from TP0 (unix socket)" in native[0]


def test_a_deadlock_of_a_mutex_and_the_gil_is_a_circle_of_threads(program):
    target = program("ranks", "unix", "deadlock", "sleep")
    with Observer([target.pid]) as observer:
        watch = Watch(observer)
        until_s = time.monotonic() + LIMIT_S
        circle = None
        while circle is None:  # its threads get there when they get a CPU
            assert time.monotonic() < until_s
            circle = told_by(watch.look("stacks", "waits"), "threads-wait-in-a-circle")
    assert circle.culprits == ("TP0",)
    assert "the GIL" in circle.because[0].text
    assert "mutex, owned by thread" in circle.because[0].text


def test_both_threads_of_a_deadlock_over_locks_of_pythons_are_named(program):
    target = program("ranks", "unix", "abba", "sleep")
    _, found = diagnose(target.pid)
    locks = found["threads-wait-for-locks"]
    assert (locks["verdict"], locks["culprits"]) == ("undecided", [])
    assert "TP0 waits for a lock at abba (" in locks["title"]
    assert "as does its thread other-order at " in locks["title"]
    assert "perhaps each holds what the other waits for" in locks["title"]


def test_threads_without_work_are_not_the_other_side_of_a_lock(program):
    target = program("ranks", "unix", "lock_beside_pool", "sleep")
    verdict, found = diagnose(target.pid)
    assert blocked(verdict)["TP0"] == "futex: a lock"
    assert "threads-wait-for-locks" not in found


def test_one_look_that_finds_a_waiter_for_the_gil_awake_does_not_begin_its_wait_anew():
    asleep, awake = ProcessWaits(threads=(FOR_GIL,)), ProcessWaits(threads=())
    track = two_threads()
    for at_s, seen in enumerate((asleep, awake, asleep, awake, asleep)):
        track = see_waits(track, seen, float(at_s))
        assert track.blocked_since == {8: 0.0}
    for at_s in (5.0, 6.0):  # it has the lock, and goes on
        track = see_waits(track, awake, at_s)
    assert track.blocked_since == {}


MUTEX = ThreadWait(tid=7, call="futex", line="202 0x90", futex="mutex", owner_tid=8, switches=3)
FOR_GIL = ThreadWait(tid=8, call="futex", line="202 0x1b4", futex="gil", timed=True)
HOLDS_GIL = ProcessStacks(
    threads=(
        ThreadStack(
            name="MainThread", frames=(Frame("f", "/a.py", 3),), tid=7, owns_gil=True
        ),
    )
)  # fmt: skip


def two_threads():
    threads = (Thread(7, "main", "S", 0.0), Thread(8, "owner", "S", 0.0))
    process = Process(
        pid=7, ppid=1, start_ticks=0, title="", comm="", state="S", cpu_s=0.0, threads=threads
    )
    return see_process(None, process, 0.0)


def folded(*looks):
    """Return the track of two threads after looks at waits, and at stacks, one a second."""
    track = two_threads()
    for at_s, seen in enumerate(looks):
        if isinstance(seen, ProcessStacks):
            track = see_stacks(track, seen, float(at_s), ())
        else:
            track = see_waits(track, ProcessWaits(threads=seen), float(at_s))
    return track


def circle(track):
    return [each.tid for each in lock_circle(blocked_threads(track, 99.0, str), track)]


def test_a_waiter_for_the_gil_waits_on_while_the_holder_has_not_moved_from_its_wait():
    looks = [(MUTEX, FOR_GIL), (MUTEX, FOR_GIL), HOLDS_GIL]
    for _ in range(4):  # it waits for a CPU
        looks.append((MUTEX,))
        assert folded(*looks).blocked_since == {7: 0.0, 8: 0.0}
    slept_anew = msgspec.structs.replace(MUTEX, switches=4)
    assert folded(*looks, (slept_anew,)).blocked_since == {7: 7.0}


def test_who_was_not_seen_to_wait_for_the_gil_since_its_holder_sleeps_may_have_gone_on():
    looks = [(MUTEX, FOR_GIL), HOLDS_GIL, (MUTEX,)]
    assert folded(*looks).blocked_since == {7: 0.0, 8: 0.0}
    assert folded(*looks, (MUTEX,)).blocked_since == {7: 0.0}


def test_threads_are_a_circle_only_if_the_holder_of_the_gil_slept_before_the_dump():
    both = (MUTEX, FOR_GIL)
    track = folded(both, HOLDS_GIL, both)
    assert circle(track) == [7, 8]
    texts = [each.text for each in blocked_threads(track, 99.0, str)]
    assert texts[1] == "futex: the GIL, which thread main (7) held at the last dump"
    assert circle(folded(HOLDS_GIL, both, both)) == []  # it may have let go of it since
    assert circle(folded(both, both)) == []  # who holds it was not seen
    assert circle(folded(both, HOLDS_GIL)) == []  # nor the same wait twice
    slept_anew = (msgspec.structs.replace(MUTEX, switches=4), FOR_GIL)
    assert circle(folded(both, HOLDS_GIL, both, slept_anew)) == []


def test_threads_that_hold_each_others_mutexes_are_a_circle_only_if_none_has_slept_anew():
    other = msgspec.structs.replace(MUTEX, tid=8, owner_tid=7, line="202 0xa0")
    assert circle(folded((MUTEX, other), (MUTEX, other))) == [7, 8]
    assert circle(folded((MUTEX, other))) == []
    again = msgspec.structs.replace(other, switches=4)
    assert circle(folded((MUTEX, other), (MUTEX, again))) == []
    uncounted = msgspec.structs.replace(other, switches=None)
    assert circle(folded((MUTEX, uncounted), (MUTEX, uncounted))) == []


def test_threads_that_take_turns_are_no_circle(program):
    target = program("ranks", "unix", "turns", "sleep")
    _, found = diagnose(target.pid)
    assert "threads-wait-in-a-circle" not in found


def test_the_lock_that_a_rank_sleeps_for_leads_to_its_holder(program, tmp_path):
    path = tmp_path / "weights.lock"
    launch = program("ranks", "unix", "flock", "flock", path)
    verdict, found = diagnose(launch.pid)
    (link,) = verdict["waits"]
    assert link["text"] == f"flock of {path}, held by {link['target']}"
    assert found["waiting-for-rank-elsewhere"]["culprits"] == [link["target"]]
    assert str(path) in found["lock-held"]["title"]


@pytest.mark.skipif(not restricted.IS_ROOT, reason="needs root")
@pytest.mark.parametrize(
    "restrictions",
    [{"user": restricted.NOBODY}, {"deny_tracing": True, "hide": True}],
    ids=["another user", "no tracing"],
)
def test_what_may_not_be_read_is_missing_and_blames_nobody(program, restrictions):
    launch = program("ranks", "unix", "recv", "sleep")
    if "hide" in restrictions:
        restrictions = restrictions | {"hide": (launch.pid, *launch.said["ranks"])}
    with tempfile.TemporaryDirectory(prefix="hangdoctor-rights-") as name:
        Path(name).chmod(0o755)
        command = restricted.hangdoctor(name, **restrictions)
        verdict, _ = diagnose(launch.pid, *command)
    assert verdict["culprits"] == []
    assert verdict["waits"] == []
    assert verdict["state"] in ("unknown", "starting")
    assert "syscall of TP0" in {missing["what"] for missing in verdict["missing"]}


@pytest.mark.skipif(not restricted.IS_ROOT, reason="needs root")
def test_without_tracing_who_polls_may_wait_for_a_lock_file_and_who_sleeps_does_not(
    program, tmp_path
):
    baton = tmp_path / "ext" / "moe" / "lock"
    baton.parent.mkdir(parents=True)
    baton.touch()
    env = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path / "ext")}
    launch = program("ranks", "unix", "baton", "sleep", baton, env=env)
    with tempfile.TemporaryDirectory(prefix="hangdoctor-rights-") as name:
        Path(name).chmod(0o755)
        hide = (launch.pid, *launch.said["ranks"])
        command = restricted.hangdoctor(name, deny_tracing=True, hide=hide)
        verdict, found = diagnose(launch.pid, *command)
    may = found["may-wait-for-lock-file"]
    assert (may["verdict"], may["ranks"], may["culprits"]) == ("undecided", ["TP0"], [])
    assert may["title"].startswith("TP0 may wait for a lock file: it wakes ")
    assert str(baton) in may["title"]
    assert verdict["culprits"] == []


@pytest.mark.skipif(not restricted.IS_ROOT, reason="needs root")
def test_without_py_spy_the_connection_still_tells_whom_a_rank_waits_for(program):
    launch = program("ranks", "unix", "recv", "child")
    with tempfile.TemporaryDirectory(prefix="hangdoctor-rights-") as name:
        Path(name).chmod(0o755)
        verdict, found = diagnose(launch.pid, *restricted.hangdoctor(name, py_spy=False))
    assert found["waiting-for-rank-elsewhere"]["culprits"] == ["TP1"]
    assert verdict["state"] == "unknown"
    assert "TP0 waits in read for TP1" in found["waiting-for-rank-elsewhere"]["title"]


@pytest.mark.skipif(not restricted.IS_ROOT, reason="needs root")
def test_without_py_spy_a_rank_that_may_wait_in_a_collective_is_not_blamed(program):
    launch = program("ranks", "unix", "recv", "sleep")  # a futex, as in an all_reduce of gloo
    with tempfile.TemporaryDirectory(prefix="hangdoctor-rights-") as name:
        Path(name).chmod(0o755)
        verdict, _ = diagnose(launch.pid, *restricted.hangdoctor(name, py_spy=False))
    assert (verdict["state"], verdict["culprits"]) == ("unknown", [])
    assert [each["target"] for each in verdict["waits"]] == ["TP1"]


@pytest.mark.skipif(not restricted.IS_ROOT, reason="needs root")
def test_a_launch_in_a_network_namespace_of_its_own_is_seen_the_same(program):
    launch = program("ranks", "unix", "recv", "sleep", before=("unshare", "--net"))
    _, found = diagnose(launch.pid)
    assert found["waiting-for-rank-elsewhere"]["culprits"] == ["TP1"]


@pytest.mark.skipif(not restricted.IS_ROOT, reason="needs root")
def test_a_network_namespace_that_may_not_be_entered_is_named_and_blames_nobody(program):
    launch = program("ranks", "unix", "recv", "sleep", before=("unshare", "--net"))
    before = ("setpriv", "--bounding-set=-sys_admin", sys.executable, "-m", "hangdoctor")
    verdict, found = diagnose(launch.pid, *before)
    missing = {each["what"]: each for each in verdict["missing"]}
    assert missing["sockets of TP0"]["reason"] == "permission"
    assert "inside the container" in missing["sockets of TP0"]["hint"]
    assert blocked(verdict)["TP0"] == "read on unix socket"
    assert verdict["waits"] == []
    assert "waiting-for-rank-elsewhere" not in found
