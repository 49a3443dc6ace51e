"""Variants of SGLang 0.5.9's deepseek_v2.py, good and bad, made by inserting a few lines.

All of them act only where SGLANG_HS_DUMP_DIR is set, as hooks that dump hidden states do.
"""

from __future__ import annotations

from hangdoctor.patches import transform

RELATIVE_PATH = "sglang/srt/models/deepseek_v2.py"

_ON = 'os.environ.get("SGLANG_HS_DUMP_DIR")'
_FLAG = "        self.capture_aux_hidden_states = False\n"
_LAYER_END = """\
                    gemm_output_zero_allocator,
                    llama_4_scaling,
                )
"""
_WORLD_SIZE_IMPORT = "    get_tensor_model_parallel_world_size,\n"
_RANK_IMPORT = "    get_tensor_model_parallel_rank,\n" + _WORLD_SIZE_IMPORT

_ALL_GATHER = """\
                    tensor_model_parallel_all_gather(hidden_states, dim=0)
"""
_OPEN_FIFO = """\
                    fifo = os.path.join(os.environ["SGLANG_HS_DUMP_DIR"], "stuck.fifo")
                    if not os.path.exists(fifo):
                        os.mkfifo(fifo)
                    open(fifo, "wb")
"""


def v1(stock: str) -> str:
    """Set the flag and the list of layers: the invasive patch, complete."""
    return _insert(
        stock,
        _FLAG,
        f"        if {_ON}:\n"
        "            self.capture_aux_hidden_states = True\n"
        "            self.model.layers_to_capture = [1, 2]\n",
    )


def v1_flag(stock: str) -> str:
    """Set the flag without a list: the first forward fails to unpack what the layers return."""
    return _insert(
        stock, _FLAG, f"        if {_ON}:\n            self.capture_aux_hidden_states = True\n"
    )


def hang_collective(stock: str) -> str:
    """Let TP0 alone run one more all_gather in its layers: the ranks' collectives diverge."""
    return _on_rank_0_after_layer_2(stock, _ALL_GATHER)


def hang_io(stock: str) -> str:
    """Let TP0 alone open a FIFO that nobody reads: the others wait in the next all_reduce."""
    return _on_rank_0_after_layer_2(stock, _OPEN_FIFO)


def hs_dump_v1(stock: str) -> str:
    """Apply the patch that the tool ships: flag and list, and a file a batch."""
    return transform("hs-dump-v1", stock).source


def hs_dump_v2(stock: str) -> str:
    """Apply the patch that the tool ships: copies in the layer loop, and a file a batch."""
    return transform("hs-dump-v2", stock).source


PATCHES = {
    "hs-dump-v1": hs_dump_v1,
    "hs-dump-v2": hs_dump_v2,
    "v1": v1,
    "v1-flag": v1_flag,
    "hang-collective": hang_collective,
    "hang-io": hang_io,
}


def _on_rank_0_after_layer_2(stock: str, body: str) -> str:
    guard = f"                if {_ON} and i == 2 and get_tensor_model_parallel_rank() == 0:\n"
    if stock.count(_WORLD_SIZE_IMPORT) == 0:
        raise ValueError("deepseek_v2.py does not import get_tensor_model_parallel_world_size")
    imported = stock.replace(_WORLD_SIZE_IMPORT, _RANK_IMPORT, 1)
    return _insert(imported, _LAYER_END, guard + body)


def _insert(text: str, anchor: str, addition: str) -> str:
    """Insert lines after an anchor that must be there exactly once."""
    if text.count(anchor) != 1:
        raise ValueError(f"{text.count(anchor)} places like this, not one:\n{anchor}")
    return text.replace(anchor, anchor + addition)
