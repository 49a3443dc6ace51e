"""What is read of the weights: of real processes that hold files, on local and on slow storage."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from hangdoctor.collect import procfs, waits, weights
from hangdoctor.collect.look import Look
from hangdoctor.model import Checkpoint, HeldFile, Missing
from hangdoctor.waits import describe

PROGRAMS = Path(__file__).parent.parent / "programs"
SIZE = 4 << 20
needs_fuse = pytest.mark.skipif(
    not os.access("/dev/fuse", os.W_OK) or os.geteuid() != 0,
    reason="mounting takes root and /dev/fuse",
)


def checkpoint(directory, count=3, *, index=True):
    directory.mkdir(parents=True, exist_ok=True)
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    for name in names:
        (directory / name).write_bytes(os.urandom(SIZE))
    (directory / "optimizer.bin").write_bytes(b"not weights")
    if index:
        text = {"metadata": {"total_size": 99}, "weight_map": dict(zip("abc", names, strict=True))}
        (directory / "model.safetensors.index.json").write_text(json.dumps(text))
    return [directory / name for name in names]


def look(pid, model="", **more):
    return weights.read(Look(roots={pid: 0}, loaders=(pid,), model=str(model), **more))


def held(pid):
    (found,) = look(pid).held.values()
    return found


def test_offset_and_resident_pages_say_how_far_a_file_was_read(program, tmp_path):
    path = checkpoint(tmp_path / "m")[0]
    reader = program("read_weights", path, "read", SIZE // 4)
    (file,) = held(reader.pid)
    assert (file.path, file.size_bytes, file.resident_bytes) == (str(path), SIZE, None)
    assert SIZE // 4 <= file.position <= SIZE // 2
    mapper = program("read_weights", path, "map", SIZE // 4)
    (file,) = held(mapper.pid)
    assert not file.position
    assert SIZE // 4 <= file.resident_bytes < SIZE
    before = file.resident_bytes
    mapper.tell(str(SIZE))
    assert before < held(mapper.pid)[0].resident_bytes <= SIZE


def test_the_index_names_the_files_of_a_checkpoint(program, tmp_path):
    paths = checkpoint(tmp_path / "m")
    sleeper = program("sleep")
    found = look(sleeper.pid, tmp_path / "m", checkpoint=True).checkpoint
    assert isinstance(found, Checkpoint)
    assert [file.path for file in found.files] == [str(path) for path in paths]
    assert [file.size_bytes for file in found.files] == [SIZE] * 3
    assert found.index_bytes == 99
    assert found.mount.type


def test_without_an_index_the_first_kind_that_is_there_counts(program, tmp_path):
    checkpoint(tmp_path / "m", index=False)
    sleeper = program("sleep")
    found = look(sleeper.pid, tmp_path / "m", checkpoint=True).checkpoint
    assert len(found.files) == 3


def test_a_name_is_looked_up_in_the_hubs_cache_and_links_are_followed(program, tmp_path):
    repository = tmp_path / "hub" / "models--org--name"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (repository / "snapshots" / "aaa").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    blob = blobs / ("1f" * 32)
    blob.write_bytes(os.urandom(SIZE))
    (blobs / ("2e" * 32 + ".incomplete")).write_bytes(b"half")
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{blob.name}")
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub")}
    reader = program("read_weights", blob, "map", SIZE // 2, env=environment)
    found = look(reader.pid, "org/name", checkpoint=True)
    assert found.checkpoint.directory == str(snapshot)
    assert [file.path for file in found.checkpoint.files] == [str(blob)]
    assert [file.size_bytes for file in found.checkpoint.unfinished] == [4]
    assert [file.path for file in found.held[reader.pid]] == [str(blob)]
    # By what is held alone, too.
    assert look(reader.pid, "", checkpoint=True).checkpoint.directory == str(snapshot)


def test_a_launch_without_files_of_weights_has_none_to_look_for(program, tmp_path):
    sleeper = program("sleep")
    found = look(sleeper.pid, tmp_path, checkpoint=True)
    assert found.checkpoint.reason == "inapplicable"
    assert found.held == {sleeper.pid: ()}


def test_links_in_a_circle_end(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many"):
        weights.real_path("", f"{tmp_path}/a")


def test_a_process_that_has_ended_is_left_out():
    child = subprocess.Popen(["true"])
    child.wait()
    assert look(child.pid) == weights.Weights()


def test_damaged_indexes_are_passed_over(program, tmp_path):
    sleeper = program("sleep")
    paths = checkpoint(tmp_path / "m")
    index = tmp_path / "m" / "model.safetensors.index.json"
    for text in ("", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../x"}}', "\xff"):
        index.write_text(text, encoding="latin-1")
        found = look(sleeper.pid, tmp_path / "m", checkpoint=True).checkpoint
        assert len(found.files) == len(paths), text


@needs_fuse
def test_a_shard_that_stalls_is_in_state_d_as_a_slow_one_and_comes_no_further(tmp_path):
    checkpoint(tmp_path / "source", count=1, index=False)
    (tmp_path / "mount").mkdir()
    rate, fifo = tmp_path / "rate", tmp_path / "fifo"
    rate.write_text("4e5")
    os.mkfifo(fifo)
    served = subprocess.Popen(
        [
            *(sys.executable, PROGRAMS / "slow_files.py", tmp_path / "source", tmp_path / "mount"),
            *(rate, sys.executable, PROGRAMS / "read_weights.py", fifo),
            *(tmp_path / "mount" / "model-00001-of-00001.safetensors", "map", str(SIZE)),
        ],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )
    try:
        reader = _child_named(served.pid, "read_weights.py")
        slow = _until(reader, lambda file: file.resident_bytes > 500_000)
        assert _state(reader) in "DS"
        rate.write_text("0")
        still = [slow.resident_bytes, held(reader)[0].resident_bytes]
        while still[-1] != still[-2]:  # what was on its way
            select.select([], [], [], 0.3)
            still.append(held(reader)[0].resident_bytes)
        assert _state(reader) == "D"
        start = procfs.read_stat("/proc", reader).start_ticks
        main = waits.read(Look(roots={reader: start})).by_pid[reader].threads[0]
        assert (main.call, main.objects, "wait" in main.kernel) == ("page fault", (), True)
        assert describe(main, str, {}) == f"page fault ({main.kernel})"
        found = look(reader, "", checkpoint=True)
        assert found.held[reader][0].resident_bytes == still[-1]
        assert isinstance(found.checkpoint, Missing) or found.checkpoint.mount.type == "fuse.slow"
        rate.write_text("inf")
        assert _until(reader, lambda file: file.resident_bytes >= SIZE).resident_bytes == SIZE
    finally:
        os.killpg(served.pid, 9)
        served.wait()


def _until(pid, enough) -> HeldFile:
    while True:
        files = look(pid).held.get(pid)
        mapped = bool(files) and files[0].resident_bytes is not None
        if mapped and enough(files[0]):
            return files[0]
        select.select([], [], [], 0.02)


def _child_named(pid, name):
    while True:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if any(word.endswith(name.encode()) for word in words[1:2]):
                return int(child)
        os.sched_yield()


def _state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
