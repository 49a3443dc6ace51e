"""The model: one forward of it is one all_reduce over all ranks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..debug_utils.dumper import dumper
from ..distributed.parallel_state import all_reduce
from ..utils.common import PACE_S

if TYPE_CHECKING:
    from ...third_party.torch.distributed.distributed_c10d import ProcessGroup


class DeepseekV2ForCausalLM:
    """A model of one layer, which computes nothing."""

    def __init__(self, rank: int, group: ProcessGroup) -> None:
        self.rank = rank
        self.group = group

    def forward(self, when: str) -> None:
        """Run once; `when` is the phase of the start in which it is."""
        time.sleep(PACE_S)
        dumper.on(when, self.rank)
        all_reduce(1.0, self.group)
