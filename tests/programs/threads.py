"""Has argv[2] threads that sleep 15 frames deep; with argv[3] its main thread works and counts."""

import sys
import threading
from pathlib import Path

from announce import announce


def deep(depth):
    if depth:
        deep(depth - 1)
    else:
        threading.Event().wait()


for _ in range(int(sys.argv[2])):
    threading.Thread(target=deep, args=(15,), daemon=True).start()
if len(sys.argv) > 3:
    import mmap
    import struct

    with Path(sys.argv[3]).open("r+b") as file:
        shared = mmap.mmap(file.fileno(), 8)
    announce()
    count = 0
    while True:
        count += 1
        shared[:8] = struct.pack("=Q", count)
announce()
threading.Event().wait()
