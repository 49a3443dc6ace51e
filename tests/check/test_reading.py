from __future__ import annotations

import pytest
from variants import BREAKS, HANGS, HEALTHY, INVASIVE, PATH, STOCK, WHOLE, patched

from hangdoctor import patches
from hangdoctor.check.environment import read_text
from hangdoctor.check.model import PatchedFile, Place, Same, Subject
from hangdoctor.check.reading import read
from hangdoctor.check.verdict import judge
from hangdoctor.errors import InputError


def verdict(text, stock=STOCK, companions=()):
    files = (PatchedFile(path=PATH, stock=stock, text=text),)
    files += tuple(
        PatchedFile(path=f"sglang/srt/models/{name}", stock=None, text=body)
        for name, body in companions
    )
    subject = Subject(name="mine", title="", files=files)
    return judge(subject, read(subject, None))


@pytest.mark.parametrize("name", HANGS)
def test_ranks_that_do_not_meet_would_hang(name):
    found = verdict(patched(**HANGS[name]))
    assert found.kind == "hangs", found
    assert found.places


@pytest.mark.parametrize("name", BREAKS)
def test_what_raises_in_a_forward_or_a_capture_breaks(name):
    found = verdict(patched(**BREAKS[name]))
    assert found.kind == "breaks", found
    assert found.places


@pytest.mark.parametrize("name", INVASIVE)
def test_what_stock_code_sees_is_invasive(name):
    assert verdict(patched(**INVASIVE[name])).kind == "invasive"


@pytest.mark.parametrize("name", HEALTHY)
def test_a_near_miss_is_no_difference(name):
    assert verdict(patched(**HEALTHY[name])).kind == "no-difference"


def test_the_decisive_line_is_that_of_the_collective():
    text = patched(**HANGS["rank-compared"])
    line = next(
        number
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() == "tensor_model_parallel_all_gather(hidden_states, dim=0)"
    )
    found = verdict(text)
    assert found.places[0] == Place(file=PATH, line=line)
    assert found.ranks == ("TP0",)


@pytest.mark.parametrize("name", ["environment-rank", "every-ten-seconds", "file-exists"])
def test_what_may_differ_between_ranks_may_hang(name):
    # The engine's own launcher sets no LOCAL_RANK: under it every rank takes the same way.
    assert verdict(patched(**HANGS[name])).title.startswith("may hang")


def test_a_function_that_nothing_calls_is_said_to_be_so():
    found = verdict(
        patched(
            method=HANGS["early-return-in-a-method"]["method"],
            top="import torch.distributed as dist",
        )
    )
    assert found.title.startswith("may hang")
    assert "nothing in this file calls" in found.title


@pytest.mark.parametrize(
    ("patch", "kind"), [("hs-dump-v1", "invasive"), ("hs-dump-v2", "no-difference")]
)
def test_the_shipped_patches_are_what_they_are(patch, kind):
    made = patches.transform(patch, WHOLE)
    assert verdict(made.source, WHOLE, made.companions).kind == kind


def test_v2_works_in_extend_on_one_rank_alone():
    made = patches.transform("hs-dump-v2", WHOLE)
    files = (
        PatchedFile(path=PATH, stock=WHOLE, text=made.source),
        *(
            PatchedFile(path=f"sglang/srt/models/{name}", stock=None, text=body)
            for name, body in made.companions
        ),
    )
    # In a mixed batch it only says, once, that it does not dump it.
    cells = read(Subject(name="v2", title="", files=files), None)
    assert cells["forward-modes"] == Same(note="new code in EXTEND, MIXED: TP0 alone")


def test_stock_itself_and_stock_laid_out_anew_are_no_difference():
    assert verdict(STOCK).kind == "no-difference"
    assert verdict(STOCK.replace("\n\n\n", "\n\n").replace('"', "'")).kind == "no-difference"


def test_an_import_of_what_this_release_does_not_have_breaks(tmp_path):
    model = tmp_path / PATH
    model.parent.mkdir(parents=True)
    model.write_text(STOCK)
    (model.parent / "there.py").touch()
    kinds = {}
    for name in ("there", "nowhere"):
        text = patched(top=f"from sglang.srt.models.{name} import something\n")
        files = (PatchedFile(path=PATH, stock=STOCK, text=text),)
        subject = Subject(name="mine", title="", files=files)
        kinds[name] = judge(subject, read(subject, tmp_path / "sglang")).kind
    assert kinds == {"there": "no-difference", "nowhere": "breaks"}


@pytest.mark.parametrize("text", ["", "import os\n", "def helper(x):\n    return x.cpu()\n"])
def test_a_file_that_is_no_model_and_has_no_stock_is_not_checked(text):
    assert verdict(text, stock=None).kind == "unchecked"


@pytest.mark.parametrize(
    "text",
    ["def f(:\n", "a = \0", "-" * 1_000_000 + "1", "(" * 100_000, "x" + ".a" * 200_000],
)
def test_a_file_that_is_no_python_is_one_line(text):
    with pytest.raises(InputError) as refused:
        verdict(text)
    assert "\n" not in str(refused.value)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    path = tmp_path / "qwen2_classification.py"  # SGLang's own has one
    path.write_bytes(b"\xef\xbb\xbfimport os\r\n")
    assert read_text(path) == "import os\n"


def test_stock_read_without_a_stock_of_its_own_breaks_nothing():
    assert verdict(STOCK, None).kind != "breaks"
