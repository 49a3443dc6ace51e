"""A patched model's forward beside stock's, in real SGLang's classes: what each comes to."""

from __future__ import annotations

import re

from sglang_patches import PATCHES

from hangdoctor.check import environment, subjects
from hangdoctor.check.model import PatchedFile, Subject
from hangdoctor.check.running import KEYS, run_all
from hangdoctor.check.verdict import judge, weighed

LAYER = "                layer = self.layers[i]\n"
ODD = """\
                hidden_states = hidden_states * (1.001 if i == 2 else 1)
                if i == 2 and forward_batch.forward_mode.is_decode():
                    os.mkfifo("stuck.fifo")
                    open("stuck.fifo", "wb")
"""


def of(name, world, change):
    stock = (world.packages / environment.MODEL_FILE).read_text()
    file = PatchedFile(path=environment.MODEL_FILE, stock=stock, text=change(stock))
    return Subject(name=name, title=name, files=(file,))


def test_running_comes_to_what_real_launches_showed(sglang_environment, monkeypatch):
    monkeypatch.setenv("HANGDOCTOR_FORWARD_LIMIT_S", "10")
    world = environment.find(sglang_environment.root)
    before = (world.packages / environment.MODEL_FILE).read_bytes()
    columns = (
        subjects.STOCK,
        *subjects.shipped(world),
        of("flag", world, PATCHES["v1-flag"]),
        of("lost", world, lambda stock: stock + "\nfrom sglang.srt.models.nowhere import it\n"),
        of("odd", world, lambda stock: stock.replace(LAYER, ODD + LAYER)),
    )
    cells = run_all(columns, world, say=lambda _: None)
    assert (world.packages / environment.MODEL_FILE).read_bytes() == before

    def said(name, key):
        cell = cells[name][key]
        return [one.how for one in getattr(cell, "differences", ())]

    kinds = {one.name: judge(one, cells[one.name]).kind for one in columns}
    assert kinds == {
        "stock": "no-difference", "v1": "invasive", "v2": "no-difference",
        "flag": "breaks", "lost": "breaks", "odd": "hangs",
    }  # fmt: skip
    assert set(cells["v2"]) == set(KEYS)
    assert not any(said("v2", key) for key in KEYS)

    # v1: states get wider, and the first stage of a pipeline cannot unpack what it is given.
    assert "hidden_states is float32 [8, 192] instead of float32 [8, 64]" in said(
        "v1", "run-hidden"
    )
    (first,) = cells["v1"]["run-pp-first"].differences
    assert first.how.endswith("ValueError: too many values to unpack (expected 2)")
    assert (first.only_with, weighed(first)) == ("pipeline parallelism", "invasive")
    text = columns[1].files[0].text.splitlines()
    assert "hidden_states, aux_hidden_states = hidden_states" in text[first.places[0].line - 1]

    # Half of it: an exception in the first forward.
    (half,) = cells["flag"]["run-extend"].differences
    assert "too many values to unpack" in half.how

    # A file that cannot be imported is not blamed for what SGLang runs in its place.
    assert {said("lost", key)[0][:44] for key in KEYS} == {
        "it cannot be imported, and SGLang goes on wi"
    }

    # A forward that does not come back is named with the line where it stands.
    (stuck,) = cells["odd"]["run-decode"].differences
    assert (stuck.effect, stuck.phase) == ("hangs", "warmup")
    assert stuck.places[0].file == environment.MODEL_FILE
    text = columns[5].files[0].text.splitlines()
    assert 'open("stuck.fifo"' in text[stuck.places[0].line - 1]
    assert "did not come back" in cells["odd"]["run-hidden"].why

    # Other numbers in the same types.
    assert re.match(r"next_token_logits: \d+ of 640 numbers differ", said("odd", "run-extend")[0])


def test_where_nothing_can_be_run_no_cell_says_anything_of_it(tmp_path):
    packages = tmp_path / "lib" / "python3.11" / "site-packages" / "sglang" / "srt" / "models"
    packages.mkdir(parents=True)
    (packages / "deepseek_v2.py").write_text("x = 1\n")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 'no torch here' >&2\nexit 1\n")
    python.chmod(0o755)
    world = environment.find(tmp_path)
    mine = of("mine", world, lambda stock: stock + "y = 2\n")
    cells = run_all((subjects.STOCK, mine), world, say=lambda _: None)
    for name in ("stock", "mine"):
        whys = {cell.why for cell in cells[name].values()}
        assert len(whys) == 1
        assert whys.pop().endswith("the forward cannot be run here: it ended with 1: no torch here")
