"""Runs in every Python of a launch, spawned children too: three repairs of SGLang 0.5.9 on the CPU.

None of them is needed on a GPU, and none touches what the tests are about. Each is applied when its
module has been imported. SGLANG_LAB_PAUSE ("load:1:120") makes one rank sleep for so many seconds,
at the start of its process, before it joins the rendezvous, or before it loads, and go on then.
"""

import functools
import importlib.abc
import importlib.util
import os
import sys
import time


def _absorbed_attention(module):
    # torch_native reads only the latent KV cache, and the prefill of DeepSeek's attention passes k
    # and v without saving them: take the absorbed form for prefill too.
    module.AttentionBackendRegistry.register("torch_native", module._dispatch_mla_subtype)


def _no_fake_ops(module):
    # Graph capture on the CPU describes operators that only a built sgl_kernel has.
    module.register_fake_ops = lambda: None


def _graph_fill_value(module):
    # Graph capture on the CPU asks for it; only the backend intel_amx has it.
    module.TorchNativeAttnBackend.get_graph_seq_len_fill_value = lambda _self: 1


def _paused(owner, name, rank_of):
    _, rank, seconds = os.environ["SGLANG_LAB_PAUSE"].split(":")
    run = getattr(owner, name)

    @functools.wraps(run)
    def pausing(*args, **kwargs):
        if str(rank_of(args, kwargs)) == rank:
            time.sleep(float(seconds))
        return run(*args, **kwargs)

    setattr(owner, name, pausing)


def _pausing_runner(module):
    name = {"load": "load_model", "rendezvous": "init_torch_distributed"}.get(_PAUSE)
    if name:
        _paused(module.ModelRunner, name, lambda args, _: args[0].tp_rank)


def _pausing_process(module):
    if _PAUSE == "start":
        _paused(module, "run_scheduler_process", lambda args, _: args[3])


_PAUSE = os.environ.get("SGLANG_LAB_PAUSE", "").partition(":")[0]
_REPAIRS = {
    "sglang.srt.model_executor.model_runner": _pausing_runner,
    "sglang.srt.managers.scheduler": _pausing_process,
    "sglang.srt.models.deepseek_common.attention_backend_handler": _absorbed_attention,
    "sglang.srt.model_executor.cpu_graph_runner": _no_fake_ops,
    "sglang.srt.layers.attention.torch_native_backend": _graph_fill_value,
}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, _path=None, _target=None):
        repair = _REPAIRS.pop(fullname, None)
        if repair is None:
            return None
        spec = importlib.util.find_spec(fullname)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            repair(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
