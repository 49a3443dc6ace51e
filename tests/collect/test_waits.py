"""What blocked threads wait for, on programs that really block."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import pytest
import restricted

from hangdoctor.collect import procfs, sockets, waits
from hangdoctor.collect.look import Look
from hangdoctor.model import Missing, ProcessWaits, Waits
from hangdoctor.waits import only_target

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60
IS_ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not IS_ROOT, reason="needs root")


def look_at(pid):
    return waits.read(Look(roots={pid: procfs.read_stat("/proc", pid).start_ticks}))


def wait_of(root, tid, *, call, pid=None):
    """Return the wait of a thread as soon as it is in that call: it said its word before it."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        found = look_at(root).by_pid.get(pid or tid)
        for wait in found.threads if isinstance(found, ProcessWaits) else ():
            if wait.tid == tid and wait.call == call:
                return wait
        time.sleep(0.05)
    raise AssertionError(f"{tid} never was in {call}: {found}")


@pytest.mark.parametrize("kind", ["unix", "tcp", "pipe"])
def test_a_read_names_the_process_at_the_other_end_that_nobody_serves(program, kind):
    launch = program("ranks", kind, "recv", "sleep")
    first, second = launch.said["ranks"]
    (end,) = wait_of(launch.pid, first, call="read").objects
    assert end.kind == kind
    assert [holder.pid for holder in end.others] == [second]
    assert end.served is False
    assert end.mutual == ()
    if kind == "tcp":
        assert end.state == "established"
        assert end.since_received_ms is not None


def test_an_end_in_an_epoll_set_is_served(program):
    launch = program("ranks", "unix", "recv", "serve")
    first, second = launch.said["ranks"]
    wait_of(launch.pid, second, call="futex")
    until_s = time.monotonic() + PATIENCE_S
    while not (end := wait_of(launch.pid, first, call="read").objects[0]).served:
        assert time.monotonic() < until_s  # its server thread starts
    assert [holder.pid for holder in end.others] == [second]


def test_two_that_read_from_each_other_are_mutual(program):
    launch = program("ranks", "unix", "recv", "recv")
    first, second = launch.said["ranks"]
    wait_of(launch.pid, second, call="read")
    assert wait_of(launch.pid, first, call="read").objects[0].mutual == (second,)


def test_an_eventfd_is_known_by_its_number_and_by_who_shares_it(program):
    launch = program("ranks", "eventfd", "recv", "sleep")
    first, second = launch.said["ranks"]
    (end,) = wait_of(launch.pid, first, call="read").objects
    assert (end.kind, [holder.pid for holder in end.others]) == ("eventfd", [second])
    assert end.identity is not None


def test_a_write_that_nobody_reads_names_who_should(program):
    launch = program("ranks", "unix", "send", "sleep")
    first, second = launch.said["ranks"]
    (end,) = wait_of(launch.pid, first, call="write").objects
    assert [holder.pid for holder in end.others] == [second]
    assert end.unsent_bytes > 0


def test_a_poll_is_followed_to_its_descriptors(program):
    launch = program("ranks", "tcp", "poll", "sleep")
    first, second = launch.said["ranks"]
    wait = wait_of(launch.pid, first, call="poll")
    assert wait.timed
    assert [[holder.pid for holder in end.others] for end in wait.objects] == [[second]]


def test_a_connection_that_is_not_accepted_names_the_listener(program):
    launch = program("ranks", "backlog", "recv", "sleep")
    first, second = launch.said["ranks"]
    (end,) = wait_of(launch.pid, first, call="read").objects
    assert end.state == sockets.NOT_ACCEPTED
    assert [holder.pid for holder in end.others] == [second]


def test_a_connect_without_an_answer_is_syn_sent(program):
    launch = program("ranks", "unix", "connect", "sleep")
    (end,) = wait_of(launch.pid, launch.said["ranks"][0], call="connect").objects
    assert (end.state, end.others) == ("syn-sent", ())


def test_the_path_of_a_fifo_that_is_opened_is_read_from_the_call(program, tmp_path):
    path = tmp_path / "shard"
    os.mkfifo(path)
    launch = program("ranks", "unix", "fifo", "sleep", path)
    (fifo,) = wait_of(launch.pid, launch.said["ranks"][0], call="openat").objects
    assert (fifo.kind, fifo.target, fifo.others) == ("fifo", str(path), ())


def test_a_wait_for_a_child_names_it(program):
    launch = program("ranks", "unix", "child", "sleep")
    first = launch.said["ranks"][0]
    child = wait_of(launch.pid, first, call="wait4").waits_for_pid
    assert procfs.read_stat("/proc", child).ppid == first


def test_a_thread_that_python_does_not_know_is_seen_with_its_peer(program):
    launch = program("ranks", "unix", "sleep", "native")
    first, second = launch.said["ranks"]
    until_s = time.monotonic() + PATIENCE_S
    native = ()
    while not native and time.monotonic() < until_s:
        found = look_at(launch.pid).by_pid[second]
        native = [wait for wait in found.threads if wait.tid != second and wait.call == "read"]
    (wait,) = native
    assert [holder.pid for holder in wait.objects[0].others] == [first]


WATCH = """
#include <pthread.h>
#include <unistd.h>
static void *run(void *fd) { char word; return (void *)(read((long)fd, &word, 1) + 0L); }
void watch(int fd) { pthread_t thread; pthread_create(&thread, 0, run, (void *)(long)fd); }
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler here")
def test_a_thread_of_a_library_is_seen_with_its_call_and_the_library(program, tmp_path):
    library = tmp_path / "libproxy.so"
    command = ["cc", "-shared", "-fPIC", "-O0", "-xc", "-", "-o", str(library), "-lpthread"]
    subprocess.run(command, input=WATCH.encode(), check=True)
    launch = program("ranks", "unix", "sleep", "library", library)
    first, second = launch.said["ranks"]
    until_s = time.monotonic() + PATIENCE_S
    native = []
    while not native and time.monotonic() < until_s:  # its maps are read when it has settled
        threads = look_at(launch.pid).by_pid[second].threads
        native = [wait for wait in threads if wait.call == "read" and wait.libraries]
    (wait,) = native
    assert wait.libraries == ("libproxy.so",)
    assert [holder.pid for holder in wait.objects[0].others] == [first]


def test_the_owners_of_mutexes_are_read_from_memory(program):
    target = program("mutexes", "ab-ba")
    first, second = target.said["tids"]
    one = wait_of(target.pid, first, call="futex", pid=target.pid)
    until_s = time.monotonic() + PATIENCE_S
    while one.futex != "mutex" and time.monotonic() < until_s:
        one = wait_of(target.pid, first, call="futex", pid=target.pid)
    other = wait_of(target.pid, second, call="futex", pid=target.pid)
    assert (one.futex, one.owner_tid) == ("mutex", second)
    assert (other.futex, other.owner_tid) == ("mutex", first)


def test_a_thread_that_waits_for_the_gil_is_told_from_one_that_waits_for_a_lock(program):
    target = program("mutexes", "gil")
    (owner,) = target.said["tids"]
    main = wait_of(target.pid, target.pid, call="futex")
    until_s = time.monotonic() + PATIENCE_S
    while main.futex != "mutex" and time.monotonic() < until_s:
        main = wait_of(target.pid, target.pid, call="futex")
    assert (main.futex, main.owner_tid) == ("mutex", owner)
    while (wait := wait_of(target.pid, owner, call="futex", pid=target.pid)).futex != "gil":
        assert time.monotonic() < until_s, wait  # its program's maps are read when it has settled


def test_a_lock_of_pythons_own_has_no_owner(program):
    target = program("locks")
    assert wait_of(target.pid, target.pid, call="futex").owner_tid is None


def test_the_same_wait_has_gone_to_sleep_as_often_as_before(program):
    launch = program("ranks", "unix", "recv", "sleep")
    first = launch.said["ranks"][0]
    once = wait_of(launch.pid, first, call="read")
    again = wait_of(launch.pid, first, call="read")
    assert once.switches is not None
    assert once == msgspec.structs.replace(again, libraries=once.libraries)


@pytest.mark.parametrize(
    ("limit", "most", "what"), [("MOST_DESCRIPTORS", 40, "fd"), ("MOST_THREADS", 3, "threads")]
)
def test_an_end_may_be_served_by_what_was_left_out(limit, most, what, program, monkeypatch):
    launch = program("ranks", "unix", "recv", "crowd")
    first, second = launch.said["ranks"]
    wait_of(launch.pid, second, call="futex")
    assert only_target(wait_of(launch.pid, first, call="read")) == second
    monkeypatch.setattr(waits, limit, most)
    until_s = time.monotonic() + PATIENCE_S
    while (
        what not in (cut := look_at(launch.pid).by_pid[second]).unreadable
    ):  # they come one by one
        assert time.monotonic() < until_s
    assert cut.unreadable[what].reason == "not-tried"
    wait = wait_of(launch.pid, first, call="read")
    assert [holder.pid for holder in wait.objects[0].others] == [second]
    assert only_target(wait) is None


@needs_root
def test_another_network_namespace_is_entered(program):
    launch = program("ranks", "unix", "recv", "sleep", before=("unshare", "--net"))
    first, second = launch.said["ranks"]
    (end,) = wait_of(launch.pid, first, call="read").objects
    assert (end.kind, [holder.pid for holder in end.others]) == ("unix", [second])
    own = Path("/proc/thread-self/ns/net").readlink()
    assert own != Path(f"/proc/{first}/ns/net").readlink()


@needs_root
def test_the_owner_of_a_mutex_in_another_pid_namespace_has_our_number(program):
    before = ("unshare", "--pid", "--fork", "--kill-child")
    target = program("mutexes", "ab-ba", before=before)
    until_s, found = time.monotonic() + PATIENCE_S, []
    while len(found) < 2 and time.monotonic() < until_s:
        threads = [
            wait
            for one in look_at(target.pid).by_pid.values()
            if isinstance(one, ProcessWaits)
            for wait in one.threads
        ]
        found = [wait for wait in threads if wait.futex == "mutex"]
    one, other = found
    assert (one.owner_tid, other.owner_tid) == (other.tid, one.tid)
    assert one.tid not in target.said["tids"]


def restricted_look(pid, *before, user=0):
    """Look from a process with fewer rights, which are given up once all is imported."""
    code = """
        import os, sys, msgspec
        from hangdoctor.collect import procfs, waits
        from hangdoctor.collect.look import Look
        pid, user = map(int, sys.argv[1:])
        waits.read(Look(roots={}))
        if user:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        look = Look(roots={pid: procfs.read_stat("/proc", pid).start_ticks})
        print(msgspec.json.encode(waits.read(look)).decode())
    """
    done = subprocess.run(
        [*before, sys.executable, "-c", textwrap.dedent(code), str(pid), str(user)],
        cwd=ROOT, capture_output=True, check=True,
    )  # fmt: skip
    return msgspec.json.decode(done.stdout, type=Waits)


@needs_root
def test_a_namespace_that_may_not_be_entered_is_read_from_its_tables(program):
    launch = program("ranks", "unix", "recv", "sleep", before=("unshare", "--net"))
    first = launch.said["ranks"][0]
    wait_of(launch.pid, first, call="read")
    found = restricted_look(launch.pid, "setpriv", "--bounding-set=-sys_admin").by_pid[first]
    assert found.unreadable["sockets"].reason == "permission"
    (end,) = found.threads[0].objects
    assert (end.kind, end.others) == ("unix", None)


@needs_root
def test_another_users_process_is_missing_and_no_wait_is_made_up(program):
    launch = program("ranks", "unix", "recv", "sleep")
    found = restricted_look(launch.pid, user=restricted.NOBODY)
    for pid in launch.said["ranks"]:
        assert isinstance(found.by_pid[pid], Missing)
        assert found.by_pid[pid].reason == "permission"


def test_the_tables_in_proc_tell_the_same_connections_as_netlink(program):
    program("ranks", "tcp", "recv", "sleep")
    table, files = sockets.read("/proc", None), sockets._from_files("/proc/self/net")
    assert not files.whole
    same = table.by_inode.keys() & files.by_inode.keys()
    pairs = [(table.by_inode[inode], files.by_inode[inode]) for inode in same]
    pairs = [(one, other) for one, other in pairs if one.family == "tcp"]
    assert pairs
    for one, other in pairs:
        assert (one.local, one.remote) == (other.local, other.remote)
