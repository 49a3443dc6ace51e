"""Run a model file's forward in SGLang's own classes, and write what comes back.

python run_forwards.py FOLDER ANSWERS.json

Runs in the SGLang environment, on the CPU, with a tiny random model that lies in FOLDER: over the
forward modes, and over both halves of a two-stage pipeline. Nothing of hangdoctor is imported. A
scenario that raises is an answer too; what cannot be prepared at all ends with a line on stderr.
"""

import contextlib
import dataclasses
import faulthandler
import importlib
import inspect
import json
import os
import sys
import traceback
import zlib
from pathlib import Path

import make_model

SEED = 7
LENGTHS = (5, 3)
"""Tokens of the two requests."""
LIMIT_S = float(os.environ.get("HANGDOCTOR_FORWARD_LIMIT_S", "60"))
"""Of one scenario; each takes less than a second on an idle core."""
MODEL_FILE = "deepseek_v2.py"
MODEL_MODULE = "sglang.srt.models.deepseek_v2"
DUMP_MODULE = "sglang.srt.models.hangdoctor_hs_dump"
SCENARIOS = (
    "run-extend", "run-decode", "run-idle", "run-hidden", "run-pp-first", "run-pp-last",
)  # fmt: skip


def main(folder: Path, answers: Path) -> None:
    make_model.describe(folder)
    try:
        runner = Runner(folder)
    finally:
        # SGLang goes on with another model class where it cannot import a file.
        failed = attempt(lambda: bool(importlib.import_module(MODEL_MODULE)))
        if "error" in failed:
            found = dict.fromkeys(SCENARIOS, failed | {"imported": False})
            answers.write_text(json.dumps(found), encoding="utf-8")
            os._exit(0)
    found = {}
    for name in SCENARIOS:
        # A thread without Python ends what does not come back, and prints where it stood.
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        found[name] = attempt(getattr(runner, name.removeprefix("run-").replace("-", "_")))
        faulthandler.cancel_dump_traceback_later()
        answers.write_text(json.dumps(found), encoding="utf-8")


class SkippedError(Exception):
    """What a scenario needs of another one is not there."""


def attempt(scenario):
    try:
        return {"answer": scenario()}
    except SkippedError as error:
        return {"skipped": str(error)}
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        mine = [frame for frame in frames if Path(frame.filename).name == MODEL_FILE]
        last = (mine or frames)[-1]
        return {
            "error": f"{type(error).__name__}: {error}"[:500],
            "file": last.filename,
            "line": last.lineno,
        }


class Runner:
    """SGLang's ModelRunner with the tiny model, as its own one-batch benchmark makes it."""

    def __init__(self, folder: Path) -> None:
        import numpy
        import torch
        from sglang import bench_one_batch
        from sglang.srt.server_args import PortArgs, ServerArgs

        torch.set_num_threads(1)  # the same sums in the same order, whatever else runs here
        torch.manual_seed(SEED)
        numpy.random.seed(SEED)  # noqa: NPY002  # the benchmark's requests are drawn from it
        self.torch, self.bench = torch, bench_one_batch
        arguments = ServerArgs(
            model_path=str(folder),
            load_format="dummy",
            device="cpu",
            dtype="float32",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            grammar_backend="none",
            disable_overlap_schedule=True,
            disable_radix_cache=True,
            enable_return_hidden_states=True,
            context_length=256,
            max_total_tokens=512,
            max_running_requests=4,
            mem_fraction_static=0.5,
            random_seed=SEED,
        )
        for module in ("sglang.srt.server_args",):
            adopt = getattr(sys.modules[module], "set_global_server_args_for_scheduler", None)
            if adopt:
                adopt(arguments)
        ports = PortArgs.init_new(arguments)
        self.runner, _ = bench_one_batch.load_model(arguments, ports, 0, 0)
        self.whole = self.runner.model
        fill(self.whole)
        self.proxies = None

    def extend(self):
        self.batch = self._prepared()
        return self._forward(self._to_run())

    def decode(self):
        self.batch = self._prepared()
        self._forward(self._to_run())
        count = len(LENGTHS)
        self.batch.output_ids = self.torch.arange(11, 11 + count)
        self.batch.prepare_for_decode()
        return self._forward(self._to_run())

    def idle(self):
        self.batch = self._batch([])
        self.batch.prepare_for_idle()
        with self._dense():
            return self._forward(self._to_run())

    def hidden(self):
        self.batch = self._prepared(return_hidden_states=True)
        return self._forward(self._to_run())

    def pp_first(self):
        self.batch = self._prepared()
        with self._stage(0):
            try:
                return self._forward(self._to_run())
            finally:
                # What the inner model hands on stands, even where the class around it fails.
                self.proxies = self.inner

    def pp_last(self):
        if type(self.proxies).__name__ != "PPProxyTensors":
            raise SkippedError("the first half hands no PPProxyTensors on")
        self.batch = self._prepared()
        with self._stage(1):
            return self._forward(self._to_run(), pp_proxy_tensors=self.proxies)

    def _prepared(self, *, return_hidden_states=False):
        requests = []
        for length in LENGTHS:
            requests += self.bench.prepare_synthetic_inputs_for_latency_test(1, length)
        for number, request in enumerate(requests):
            request.rid = str(number)
            tokens = [20 + 10 * number + at for at in range(LENGTHS[number])]
            request.origin_input_ids = request.fill_ids = tokens
            request.return_hidden_states = return_hidden_states
        batch = self._batch(requests)
        batch.prepare_for_extend()
        return batch

    def _batch(self, requests):
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self.runner.req_to_token_pool.clear()
        self.runner.token_to_kv_pool_allocator.clear()
        cache = self.bench.TreeCacheNamespace(
            page_size=self.runner.server_args.page_size,
            device=self.runner.device,
            token_to_kv_pool_allocator=self.runner.token_to_kv_pool_allocator,
        )
        return ScheduleBatch.init_new(
            reqs=requests,
            req_to_token_pool=self.runner.req_to_token_pool,
            token_to_kv_pool_allocator=self.runner.token_to_kv_pool_allocator,
            tree_cache=cache,
            model_config=self.runner.model_config,
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )

    def _to_run(self):
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        return ForwardBatch.init_new(self.batch.get_model_worker_batch(), self.runner)

    def _forward(self, batch, **further):
        """Return what the model and the inner model gave back."""
        model = self.runner.model
        seen = {}
        self.inner = None

        def watched(name, forward):
            def call(*args, **kwargs):
                seen[name] = forward(*args, **kwargs)
                self.inner = seen.get("inner")
                return seen[name]

            call.__signature__ = inspect.signature(forward)
            return call

        model.forward = watched("model", type(model).forward.__get__(model))
        model.model.forward = watched("inner", type(model.model).forward.__get__(model.model))
        try:
            with self.torch.no_grad():
                self.runner.forward(batch, **further)
        finally:
            del model.forward, model.model.forward
        return {
            "mode": batch.forward_mode.name,
            "model": described(seen["model"]),
            "inner": described(seen["inner"]),
        }

    @contextlib.contextmanager
    def _stage(self, rank):
        """Let the runner have one half of the model, as a stage of a two-stage pipeline has it."""
        from sglang.srt.distributed import parallel_state

        real = parallel_state._PP  # noqa: SLF001  # there is no other way to be two stages
        parallel_state._PP = Stage(real, rank)  # noqa: SLF001
        try:
            with self._another_model():
                yield
        finally:
            parallel_state._PP = real  # noqa: SLF001

    @contextlib.contextmanager
    def _dense(self):
        """Let the runner have a model without experts: those of the CPU cannot take no tokens."""
        config = self.runner.model_config.hf_config
        experts_from = config.first_k_dense_replace
        config.first_k_dense_replace = config.num_hidden_layers
        try:
            with self._another_model():
                yield
        finally:
            config.first_k_dense_replace = experts_from

    @contextlib.contextmanager
    def _another_model(self):
        from sglang.srt.configs.device_config import DeviceConfig
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.model_loader import get_model

        if dump := sys.modules.get(DUMP_MODULE):
            dump._state["made"] = False  # noqa: SLF001  # it is the first of a process elsewhere
        self.runner.model = get_model(
            model_config=self.runner.model_config,
            load_config=LoadConfig(load_format="dummy"),
            device_config=DeviceConfig("cpu"),
        )
        fill(self.runner.model)
        try:
            yield
        finally:
            self.runner.model = self.whole


class Stage:
    """A pipeline group that says it is of two, and else is the real one."""

    def __init__(self, real, rank):
        self._real = real
        self.rank_in_group, self.world_size = rank, 2
        self.is_first_rank, self.is_last_rank = rank == 0, rank == 1

    def __getattr__(self, name):
        return getattr(self._real, name)


def fill(model):
    """Give a model weights by the names of its parameters: both halves have those of the whole.

    Those of SGLang's dummy format are so small that nothing that comes out could differ.
    """
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            drawn = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.1 * drawn if "norm" in name else 0.2 * drawn)
    if hasattr(model, "post_load_weights"):
        model.post_load_weights()  # the attention keeps products of some


def described(value):
    """Return a value as JSON: its types, and its numbers."""
    import torch

    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        numbers = value.detach().flatten().tolist()
        return {"type": str(value.dtype), "shape": list(value.shape), "numbers": numbers}
    if isinstance(value, (list, tuple)):
        return {"type": kind, "parts": [described(part) for part in value]}
    if isinstance(value, dict):
        return {"type": kind, "fields": {str(key): described(value[key]) for key in value}}
    if kind == "PPProxyTensors":
        return {"type": kind, "fields": described(value.tensors)["fields"]}
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        there = {key: described(part) for key, part in fields.items() if part is not None}
        return {"type": kind, "fields": there}
    return {"type": kind, "text": repr(value)[:200]}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
