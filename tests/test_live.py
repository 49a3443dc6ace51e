"""What is kept of a launch under observation, whatever becomes of its log and of the watching."""

from __future__ import annotations

import os
import time

import msgspec
import pytest

from hangdoctor import engines
from hangdoctor.live import Live
from hangdoctor.model import (
    FlightRecorder,
    FlightRecorderDump,
    Header,
    Installation,
    LogPosition,
    LogSource,
    Missing,
)
from hangdoctor.recording import Recorder, load

SGLANG = engines.load("sglang")


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "the.log"
    path.write_bytes(b"one\n")
    return path


def append(log, line):
    with log.open("ab") as file:
        file.write(line)


def live_of(program, log, record):
    target = program("sleep")
    header = Header(engine="sglang", log=LogSource(origin=str(log)))
    return Live([target.pid], SGLANG, header, log=log, record=record)


def test_dumps_that_the_user_names_are_kept_beside_what_was_seen(program, log, tmp_path):
    recorder = FlightRecorder(dumps={0: FlightRecorderDump(rank=0, file="trace_0")})
    with live_of(program, log, tmp_path / "recording") as live:
        live.look()
        live.add_dumps(recorder)
    recording = load(tmp_path / "recording")
    assert [each.flight_recorder for each in recording.snapshots] == [None, recorder]
    assert b"".join(b"".join(blocks) for _, blocks in recording.steps()) == b"one\n"


def test_a_log_is_as_old_as_at_the_beginning_of_the_look(program, log, tmp_path, monkeypatch):
    """A driver that does not answer makes a look last for 5 s, and the launch is younger then."""
    with live_of(program, log, tmp_path / "recording") as live:
        take = live._observer.take

        def late(*arguments, **options):
            snapshot = take(*arguments, **options)
            live._began_s -= 60  # as if it had taken so long
            os.utime(log, (time.time() - 50, time.time() - 50))
            return snapshot

        monkeypatch.setattr(live._observer, "take", late)
        assert live.look().log_silent_s == 0
        os.utime(log, (time.time() - 90, time.time() - 90))
        monkeypatch.setattr(live._observer, "take", take)
        assert live.look().log_silent_s > 80


def test_a_log_that_fails_in_the_middle_is_missing_in_that_snapshot_and_read_on_later(
    program, log, tmp_path, monkeypatch
):
    def fail(*_):
        raise OSError(116, "Stale file handle")

    with live_of(program, log, tmp_path / "recording") as live:
        live.look()
        append(log, b"two\n")
        with monkeypatch.context() as patch:
            patch.setattr("hangdoctor.logs.follow.os.fstat", fail)
            facts = live.look()
        assert facts.sections["log"].reason == "failed"
        assert "Stale file handle" in facts.sections["log"].detail
        facts = live.look()
        assert facts.sections["log"] is None
    recording = load(tmp_path / "recording")
    assert [
        each.log.read_bytes if isinstance(each.log, LogPosition) else None
        for each in recording.snapshots
    ] == [4, None, 8]
    heard = [b"".join(blocks) for _, blocks in recording.steps()]
    assert heard == [b"one\n", b"", b"two\n"]


def test_a_ctrl_c_while_a_snapshot_is_written_writes_nothing_twice(
    program, log, tmp_path, monkeypatch
):
    add = Recorder.add

    def interrupted(self, snapshot, written=b""):
        add(self, snapshot, written)
        monkeypatch.undo()
        raise KeyboardInterrupt

    with live_of(program, log, tmp_path / "recording") as live:
        live.look()
        append(log, b"two\n")
        live.look()
        monkeypatch.setattr(Recorder, "add", interrupted)
        append(log, b"three\n")
        with pytest.raises(KeyboardInterrupt):
            live.look()
    recording = load(tmp_path / "recording")
    lines = [msgspec.json.encode(each) for each in recording.snapshots]
    assert len(lines) == len(set(lines)) == 2
    assert recording.log_path.read_bytes() == b"one\ntwo\n"


@pytest.fixture
def launch(program, tmp_path):
    """Return a launch with one rank, and the package that it would import, not yet there."""
    site = tmp_path / "site"
    target = program(
        "launch_server", "sglang::scheduler_TP0", env=os.environ | {"PYTHONPATH": str(site)}
    )
    return target, site / "sglang"


def live_on(target):
    none = Missing(reason="not-tried")
    return Live([target.pid], SGLANG, Header(engine="sglang"), log=none)


def test_an_installation_that_was_not_found_is_looked_for_again_and_once_more_at_the_end(
    launch, monkeypatch
):
    target, package = launch
    monkeypatch.setattr("hangdoctor.live.SEARCH_AGAIN_S", 0.0)
    monkeypatch.setattr("hangdoctor.live.FRESH_S", 0.0)
    with live_on(target) as live:
        live.look()
        assert live.finish().header.installation.reason == "failed"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "version.py").write_text("__version__ = '1.2.3'")
        live.look()
        found = live.finish().header.installation
        assert (found.path, found.version) == (str(package), "1.2.3")
        (package / "patched.py").write_text("")
        os.utime(package / "patched.py", (4_000_000_000, 4_000_000_000))
        (changed,) = live.finish().header.installation.changed_files
        assert changed.path == "sglang/patched.py"
        target.process.kill()
        for pid in target.said["children"]:
            os.kill(pid, 9)
        target.process.wait()
        live.look()
        assert live.finish().header.installation.changed_files == (changed,)


def test_one_that_was_found_is_not_looked_for_again_soon(launch):
    target, package = launch
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    with live_on(target) as live:
        live.look()
        assert isinstance(live.finish().header.installation, Installation)
        searched = live._searching
        live.look()
        live.finish()
        assert live._searching is searched


def test_without_a_rank_and_a_frame_of_the_package_nothing_is_searched(program):
    with live_on(program("sleep")) as live:
        live.look()
        assert live.finish().header.installation is None


def test_after_a_ctrl_c_nobody_waits_for_the_search(launch):
    target, package = launch
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    stalled = package / "_version.py"
    os.mkfifo(stalled)
    with live_on(target) as live:
        live.look()
        assert live.finish(wait=False).header.installation is None
        os.close(os.open(stalled, os.O_RDWR))
        stalled.unlink()
