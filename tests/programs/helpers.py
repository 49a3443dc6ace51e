"""Has children that are no ranks: multiprocessing's own helper, and one that is not Python."""

import subprocess
import threading
from multiprocessing import resource_tracker

from announce import announce

resource_tracker.ensure_running()
with subprocess.Popen(["sleep", "600"]) as compiler:
    announce(compiler=compiler.pid)
    threading.Event().wait()
