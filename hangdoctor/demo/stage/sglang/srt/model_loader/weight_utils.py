"""Reads the shards of a model, with a progress bar of the first rank."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from ..debug_utils.dumper import dumper
from ..utils.common import PACE_S, bar

if TYPE_CHECKING:
    from collections.abc import Iterator

TITLE = "Loading safetensors checkpoint shards"
BLOCK_BYTES = 1 << 17


def safetensors_weights_iterator(model_path: str, rank: int) -> Iterator[tuple[int, int]]:
    """Read shard after shard; yield after each how many are done, and of how many."""
    with ExitStack() as exits:
        paths = sorted(Path(model_path).glob("*.safetensors"))
        shards = [exits.enter_context(path.open("rb", buffering=0)) for path in paths]
        began_s = time.monotonic()
        for number, shard in enumerate(shards):
            if rank == 0:
                bar(TITLE, number, len(shards), began_s)
            while shard.read(BLOCK_BYTES):
                dumper.slowly("weights")
            time.sleep(PACE_S / 2)
            yield number + 1, len(shards)
        if rank == 0:
            bar(TITLE, len(shards), len(shards), began_s)
