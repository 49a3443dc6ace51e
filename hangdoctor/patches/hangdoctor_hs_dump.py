"""Writes the hidden states of prefill batches to files, from inside SGLang's deepseek_v2.py.

hangdoctor places this file beside a patched model file; hangdoctor itself need not be installed
there. It acts only where SGLANG_HS_DUMP_DIR is set when the server starts:

    SGLANG_HS_DUMP_DIR     folder for the files, for example one under /dev/shm
    SGLANG_HS_DUMP_LAYERS  layer ids, such as 3,31,59; the state of id i is the input of layer i

Two rules hold for all that a forward calls: it never raises, and it never waits for a disk. The
states are copied to the host on the stream of the forward; a thread writes them. New pinned memory
for a copy takes its time: on an H200 up to 0.2 s for a batch of 4096 tokens and four states 7168
wide, 0.6 ms where memory of an earlier batch is free again. Where the thread falls behind, or a
write fails, batches are lost: their numbers are missing among the files, and one line in the log
says why, not one a batch.

A file is one EXTEND batch of one rank, in the safetensors format, written under another name and
renamed when it is complete:

    layer.<i>    [tokens, hidden]  input of layer i: hidden_states + residual
    final        [tokens, hidden]  after the final norm; only from the last pipeline stage
    input_ids    [tokens]
    positions    [tokens]
    seq_lens     [requests]        tokens of each request in this file, in the order of the rows
    prefix_lens  [requests]        tokens before these, from the cache or an earlier chunk

and under "__metadata__", all as text: format, convention, layer_ids, missing_layers, dtype, engine,
patch, mode, the ranks, writer, number, written_at_s, lost, request_ids and pool_indices.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import json
import logging
import os
import sys
import threading
import time
from typing import Any

FORMAT = "hangdoctor-hs-dump/1"
CONVENTION = (
    "id i = the input of layer i = hidden_states + residual that layer i-1 put out; "
    "layer 0 has no residual: the embedding"
)
DIRECTORY_VARIABLE = "SGLANG_HS_DUMP_DIR"
LAYERS_VARIABLE = "SGLANG_HS_DUMP_LAYERS"
USUAL_LAYERS = (3, 31, 59)
FREE_RESERVE_BYTES = 256 << 20
"""What a write leaves free: NCCL and PyTorch need /dev/shm too."""
PENDING_LIMIT_BYTES = 4 << 30
"""Host memory for batches that are not written yet; a single batch may be larger."""

logger = logging.getLogger(__name__)

_CAPTURE_FLAGS = (
    ("sglang.srt.model_executor.cuda_graph_runner", "get_is_capture_mode"),
    ("sglang.srt.model_executor.runner_utils.capture_mode", "get_is_capture_mode"),
    ("sglang.srt.compilation.piecewise_context_manager", "is_in_piecewise_cuda_graph"),
    (
        "sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph.context_manager",
        "is_in_tc_piecewise_cuda_graph",
    ),
    (
        "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context",
        "is_in_breakable_cuda_graph",
    ),
)
"""SGLang's own word for "a graph is being captured or replayed", release by release."""
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_state = {"made": False}
"""The first model that is built in a process is the target; a draft model follows it."""


def hs_dump_layers(config: Any, *, first: int = 1) -> list[int]:
    """Return the layer ids to capture, ascending; none where dumping is off.

    `first` is 1 for SGLang's own capture, which cannot add a residual that layer 0 has not.
    """
    if not os.environ.get(DIRECTORY_VARIABLE):
        return []
    layers = int(getattr(config, "num_hidden_layers", 0))
    return _chosen_layers(os.environ.get(LAYERS_VARIABLE, ""), layers, first)[0]


def make_hs_dump(patch: str, model: Any, config: Any) -> HiddenStateDump | None:
    """Return what dumps the states of this rank, or None where it has nothing to write.

    None: dumping is off, another rank of its group writes, or this is a draft model. Whatever
    fails here is a line in the log.
    """
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if not directory:
        return None
    try:
        return _made(patch, model, config, os.path.abspath(directory))
    except Exception as error:  # noqa: BLE001  # dumping must not end a server
        logger.warning("hidden states are not dumped: %s: %s", type(error).__name__, error)
        return None


class HiddenStateDump:
    """What one rank dumps: which layers, as whom, and the thread that writes."""

    def __init__(
        self, layer_ids: list[int], own_layers: range, metadata: dict[str, str], writer: Writer
    ) -> None:
        self.layer_ids = frozenset(layer_ids)
        self.own_layers = own_layers
        self.metadata = metadata
        self.writer = writer

    def begin(self, input_ids: Any, positions: Any, forward_batch: Any) -> Batch | None:
        """Return what collects the states of this forward, or None where it is not to be dumped."""
        try:
            if not self._is_to_be_dumped(forward_batch):
                return None
            return Batch(self, input_ids, positions, forward_batch)
        except Exception as error:  # noqa: BLE001  # a dump never ends a forward
            self.writer.lose("begin", f"{type(error).__name__}: {error}")
            return None

    def dump_captured(
        self,
        input_ids: Any,
        positions: Any,
        forward_batch: Any,
        layer_ids: Any,
        states: Any,
        final: Any,
    ) -> None:
        """Dump what SGLang's own capture returned: a list of states, or all in one tensor."""
        batch = self.begin(input_ids, positions, forward_batch)
        if batch is None:
            return
        try:
            # A pipeline stage captures those of its own layers.
            ids = sorted(layer for layer in layer_ids if layer in self.own_layers)
            if not isinstance(states, (list, tuple)):
                states = states.chunk(len(ids), dim=-1)
            for layer_id, state in zip(ids, states, strict=True):
                batch.keep(layer_id, state)
        except Exception as error:  # noqa: BLE001  # a dump never ends a forward
            batch.fail(error)
        batch.finish(final)

    def _is_to_be_dumped(self, forward_batch: Any) -> bool:
        mode = forward_batch.forward_mode.name
        if mode != "EXTEND":
            if mode == "MIXED":
                self.writer.say(
                    "mixed",
                    "batches that mix prefill and decode are not dumped; "
                    "start without --enable-mixed-chunk",
                )
            return False
        return not _is_captured_or_compiled()


class Batch:
    """The states of one forward, on their way to the host."""

    def __init__(
        self, dump: HiddenStateDump, input_ids: Any, positions: Any, forward_batch: Any
    ) -> None:
        self._dump = dump
        self._lengths = [int(length) for length in forward_batch.extend_seq_lens_cpu]
        # Padding comes after the last token.
        self._tokens = sum(self._lengths)
        self._rows = int(positions.shape[-1])
        self._tensors: dict[str, Any] = {}
        self._failed = ""
        self._missing: dict[int, str] = {}
        self._keep("positions", positions[..., : self._tokens])
        if input_ids is not None:
            self._keep("input_ids", input_ids[: self._tokens])
        self._prefixes = [int(length) for length in forward_batch.extend_prefix_lens_cpu]
        self._request_ids = list(getattr(forward_batch, "rids", None) or ())
        self._pool_indices = _to_host(forward_batch.req_pool_indices[: len(self._lengths)])

    def capture(self, layer_id: int, hidden_states: Any, residual: Any) -> None:
        """Copy the input of a layer, if it is one of the chosen."""
        if layer_id not in self._dump.layer_ids or self._failed:
            return
        try:
            if why := self._why_incomplete(hidden_states, residual):
                self._missing[layer_id] = why
                self._dump.writer.say(
                    f"incomplete-{why}", f"the input of layer {layer_id} is not dumped: {why}"
                )
                return
            self.keep(layer_id, hidden_states if residual is None else hidden_states + residual)
        except Exception as error:  # noqa: BLE001  # a dump never ends a forward
            self.fail(error)

    def keep(self, layer_id: int, state: Any) -> None:
        """Copy a state that is complete."""
        if int(state.shape[0]) != self._rows:
            raise ValueError(f"{int(state.shape[0])} rows for {self._rows} tokens")
        self._keep(f"layer.{layer_id}", state[: self._tokens])

    def fail(self, error: Exception) -> None:
        """Give the batch up: the forward goes on without a dump."""
        self._failed = self._failed or f"{type(error).__name__}: {error}"
        self._tensors.clear()

    def finish(self, final: Any) -> None:
        """Hand the batch to the thread that writes; `final` is None before the last stage."""
        try:
            if final is not None and not self._failed:
                self._keep("final", final[: self._tokens])
            self._hand_over()
        except Exception as error:  # noqa: BLE001  # a dump never ends a forward
            self._dump.writer.lose("finish", f"{type(error).__name__}: {error}")

    def _hand_over(self) -> None:
        if self._failed:
            self._dump.writer.lose("copy", self._failed)
            return
        there = sorted(int(name[6:]) for name in self._tensors if name.startswith("layer."))
        for layer_id in self._dump.layer_ids - set(there) - set(self._missing):
            self._missing[layer_id] = "it did not run in the layer loop (two-batch overlap)"
            self._dump.writer.say("loop", f"layer {layer_id}: {self._missing[layer_id]}")
        sample = self._tensors.get("final", self._tensors.get(f"layer.{there[0]}" if there else ""))
        metadata = self._dump.metadata | {
            "layer_ids": json.dumps(there),
            "missing_layers": json.dumps({str(k): v for k, v in sorted(self._missing.items())}),
            "dtype": "" if sample is None else str(sample.dtype).removeprefix("torch."),
            "request_ids": json.dumps(self._request_ids),
        }
        self._dump.writer.put(
            self._tensors, metadata, (self._lengths, self._prefixes, self._pool_indices), _event()
        )

    def _keep(self, name: str, tensor: Any) -> None:
        self._tensors[name] = _to_host(tensor)

    def _why_incomplete(self, hidden_states: Any, residual: Any) -> str:
        """Say why this rank does not hold the whole input of a layer, or return "".

        A sum that other ranks still owe a part to looks like any other tensor.
        """
        if getattr(hidden_states, "_sglang_needs_allreduce_fusion", False):
            return (
                "its all-reduce is fused into the next layer; "
                "start without FlashInfer all-reduce fusion"
            )
        communicator = sys.modules.get("sglang.srt.layers.communicator")
        context = getattr(communicator, "get_attn_tp_context", None)
        if context is not None and getattr(context(), "input_scattered", False):
            return "the ranks of the group hold it in parts (scattered attention input)"
        for part in (hidden_states, residual):
            if part is not None and int(part.shape[0]) != self._rows:
                return (
                    f"this rank holds {int(part.shape[0])} of {self._rows} rows "
                    "(tokens are scattered over the attention group)"
                )
        return ""


class Writer:
    """A thread that writes one batch after the other; never waited for."""

    def __init__(self, directory: str, name: str) -> None:
        self.directory = directory
        self.name = name
        self._pending: collections.deque[Any] = collections.deque()
        self._pending_bytes = 0
        self._lock = threading.Condition()
        self._said: set[str] = set()
        self._number = 0
        self._lost = 0
        threading.Thread(target=self._run, name="hs-dump-writer", daemon=True).start()

    def put(
        self, tensors: dict[str, Any], metadata: dict[str, str], lists: Any, event: Any
    ) -> None:
        """Queue a batch, or lose it where too much is waiting."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        with self._lock:
            self._number += 1
            full = bool(self._pending) and self._pending_bytes + size > PENDING_LIMIT_BYTES
            if full:
                self._lost += 1
            else:
                self._pending.append((self._number, size, tensors, metadata, lists, event))
                self._pending_bytes += size
                self._lock.notify()
        if full:
            self.say("slow", f"{self.directory} is too slow: batches are lost")

    def lose(self, kind: str, why: str) -> None:
        """Count a batch that is lost, and say so the first time."""
        with self._lock:
            self._number += 1
            self._lost += 1
        self.say(kind, f"a batch is lost: {why}")

    def say(self, kind: str, text: str) -> None:
        """Log a line, once for each kind."""
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("hidden states: %s (said once)", text)

    def _run(self) -> None:
        try:
            os.makedirs(self.directory, exist_ok=True)
        except OSError as error:
            self.say(f"write-{error.errno}", f"{self.directory}: {error.strerror}")
        while True:
            with self._lock:
                while not self._pending:
                    self._lock.wait()
                number, size, tensors, metadata, lists, event = self._pending.popleft()
            try:
                if event is not None:
                    event.synchronize()
                self._write(number, tensors, metadata, lists)
            except Exception as error:  # noqa: BLE001  # the next batch may go well
                kind = f"write-{getattr(error, 'errno', None) or type(error).__name__}"
                with self._lock:
                    self._lost += 1
                self.say(kind, f"a batch is lost: {getattr(error, 'strerror', None) or error}")
            del tensors, event
            with self._lock:
                self._pending_bytes -= size

    def _write(
        self, number: int, tensors: dict[str, Any], metadata: dict[str, str], lists: Any
    ) -> None:
        lengths, prefixes, pool_indices = lists
        metadata = metadata | {
            "number": str(number),
            "lost": str(self._lost),
            "written_at_s": f"{time.time():.3f}",
            "pool_indices": json.dumps([int(index) for index in pool_indices.tolist()]),
        }
        parts = {name: _raw(tensor) for name, tensor in tensors.items()}
        parts["seq_lens"] = _raw_integers(lengths)
        parts["prefix_lens"] = _raw_integers(prefixes)
        header = _header(parts, metadata)
        size = len(header) + sum(len(part[2]) for part in parts.values())
        free = os.statvfs(self.directory)
        if free.f_bavail * free.f_frsize < size + FREE_RESERVE_BYTES:
            raise OSError(
                errno.ENOSPC,
                f"{self.directory} has {free.f_bavail * free.f_frsize >> 20} MiB left, a file of "
                f"{size >> 20} MiB would leave less than {FREE_RESERVE_BYTES >> 20}",
            )
        final = os.path.join(self.directory, f"{self.name}-{number:08d}.safetensors")
        unfinished = f"{final}.tmp"
        # Neither a FIFO nor a link of another's can be opened by this.
        descriptor = os.open(
            unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
        )
        try:
            try:
                for block in (header, *(part[2] for part in parts.values())):
                    _write_all(descriptor, block)
            finally:
                os.close(descriptor)
            os.rename(unfinished, final)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise


def _made(patch: str, model: Any, config: Any, directory: str) -> HiddenStateDump | None:
    ranks = _ranks(model)
    if _state["made"]:
        if ranks["attn_tp_rank"] == 0:
            logger.info("hidden states of a second model, a draft, are not dumped")
        return None
    _state["made"] = True
    if ranks["attn_tp_rank"] != 0:
        return None
    if ranks["attn_cp_size"] > 1:
        logger.warning(
            "hidden states are not dumped: under context parallelism each rank holds other tokens"
        )
        return None
    layers = int(config.num_hidden_layers)
    asked = os.environ.get(LAYERS_VARIABLE, "")
    chosen, wrong = _chosen_layers(asked, layers, 1 if patch == "hs-dump-v1" else 0)
    if wrong:
        logger.warning("hidden states: %s=%s: left out: %s", LAYERS_VARIABLE, asked, wrong)
    own_layers = range(model.start_layer, model.end_layer)
    own = [layer for layer in chosen if layer in own_layers]
    if not own and not ranks["is_last_stage"]:
        return None
    name = f"hs-dp{ranks['dp_rank']}-pp{ranks['pp_rank']}-{os.getpid()}-{int(time.time() * 1e3):x}"
    version = getattr(sys.modules.get("sglang"), "__version__", "unknown")
    metadata = {
        "format": FORMAT,
        "convention": CONVENTION,
        "engine": f"sglang {version}",
        "patch": patch,
        "mode": "EXTEND",
        "model_layers": str(layers),
        "hidden_size": str(getattr(config, "hidden_size", "")),
        "expected_layer_ids": json.dumps(own),
        "writer": name,
        **{key: str(value) for key, value in ranks.items()},
    }
    logger.info(
        "%s: hidden states of layers %s go to %s, for EXTEND batches", patch, own, directory
    )
    if graphs := _prefill_graphs():
        logger.warning(
            "hidden states: prefill CUDA graphs are on (%s); a batch that they replay runs no "
            "Python, and is not dumped",
            graphs,
        )
    return HiddenStateDump(own, own_layers, metadata, Writer(directory, name))


def _ranks(model: Any) -> dict[str, int]:
    """Return this process's ranks; a group that has tokens of its own is an attention TP group."""
    pipeline = model.pp_group
    found = {
        "pp_rank": int(pipeline.rank_in_group),
        "pp_size": int(pipeline.world_size),
        "is_last_stage": int(pipeline.is_last_rank),
    }
    with contextlib.suppress(ImportError):
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        return found | {
            "attn_tp_rank": int(parallel.attn_tp_rank),
            "attn_tp_size": int(parallel.attn_tp_size),
            "attn_cp_size": int(parallel.attn_cp_size),
            "dp_rank": int(parallel.attn_dp_rank),
            "tp_rank": int(parallel.tp_rank),
        }
    from sglang.srt.distributed import get_tensor_model_parallel_rank
    from sglang.srt.layers import dp_attention

    cp_size = getattr(dp_attention, "get_attention_cp_size", None)
    return found | {
        "attn_tp_rank": int(dp_attention.get_attention_tp_rank()),
        "attn_tp_size": int(dp_attention.get_attention_tp_size()),
        "attn_cp_size": int(cp_size()) if cp_size else 1,
        "dp_rank": int(dp_attention.get_attention_dp_rank()),
        "tp_rank": int(get_tensor_model_parallel_rank()),
    }


def _chosen_layers(asked: str, layers: int, first: int) -> tuple[list[int], list[str]]:
    """Return the ids to capture, and what of the wish cannot be.

    >>> _chosen_layers("", 61, 1)
    ([3, 31, 59], [])
    >>> _chosen_layers("", 27, 1)
    ([2, 13, 24], [])
    >>> _chosen_layers("0, 4,x,99,4", 61, 1)
    ([4], ['0', 'x', '99'])
    """
    if not asked.strip():
        if layers > max(USUAL_LAYERS):
            return list(USUAL_LAYERS), []
        # As SGLang's own set_eagle3_layers_to_capture spreads them.
        spread = (2, layers // 2, layers - 3)
        return sorted({min(max(layer, 1), layers - 1) for layer in spread if layers > 1}), []
    words = [word.strip() for word in asked.split(",") if word.strip()]
    good = {word for word in words if word.isdecimal() and first <= int(word) < layers}
    return sorted({int(word) for word in good}), [word for word in words if word not in good]


def _prefill_graphs() -> str:
    """Return by which option prefill CUDA graphs are on, or ""."""
    with contextlib.suppress(Exception):
        arguments = _server_arguments()
        if getattr(arguments, "device", "cuda") != "cuda":
            return ""
        graphs = getattr(arguments, "cuda_graph_config", None)
        if graphs is not None:
            backend = str(graphs.prefill.backend)
            return "" if backend == "disabled" else f"prefill backend {backend}"
        if getattr(arguments, "enable_piecewise_cuda_graph", False):
            return "--enable-piecewise-cuda-graph"
        if getattr(arguments, "disable_piecewise_cuda_graph", True) is False:
            return "start with --disable-piecewise-cuda-graph"
    return ""


def _server_arguments() -> Any:
    with contextlib.suppress(ImportError):
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    from sglang.srt.server_args import get_global_server_args

    return get_global_server_args()


def _is_captured_or_compiled() -> bool:
    import torch

    if torch.compiler.is_compiling():
        return True
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return True
    for module, name in _CAPTURE_FLAGS:
        flag = getattr(sys.modules.get(module), name, None)
        if flag is not None and flag():
            return True
    return False


def _to_host(tensor: Any) -> Any:
    """Return a copy in host memory, which the stream of a GPU fills when it comes to it."""
    tensor = tensor.detach().contiguous()  # before the copy: it may still be under way after it
    return tensor.to("cpu", non_blocking=bool(tensor.is_cuda), copy=True)


def _event() -> Any:
    """Return what tells when the copies of this stream are done; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def _raw(tensor: Any) -> tuple[str, list[int], memoryview]:
    """Return the safetensors name of a type, the shape and the bytes of a tensor on the host."""
    size = tensor.numel() * tensor.element_size()
    data = (ctypes.c_char * size).from_address(tensor.data_ptr()) if size else b""
    return _DTYPES[str(tensor.dtype).removeprefix("torch.")], list(tensor.shape), memoryview(data)


def _raw_integers(numbers: list[int]) -> tuple[str, list[int], memoryview]:
    data = b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)
    return "I64", [len(numbers)], memoryview(data)


def _header(parts: dict[str, tuple[str, list[int], memoryview]], metadata: dict[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, (dtype, shape, data) in parts.items():
        entries[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [offset, offset + data.nbytes],
        }
        offset += data.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_all(descriptor: int, data: Any) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view[: 64 << 20]) :]
