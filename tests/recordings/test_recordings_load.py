"""The recordings of real launches can be read, and hold what the tests of verdicts rest on."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from hangdoctor import recording
from hangdoctor.model import LogPosition, Processes, ProcessStacks, Stacks

HERE = Path(__file__).parent
CASES = sorted(path.parent for path in HERE.glob("*/cause.toml"))
LIMIT_BYTES = 300_000


class Cause(msgspec.Struct, forbid_unknown_fields=True):
    state: str
    phase: str
    culprits: tuple[str, ...]
    kind: str
    engine: str
    machine: str
    note: str
    stalled_since_s: float | None = None


def test_ten_recordings_were_converted_and_the_others_are_our_own():
    assert sum(not case.name.endswith("-live") for case in CASES) == 10


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request):
    return request.param


def test_steps_give_the_whole_log_back(case):
    loaded = recording.load(case)
    log = b"".join(block for _, blocks in loaded.steps() for block in blocks)
    assert log == (case / "server.log").read_bytes()


def test_time_and_log_position_only_grow(case):
    snapshots = recording.load(case).snapshots
    times = [snapshot.at_s for snapshot in snapshots]
    assert times == sorted(set(times))
    positions = [snapshot.log.read_bytes for snapshot in snapshots]
    assert positions == sorted(positions)
    assert all(isinstance(s.log, LogPosition) and s.log.silent_s >= 0 for s in snapshots)


def test_every_snapshot_has_the_tree_with_its_root_and_its_cards(case):
    for snapshot in recording.load(case).snapshots:
        assert isinstance(snapshot.processes, Processes)
        first = snapshot.processes.processes[0]
        assert (first.pid,) == snapshot.processes.roots
        assert "sglang.launch_server" in first.title
        assert case.name.startswith("cpu-") or snapshot.gpus.cards


def test_main_threads_come_first(case):
    for snapshot in recording.load(case).snapshots:
        for process in snapshot.processes.processes:
            assert process.threads[0].tid == process.pid
        if isinstance(snapshot.stacks, Stacks):
            for pid, stacks in snapshot.stacks.by_pid.items():
                if isinstance(stacks, ProcessStacks):
                    assert stacks.threads[0].tid == pid


def test_it_stays_small(case):
    assert sum(file.stat().st_size for file in case.iterdir()) < LIMIT_BYTES


def test_the_fault_is_not_named(case):
    loaded = recording.load(case)
    text = b"".join(msgspec.json.encode(snapshot) for snapshot in loaded.snapshots)
    text += (case / "server.log").read_bytes()
    for trace in (b"sitecustomize", b"_misbehave", b"_Hook", b"/root/.cache", b"\x00"):
        assert trace not in text


def test_the_ground_truth_is_there(case):
    cause = msgspec.toml.decode((case / "cause.toml").read_bytes(), type=Cause)
    snapshots = recording.load(case).snapshots
    titles = {process.title for s in snapshots for process in s.processes.processes}
    assert (cause.state != "ready") == bool(cause.culprits) == (cause.stalled_since_s is not None)
    for rank in cause.culprits:
        assert f"sglang::scheduler_{rank}" in titles
    if cause.stalled_since_s is not None:
        assert cause.stalled_since_s < snapshots[-1].at_s


def test_carriage_returns_of_bars_are_back():
    log = (HERE / "h200-tp2-good-warm" / "server.log").read_bytes()
    assert b"\n\rMulti-thread loading shards:   0% Completed | 0/55 " in log
    assert b"\n\n" not in log
