"""Captures a graph for each batch size; all ranks run the model together for it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..utils.common import bar, get_available_cpu_memory, log

if TYPE_CHECKING:
    from ..models.deepseek_v2 import DeepseekV2ForCausalLM

BATCH_SIZES = (4, 2, 1)


class CPUGraphRunner:
    """The graphs of one rank."""

    def __init__(self, rank: int, model: DeepseekV2ForCausalLM) -> None:
        self.rank = rank
        self.model = model

    def capture(self) -> None:
        """Capture all sizes, the largest first."""
        memory = f"{get_available_cpu_memory():.2f} GB"
        log(
            f"Capture cpu graph begin. This can take up to several minutes. avail mem={memory}",
            self.rank,
        )
        began_s = time.monotonic()
        for done, size in enumerate(BATCH_SIZES):
            if self.rank == 0:
                title = f"Capturing batches (bs={size} avail_mem={memory})"
                bar(title, done, len(BATCH_SIZES), began_s)
            self.capture_one_batch_size(size)
        if self.rank == 0:
            bar(title, len(BATCH_SIZES), len(BATCH_SIZES), began_s)
        log(
            f"Capture cpu graph end. Time elapsed: {time.monotonic() - began_s:.2f} s. "
            f"mem usage=0.00 GB. avail mem={memory}.",
            self.rank,
        )

    def capture_one_batch_size(self, size: int) -> None:
        """Capture one size."""
        self.model.forward("graph-capture" if size != BATCH_SIZES[0] else "")
