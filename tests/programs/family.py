"""A parent with a child that waits, one with a grandchild, and one that has died unnoticed.

On "orphan" at its stdin the middle child dies, and its child gets another parent.
"""

import os
import signal
import sys

from announce import announce


def child(run):
    if (pid := os.fork()) == 0:
        run()
        os._exit(7)
    return pid


def wait():
    while True:
        signal.pause()


inner, outer = os.pipe()


def middle():
    os.write(outer, str(child(wait)).encode())
    wait()


waiting, between, dead = child(wait), child(middle), child(lambda: None)
grandchild = int(os.read(inner, 20))
os.waitid(os.P_PID, dead, os.WEXITED | os.WNOWAIT)
announce(waiting=waiting, between=between, dead=dead, grandchild=grandchild)
for command in sys.stdin:
    if command == "orphan\n":
        os.kill(between, signal.SIGKILL)
        os.waitpid(between, 0)
    if command == "reap\n":
        os.waitpid(dead, 0)
    announce()
wait()
