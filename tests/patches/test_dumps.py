"""What `patch verify-dumps` says of files that the dump module itself wrote, and of broken ones."""

from __future__ import annotations

import array
import json
import os
import struct
import subprocess
import sys

import pytest

from hangdoctor.patches import hangdoctor_hs_dump as module
from hangdoctor.patches.dumps import BLOCK_BYTES, read_dumps

WIDE = 4


def states(rows, kind="F32", value=1.5):
    if kind == "F32":
        return kind, [rows, WIDE], memoryview(array.array("f", [value] * rows * WIDE).tobytes())
    raw = struct.pack("<f", value)[2:]  # bfloat16: the upper half
    return kind, [rows, WIDE], memoryview(raw * rows * WIDE)


def write(folder, number=1, *, lengths=(3, 2), prefixes=(0, 0), parts=(), metadata=(), name=None):
    """Write one file as the dump module does, with parts and metadata changed."""
    rows = sum(lengths)
    positions = [p for at, n in zip(prefixes, lengths, strict=False) for p in range(at, at + n)]
    writer = name or "hs-dp0-pp0-77-abc"
    tensors = {
        "layer.1": states(rows), "layer.2": states(rows), "final": states(rows),
        "input_ids": module._raw_integers([5] * rows),
        "positions": module._raw_integers(positions),
        "seq_lens": module._raw_integers(list(lengths)),
        "prefix_lens": module._raw_integers(list(prefixes)),
    } | dict(parts)  # fmt: skip
    told = {
        "format": module.FORMAT, "writer": writer, "number": str(number),
        "written_at_s": f"{100 + number}.0", "hidden_size": str(WIDE), "is_last_stage": "1",
        "expected_layer_ids": "[1, 2]", "missing_layers": "{}", "dp_rank": "0", "pp_rank": "0",
        "attn_tp_rank": "0",
    } | dict(metadata)  # fmt: skip
    tensors = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    data = module._header(tensors, told) + b"".join(bytes(t[2]) for t in tensors.values())
    path = folder / f"{writer}-{number:08d}.safetensors"
    path.write_bytes(data)
    return path


def said(folder):
    dumps = read_dumps(folder)
    return [*dumps.wrong, *(text for file in dumps.files for text in file.wrong)]


def test_whole_files_are_all_right(tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 2, lengths=(7,), prefixes=(0,))
    dumps = read_dumps(tmp_path)
    assert dumps.all_right
    assert [(file.tokens, file.requests, file.layers, file.hidden, file.dtype) for file in
            dumps.files] == [(5, 2, (1, 2), WIDE, "F32"), (7, 1, (1, 2), WIDE, "F32")]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parts": {"layer.1": states(5, value=float("nan"))}}, "layer.1 has 20 numbers that are"),
        ({"parts": {"final": states(5, "BF16", float("inf"))}}, "final has 20 numbers that are Na"),
        ({"parts": {"layer.2": states(5, value=0.0)}}, "layer.2 is all zeros"),
        ({"parts": {"layer.2": states(4)}}, "layer.2 has shape [4, 4], not [5, 4]"),
        ({"parts": {"layer.2": None}}, "layer 2 is missing: no reason told"),
        ({"parts": {"layer.2": None}, "metadata": {"missing_layers": '{"2": "why"}'}}, "g: why"),
        ({"parts": {"final": None}}, "the final states are missing"),
        ({"parts": {"final": states(5, "BF16")}}, "several types: BF16, F32"),
        ({"parts": {"positions": module._raw_integers([9] * 5)}}, "positions of request 0 do not"),
        ({"parts": {"input_ids": module._raw_integers([9])}}, "input_ids has shape [1] for 5"),
        ({"parts": {"seq_lens": None}}, "seq_lens is missing"),
        ({"metadata": {"attn_tp_rank": "1"}}, "written by rank 1 of its group"),
        ({"metadata": {"format": "other"}}, "its format is other"),
        ({"number": 3}, "2 batches missing"),
    ],
)
def test_what_is_off_is_said(changes, words, tmp_path):
    write(tmp_path, **changes)
    found = said(tmp_path)
    assert any(words in text for text in found), found


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_file_that_is_cut_off_is_said(keep, tmp_path):
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    assert any("cut off" in text for text in said(tmp_path))


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 64,
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"null",
        (9).to_bytes(8, "little") + b'{"a": 12}',
        b"".join([(len(t := b'{"__metadata__": 3}')).to_bytes(8, "little"), t]),
    ],
)
def test_what_is_no_dump_is_said(data, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(data)
    assert said(tmp_path)


def test_links_and_fifos_are_not_opened(tmp_path):
    os.mkfifo(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").symlink_to("/etc/hostname")
    assert len(said(tmp_path)) == 2


def test_tokens_from_the_cache_are_a_note_and_two_ranks_are_wrong(tmp_path):
    write(tmp_path, 1, lengths=(3, 2), prefixes=(0, 64))
    dumps = read_dumps(tmp_path)
    assert dumps.all_right
    assert any("64 tokens before these" in text for text in dumps.files[0].doubts)
    write(tmp_path, 1, name="hs-dp0-pp0-78-abc")
    assert any("two ranks write for DP 0, PP 0" in text for text in read_dumps(tmp_path).wrong)


def test_two_starts_one_after_the_other_are_a_note(tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 1, name="hs-dp0-pp0-99-def", metadata={"written_at_s": "5000.0"})
    dumps = read_dumps(tmp_path)
    assert dumps.all_right
    assert any("two starts" in text for text in dumps.doubts)


def test_an_empty_folder_and_an_unfinished_file_are_off(tmp_path):
    assert any("no dumps" in text for text in said(tmp_path))
    write(tmp_path, 1)
    (tmp_path / "x.safetensors.tmp").write_bytes(b"1")
    assert any("1 file unfinished" in text for text in said(tmp_path))


def test_numbers_across_blocks_are_all_looked_at(tmp_path):
    rows = BLOCK_BYTES // (4 * WIDE) + 1
    values = array.array("f", [1.0] * rows * WIDE)
    values[0] = values[-1] = float("nan")
    big = "F32", [rows, WIDE], memoryview(values.tobytes())
    write(tmp_path, lengths=(rows,), prefixes=(0,),
          parts={"layer.1": big, "layer.2": None, "final": None},
          metadata={"expected_layer_ids": "[1]", "is_last_stage": "0"})  # fmt: skip
    assert said(tmp_path) == ["layer.1 has 2 numbers that are NaN or infinite"]


def test_the_command_ends_with_0_1_and_2(tmp_path):
    def verify(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "hangdoctor", "patch", "verify-dumps", *map(str, arguments)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    write(tmp_path, 1)
    done = verify(tmp_path)
    assert (done.returncode, done.stdout.splitlines()[0]) == (
        0, f"ALL RIGHT: 1 files in {tmp_path}",
    )  # fmt: skip
    write(tmp_path, 3)
    done = verify(tmp_path, "--format=json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["all_right"]) == (1, False)
    assert verify(tmp_path / "none").returncode == 2


class Indices:
    def tolist(self):
        return [3]


def test_the_first_batch_of_a_writer_is_neither_lost_nor_called_slow(tmp_path):
    writer = module.Writer(str(tmp_path / "new"), "hs-dp0-pp0-1-a")
    writer.put({}, {"format": module.FORMAT}, ([2], [0], Indices()), None)
    path = tmp_path / "new" / "hs-dp0-pp0-1-a-00000001.safetensors"
    while not path.exists():
        os.sched_yield()
    assert writer._said == set()
    (file,) = read_dumps(path.parent).files
    assert (file.tokens, file.requests) == (2, 1)
