from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time

import pytest

from hangdoctor.errors import InputError
from hangdoctor.logs.follow import Follower, Listener
from hangdoctor.model import LogPosition, Missing
from hangdoctor.recording import LOG_BLOCK_BYTES


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "server.log"
    path.write_bytes(b"one\n")
    return path


def test_a_file_is_read_from_its_start_and_then_where_it_grows(log):
    follower = Follower(log)
    assert follower.read() == b"one\n"
    assert follower.read() == b""
    with log.open("ab") as file:
        file.write(b"two\n")
    assert follower.read() == b"two\n"
    assert follower.position().read_bytes == 8
    follower.close()


def test_a_long_file_comes_in_blocks_of_bounded_size(log):
    log.write_bytes(b"x" * (2 * LOG_BLOCK_BYTES + 5))
    sizes = [len(block) for block in Follower(log).read_all()]
    assert sizes == [LOG_BLOCK_BYTES, LOG_BLOCK_BYTES, 5]


def test_a_rotated_log_is_read_to_its_end_and_then_its_successor_from_its_start(log):
    follower = Follower(log)
    follower.read()
    with log.open("ab") as file:
        file.write(b"last words\n")
    log.rename(log.with_suffix(".1"))
    assert follower.read() == b"last words\n"
    assert follower.read() == b""
    log.write_bytes(b"new\n")
    assert follower.read() == b"new\n"
    assert follower.position().read_bytes == len(b"one\nlast words\nnew\n")


def test_a_truncated_log_is_read_from_its_new_start(log):
    log.write_bytes(b"a long first line\n")
    follower = Follower(log)
    follower.read()
    with log.open("r+b") as file:
        file.truncate(0)
        file.write(b"short\n")
    assert follower.read() == b"short\n"


def test_a_deleted_log_is_read_on_through_the_descriptor_of_its_writer(log):
    with log.open("ab", buffering=0) as writer:
        follower = Follower(f"/proc/{os.getpid()}/fd/{writer.fileno()}")
        assert follower.read() == b"one\n"
        log.unlink()
        writer.write(b"two\n")
        assert follower.read() == b"two\n"


def test_silence_is_told_by_the_files_time_stamp(log):
    os.utime(log, (time.time() - 3600, time.time() - 3600))
    assert 3590 < Follower(log).position().silent_s < 3700


def test_the_pipe_of_somebody_else_is_refused_and_loses_nothing():
    read_end, write_end = os.pipe()
    os.write(write_end, b"line\n")
    with pytest.raises(InputError, match="take lines away"):
        Follower(f"/proc/{os.getpid()}/fd/{read_end}")
    assert os.read(read_end, 100) == b"line\n"
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize("source", ["/nonexistent/server.log", "/dev/null", "/"])
def test_what_is_no_log_is_one_clear_error(source):
    with pytest.raises(InputError, match="log"):
        Follower(source)


def test_a_fifo_without_a_writer_does_not_block_and_is_not_ended(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    follower = Follower(fifo)
    assert follower.read() == b""
    assert not follower.position().ended
    assert follower.position().silent_s is None
    writer = os.open(fifo, os.O_WRONLY)
    os.write(writer, b"line\n")
    assert follower.read() == b"line\n"
    os.close(writer)
    follower.close()


def test_stdin_is_read_without_waiting_and_ends_with_its_writer():
    program = """
import sys
from hangdoctor.logs.follow import Follower, Listener
from hangdoctor.model import LogPosition, Missing
follower = Follower("-")
print(follower.read(), follower.position().ended, flush=True)
for step in sys.argv[1:]:
    open(step).read()
    print(follower.read(), follower.position().ended, flush=True)
"""
    pairs = [os.pipe() for _ in range(2)]
    steps = [f"/dev/fd/{read_end}" for read_end, _ in pairs]
    with subprocess.Popen(
        [sys.executable, "-c", program, *steps],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[read_end for read_end, _ in pairs],
    ) as process:
        assert process.stdout.readline() == b"b'' False\n"
        process.stdin.write(b"line\n")
        process.stdin.flush()
        os.close(pairs[0][1])
        assert process.stdout.readline() == b"b'line\\n' False\n"
        process.stdin.close()
        os.close(pairs[1][1])
        assert process.stdout.readline() == b"b'' True\n"
    for read_end, _ in pairs:
        os.close(read_end)


class Storage:
    """Storage that stalls while it is told to: the kernel's side of a log on a dead server."""

    def __init__(self, monkeypatch):
        self.well = threading.Event()
        self.well.set()
        self.asked = 0
        for name in ("pread", "fstat"):
            monkeypatch.setattr(
                f"hangdoctor.logs.follow.os.{name}", self.stalling(getattr(os, name))
            )

    def stalling(self, call):
        def stalled(*arguments):
            self.asked += 1
            self.well.wait()
            return call(*arguments)

        return stalled


@pytest.fixture
def storage(monkeypatch):
    one = Storage(monkeypatch)
    yield one
    one.well.set()


def until_read(listener):
    """Wait for the read that is under way, as the time between two looks does."""
    listener._thread.join(60)
    return b"".join(listener.read_all())


def test_a_log_on_stalled_storage_is_missing_and_nothing_is_lost_when_it_comes_back(log, storage):
    listener = Listener(log, within_s=0.05)
    assert b"".join(listener.read_all()) == b"one\n"
    with log.open("ab") as file:
        file.write(b"two\n")
    storage.well.clear()
    assert list(listener.read_all()) == []
    assert listener.position().reason == "timeout"
    asked = storage.asked
    assert list(listener.read_all()) == []
    assert storage.asked == asked  # not a second one beside the first
    storage.well.set()
    assert until_read(listener) == b"two\n"
    assert listener.position().read_bytes == 8
    listener.close()


def test_a_log_whose_storage_is_stalled_from_the_start_is_read_once_it_is_not(log, storage):
    storage.well.clear()
    listener = Listener(log, within_s=0.05)
    assert list(listener.read_all()) == []
    assert isinstance(listener.position(), Missing)
    listener.close()  # the read that is under way still has it
    storage.well.set()
    until_read(listener)
    assert b"".join(listener.read_all()) in (b"", b"one\n")
    assert listener.position().read_bytes == 4
    listener.close()


def test_a_rotation_to_what_cannot_be_opened_is_missing_for_that_look_only(log):
    listener = Listener(log)
    assert list(listener.read_all()) == [b"one\n"]
    log.rename(log.with_suffix(".1"))
    log.write_bytes(b"new\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        assert list(listener.read_all()) == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert listener.position().reason == "failed"
    assert "Too many open files" in listener.position().detail
    assert list(listener.read_all()) == [b"new\n"]
    assert isinstance(listener.position(), LogPosition)
    listener.close()


def test_what_is_no_log_is_the_same_error_for_a_listener():
    with pytest.raises(InputError, match="neither a file nor a pipe"):
        Listener("/dev/null")
