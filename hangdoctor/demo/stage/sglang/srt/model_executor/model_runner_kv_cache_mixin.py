"""Sizes the KV cache by the least memory that any rank has."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ...third_party.torch.distributed import distributed_c10d
from ..debug_utils.dumper import dumper
from ..utils.common import PACE_S, get_available_cpu_memory, log

if TYPE_CHECKING:
    from ...third_party.torch.distributed.distributed_c10d import ProcessGroup


class ModelRunnerKVCacheMixin:
    """The model runner's part that allocates."""

    rank: int
    tp_group: ProcessGroup

    def init_memory_pool(self) -> None:
        """Agree on a size, and allocate."""
        if self.rank == 0:
            log("Using KV cache dtype: torch.float32", self.rank)
        time.sleep(PACE_S)
        dumper.on("kv-cache", self.rank)
        distributed_c10d.all_reduce(get_available_cpu_memory(), self.tp_group)
        log("KV Cache is allocated. #tokens: 2048, KV size: 0.00 GB", self.rank)
        log(f"Memory pool end. avail mem={get_available_cpu_memory():.2f} GB", self.rank)
