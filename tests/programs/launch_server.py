"""A launch in name only: a launcher of this file's name, with children titled like SGLang's.

argv[2:] are the titles: each child is started by that name, as setproctitle would leave it. On
SIGUSR1 a child takes memory without end. The launcher waits for its first child, or with REAPS in
its environment for all of them, whichever ends first, and stays.
"""

import os
import subprocess
import sys

from announce import announce

SLEEP = """
import signal, threading
def eat(number, frame):
    taken = []
    while True:
        taken.append(bytearray(b"x") * (1 << 20))
signal.signal(signal.SIGUSR1, eat)
threading.Event().wait()
"""
children = [
    subprocess.Popen([title, "-S", "-c", SLEEP], executable=sys.executable)
    for title in sys.argv[2:]
]
announce(children=[child.pid for child in children])
while "REAPS" in os.environ:
    os.wait()
children[0].wait()
