"""What a patch does to the text of a model file, and when it refuses."""

from __future__ import annotations

import difflib

import pytest
from models import STOCK

from hangdoctor.errors import UsageError
from hangdoctor.patches import COMPANION, PATCHES, PatchRefusedError, transform

NAMES = [patch.name for patch in PATCHES]


def added_lines(patched):
    diff = list(difflib.ndiff(STOCK.splitlines(), patched.splitlines()))
    assert not [line for line in diff if line.startswith("- ")]
    return [line[2:] for line in diff if line.startswith("+ ")]


@pytest.mark.parametrize("name", NAMES)
def test_a_patch_only_adds_lines_and_names_each(name):
    patched = transform(name, STOCK)
    compile(patched.source, "deepseek_v2.py", "exec")
    assert not patched.already
    lines = patched.source.splitlines()
    told = [line for added in patched.added for line in added.text.splitlines()]
    assert [line.strip().replace(f"  # {name}", "") for line in added_lines(patched.source)] == [
        line.strip() for line in told
    ]
    for added in patched.added:
        assert lines[added.line - 1].strip().startswith(added.text.splitlines()[0])
    assert [file for file, _ in patched.companions] == [COMPANION]


@pytest.mark.parametrize("name", NAMES)
def test_a_second_time_changes_nothing(name):
    once = transform(name, STOCK)
    twice = transform(name, once.source)
    assert twice.already
    assert (twice.source, twice.added) == (once.source, once.added)


def test_v2_leaves_the_shared_attributes_alone():
    text = transform("hs-dump-v2", STOCK).source
    for attribute in ("capture_aux_hidden_states", "layers_to_capture"):
        assert text.count(attribute) == STOCK.count(attribute)


def test_v2_copies_before_the_layer_and_hands_over_before_each_return():
    text = transform("hs-dump-v2", STOCK).source
    order = [
        "hs_batch = self._hs_dump.begin(",
        "for i in range",
        "hs_batch.capture(i, hidden_states, residual)",
        "layer = self.layers[i]",
        "hs_batch.finish(None)",
        "return PPProxyTensors",
        "self.norm(",
        "hs_batch.finish(hidden_states)",
        "return hidden_states\n",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_v1_sets_flag_and_list_together():
    text = transform("hs-dump-v1", STOCK).source
    block = text[text.index("if hs_dump_layers(config):") :]
    assert block.index("capture_aux_hidden_states = True") < block.index("layers_to_capture = ")


@pytest.mark.parametrize("name", NAMES)
def test_windows_line_ends_stay(name):
    text = transform(name, STOCK.replace("\n", "\r\n")).source
    assert text.count("\n") == text.count("\r\n")
    assert text.replace("\r\n", "\n") == transform(name, STOCK).source


@pytest.mark.parametrize(
    ("name", "old", "new", "anchor"),
    [
        ("hs-dump-v2", "hidden_states, residual = layer", "hidden_states, k = layer", "residual"),
        ("hs-dump-v2", "layer = self.layers[i]", "layer = self.layer_at(i)", "loop over the lay"),
        ("hs-dump-v2", "if not self.pp_group.is_last_rank:", "if self.middle:", "is_last_rank"),
        ("hs-dump-v2", "        return hidden_states, aux_hidden_states\n", "", "return"),
        ("hs-dump-v2", "positions, forward_batch, pp", "positions, batch, pp", "forward_batch"),
        ("hs-dump-v1", "self.capture_aux_hidden_states = False", "pass", "states = False"),
        ("hs-dump-v1", "hidden_states, aux_hidden_states = hid", "x = hid", "aux_hidden_states ="),
        ("hs-dump-v1", "import torch\n", "", "import torch"),
        ("hs-dump-v1", "from sglang.srt.utils import", "from x import", "import from sglang"),
    ],
)
def test_a_missing_anchor_is_named(name, old, new, anchor):
    assert old in STOCK
    with pytest.raises(PatchRefusedError, match=r"not found: .*" + anchor):
        transform(name, STOCK.replace(old, new, 1))


def test_an_anchor_that_is_there_twice_is_named():
    twice = STOCK.replace(
        "        self.capture_aux_hidden_states = False\n",
        "        self.capture_aux_hidden_states = False\n" * 2,
        1,
    )
    with pytest.raises(PatchRefusedError, match=r"once \(it is there 2 times\)"):
        transform("hs-dump-v1", twice)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print('no model')\n", "no deepseek_v2.py of SGLang: it has no class DeepseekV2ForCausal"),
        ("", "no deepseek_v2.py"),
        (STOCK + "def broken(:\n", "syntax error in line"),
        (STOCK + "\0", "syntax error"),
        (STOCK.replace("import torch\n", "import torch\nimport hs_dump\n"), "by something else"),
        (STOCK + 'D = os.environ["SGLANG_HS_DUMP_DIR"]\n', "by something else: line"),
        (
            STOCK.replace("_states = False", "_states = True"),
            "by something else: DeepseekV2ForCausalLM.__init__ sets capture_aux_hidden_states",
        ),
    ],
)
def test_what_is_no_stock_model_file_is_refused(name, text, said):
    with pytest.raises(PatchRefusedError, match=said):
        transform(name, text)


@pytest.mark.parametrize(("there", "wanted"), [NAMES, NAMES[::-1]])
def test_the_other_patch_in_it_is_refused_by_name(there, wanted):
    with pytest.raises(PatchRefusedError, match=f"{there} is in it"):
        transform(wanted, transform(there, STOCK).source)


@pytest.mark.parametrize("name", NAMES)
def test_a_part_of_the_patch_is_neither_taken_for_all_nor_completed(name):
    lines = transform(name, STOCK).source.splitlines(keepends=True)
    at = next(index for index, line in enumerate(lines) if line.rstrip().endswith(f"# {name}"))
    with pytest.raises(PatchRefusedError, match="not as this hangdoctor writes them"):
        transform(name, "".join(lines[:at] + lines[at + 1 :]))


def test_a_name_that_is_no_patch_lists_those_there_are():
    with pytest.raises(UsageError) as raised:
        transform("hs-dump-v3", STOCK)
    assert raised.value.hint == "one of: hs-dump-v1, hs-dump-v2"
