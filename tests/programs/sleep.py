"""Sleeps, under the name argv[2] if there is one. Tests also stop it, trace it and kill it."""

import sys
import threading
from pathlib import Path

from announce import announce

if len(sys.argv) > 2:
    Path("/proc/self/comm").write_text(sys.argv[2], encoding="ascii")
announce()
threading.Event().wait()
