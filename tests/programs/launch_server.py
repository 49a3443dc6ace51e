"""A launch in name only: a launcher of this file's name, with children titled like SGLang's.

argv[2:] are the titles: each child is started by that name, as setproctitle would leave it.
"""

import subprocess
import sys

from announce import announce

SLEEP = "import threading; threading.Event().wait()"
children = [
    subprocess.Popen([title, "-S", "-c", SLEEP], executable=sys.executable)
    for title in sys.argv[2:]
]
announce(children=[child.pid for child in children])
children[0].wait()
