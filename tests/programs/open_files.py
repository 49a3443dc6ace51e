"""Holds descriptors of all kinds: argv[2] is a directory for its files."""

import os
import signal
import socket
import sys
from pathlib import Path

from announce import announce

place = Path(sys.argv[2])
shard = place / "model-00001.safetensors"
shard.write_bytes(b"w" * 1000)
reading = os.open(shard, os.O_RDONLY)
os.read(reading, 640)
writing = os.open(place / "out.log", os.O_WRONLY | os.O_CREAT)
os.mkfifo(place / "shard.fifo")
fifo = os.open(place / "shard.fifo", os.O_RDWR)
pipe = os.pipe()[0]
counter = os.eventfd(31) if hasattr(os, "eventfd") else -1
unix = socket.socket(socket.AF_UNIX)
null = os.open("/dev/null", os.O_RDONLY)
source = os.open(__file__, os.O_RDONLY)
announce(
    reading=reading,
    writing=writing,
    fifo=fifo,
    pipe=pipe,
    counter=counter,
    unix=unix.fileno(),
    null=null,
    source=source,
)
signal.pause()
