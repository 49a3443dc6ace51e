"""What is compared with what, and how two answers of a forward are: types, shapes, numbers."""

from __future__ import annotations

import math

import pytest
from variants import WHOLE

from hangdoctor.check import environment, subjects
from hangdoctor.check.running import TOLERANCE, compare
from hangdoctor.patches.files import apply


def tensor(*numbers, kind="torch.float32", shape=None):
    return {"type": kind, "shape": shape or [len(numbers)], "numbers": list(numbers)}


def output(**fields):
    return {"type": "LogitsProcessorOutput", "fields": fields}


@pytest.mark.parametrize(
    ("mine", "stock"),
    [
        (tensor(1.0, 2.0), tensor(1.0, 2.0)),
        (tensor(1e6), tensor(1e6 * (1 + TOLERANCE / 2))),
        (tensor(math.nan, math.inf), tensor(math.nan, math.inf)),
        (output(a=tensor(1.0)), output(a=tensor(1.0))),
        (tensor(), tensor()),
    ],
)
def test_what_is_the_same_or_near_enough_is_no_difference(mine, stock):
    assert list(compare(mine, stock)) == []


@pytest.mark.parametrize(
    ("mine", "stock", "said"),
    [
        (tensor(1.0, 2.1), tensor(1.0, 2.0), "it: 1 of 2 numbers differ, by up to 0.1"),
        (tensor(math.nan), tensor(1.0), "it: 1 of 1 numbers differ, by up to nan"),
        (tensor(math.inf), tensor(1.0), "it: 1 of 1 numbers differ, by up to inf"),
        (tensor(1.0, 2.0), tensor(1.0), "it is float32 [2] instead of float32 [1]"),
        (tensor(1.0, kind="torch.bfloat16"), tensor(1.0), "it is bfloat16 [1] instead of float32"),
        (
            {"type": "tuple", "parts": [tensor(1.0), tensor(1.0)]},
            tensor(1.0),
            "it is tuple of 2 instead of float32 [1]",
        ),
        (
            {"type": "tuple", "parts": [tensor(1.0)]},
            {"type": "tuple", "parts": [tensor(1.0), tensor(2.0)]},
            "it is tuple of 1 instead of tuple of 2",
        ),
        (
            {"type": "tuple", "parts": [tensor(1.0), tensor(3.0)]},
            {"type": "tuple", "parts": [tensor(1.0), tensor(2.0)]},
            "it[1]: 1 of 1 numbers differ, by up to 1",
        ),
        (output(a=tensor(1.0)), output(a=tensor(1.0), b=tensor(1.0)), "it lacks b"),
        (output(a=tensor(1.0), b=tensor(1.0)), output(a=tensor(1.0)), "it has a new b"),
        (output(a=tensor(2.0)), output(a=tensor(1.0)), "a: 1 of 1 numbers differ"),
        ({"type": "int", "text": "1"}, {"type": "int", "text": "2"}, "it is 1 instead of 2"),
    ],
)
def test_a_difference_is_said_with_its_size(mine, stock, said):
    found = list(compare(mine, stock))
    assert len(found) == 1
    assert found[0].startswith(said)


def test_where_a_patch_was_applied_stock_is_the_original_beside_it(tmp_path):
    models = tmp_path / "lib" / "python3.11" / "site-packages" / "sglang" / "srt" / "models"
    models.mkdir(parents=True)
    model = models / "deepseek_v2.py"
    model.write_text(WHOLE)
    apply("hs-dump-v1", model)
    assert model.read_text() != WHOLE
    world = environment.find(tmp_path)
    v1, v2 = subjects.shipped(world)
    assert v1.files[0].stock == v2.files[0].stock == WHOLE
    assert v1.files[0].text == model.read_text()
    mine = subjects.of_file(model, world)
    assert mine.files[0].stock == WHOLE
    assert mine.files == v1.files  # with the module that it imports
    assert world.originals == {environment.MODEL_FILE: WHOLE}
    model.write_text(WHOLE + "# mine\n")
    assert environment.find(tmp_path).originals == {}
