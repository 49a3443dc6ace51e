from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import msgspec
import pytest

from hangdoctor.collect import Observer, bounded, processes, procfs
from hangdoctor.collect.look import Look
from hangdoctor.model import Missing, Processes, ProcessStacks, Snapshot, Stacks

ROOT = Path(__file__).parents[2]


def look_at(*pids, proc="/proc", **options):
    roots = {pid: procfs.read_stat(str(proc), pid).start_ticks for pid in pids}
    return processes.read(Look(proc=str(proc), roots=roots, **options))


def only(found):
    (process,) = found.processes
    return process


def as_nobody(code, *arguments, **options):
    """Run code after giving up all rights; where there are none to give up, it runs as it is."""
    preamble = """
        import os, sys
        from pathlib import Path
        import msgspec
        from hangdoctor.collect import processes, procfs, stacks
        from hangdoctor.collect.look import Look
        if os.getuid() == 0:
            os.setgroups([]); os.setgid(65534); os.setuid(65534)
        def roots(*pids, proc="/proc"):
            return {pid: procfs.read_stat(proc, pid).start_ticks for pid in pids}
        def show(value):
            print(msgspec.json.encode(value).decode())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(preamble) + textwrap.dedent(code), *arguments],
        cwd=ROOT,
        capture_output=True,
        check=True,
        **options,
    )
    return done.stdout


def test_a_process_is_read_with_its_threads_main_thread_first(program):
    target = program("threads", 3)
    process = only(look_at(target.pid))
    while {thread.state for thread in process.threads} != {"S"}:  # from its word to its wait
        process = only(look_at(target.pid))
    assert process.pid == target.pid
    assert process.title.endswith(f"threads.py {target.process.args[2]} 3")
    assert process.state == "S"
    assert process.user == os.getuid()
    assert process.tracer_pid == 0
    assert process.age_s >= 0
    assert process.rss_bytes > process.rss_file_bytes > 0
    assert process.io.rchar > 0
    assert process.threads[0].tid == target.pid
    assert len(process.threads) == 4
    assert all("futex" in thread.wchan for thread in process.threads)
    assert all(thread.syscall.startswith("202 ") for thread in process.threads)
    assert process.unreadable == {}
    assert process.files is None


def test_the_tree_holds_children_and_grandchildren_and_the_dead_child_with_its_status(program):
    family = program("family")
    said = family.said
    found = {process.pid: process for process in look_at(family.pid).processes}
    assert set(found) == {family.pid, *said.values()}
    assert next(iter(found)) == family.pid
    dead = found[said["dead"]]
    assert (dead.state, dead.exit_code) == ("Z", 7 << 8)
    assert found[said["grandchild"]].ppid == said["between"]


def test_a_grandchild_is_followed_when_it_gets_another_parent(program):
    family = program("family")
    with Observer([family.pid]) as observer:
        observer.take(frozenset({"processes"}), at_s=0, wall_s=0)
        family.tell("orphan")
        later = observer.take(frozenset({"processes"}), at_s=1, wall_s=1).processes
    pids = [process.pid for process in later.processes]
    assert family.said["grandchild"] in pids
    assert family.said["between"] not in pids
    assert family.said["between"] in later.ended


def test_an_ended_process_has_the_status_that_it_had_as_a_zombie(program):
    family = program("family")
    with Observer([family.pid]) as observer:
        observer.take(frozenset({"processes"}), at_s=0, wall_s=0)
        family.tell("reap")
        later = observer.take(frozenset({"processes"}), at_s=1, wall_s=1).processes
    assert later.ended == {family.said["dead"]: 7}


def test_a_root_that_ended_before_the_first_look_is_among_the_ended(program):
    target = program("sleep")
    os.killpg(target.pid, signal.SIGKILL)
    target.process.wait()
    with Observer([target.pid]) as observer:
        found = observer.take(frozenset({"processes"}), at_s=0, wall_s=0).processes
    assert found == Processes(processes=(), roots=(target.pid,), ended={target.pid: None})


def test_an_orphan_of_the_group_is_adopted_only_by_its_title(proc_tree):
    proc_tree.add(10, "python -m server", session=10, group=10)
    proc_tree.add(20, "engine::rank_1", session=10, group=10, start=2000)
    proc_tree.add(21, "vim notes", session=10, group=10, start=2000)
    proc_tree.add(22, "engine::rank_2", session=10, group=22, start=2000)
    proc_tree.add(23, "engine::rank_0", session=10, group=10, start=500)
    found = look_at(10, proc=proc_tree.root, adopt=("^engine::",))
    assert [process.pid for process in found.processes] == [10, 20]


def test_a_reused_pid_does_not_belong_to_the_tree(proc_tree):
    proc_tree.add(10, "python -m server")
    proc_tree.add(11, "bash", start=5000)
    look = Look(proc=str(proc_tree.root), roots={10: 1000}, known={11: 1001})
    assert [process.pid for process in processes.read(look).processes] == [10]


def test_the_observer_is_not_part_of_the_tree_that_it_stands_in():
    with Observer([os.getppid(), os.getpid()]) as observer:
        found = observer.take(frozenset({"processes"}), at_s=0, wall_s=0).processes
    assert os.getppid() in [process.pid for process in found.processes]
    assert os.getpid() not in [process.pid for process in found.processes]
    assert os.getpid() not in [process.ppid for process in found.processes]


def test_descriptors_worth_keeping_are_kept_with_their_position(program, tmp_path):
    target = program("open_files", tmp_path)
    said = target.said
    files = {file.fd: file for file in only(look_at(target.pid, files=True)).files}
    reading = files[said["reading"]]
    assert (reading.kind, reading.position, reading.size_bytes) == ("file", 640, 1000)
    assert reading.target.endswith("model-00001.safetensors")
    assert files[said["fifo"]].kind == "fifo"
    assert files[said["pipe"]].kind == "pipe"
    if said["counter"] != -1:
        assert (files[said["counter"]].kind, files[said["counter"]].position) == ("eventfd", 31)
    assert not {said["writing"], said["unix"], said["null"], said["source"]} & files.keys()


def held_open(files):
    links = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the directory
            links.add(str(fd.readlink()))
    return [file for file in files if file in links]


def test_what_is_kept_open_ends_with_its_process_or_when_it_is_not_read_any_more(program):
    kept = procfs.KeptOpen()
    target, other = program("sleep"), program("sleep")
    files = [f"/proc/{one.pid}/schedstat" for one in (target, other)]
    assert [kept.read(file) for file in files] == [procfs.read(file) for file in files]
    assert held_open(files) == files
    target.process.kill()
    target.process.wait()
    with pytest.raises(FileNotFoundError):
        kept.read(files[0])
    assert held_open(files) == files[1:]
    for _ in range(2):
        kept.close_unused()
        assert held_open(files) == files[1:]
    kept.close_unused()
    assert held_open(files) == []


def test_where_no_more_can_be_kept_open_files_are_read_all_the_same(program, monkeypatch):
    monkeypatch.setattr(procfs, "MOST_KEPT", 1)
    kept = procfs.KeptOpen()
    files = [f"/proc/{program('sleep').pid}/schedstat" for _ in range(2)]
    assert [kept.read(file) for file in files] == [procfs.read(file) for file in files]
    assert held_open(files) == files[:1]


def test_what_is_left_out_of_the_descriptors_is_said(program, tmp_path, monkeypatch):
    target = program("open_files", tmp_path)
    assert "fd" not in only(look_at(target.pid, files=True)).unreadable
    monkeypatch.setattr(processes, "MOST_FILES", 1)
    process = only(look_at(target.pid, files=True))
    assert [file.kind for file in process.files] == ["pipe", "file"]
    assert process.unreadable["fd"].reason == "not-tried"
    assert " of its open files were not looked at" in process.unreadable["fd"].detail


def test_a_name_with_blanks_and_parentheses_is_read_whole(program):
    target = program("sleep", "x) R 1 (y")
    process = only(look_at(target.pid))
    assert process.comm == "x) R 1 (y"
    assert process.state in "RS"
    assert process.ppid == os.getpid()


def test_a_stopped_process_is_in_state_t_and_a_vfork_parent_in_state_d(program, tmp_path):
    stopped = program("sleep")
    os.kill(stopped.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
    assert only(look_at(stopped.pid)).state == "T"
    stuck = program("uninterruptible", tmp_path / "never")
    while procfs.read_stat("/proc", stuck.pid).state != "D":
        os.sched_yield()
    found = look_at(stuck.pid).processes
    assert found[0].state == "D"
    assert found[0].unreadable == {}


def test_a_command_line_that_blocks_costs_nothing_but_the_command_line(proc_tree):
    at = proc_tree.add(10, "python -m server")
    proc_tree.add(11, "engine::rank_0", ppid=10)
    (at / "cmdline").unlink()
    os.mkfifo(at / "cmdline")  # nobody ever writes: opening it blocks for ever
    server, rank = look_at(10, proc=proc_tree.root).processes
    assert server.unreadable["title"].reason == "timeout"
    assert server.title == "python"
    assert server.io
    assert rank.title == "engine::rank_0"
    release(at / "cmdline")


def test_a_process_whose_files_block_is_there_with_what_its_stat_tells(proc_tree):
    proc_tree.add(10, "python -m server")
    at = proc_tree.add(11, "engine::rank_0", ppid=10)
    (at / "io").unlink()
    os.mkfifo(at / "io")
    server, rank = look_at(10, proc=proc_tree.root).processes
    assert server.io
    assert rank.unreadable["io"].reason == "timeout"
    assert (rank.title, rank.state, rank.cpu_s) == ("engine::rank_0", "S", 2.0)
    release(at / "io")


def test_a_collector_that_blocks_altogether_is_given_up_and_replaced(proc_tree):
    at = proc_tree.add(10, "python -m server")
    with Observer([10], proc=proc_tree.root) as observer:
        good = observer.take(frozenset({"processes"}), at_s=0, wall_s=0)
        assert isinstance(good.processes, Processes)
        (at / "stat").rename(at / "stat-text")
        os.mkfifo(at / "stat")
        observer._workers["processes"].job = msgspec.structs.replace(
            observer._workers["processes"].job, deadline_s=0.5
        )
        bad = observer.take(frozenset({"processes", "host"}), at_s=1, wall_s=1)
        assert bad.processes.reason == "timeout"
        assert bad.host
        (at / "stat").unlink()
        (at / "stat-text").rename(at / "stat")
        observer._workers["processes"].job = msgspec.structs.replace(
            observer._workers["processes"].job, deadline_s=30.0
        )
        again = observer.take(frozenset({"processes"}), at_s=2, wall_s=2)
    assert isinstance(again.processes, Processes)


def test_another_users_process_is_read_as_far_as_the_system_lets_us(program):
    target = program("sleep")
    said = as_nobody("show(processes.read(Look(roots=roots(int(sys.argv[1])))))", str(target.pid))
    process = only(msgspec.json.decode(said, type=Processes))
    assert process.title.startswith(sys.executable)
    assert process.threads[0].state == "S"
    if os.getuid():  # no right to become another user: then it was our own process
        assert process.unreadable == {}
        return
    assert (process.io, process.threads[0].wchan, process.threads[0].syscall) == (None, None, None)
    for what in ("io", "wchan", "syscall"):
        assert process.unreadable[what].reason == "permission"
        assert "sudo" in process.unreadable[what].hint


def test_another_users_stacks_are_refused_with_the_way_to_get_them(program):
    target = program("sleep")
    # The environment may lie where only its owner may look; py-spy must be found all the same.
    with tempfile.TemporaryDirectory() as public:
        Path(public).chmod(0o755)
        shutil.copy(Path(sys.executable).parent / "py-spy", public)
        said = as_nobody(
            "show(stacks.read(Look(roots=roots(int(sys.argv[1])))))",
            str(target.pid),
            env=os.environ | {"PATH": f"{public}:{os.environ['PATH']}"},
        )
    stack = msgspec.json.decode(said, type=Stacks).by_pid[target.pid]
    if os.getuid():
        assert isinstance(stack, ProcessStacks)
        return
    assert stack.reason == "permission"
    assert "sudo" in stack.hint


def test_with_only_syscall_denied_all_the_rest_is_read(proc_tree):
    at = proc_tree.add(os.getpid(), "python -m server")
    denied = at / "task" / str(os.getpid()) / "syscall"
    denied.chmod(0)
    for directory in (proc_tree.root, *proc_tree.root.parents):
        if directory.stat().st_uid == os.getuid() and directory != Path("/"):
            directory.chmod(directory.stat().st_mode | 0o055)
    said = as_nobody(
        "pid = int(sys.argv[1]); root = sys.argv[2]\n"
        "show(processes.read(Look(proc=root, roots=roots(pid, proc=root))))",
        str(os.getpid()),
        str(proc_tree.root),
    )
    process = only(msgspec.json.decode(said, type=Processes))
    assert process.threads[0].wchan == "futex_wait"
    assert process.threads[0].syscall is None
    assert process.io
    assert {name: missing.reason for name, missing in process.unreadable.items()} == {
        "syscall": "permission"
    }


def test_a_process_in_a_pid_namespace_of_its_own_has_its_inner_pid(program):
    as_root = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    target = program("sleep", before=("unshare", *as_root, "-mp", "--fork", "--mount-proc"))
    outer, inner = look_at(target.pid).processes
    assert (outer.comm, outer.inner_pid) == ("unshare", None)
    assert inner.inner_pid == 1
    assert inner.ppid == target.pid


def test_sections_that_are_not_due_are_none(program):
    target = program("sleep")
    with Observer([target.pid]) as observer:
        snapshot = observer.take(frozenset({"host"}), at_s=3.5, wall_s=9.0)
    assert snapshot == Snapshot(at_s=3.5, wall_s=9.0, took_s=snapshot.took_s, host=snapshot.host)
    assert set(snapshot.took_s) == {"host"}


def test_a_job_that_blocks_is_not_tried_again_before_it_has_returned():
    read, write = os.pipe()
    calls = []

    def block():
        calls.append(1)
        return os.read(read, 1)

    one = bounded.Bounded()
    assert one.run({"stuck": block, "fine": lambda: 1}, within_s=0.2) == {"fine": 1}
    assert one.run({"stuck": block, "fine": lambda: 2}, within_s=0.2) == {"fine": 2}
    assert len(calls) == 1
    (thread,) = one._stuck.values()
    os.write(write, b"x")
    thread.join()
    os.write(write, b"y")
    assert one.run({"stuck": block}, within_s=30) == {"stuck": b"y"}
    os.close(read)
    os.close(write)


def test_an_error_that_a_job_does_not_expect_is_raised():
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        bounded.Bounded().run({"bad": fail}, within_s=30)


def test_what_is_missing_is_a_value_that_survives_the_disk():
    missing = Missing(reason="permission", detail="no", hint="sudo")
    assert msgspec.json.decode(msgspec.json.encode(missing), type=Processes | Missing) == missing


def release(fifo):
    """Let whoever blocks in opening a FIFO go."""
    os.close(os.open(fifo, os.O_RDWR))
