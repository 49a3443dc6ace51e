"""The group of all ranks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ...third_party.torch.distributed import distributed_c10d
from ..debug_utils.dumper import dumper
from ..utils.common import PACE_S

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping


def init_distributed_environment(
    rank: int, peers: Mapping[int, socket.socket]
) -> distributed_c10d.ProcessGroup:
    """Meet the other ranks."""
    time.sleep(PACE_S)
    dumper.on("distributed-init", rank)
    return distributed_c10d.init_process_group(rank, peers)


def all_reduce(value: float, group: distributed_c10d.ProcessGroup) -> float:
    """Reduce a value over all ranks."""
    return distributed_c10d.all_reduce(value, group)
