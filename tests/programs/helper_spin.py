"""A launch in name only whose rank TP0 waits for a helper that is no compiler, and spins."""

import subprocess
import sys

from announce import announce

RANK = """
import subprocess, sys
subprocess.run([sys.argv[1], "-S", "-c", "while True: pass"])
"""
rank = subprocess.Popen(
    ["sglang::scheduler_TP0", "-S", "-c", RANK, sys.executable], executable=sys.executable
)
announce(rank=rank.pid)
rank.wait()
