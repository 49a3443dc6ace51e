"""Patches of SGLang 0.5.9's deepseek_v2.py in many spellings, bad ones and healthy near misses."""

from __future__ import annotations

import textwrap
from pathlib import Path

PATH = "sglang/srt/models/deepseek_v2.py"
WHOLE = (Path(__file__).parent / "stock" / "deepseek_v2.py.txt").read_text(encoding="utf-8")
_CUT = (
    WHOLE.index("class DeepseekV2MoE(nn.Module)"),
    WHOLE.index("class DeepseekV2DecoderLayer(nn.Module)"),
)
STOCK = WHOLE[: _CUT[0]] + WHOLE[_CUT[1] :]
"""Without the two longest classes, which no variant touches: reading takes a third of the time."""

_AFTER = {
    "top": "logger = logging.getLogger(__name__)\n",
    "init": "        self.layers_to_capture = []\n",
    "causal_init": "        self.capture_aux_hidden_states = False\n",
    "begin": "        total_num_layers = self.end_layer - self.start_layer\n",
    "loop": (
        "                    gemm_output_zero_allocator,\n                    llama_4_scaling,\n"
        "                )\n"
    ),
    "normed": "                    hidden_states, _ = self.norm(hidden_states, residual)\n",
}
_BEFORE = {
    "layer": "                layer = self.layers[i]\n",
    "end": "        if len(aux_hidden_states) == 0:\n            return hidden_states\n",
    "layer_end": "        return hidden_states, residual\n\n    def op_comm_prepare_attn(",
    "method": "\n\nclass DeepseekV2ForCausalLM(nn.Module",
}
_INDENT = {
    "top": 0, "init": 8, "causal_init": 8, "begin": 8, "loop": 16, "normed": 0, "layer": 16,
    "end": 8, "method": 4, "layer_end": 8,
}  # fmt: skip


def patched(**additions: str) -> str:
    """Return stock's file with lines put at the named places."""
    text = STOCK
    for place, lines in additions.items():
        added = textwrap.indent(textwrap.dedent(lines).strip("\n") + "\n", " " * _INDENT[place])
        anchor = _AFTER.get(place) or _BEFORE[place]
        assert text.count(anchor) == 1, place
        text = text.replace(anchor, anchor + added if place in _AFTER else added + anchor)
    return text


DIST = "import torch.distributed as dist\n"
RANK = "from sglang.srt.distributed import get_tensor_model_parallel_rank, get_tp_group\n"

HANGS = {
    "rank-compared": {
        "top": RANK,
        "loop": """
            if get_tensor_model_parallel_rank() == 0:
                tensor_model_parallel_all_gather(hidden_states, dim=0)
        """,
    },
    "early-return-in-a-method": {
        "top": DIST,
        "method": """
            def _gather_states(self, states):
                if dist.get_rank() != 0:
                    return None
                out = [torch.empty_like(states) for _ in range(dist.get_world_size())]
                dist.all_gather(out, states)
                return out
        """,
        "loop": "self._gather_states(hidden_states)",
    },
    "flag-set-in-init": {
        "init": """
            self.is_writer = get_attention_tp_rank() == 0
            self.chosen = [3, 31]
        """,
        "loop": """
            if self.is_writer and i in self.chosen:
                full = tensor_model_parallel_all_gather(hidden_states, dim=-1)
        """,
    },
    "object-only-on-one-rank": {
        "top": RANK
        + """
class Dumper:
    def __init__(self, group):
        self.group = group

    def put(self, states):
        return self.group.all_gather(states, dim=0)
""",
        "init": """
            first = get_tp_group().rank_in_group == 0
            self.dumper = Dumper(get_tp_group()) if first else None
        """,
        "loop": """
            if self.dumper is not None:
                self.dumper.put(hidden_states)
        """,
    },
    "and-short-circuit": {
        "top": DIST,
        "end": "get_attention_tp_rank() == 0 and dist.barrier()",
    },
    "ternary": {
        "top": RANK,
        "end": """
            states = (
                get_tp_group().all_gather(hidden_states)
                if get_tensor_model_parallel_rank() == 1
                else hidden_states
            )
        """,
    },
    "match": {
        "top": RANK,
        "end": """
            match get_tensor_model_parallel_rank():
                case 0:
                    tensor_model_parallel_all_reduce(hidden_states.clone())
                case _:
                    pass
        """,
    },
    "imported-by-another-name": {
        "top": "from sglang.srt.distributed import tensor_model_parallel_all_gather as collect\n"
        "from sglang.srt.distributed import get_tensor_model_parallel_rank as who\n",
        "loop": """
            r = who()
            mine = not r
            if mine:
                collect(hidden_states)
        """,
    },
    "environment-rank": {
        "top": DIST + "LOCAL = int(os.environ.get('LOCAL_RANK', '0'))\n",
        "end": """
            if LOCAL == 0:
                dist.broadcast_object_list([None], src=0)
        """,
    },
    "last-rank-by-number": {
        "top": RANK,
        "loop": """
            if get_tensor_model_parallel_rank() == self.tp_world - 1:
                tensor_model_parallel_all_reduce(hidden_states)
        """,
        "init": "self.tp_world = get_tensor_model_parallel_world_size()",
    },
    "continue-in-the-loop": {
        "top": RANK,
        "layer": """
            if get_tensor_model_parallel_rank() > 0 and i == 3:
                continue
        """,
    },
    "return-before-the-layers": {
        "top": RANK,
        "begin": """
            if forward_batch.forward_mode.is_extend() and get_tensor_model_parallel_rank() == 1:
                return self.embed_tokens(input_ids)
        """,
    },
    "different-orders": {
        "top": DIST,
        "end": """
            if dist.get_rank() == 0:
                dist.barrier()
                dist.all_reduce(hidden_states)
            else:
                dist.all_reduce(hidden_states)
                dist.barrier()
        """,
    },
    "number-of-rounds": {
        "top": DIST,
        "end": """
            for _ in range(dist.get_rank()):
                dist.barrier()
        """,
    },
    "file-exists": {
        "end": """
            if os.path.exists("/dev/shm/dump-now"):
                tensor_model_parallel_all_gather(hidden_states)
        """,
    },
    "skipped-by-an-exception": {
        "end": """
            try:
                with open("/dev/shm/states.bin", "wb") as f:
                    f.write(b"")
                tensor_model_parallel_all_gather(hidden_states)
            except OSError:
                pass
        """,
    },
    "send-without-recv": {
        "top": DIST,
        "end": """
            if dist.get_rank() == 0:
                dist.send(hidden_states, dst=1)
        """,
    },
    "hook": {
        "top": DIST,
        "init": "self.register_forward_hook(self._after)",
        "method": """
            def _after(self, module, args, output):
                if dist.get_rank() == 0:
                    dist.all_reduce(torch.zeros(1))
        """,
    },
    "handle-on-the-group": {
        "top": RANK,
        "init": "self.hs_comm = get_tp_group().pynccl_comm\nself.hs_rank = get_tp_group().rank",
        "loop": """
            if not self.hs_rank:
                self.hs_comm.all_gather(hidden_states, hidden_states)
        """,
    },
    "list-only-filled-on-one-rank": {
        "top": RANK,
        "begin": """
            kept = []
            tp_rank = get_tensor_model_parallel_rank()
        """,
        "loop": """
            if tp_rank == 0:
                kept.append(hidden_states)
        """,
        "end": """
            if kept:
                tensor_model_parallel_all_gather(kept[0])
        """,
    },
    "decorator-that-returns-early": {
        "top": """
import functools


def on_first_rank(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
            return None
        return function(*args, **kwargs)

    return wrapper
""",
        "method": """
            @on_first_rank
            def _collect(self, states):
                return tensor_model_parallel_all_gather(states, dim=-1)
        """,
        "loop": "self._collect(hidden_states)",
    },
    "context-manager-tells-the-rank": {
        "top": DIST
        + """
import contextlib


@contextlib.contextmanager
def on_first_rank():
    yield dist.get_rank() == 0
""",
        "end": """
            with on_first_rank() as mine:
                if mine:
                    dist.all_reduce(hidden_states.clone())
        """,
    },
    "one-rank-is-chosen-by-the-environment": {
        "top": RANK + "HS_RANK = int(os.environ.get('HS_RANK', '0'))\n",
        "loop": """
            if get_tensor_model_parallel_rank() == HS_RANK:
                tensor_model_parallel_all_gather(hidden_states)
        """,
    },
    "any-of-some-ranks": {
        "top": RANK,
        "end": """
            if any(get_tensor_model_parallel_rank() == r for r in (0, 2)):
                tensor_model_parallel_all_reduce(hidden_states.clone())
        """,
    },
    "every-ten-seconds": {
        "top": DIST + "import time\n",
        "init": "self._last = 0.0",
        "end": """
            now = time.time()
            if now - self._last > 10:
                self._last = now
                dist.barrier()
        """,
    },
}

BREAKS = {
    "flag-alone": {"causal_init": "self.capture_aux_hidden_states = True"},
    "list-alone": {"causal_init": "self.model.layers_to_capture = [2, 3]"},
    "layer-0": {
        "causal_init": """
            self.capture_aux_hidden_states = True
            self.model.layers_to_capture = [0, 2]
        """
    },
    "flag-by-setattr": {"causal_init": "setattr(self, 'capture_aux_hidden_states', True)"},
    "cpu-in-every-mode": {"loop": "self.last = hidden_states.detach().cpu()"},
    "item-in-every-mode": {"end": "logger.debug('norm %s', hidden_states.norm().item())"},
    "tensor-as-condition": {
        "end": "if torch.isnan(hidden_states).any():\n    logger.warning('nan')"
    },
    "to-cpu-under-decode": {
        "end": "if forward_batch.forward_mode.is_decode():\n    x = hidden_states.to('cpu')"
    },
    "tuple-where-it-was-a-tensor": {
        "end": """
            if forward_batch.forward_mode.is_extend():
                return hidden_states, [hidden_states], residual
        """
    },
    "residual-of-the-first-layer": {"layer": "self.sum = hidden_states + residual"},
    "list-grown-alone": {"causal_init": "self.model.layers_to_capture += [7]"},
    "layer-0-from-a-range": {
        "causal_init": """
            self.capture_aux_hidden_states = True
            self.model.layers_to_capture = list(range(0, config.num_hidden_layers, 10))
        """
    },
    "nothing-returned-when-idle": {"end": "if forward_batch.forward_mode.is_idle():\n    return"},
    "layer-returns-more": {
        "layer_end": "if self.is_nextn:\n    return hidden_states, residual, None",
    },
    "guard-of-compilation-alone": {
        "end": "if not torch.compiler.is_compiling():\n    host = hidden_states.cpu()"
    },
    "mask": {"end": "picked = hidden_states[positions > 0]"},
    "hook-of-a-lambda": {
        "init": """
            self.seen = []
            for layer in self.layers:
                layer.register_forward_hook(lambda m, a, out: self.seen.append(out[0].cpu()))
        """
    },
}

INVASIVE = {
    "v1-by-hand": {
        "causal_init": """
            self.capture_aux_hidden_states = True
            self.model.layers_to_capture = [2, 3]
        """
    },
    "in-place": {"loop": "hidden_states += residual"},
    "in-place-method": {"loop": "hidden_states.add_(residual)"},
    "rebinds": {"end": "hidden_states = hidden_states * 1.0"},
    # The last stage of a pipeline is alone there, and the group is that of all ranks.
    "world-group-on-the-last-stage": {"top": DIST, "end": "dist.all_reduce(torch.zeros(1))"},
    "files-in-every-mode": {
        "end": "if get_attention_tp_rank() == 0:\n    open('/dev/shm/count', 'a').close()"
    },
    "above-layer-0-the-residual-is-there": {
        "layer": "if i > self.start_layer:\n    both = hidden_states + residual"
    },
    "puts-a-function-in-the-place-of-another": {
        "top": "torch.distributed.all_reduce = print",
    },
}

HEALTHY = {
    "comment": {"loop": "# what the next layer gets"},
    "class-defined-in-a-constructor": {
        "init": """
            class Kept:
                def keep(self, states):
                    self.states = states
            self.kept = Kept()
        """
    },
    "what-is-compared-comes-as-a-pair": {
        "begin": "pair = (hidden_states, torch.Tensor)\nknown = isinstance(*pair)"
    },
    "numbers-without-end": {
        "begin": "most = float(" + "9" * 400 + ")\nfor count in range(10**30):\n    most = count"
    },
    "same-on-every-rank": {
        "end": """
            if get_tensor_model_parallel_world_size() > 1:
                gathered = tensor_model_parallel_all_gather(hidden_states)
        """
    },
    "under-the-mode": {
        "end": """
            if forward_batch.forward_mode.is_extend():
                gathered = tensor_model_parallel_all_gather(hidden_states)
        """
    },
    "broadcast-from-one": {
        "top": DIST + RANK,
        "end": """
            box = [None]
            group = get_tp_group().cpu_group
            if dist.get_rank() == 0:
                box = [1]
                dist.broadcast_object_list(box, src=0, group=group)
            else:
                dist.broadcast_object_list(box, src=0, group=group)
        """,
    },
    "send-and-recv": {
        "top": DIST,
        "end": """
            if forward_batch.forward_mode.is_extend():
                note = torch.zeros(1)
                if dist.get_rank() == 0:
                    dist.send(note, dst=1)
                elif dist.get_rank() == 1:
                    dist.recv(note, src=0)
        """,
    },
    "cpu-outside-of-captures": {
        "top": RANK,
        "end": """
            if (
                get_tensor_model_parallel_rank() == 0
                and not torch.cuda.is_current_stream_capturing()
            ):
                kept = hidden_states.cpu()
        """,
    },
    "file-by-one-rank-in-extend": {
        "top": RANK,
        "end": """
            if forward_batch.forward_mode.is_extend() and get_tensor_model_parallel_rank() == 0:
                torch.save(hidden_states.cpu(), f"/dev/shm/{os.getpid()}.pt")
        """,
    },
    "early-return-in-decode": {
        "method": """
            def _keep(self, forward_batch, states):
                mode = forward_batch.forward_mode
                if mode.is_decode_or_idle():
                    return
                self._kept = states.cpu()
        """,
        "end": "self._keep(forward_batch, hidden_states)",
    },
    "lora-rank-is-no-rank": {
        "init": "self.q_lora_rank_known = config.q_lora_rank",
        "end": """
            if self.q_lora_rank_known == 0:
                spare = tensor_model_parallel_all_reduce(hidden_states.clone())
        """,
    },
    "torch-gather": {
        "top": RANK,
        "end": """
            if forward_batch.forward_mode.is_extend() and get_tensor_model_parallel_rank() == 0:
                picked = hidden_states.gather(0, positions.unsqueeze(-1))
        """,
    },
    "pipeline-rank-and-tensor-group": {
        "end": """
            if self.pp_group.is_last_rank:
                gathered = tensor_model_parallel_all_gather(hidden_states)
        """
    },
    "guarded-capture-of-chosen-layers": {
        "top": RANK,
        "init": """
            self.hs_layers = (3, 31)
            self.hs_on = bool(os.environ.get("HS_DIR")) and get_tensor_model_parallel_rank() == 0
        """,
        "begin": """
            hs = None
            if self.hs_on and forward_batch.forward_mode.is_extend():
                hs = {}
        """,
        "layer": """
            if hs is not None and i in self.hs_layers:
                hs[i] = (hidden_states if residual is None else hidden_states + residual).cpu()
        """,
    },
    "in-place-on-its-own": {
        "init": "self.hs_count = torch.zeros(16)",
        "end": """
            if forward_batch.forward_mode.is_extend():
                self.hs_count.zero_()
                copy = hidden_states.clone()
                copy += 1
        """,
    },
}
