"""Stands in state D: the parent of a vfork waits for an exec that a FIFO (argv[2]) holds up."""

import os
import sys

from announce import announce

os.mkfifo(sys.argv[2])
announce()
os.posix_spawn(
    "/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, sys.argv[2], 0, 0)]
)
