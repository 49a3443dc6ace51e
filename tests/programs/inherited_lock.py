"""Takes a flock on argv[2] in a process that ends; its child inherits it and lives on."""

import fcntl
import os
import signal
import sys

from announce import announce

reading, writing = os.pipe()
if (taker := os.fork()) == 0:
    file = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)
    fcntl.flock(file, fcntl.LOCK_EX)
    if (child := os.fork()) == 0:
        signal.pause()
    os.write(writing, str(child).encode())
    os._exit(0)
os.waitpid(taker, 0)
announce(child=int(os.read(reading, 20)))
signal.pause()
