"""Builds an extension once for all ranks: who gets the lock file compiles, the others wait."""

from __future__ import annotations

import subprocess
import time
from typing import TYPE_CHECKING

from .file_baton import FileBaton

if TYPE_CHECKING:
    from pathlib import Path

FUNCTIONS = 400
"""In one source file: seconds of work for a compiler that optimises."""

_FUNCTION = """
static double f{n}(double *x, int k) {{
  double s = {n};
  for (int i = 0; i < k; i++)
    for (int j = i; j < k; j++)
      s += x[i] * x[(j * {n} + 7) % k] - (x[j] > s ? x[(i + {n}) % k] : s / (1.0 + x[j] * x[j]));
  return s;
}}"""


def load(name: str, build_directory: Path, compiler: str) -> None:
    """Build an extension in its directory, or wait for who builds it."""
    build_directory.mkdir(parents=True, exist_ok=True)
    _jit_compile(name, build_directory, compiler)


def _jit_compile(name: str, build_directory: Path, compiler: str) -> None:
    baton = FileBaton(build_directory / "lock")
    if not baton.try_acquire():
        baton.wait()
        return
    try:
        _run_ninja_build(name, build_directory, compiler)
    finally:
        baton.release()


def _run_ninja_build(name: str, build_directory: Path, compiler: str) -> None:
    """Compile one source after the other, more than anybody waits for."""
    source = build_directory / f"{name}.c"
    calls = "\n".join(f"  s += f{n}(x, k);" for n in range(FUNCTIONS))
    source.write_text(
        "".join(_FUNCTION.format(n=n) for n in range(FUNCTIONS))
        + f"\ndouble {name}(double *x, int k) {{\n  double s = 0;\n{calls}\n  return s;\n}}\n",
        encoding="ascii",
    )
    number = 0
    while True:
        number += 1
        target = build_directory / f"{name}_{number % 64}.o"
        command = [compiler, "-O3", "-c", str(source), "-o", str(target)]
        if subprocess.run(command, check=False).returncode:
            time.sleep(1)  # a compiler that fails must not be started a thousand times
