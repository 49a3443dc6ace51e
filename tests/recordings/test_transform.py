"""The changes that metamorphic tests make to recordings change what they say they change."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import transform

from hangdoctor import recording
from hangdoctor.model import Missing

HERE = Path(__file__).parent
CASES = sorted(path.parent for path in HERE.glob("*/cause.toml"))
SWAP = {"TP0": "TP1", "TP1": "TP0"}


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def loaded(request):
    return recording.load(request.param)


@pytest.fixture
def hung():
    return recording.load(HERE / "h200-tp2-load-sleep-r1")


def pieces(a_recording):
    return [b"".join(blocks) for _, blocks in a_recording.steps()]


def titles(snapshot):
    return [process.title for process in snapshot.processes.processes]


def test_every_log_stays_whole_and_in_place(loaded, tmp_path):
    for number, changed in enumerate(
        (
            transform.permute_ranks(loaded, SWAP, tmp_path / "a"),
            transform.rename_fault(loaded, tmp_path / "b"),
            transform.scale_time(loaded, 3, tmp_path / "c"),
        )
    ):
        assert b"".join(pieces(changed)) == changed.log_path.read_bytes(), number
        for old, new in zip(pieces(loaded), pieces(changed), strict=True):
            assert old.count(b"\n") == new.count(b"\n")
            assert old.endswith(b"\n") == new.endswith(b"\n")


def test_permuting_twice_gives_the_first_back(loaded, tmp_path):
    there = transform.permute_ranks(loaded, SWAP, tmp_path / "there")
    back = transform.permute_ranks(there, SWAP, tmp_path / "back")
    assert back.snapshots == loaded.snapshots
    assert back.log_path.read_bytes() == loaded.log_path.read_bytes()


def test_permuted_ranks_swap_titles_prefixes_and_cards(hung, tmp_path):
    swapped = transform.permute_ranks(hung, SWAP, tmp_path)
    before, after = hung.snapshots[-1], swapped.snapshots[-1]
    assert [SWAP.get(t[-3:], t[-3:]) for t in titles(before)] == [t[-3:] for t in titles(after)]
    assert before.gpus.cards[0].power_w == after.gpus.cards[1].power_w
    assert b" TP1] Load weight end." in swapped.log_path.read_bytes()
    assert b" TP0] Load weight end." not in swapped.log_path.read_bytes()


def test_multiplied_ranks_have_process_stacks_lines_and_card(hung, tmp_path):
    names = [f"TP{number}" for number in range(2, 8)]
    eight = transform.multiply_rank(hung, "TP0", names, tmp_path)
    assert b"".join(pieces(eight)) == eight.log_path.read_bytes()
    log = eight.log_path.read_bytes()
    assert b"tp_size=8," in log
    for name in ("TP0", *names):
        assert log.count(f" {name}] Load weight end.".encode()) == 1
        assert f"sglang::scheduler_{name}" in titles(eight.snapshots[-1])
    assert sorted(eight.snapshots[-1].gpus.cards) == list(range(8))
    last = [snapshot.stacks for snapshot in eight.snapshots if snapshot.stacks][-1]
    processes = eight.snapshots[-1].processes.processes
    ranks = [process for process in processes if process.title.startswith("sglang::scheduler")]
    assert len({process.pid for process in ranks}) == 8
    assert all(last.by_pid[rank.pid].threads[0].tid == rank.pid for rank in ranks)


def test_renamed_recordings_hold_no_old_name(loaded, tmp_path):
    renamed = transform.rename_fault(loaded, tmp_path)
    text = renamed.log_path.read_bytes() + msgspec.json.encode(renamed.header)
    text += b"".join(msgspec.json.encode(snapshot) for snapshot in renamed.snapshots)
    for name in transform.RENAMED:
        assert name.encode() not in text
    for old, new in zip(loaded.snapshots, renamed.snapshots, strict=True):
        assert new.processes.roots[0] == old.processes.roots[0] + transform.PID_SHIFT
        assert new.processes.processes[0].pid == new.processes.roots[0]


def test_scaled_time_keeps_counters(loaded, tmp_path):
    scaled = transform.scale_time(loaded, 3, tmp_path)
    old, new = loaded.snapshots[-1], scaled.snapshots[-1]
    assert new.at_s == pytest.approx(3 * old.at_s)
    assert new.log.silent_s == pytest.approx(3 * old.log.silent_s)
    assert new.processes.processes[0].io == old.processes.processes[0].io
    began = loaded.header.created_wall_s
    assert new.wall_s - began == pytest.approx(3 * (old.wall_s - began), abs=0.01)


def test_a_dropped_section_is_missing_where_it_was_seen(loaded):
    without = transform.drop_section(loaded, "stacks")
    for old, new in zip(loaded.snapshots, without.snapshots, strict=True):
        assert isinstance(new.stacks, Missing) == (old.stacks is not None)


def test_a_dropped_snapshot_leaves_its_lines_to_the_next(hung):
    shorter = transform.drop_snapshot(hung, 5)
    assert len(shorter.snapshots) == len(hung.snapshots) - 1
    assert b"".join(pieces(shorter)) == b"".join(pieces(hung))


def test_a_log_without_its_head_says_so(hung, tmp_path):
    cut = transform.cut_log_head(hung, 10_000, tmp_path)
    assert not cut.header.log.from_start
    assert b"".join(pieces(cut)) == hung.log_path.read_bytes()[10_000:]


def test_a_prefix_knows_nothing_of_what_comes_later(hung, tmp_path):
    first = transform.prefix(hung, 20, tmp_path)
    assert first.snapshots == hung.snapshots[:20]
    assert first.log_path.read_bytes() == b"".join(pieces(hung)[:20])
