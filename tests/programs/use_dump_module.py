"""Uses the dump module as a patched model does, with real tensors; runs in SGLang's environment.

python use_dump_module.py MODULE DIRECTORY

Each case runs in a process of its own, and writes what it saw and the lines of the log into
DIRECTORY/CASE.json; its dumps go to DIRECTORY/CASE.
"""

import importlib.util
import json
import logging
import os
import resource
import sys
import threading
import time
import traceback
import types
from pathlib import Path

import torch

LINES = []
RANKS = {"attn_tp_rank": 0, "attn_tp_size": 2, "attn_cp_size": 1, "attn_dp_rank": 0, "tp_rank": 0}


def load(path):
    spec = importlib.util.spec_from_file_location("hangdoctor_hs_dump", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def ranks(**further):
    context = types.ModuleType("sglang.srt.runtime_context")
    context.get_parallel = lambda: types.SimpleNamespace(**(RANKS | further))
    for name in ("sglang", "sglang.srt"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules[context.__name__] = context


def make(module, directory, patch="hs-dump-v2", layers="0,1,3", **further):
    ranks(**further)
    os.environ.update(SGLANG_HS_DUMP_DIR=str(directory), SGLANG_HS_DUMP_LAYERS=layers)
    pipeline = types.SimpleNamespace(rank_in_group=0, world_size=1, is_last_rank=True)
    model = types.SimpleNamespace(pp_group=pipeline, start_layer=0, end_layer=5)
    config = types.SimpleNamespace(num_hidden_layers=5, hidden_size=4)
    return module.make_hs_dump(patch, model, config)


def a_batch(mode="EXTEND", lengths=(3, 2), prefixes=(0, 0)):
    return types.SimpleNamespace(
        forward_mode=types.SimpleNamespace(name=mode),
        extend_seq_lens_cpu=list(lengths),
        extend_prefix_lens_cpu=list(prefixes),
        req_pool_indices=torch.arange(len(lengths)),
        rids=["a", "b"],
    )


def forward(dump, mode="EXTEND", padding=0, mark=None, rows=None, **further):
    """Do what the patched forward does; return how long it took."""
    began_s = time.perf_counter()
    tokens = sum(further.get("lengths", (3, 2)))
    ids = torch.arange(tokens + padding)
    positions = torch.cat([torch.arange(3), torch.arange(2), torch.zeros(padding).long()])
    batch = dump.begin(ids, positions, a_batch(mode, **further))
    hidden, residual = torch.full((rows or tokens + padding, 4), 2.0), None
    for layer in range(5):
        if batch is not None:
            if mark == layer:
                hidden._sglang_needs_allreduce_fusion = True
            batch.capture(layer, hidden, residual)
            hidden._sglang_needs_allreduce_fusion = False
        residual = torch.full_like(hidden, float(layer))
    if batch is not None:
        batch.finish(hidden)
    return time.perf_counter() - began_s


def settle(dump):
    """Wait until the thread has nothing left to write."""
    writer = dump.writer
    while True:
        with writer._lock:
            if not writer._pending and not writer._pending_bytes:
                return
        time.sleep(0.01)


def good(module, directory):
    dump = make(module, directory)
    forward(dump, padding=3)
    settle(dump)


def modes(module, directory):
    dump = make(module, directory)
    for mode in ("DECODE", "IDLE", "TARGET_VERIFY", "DRAFT_EXTEND", "SPLIT_PREFILL", "DLLM_EXTEND"):
        forward(dump, mode)
    for _ in range(2):
        forward(dump, "MIXED")
    settle(dump)


def captured(module, directory):
    dump = make(module, directory)
    flags = types.ModuleType("sglang.srt.model_executor.cuda_graph_runner")
    flags.get_is_capture_mode = lambda: True
    sys.modules[flags.__name__] = flags
    forward(dump)
    settle(dump)


def compiled(module, directory):
    dump = make(module, directory)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self._hs_dump = dump

        def forward(self, ids, positions, batch):
            hs_batch = None
            if getattr(self, "_hs_dump", None) is not None and not torch.compiler.is_compiling():
                hs_batch = self._hs_dump.begin(ids, positions, batch)
            hidden = ids * 2.0
            if hs_batch is not None:
                hs_batch.finish(hidden)
            return hidden

    # As SGLang's piecewise graphs compile it: a part that cannot be traced is an error.
    model = torch.compile(Model(), fullgraph=True, backend="eager")
    model(torch.arange(5), torch.arange(5), None)
    settle(dump)


def incomplete(module, directory):
    dump = make(module, directory)
    for _ in range(2):
        forward(dump, mark=3)
    settle(dump)


def scattered(module, directory):
    dump = make(module, directory)
    forward(dump, rows=2)
    settle(dump)


def fifo(module, directory):
    os.mkfifo(directory / "fifo")
    dump = make(module, directory / "fifo")
    took = max(forward(dump) for _ in range(3))
    settle(dump)
    return {"took_s": took}


def gone(module, directory):
    place = directory / "place"
    dump = make(module, place)
    forward(dump)
    settle(dump)
    for file in place.iterdir():
        file.unlink()
    place.rmdir()
    for _ in range(3):
        forward(dump)
    settle(dump)


def full(module, directory):
    """A file that may not grow any more: what a full disk or a quota does to write()."""
    dump = make(module, directory)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))
    for _ in range(3):
        forward(dump)
    settle(dump)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    forward(dump)
    settle(dump)


def reserve(module, directory):
    module.FREE_RESERVE_BYTES = 1 << 60
    dump = make(module, directory)
    for _ in range(3):
        forward(dump)
    settle(dump)


def stuck(module, directory):
    """A disk that never answers: the thread hangs, the forward goes on."""
    module.PENDING_LIMIT_BYTES = 1000
    release = threading.Event()
    dump = make(module, directory)
    dump.writer._write = lambda *_: release.wait()
    took = max(forward(dump) for _ in range(8))
    return {"took_s": took, "waiting": len(dump.writer._pending)}


def raising(module, directory):
    """Whatever a release may hand over: nothing of it ends the forward."""
    dump = make(module, directory)
    for batch in (None, types.SimpleNamespace(), a_batch(lengths=(3, "x"))):
        dump.begin(torch.arange(5), torch.arange(5), batch)
    batch = dump.begin(torch.arange(5), torch.arange(5), a_batch())
    batch.capture(1, torch.zeros(5, 4), torch.zeros(7, 9, 2))
    batch.finish("no tensor")
    dump.dump_captured(
        torch.arange(5), torch.arange(5), a_batch(), [1, 3], [torch.ones(5, 4)], None
    )
    settle(dump)


def packed(module, directory):
    """What newer releases return: all states side by side in one tensor."""
    dump = make(module, directory, "hs-dump-v1")
    states = torch.arange(5 * 8).reshape(5, 8).float()
    positions = torch.tensor([0, 1, 2, 0, 1])
    final = torch.ones(5, 4)
    dump.dump_captured(torch.arange(5), positions, a_batch(), [3, 1], states, final)
    settle(dump)
    return {"layer 3": states[:, 4:].flatten().tolist()}


def roles(module, directory):
    said = {}
    for name, further in (
        ("other rank", {"attn_tp_rank": 1}),
        ("first", {}),
        ("draft", {}),
        ("context parallel", {"attn_cp_size": 2}),
    ):
        if name != "draft":
            module._state["made"] = False
        said[name] = make(module, directory, **further) is not None
    del os.environ["SGLANG_HS_DUMP_DIR"]
    module._state["made"] = False
    said["off"] = module.make_hs_dump("hs-dump-v2", None, None) is not None
    said["list off"] = module.hs_dump_layers(types.SimpleNamespace(num_hidden_layers=61))
    return said


CASES = (
    good, modes, captured, compiled, incomplete, scattered, fifo, gone, full, reserve, stuck,
    raising, packed, roles,
)  # fmt: skip


def run(case, path, directory):
    handler = logging.Handler()
    handler.emit = lambda record: LINES.append(record.getMessage())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    place = directory / case.__name__
    place.mkdir()
    saw = case(load(path), place) or {}
    answer = json.dumps({"saw": saw, "log": LINES})
    (directory / f"{case.__name__}.json").write_text(answer, encoding="utf-8")


def main():
    path, directory = sys.argv[1:]
    torch.set_num_threads(1)
    for case in CASES:
        # PyTorch takes more than a second to import: once is enough.
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                run(case, path, Path(directory))
                status = 0
            except BaseException:  # noqa: BLE001  # what it was is for the parent's stderr
                traceback.print_exc()
            finally:
                os._exit(status)  # a thread may be stuck on purpose
        if os.waitpid(pid, 0)[1]:
            raise SystemExit(f"the case {case.__name__} failed")


if __name__ == "__main__":
    main()
