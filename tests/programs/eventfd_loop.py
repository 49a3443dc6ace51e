"""Writes 8 bytes to an eventfd as fast as it can: system calls without end, and no progress."""

import os
import struct

from announce import announce

one = struct.pack("=Q", 1)
fd = os.eventfd(0) if hasattr(os, "eventfd") else os.pipe()[1]
announce(fd=fd)
while True:
    os.write(fd, one)
