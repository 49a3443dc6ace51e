"""Opens a FIFO that nobody writes to (argv[2]), as a shard on storage that never delivers."""

import os
import sys
from pathlib import Path

from announce import announce


def load_shard(path):
    with Path(path).open("rb") as shard:
        return shard.read()


os.mkfifo(sys.argv[2])
announce()
load_shard(sys.argv[2])
