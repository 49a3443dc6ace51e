"""A launch in name only: its rank TP0 builds with ninja, as PyTorch's cpp_extension does.

argv[2] is an empty directory; argv[3] a command that ninja runs the compiler with, such as one that
waits for a lock; it may be left out. What is compiled takes minutes.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from announce import announce

LINES = ["constexpr unsigned turn(unsigned x, int n) { while (n--) x = x * 3u + 1u; return x; }"]
LINES += [f'static_assert(turn({number}, 20000) != 1, "");' for number in range(50_000)]
BUILD = """ninja_required_version = 1.3
cxx = {before}c++
cflags = -DTORCH_EXTENSION_NAME=moe -std=c++17 -fPIC
rule compile
  command = $cxx -MMD -MF $out.d $cflags -c $in -o $out
  depfile = $out.d
  deps = gcc
rule link
  command = $cxx $in -shared -o $out
build moe.o: compile {place}/moe.cpp
build moe.so: link moe.o
default moe.so
"""
RANK = """
import subprocess, sys
def _run_ninja_build(command):
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
_run_ninja_build(sys.argv[1:])
"""

place = Path(sys.argv[2])
(place / "moe.cpp").write_text("\n".join(LINES) + "\n", encoding="ascii")
before = " ".join(sys.argv[3:4]) + " " if sys.argv[3:] else ""
(place / "build.ninja").write_text(BUILD.format(before=before, place=place), encoding="ascii")
beside = Path(sys.executable).parent / "ninja"  # where pip installs it
ninja = str(beside) if beside.exists() else shutil.which("ninja")
rank = subprocess.Popen(
    ["sglang::scheduler_TP0", "-S", "-c", RANK, ninja, "-v"],
    executable=sys.executable,
    cwd=place,
)
announce(rank=rank.pid)
os.waitpid(rank.pid, 0)
