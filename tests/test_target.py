from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from hangdoctor import engines, target
from hangdoctor.collect import procfs
from hangdoctor.errors import InputError, UsageError
from hangdoctor.model import Missing

TITLES = ("sglang::scheduler_TP0", "sglang::scheduler_TP1", "sglang::detokenizer")
SPAWNED = "python -c from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=6)"
SERVER = "python -m sglang.launch_server --tp 2"


@pytest.fixture(scope="module")
def known():
    return tuple(engines.load(name) for name in engines.names())


@pytest.fixture
def launch(proc_tree):
    """A hand-made launch under a shell, and its /proc."""
    proc_tree.add(1, "init", ppid=0)
    proc_tree.add(90, "bash -c python -m sglang.launch_server --tp 2; true", session=90)
    proc_tree.add(100, SERVER, ppid=90, session=90, group=90)
    proc_tree.add(101, "sglang::scheduler_TP0", ppid=100, session=90, group=90)
    proc_tree.add(102, SPAWNED, ppid=100, session=90, group=90)
    proc_tree.add(103, "sglang::detokenizer", ppid=100, session=90, group=90)
    proc_tree.add(110, "nvcc -c kernel.cu", ppid=101, session=90, group=90, comm="nvcc")
    proc_tree.add(111, "cicc", ppid=110, session=90, group=90, comm="cicc")
    proc_tree.add(200, "python train.py", session=200)
    return proc_tree


def test_the_only_launch_is_found_with_its_roles_and_ranks(launch, known):
    found = target.resolve(None, known, launch.root)
    assert found.roots == (100,)
    assert found.launcher_pid == 100
    assert found.engine == "sglang"
    assert found.title == SERVER
    assert found.ranks == ("TP0",)
    roles = {member.pid: member.role for member in found.members}
    assert (roles[100], roles[101], roles[103]) == ("launcher", "scheduler", "detokenizer")
    assert set(roles) == {100, 101, 102, 103, 110, 111}


@pytest.mark.parametrize("pid", [90, 100, 101, 102, 103, 111, 1])
def test_any_pid_in_it_or_above_it_leads_to_the_launch(launch, known, pid):
    assert target.resolve(pid, known, launch.root).roots == (100,)


def test_a_process_that_is_no_launch_is_named_and_the_launches_are_listed(launch, known):
    with pytest.raises(InputError, match=r"PID 200 .*python train\.py") as caught:
        target.resolve(200, known, launch.root)
    assert "PID 100" in caught.value.hint


def test_a_pid_that_does_not_exist_is_one_clear_line(launch, known):
    with pytest.raises(InputError, match="there is no process with PID 4711"):
        target.resolve(4711, known, launch.root)


def test_a_zombie_of_no_launch_is_told_from_a_missing_process(launch, known):
    launch.add(300, "", comm="worker", state="Z", ppid=200)
    with pytest.raises(InputError, match=r"PID 300 \(worker\) has ended; its parent, PID 200"):
        target.resolve(300, known, launch.root)


def test_a_zombie_of_a_launch_leads_to_the_launch(launch, known):
    launch.add(104, "", comm="sglang::schedul", state="Z", ppid=100, session=90, group=90)
    assert target.resolve(104, known, launch.root).roots == (100,)


def test_several_launches_are_listed_and_none_is_chosen(launch, known):
    launch.add(500, "python3 -m sglang.launch_server --port 31000", session=500)
    with pytest.raises(UsageError) as caught:
        target.resolve(None, known, launch.root)
    assert "PID 100  sglang  1 rank (TP0)" in str(caught.value)
    assert "--port 31000" in str(caught.value)
    assert "--pid-tree PID" in caught.value.hint
    assert target.resolve(500, known, launch.root).roots == (500,)
    with pytest.raises(UsageError, match="PID 1 stands above several"):
        target.resolve(1, known, launch.root)


def test_without_a_launch_the_hint_says_what_to_give(proc_tree, known):
    proc_tree.add(1, "init", ppid=0)
    with pytest.raises(InputError, match="no running launch") as caught:
        target.resolve(None, known, proc_tree.root)
    assert "hangdoctor diagnose" in caught.value.hint


def test_what_a_dead_launcher_left_behind_is_still_a_launch(proc_tree, known):
    proc_tree.add(1, "init", ppid=0)
    for pid, title in enumerate([*TITLES, SPAWNED], start=101):
        proc_tree.add(pid, title, session=90, group=90, start=pid)
    proc_tree.add(300, SPAWNED, session=300)  # of some other program
    found = target.resolve(None, known, proc_tree.root)
    assert found.roots == (101, 102, 103, 104)
    assert found.launcher_pid is None
    assert found.ranks == ("TP0", "TP1")
    again = target.resolve(102, known, proc_tree.root)
    assert msgspec.structs.replace(again, age_s=found.age_s) == found


def test_the_zombie_of_a_dead_launcher_leads_to_what_it_left_behind(proc_tree, known):
    proc_tree.add(1, "init", ppid=0)
    proc_tree.add(100, "", comm="python", state="Z", session=90, group=90)
    proc_tree.add(101, TITLES[0], session=90, group=90)
    assert target.resolve(100, known, proc_tree.root).roots == (101,)


def test_two_dead_launchers_left_two_launches(proc_tree, known):
    proc_tree.add(1, "init", ppid=0)
    proc_tree.add(101, TITLES[0], session=90)
    proc_tree.add(201, TITLES[0], session=190)
    found = target.find_launches(known, proc_tree.root)
    assert [launch.roots for launch in found] == [(101,), (201,)]


def test_orphans_of_a_living_launcher_belong_to_it(launch, known):
    launch.add(120, "sglang::scheduler_DP1_TP0", session=90, group=90, start=2000)
    found = target.resolve(None, known, launch.root)
    assert found.roots == (100, 120)
    assert sorted(found.ranks) == ["DP1 TP0", "TP0"]


def test_resource_trackers_of_other_programs_are_no_launch(proc_tree, known):
    proc_tree.add(1, "init", ppid=0)
    tracker = "python -c from multiprocessing.resource_tracker import main;main(5)"
    proc_tree.add(300, tracker, session=300)
    assert target.find_launches(known, proc_tree.root) == ()


@pytest.mark.parametrize(
    "title",
    [
        "python /usr/bin/hangdoctor watch -- python -m sglang.launch_server --tp 2",
        "python3 -m hangdoctor watch -- python -m sglang.launch_server --tp 2",
        "vim sglang.launch_server",
        "docker run image python -m sglang.launch_server --tp 2",
    ],
)
def test_what_only_names_a_launcher_is_none(proc_tree, known, title):
    proc_tree.add(1, "init", ppid=0)
    proc_tree.add(50, title)
    assert target.find_launches(known, proc_tree.root) == ()


def test_a_python_wrapper_is_not_the_launcher_and_a_forked_copy_is_not_one_either(launch, known):
    launch.add(80, "python bench.py --server sglang.launch_server", ppid=1)
    (launch.root / "90" / "stat").write_text(
        (launch.root / "90" / "stat").read_text().replace(") S 1 ", ") S 80 ")
    )
    launch.add(130, SERVER, ppid=100, session=90, group=90)
    assert target.resolve(None, known, launch.root).roots == (100,)


def test_hangdoctor_in_a_path_does_not_hide_a_launcher(proc_tree, known):
    proc_tree.add(1, "init", ppid=0)
    proc_tree.add(100, "/hangdoctor/python -m sglang.launch_server --model-path /x/hangdoctor/m")
    assert len(target.find_launches(known, proc_tree.root)) == 1


def test_a_command_line_that_blocks_does_not_block_the_search(launch, known):
    (launch.root / "200" / "cmdline").unlink()
    os.mkfifo(launch.root / "200" / "cmdline")
    assert target.resolve(None, known, launch.root).roots == (100,)
    os.close(os.open(launch.root / "200" / "cmdline", os.O_RDWR))


def test_a_real_launch_is_found_from_a_child_a_thread_and_after_its_launcher_died(program, known):
    launcher = program("launch_server", *TITLES)
    children = launcher.said["children"]
    for pid in children:
        while procfs.read_title("/proc", pid).startswith(sys.executable):  # not yet exec'd
            os.sched_yield()
    found = target.resolve(children[1], known)
    assert found.roots == (launcher.pid,)
    assert found.ranks == ("TP0", "TP1")
    assert found.age_s >= 0
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.process.wait()
    found = target.resolve(children[1], known)
    assert found.roots == tuple(children)
    assert found.launcher_pid is None


def test_a_thread_leads_to_the_launch_of_its_process(program, known):
    launcher = program("launch_server", *TITLES)
    # A thread's number opens under /proc although it is not listed there.
    tids = [int(task.name) for task in Path(f"/proc/{launcher.pid}/task").iterdir()]
    assert all(target.resolve(tid, known).roots == (launcher.pid,) for tid in tids)


def test_roles_to_adopt_are_all_but_the_launchers(known):
    (engine,) = [engine for engine in known if engine.name == "sglang"]
    patterns = target.role_patterns(engine)
    assert any(engines.matches_any((pattern,), TITLES[0]) for pattern in patterns)
    assert not any(engines.matches_any((pattern,), SERVER) for pattern in patterns)


def test_the_log_is_the_file_that_the_launcher_writes_to(program, tmp_path):
    with (tmp_path / "server.log").open("wb") as log:
        one = program("sleep", stdout=log, stderr=log)
    found = target.find_log([one.pid])
    assert (found.path, found.name) == (tmp_path / "server.log", str(tmp_path / "server.log"))


def test_standard_error_comes_before_standard_output(program, tmp_path):
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        one = program("sleep", stdout=out, stderr=err)
    assert target.find_log([one.pid]).path == tmp_path / "err"


def test_a_deleted_log_is_opened_through_proc(program, tmp_path):
    with (tmp_path / "server.log").open("wb") as log:
        log.write(b"so far\n")
        one = program("sleep", stdout=log, stderr=log)
    (tmp_path / "server.log").unlink()
    found = target.find_log([one.pid])
    assert found.path.read_bytes() == b"so far\n"
    assert found.name == str(tmp_path / "server.log")


def test_a_log_in_another_mount_namespace_is_opened_through_proc(program, tmp_path):
    inside = tmp_path / "logs"
    inside.mkdir()
    as_root = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    script = f'mount -t tmpfs none {inside} && exec "$0" "$@" >{inside}/server.log 2>&1'
    one = program("sleep", before=("unshare", *as_root, "-m", "sh", "-c", script))
    found = target.find_log([one.pid])
    assert found.name == str(inside / "server.log")
    assert not Path(found.name).exists()
    assert found.path.read_bytes() == b""


def test_a_log_behind_tee_is_the_file_that_tee_writes(program, tmp_path):
    log = tmp_path / "server.log"
    wait = f"while [ ! -e {log} ]; do sleep 0.01; done"  # else we may look before tee opened it
    script = f'{{ {wait}; exec {sys.executable} "$1" "$2"; }} 2>&1 | tee {log}'
    one = program("sleep", before=("sh", "-c", script))
    children = Path(f"/proc/{one.pid}/task/{one.pid}/children").read_text().split()
    python = next(int(pid) for pid in children if procfs.read_stat("/proc", int(pid)).comm != "tee")
    assert target.find_log([python]).path == log


@pytest.mark.parametrize(
    ("stream", "word"), [(subprocess.PIPE, "pipe"), (subprocess.DEVNULL, "null")]
)
def test_an_output_that_is_no_file_says_what_it_is_and_what_to_do(program, stream, word):
    one = program("sleep", stdout=stream, stderr=stream)
    found = target.find_log([one.pid])
    assert isinstance(found, Missing)
    assert word in found.detail
    assert "--log" in found.hint
    for pipe in (one.process.stdout, one.process.stderr):
        if pipe:
            pipe.close()


def test_the_log_of_an_ended_process_is_gone():
    assert target.find_log([]).reason == "gone"
