"""Locks on files that processes really hold, wait for, and leave behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import pytest
import restricted

from hangdoctor.collect import lock_files, procfs, waits
from hangdoctor.collect.look import Look
from hangdoctor.model import FileLock, ProcessWaits

PATIENCE_S = 60
ROOT = Path(__file__).parents[2]


def look_at(pid):
    roots = {pid: procfs.read_stat("/proc", pid).start_ticks}
    return waits.read(Look(roots=roots, locks=True))


def lock_at(path, pid, enough=lambda _: True):
    """Return the lock on a path as soon as it is as it should be."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        found = [lock for lock in look_at(pid).locks if lock.path == str(path)]
        if found and enough(found[0]):
            return found[0]
        time.sleep(0.05)
    raise AssertionError(f"not seen: {found}")


def test_a_flock_names_its_holder_and_who_waits(program, tmp_path):
    path = tmp_path / "weights.lock"
    launch = program("ranks", "unix", "flock", "flock", path)
    lock = lock_at(path, launch.pid, lambda lock: lock.waiters)
    assert (lock.kind, lock.owner) == ("flock", "alive")
    (holder,) = lock.holders
    assert {holder.pid, *lock.waiters} == set(launch.said["ranks"])
    found = look_at(launch.pid).by_pid[lock.waiters[0]]
    assert isinstance(found, ProcessWaits)
    (file,) = found.threads[0].objects
    assert (found.threads[0].call, file.target) == ("flock", str(path))
    assert [each.pid for each in file.others] == [holder.pid]


def test_a_flock_that_was_inherited_is_held_by_who_lives(program, tmp_path):
    path = tmp_path / "inherited.lock"
    holder = program("inherited_lock", path)
    lock = lock_at(path, holder.pid)
    assert lock.owner == "alive"
    assert [each.pid for each in lock.holders] == [holder.said["child"]]


def extensions(tmp_path):
    """Return an environment whose extensions are built in a directory of the test's."""
    return os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path / "ext")}


@pytest.fixture
def baton(tmp_path):
    path = tmp_path / "ext" / "moe_kernels" / "lock"
    path.parent.mkdir(parents=True)
    return path


def test_a_baton_is_held_by_who_has_it_open(program, baton, tmp_path):
    launch = program("ranks", "unix", "baton", "baton", baton, env=extensions(tmp_path))
    lock = lock_at(baton, launch.pid)
    assert (lock.kind, lock.owner) == ("file", "alive")
    assert lock.holders[0].pid in launch.said["ranks"]


def test_a_baton_in_a_directory_of_its_own_is_found_through_its_owner(program, tmp_path):
    path = tmp_path / "custom" / "lock"
    path.parent.mkdir()
    launch = program("ranks", "unix", "baton", "baton", path, env=extensions(tmp_path))
    assert lock_at(path, launch.pid).owner == "alive"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees all who may hold it")
def test_a_baton_that_nobody_has_open_has_lost_its_owner(program, baton, tmp_path, monkeypatch):
    monkeypatch.setattr(lock_files, "_unseen_holders", lambda *_: "")  # wherever the tests run
    baton.touch()
    os.utime(baton, (1_000_000_000, 1_000_000_000))
    launch = program("ranks", "unix", "baton", "baton", baton, env=extensions(tmp_path))
    lock = lock_at(baton, launch.pid)
    assert (lock.owner, lock.holders, lock.older_than_all) == ("dead", (), True)
    baton.touch()
    assert lock_at(baton, launch.pid).older_than_all is False


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees all who may hold it")
def test_a_baton_in_a_cache_that_was_not_searched_whole_may_not_be_the_one(
    program, baton, tmp_path, monkeypatch
):
    monkeypatch.setattr(lock_files, "_unseen_holders", lambda *_: "")
    baton.touch()
    (baton.parents[1] / "fused_kernels").mkdir()
    launch = program("ranks", "unix", "baton", "baton", baton, env=extensions(tmp_path))
    assert lock_at(baton, launch.pid).owner == "dead"
    entries = lock_files._entries
    in_order = lambda directory: sorted(entries(directory), reverse=True)  # noqa: E731
    monkeypatch.setattr(lock_files, "_entries", in_order)
    monkeypatch.setattr(lock_files, "MOST_DIRECTORIES", 2)
    lock = lock_at(baton, launch.pid)
    assert (lock.owner, lock.why.startswith("not all of ")) == ("unknown", True)


def test_a_baton_on_a_network_file_system_may_be_another_machines(tmp_path):
    mounts = tmp_path / "7" / "mountinfo"
    mounts.parent.mkdir()
    mounts.write_text(
        "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "40 21 0:50 / /home rw shared:1 - nfs4 server:/home rw\n"
    )
    said = lock_files._unseen_holders(str(tmp_path), 7, "/home/me/.cache/torch_extensions/x/lock")
    assert "another machine" in said
    assert "nfs4" in said
    assert "another machine" not in lock_files._unseen_holders(str(tmp_path), 7, "/homely/lock")


def test_a_baton_in_a_container_may_be_another_containers(tmp_path):
    place = tmp_path / "self" / "ns"
    place.mkdir(parents=True)
    (place / "pid").symlink_to("pid:[4026532999]")
    (tmp_path / "7").mkdir()
    mounts = tmp_path / "7" / "mountinfo"
    mounts.write_text(
        "21 1 0:30 / / rw - overlay overlay rw\n40 21 8:1 / /root/.cache rw - ext4 /dev/sda1 rw\n"
    )
    shared, own = "/root/.cache/torch_extensions/x/lock", "/opt/ext/x/lock"
    assert "another container" in lock_files._unseen_holders(str(tmp_path), 7, shared)
    assert lock_files._unseen_holders(str(tmp_path), 7, own) == ""


@pytest.fixture
def hub(tmp_path):
    """Return the lock of a blob in a cache of the hub's, and the environment that names it."""
    lock = tmp_path / "hub" / ".locks" / "models--org--m" / "0a1b.lock"
    lock.parent.mkdir(parents=True)
    return lock, os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub")}


def test_a_soft_lock_is_held_by_who_has_it_open(program, hub):
    path, env = hub
    launch = program("ranks", "unix", "soft_lock", "soft_lock", path, env=env)
    lock = lock_at(path, launch.pid)
    assert (lock.kind, lock.owner) == ("soft", "alive")
    assert lock.holders[0].pid in launch.said["ranks"]


def record(host, pid, start=None):
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    inside = f"?pidns-{namespace:x}" if namespace != 0xEFFFFFFC else ""
    written = f"filelock/2\npid={pid}\nhost={host}{inside}\nmode=exclusive\n"
    boot = int(Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", ""), 16)
    return written + (f"start={(boot << 64) + start}\n" if start is not None else "")


@pytest.mark.parametrize(
    ("written", "owner", "why"),
    [
        ((socket.gethostname(), 1 << 22, 1), "dead", ""),
        ((socket.gethostname(), os.getppid(), 1), "dead", ""),
        ((socket.gethostname(), os.getpid()), "unknown", f"pid {os.getpid()} ("),
        (("node7", 1 << 22, 1), "unknown", "pid 4194304 on node7 has taken it"),
    ],
    ids=["ended", "its number is another's by now", "perhaps another's", "of another machine"],
)
def test_a_soft_lock_is_judged_by_the_owner_that_stands_in_it(written, owner, why, program, hub):
    path, env = hub
    path.write_text(record(*written))
    launch = program("ranks", "unix", "soft_lock", "sleep", path, env=env)
    lock = lock_at(path, launch.pid)
    assert (lock.kind, lock.owner, lock.holders) == ("soft", owner, ())
    assert lock.why.startswith(why) if why else not lock.why


def test_a_soft_lock_is_held_by_who_stands_in_it_where_his_descriptors_are_not_seen(program, hub):
    path, env = hub
    holder = program("sleep")
    start = procfs.read_stat("/proc", holder.pid).start_ticks
    path.write_text(record(socket.gethostname(), holder.pid, start))
    launch = program("ranks", "unix", "soft_lock", "sleep", path, env=env)
    lock = lock_at(path, launch.pid)
    assert (lock.owner, [each.pid for each in lock.holders]) == ("alive", [holder.pid])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees all who may hold it")
def test_a_soft_lock_without_its_boot_is_judged_by_who_has_it_open(program, hub, monkeypatch):
    path, env = hub
    path.write_text(f"{1 << 22}\n{socket.gethostname()}\n")
    launch = program("ranks", "unix", "soft_lock", "sleep", path, env=env)
    monkeypatch.setattr(lock_files, "_unseen_holders", lambda *_: "it lies on nfs4")
    inside = Path("/proc/self/ns/pid").stat().st_ino != 0xEFFFFFFC
    assert lock_at(path, launch.pid).owner == "unknown"
    monkeypatch.setattr(lock_files, "_unseen_holders", lambda *_: "")
    assert lock_at(path, launch.pid).owner == ("unknown" if inside else "dead")


def test_a_file_that_a_kernels_lock_has_left_behind_locks_nothing(program, hub):
    path, env = hub
    path.touch()
    launch = program("ranks", "unix", "sleep", "sleep", path, env=env)
    assert [lock for lock in look_at(launch.pid).locks if lock.path == str(path)] == []


def test_the_lock_of_a_download_tells_when_that_was_last_written_to(program, hub, tmp_path):
    path, env = hub
    blobs = tmp_path / "hub" / "models--org--m" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "0a1b.incomplete").touch()
    os.utime(blobs / "0a1b.incomplete", (1_000_000_000, 1_000_000_000))
    (blobs / "ffff.incomplete").touch()  # of another lock
    launch = program("ranks", "unix", "flock", "sleep", path, env=env)
    lock = lock_at(path, launch.pid)
    assert (lock.kind, lock.owner) == ("flock", "alive")
    assert lock.download_age_s > 1e8


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_told_who_holds_a_lock_by_its_inode(program, tmp_path):
    path = tmp_path / "weights.lock"
    launch = program("ranks", "unix", "flock", "flock", path)
    lock_at(path, launch.pid, lambda lock: lock.waiters)
    code = """
        import os, sys, msgspec
        from hangdoctor.collect import procfs, waits
        from hangdoctor.collect.look import Look
        waits.read(Look(roots={}))
        pid, user = map(int, sys.argv[1:])
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        look = Look(roots={pid: procfs.read_stat("/proc", pid).start_ticks})
        print(msgspec.json.encode(waits.read(look).locks).decode())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(launch.pid), str(restricted.NOBODY)],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    inode = path.stat().st_ino
    locks = msgspec.json.decode(done.stdout, type=tuple[FileLock, ...])
    (lock,) = [lock for lock in locks if lock.path.startswith(f"inode {inode} of device ")]
    assert lock.owner == "alive"
    assert {lock.holders[0].pid, *lock.waiters} == set(launch.said["ranks"])
