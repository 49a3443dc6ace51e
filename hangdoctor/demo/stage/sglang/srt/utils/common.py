"""What all processes need: the log, the title, an end with the parent, and numbers to print."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

from ...third_party.torch.distributed import distributed_c10d

PACE_S = 0.4
"""A step of a healthy start takes so long: the whole of it is over in some seconds."""

_PR_SET_PDEATHSIG = 1


def log(text: str, rank: int | None = None) -> None:
    """Write a line as Python's logging does for SGLang, whole, so that no other cuts it in two."""
    who = "" if rank is None else f" TP{rank}"
    write(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}{who}] {text}\n")


def write(text: str) -> None:
    """Write to stderr, which is the log; it is not worth an exception if that is full."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


def bar(title: str, done: int, total: int, began_s: float) -> None:
    """Write a progress bar as tqdm does into a file: each state of it on the same line."""
    spent_s = max(time.monotonic() - began_s, 0.001)
    left_s = _clock(spent_s * (total - done) / done) if done else "?"
    speed = f"{done / spent_s:.2f}it/s" if done else "?it/s"
    filled = "█" * (10 * done // total)
    drawn = f"|{filled:<10}|" if title.startswith("Capturing") else " Completed |"
    end = "\n" if done == total else ""
    times = f"[{_clock(spent_s)}<{left_s}, {speed}]"
    write(f"\r{title}: {100 * done // total:3}%{drawn} {done}/{total} {times}{end}")


def setproctitle(title: str) -> None:
    """Give the process a title, in the place where its arguments lie, as setproctitle does."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
    words = fields.rpartition(")")[2].split()
    begin, end = int(words[45]), int(words[46])  # arg_start, arg_end: fields 48 and 49
    space = title.encode()[: end - begin - 1].ljust(end - begin, b"\0")
    ctypes.memmove(begin, space, len(space))
    Path("/proc/self/comm").write_text(title[:15], encoding="ascii")


def kill_itself_when_parent_died() -> None:
    """Let the kernel kill this process when its parent ends, whatever state it is in then."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def get_available_cpu_memory() -> float:
    """Return the machine's free memory in GB."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9


def broadcast_pyobj(data: Any, group: distributed_c10d.ProcessGroup) -> Any:
    """Send the first rank's object to all ranks."""
    return distributed_c10d.broadcast(data, group)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02}:{int(seconds) % 60:02}"
