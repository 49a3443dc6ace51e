"""The hidden-state patches of SGLang's deepseek_v2.py, as transformations of its text.

Nothing here touches a file: the command `patch` reads and writes, the check compares.
"""

from __future__ import annotations

from pathlib import Path

from hangdoctor.errors import InputError, UsageError
from hangdoctor.model import Struct

COMPANION = "hangdoctor_hs_dump.py"
"""The dump module; the patched model file imports it, so it has to lie in the same folder."""


class PatchRefusedError(InputError):
    """A patch does not fit a text; the message names what was looked for and not found."""


class Patch(Struct, frozen=True):
    """A named patch of the model file.

    Attributes:
        name: as the command line takes it, and as its lines are marked.
        title: one line.
        explanation: what it adds, what it leaves alone and what follows, for `patch show`.
        left_alone: what a reader may fear that it changes, and it does not.
    """

    name: str
    title: str
    explanation: str
    left_alone: tuple[str, ...] = ()


class Addition(Struct, frozen=True):
    """Lines that a patch added.

    Attributes:
        where: the scope, such as "DeepseekV2Model.forward".
        line: number of its first line in the patched text, from 1.
        text: the lines, without their indentation.
    """

    where: str
    line: int
    text: str


class Patched(Struct, frozen=True):
    """A text with a patch in it.

    Attributes:
        name: of the patch.
        source: the whole text.
        already: the patch was there before, complete: the text is unchanged.
        added: its lines, in the text's order; also where they were there before.
        left_alone: what it does not touch.
        companions: further files, name and text, that have to lie beside the patched one.
    """

    name: str
    source: str
    already: bool
    added: tuple[Addition, ...]
    left_alone: tuple[str, ...]
    companions: tuple[tuple[str, str], ...]


V1 = Patch(
    name="hs-dump-v1",
    title="invasive: turns on SGLang's own capture for every forward",
    explanation="""\
In DeepseekV2ForCausalLM it sets capture_aux_hidden_states and, on the inner model,
layers_to_capture, so that SGLang's mechanism for EAGLE-3 returns the states of these layers.
Its forward hands them to the dump module.
The two are shared state: every forward mode returns a pair now, return_hidden_states gives rows
of another width, the logits processor concatenates on every batch, and with pipeline parallelism
the stages before the last return no pair, which ends their first forward with
"too many values to unpack".
Setting one of the two alone ends the first forward of every rank.""",
    left_alone=("DeepseekV2Model", "the layer loop", "the list of EntryClass"),
)
V2 = Patch(
    name="hs-dump-v2",
    title="leaves SGLang's own capture alone: copies states in the layer loop, for prefill only",
    explanation="""\
DeepseekV2Model gets an object _hs_dump, which is None unless SGLANG_HS_DUMP_DIR is set and this
rank is the one of its group that writes. In the layer loop it copies hidden_states + residual
before a chosen layer runs, after the final norm it hands over the batch; a thread writes the file.
It runs for forward mode EXTEND alone, and never while a graph is captured or compiled.
The other modes for which is_extend() is true are left out: MIXED has rows of requests that decode,
TARGET_VERIFY and DRAFT_EXTEND tokens that may be rejected, DLLM_EXTEND tokens still masked, and
SPLIT_PREFILL does not pass through this forward.""",
    left_alone=(
        "capture_aux_hidden_states",
        "layers_to_capture",
        "what forward returns",
        "DeepseekV2ForCausalLM",
    ),
)
PATCHES = (V1, V2)


def patch_named(name: str) -> Patch:
    """Return a patch by its name.

    Raises:
        UsageError: there is none of this name.
    """
    for patch in PATCHES:
        if patch.name == name:
            return patch
    raise UsageError(
        f"there is no patch {name!r}", hint=f"one of: {', '.join(p.name for p in PATCHES)}"
    )


def transform(name: str, source: str) -> Patched:
    """Return the text of a deepseek_v2.py with a patch in it; nothing is read from its release.

    The edit goes by structure, so that a release that only moves code takes it too. All anchors
    are looked for before anything is changed. A text that has the patch already comes back as it
    is, with `already` set. The patched text needs `companions` in its folder.

    Takes about 2 s on a real file, most of it for parsing.

    Raises:
        PatchRefusedError: no Python, no deepseek_v2.py, an anchor is missing, or another patch or a
            part of this one is there.
        UsageError: no patch has this name.
    """
    # LibCST takes 0.2 s to import: only what edits pays for it.
    from hangdoctor.patches import edits

    patch = patch_named(name)
    text, already = edits.apply(name, source)
    return Patched(
        name=name,
        source=text,
        already=already,
        added=tuple(Addition(*part) for part in edits.marked(name, text)),
        left_alone=patch.left_alone,
        companions=((COMPANION, companion_text()),),
    )


def companion_text() -> str:
    """Return the dump module's text, which is placed beside a patched model file."""
    return Path(__file__).with_name(COMPANION).read_text(encoding="utf-8")
