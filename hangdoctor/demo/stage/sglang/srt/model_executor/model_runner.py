"""Builds the model step by step, and runs it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ...third_party.torch.distributed import distributed_c10d
from ..distributed.parallel_state import init_distributed_environment
from ..model_loader.loader import DefaultModelLoader
from ..models.deepseek_v2 import DeepseekV2ForCausalLM
from ..utils.common import PACE_S, get_available_cpu_memory, log
from .cpu_graph_runner import CPUGraphRunner
from .model_runner_kv_cache_mixin import ModelRunnerKVCacheMixin

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from ..server_args import ServerArgs


class ModelRunner(ModelRunnerKVCacheMixin):
    """A rank's model."""

    def __init__(
        self, server_args: ServerArgs, rank: int, peers: Mapping[int, socket.socket]
    ) -> None:
        self.server_args = server_args
        self.rank = rank
        self.init_torch_distributed(peers)
        self.initialize()

    def initialize(self) -> None:
        """Load the weights, allocate the cache, capture the graphs."""
        self.load_model()
        self.init_memory_pool()
        self.init_device_graphs()

    def init_torch_distributed(self, peers: Mapping[int, socket.socket]) -> None:
        """Meet the other ranks."""
        log("Init torch distributed begin.", self.rank)
        began_s = time.monotonic()
        self.tp_group = init_distributed_environment(self.rank, peers)
        spent_s = time.monotonic() - began_s
        log(f"Init torch distributed ends. elapsed={spent_s:.2f} s, mem usage=0.00 GB", self.rank)

    def load_model(self) -> None:
        """Load the weights, and wait until all ranks have theirs."""
        log(f"Load weight begin. avail mem={get_available_cpu_memory():.2f} GB", self.rank)
        began_s = time.monotonic()
        DefaultModelLoader(self.server_args.model_path).load_model(self.rank)
        self.model = DeepseekV2ForCausalLM(self.rank, self.tp_group)
        log(
            f"Load weight end. elapsed={time.monotonic() - began_s:.2f} s, "
            f"type=DeepseekV2ForCausalLM, dtype=torch.float32, "
            f"avail mem={get_available_cpu_memory():.2f} GB, mem usage=0.01 GB.",
            self.rank,
        )
        distributed_c10d.monitored_barrier(self.tp_group)

    def init_device_graphs(self) -> None:
        """Capture the graphs."""
        time.sleep(PACE_S)
        CPUGraphRunner(self.rank, self.model).capture()

    def forward(self) -> None:
        """Run the model once, for a request."""
        self.model.forward("warmup")
