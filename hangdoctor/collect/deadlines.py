"""When a sleep ends by itself, by its call's arguments.

A sleep to a moment tells that moment. Of one for a while only its length can be read: the kernel
does not tell when it began.
"""

from __future__ import annotations

import os
import struct
import time
from typing import TYPE_CHECKING

from hangdoctor.calls import SLEEPS

if TYPE_CHECKING:
    from collections.abc import Callable

    from hangdoctor.calls import Call

    Memory = Callable[[int, int], bytes]

_ABSOLUTE = 1  # TIMER_ABSTIME
_CLOCKS = (time.CLOCK_REALTIME, time.CLOCK_MONOTONIC, time.CLOCK_BOOTTIME, time.CLOCK_TAI)
_OF_A_NAMESPACE = (time.CLOCK_MONOTONIC, time.CLOCK_BOOTTIME)
_TIMESPEC = struct.Struct("=qq")


def is_sleep(call: Call) -> bool:
    """Tell whether a call waits for time alone: no descriptor, no lock, and not for ever."""
    name, arguments = call.name, call.arguments
    if name in SLEEPS:
        return True
    if name in ("select", "pselect6"):
        return call.fd == 0 and bool(arguments[4])
    if name == "ppoll":
        return not arguments[1] & 0xFFFF_FFFF and bool(arguments[2])
    return name == "poll" and not arguments[1] & 0xFFFF_FFFF and not arguments[2] >> 31 & 1


def read_end(
    call: Call, memory: Memory, *, proc: str, pid: int
) -> tuple[float | None, float | None]:
    """Return when a sleep ends and how long it is, of which one call tells one.

    The end is a time of the monotonic clock, in seconds. Both are None where neither can be read,
    or the sleep goes by a clock of which we do not know how it goes.

    Args:
        call: of which `is_sleep` is true.
        memory: reads the process's memory, from an address so many bytes; fewer where it cannot.
        proc: root of the processes' world.
        pid: of the process.
    """
    name, arguments = call.name, call.arguments
    if name == "poll":
        return None, (arguments[2] & 0xFFFF_FFFF) / 1000
    at = {"nanosleep": 0, "clock_nanosleep": 2, "ppoll": 2}.get(name, 4)
    raw = memory(arguments[at], _TIMESPEC.size)
    if len(raw) < _TIMESPEC.size:
        return None, None
    seconds, part = _TIMESPEC.unpack(raw)
    told_s = seconds + part / (1e6 if name == "select" else 1e9)
    if seconds < 0:
        return None, None
    if name != "clock_nanosleep" or not arguments[1] & _ABSOLUTE:
        return None, told_s
    clock = arguments[0] & 0xFFFF_FFFF
    if clock not in _CLOCKS or (clock in _OF_A_NAMESPACE and not _same_clock(proc, pid)):
        return None, None
    left_s = told_s - time.clock_gettime(clock)
    return time.monotonic() + left_s, None


def _same_clock(proc: str, pid: int) -> bool:
    """Tell whether a process is in our time namespace; kernels before 5.6 have only one."""
    try:
        return os.readlink(f"{proc}/{pid}/ns/time") == os.readlink(f"{proc}/self/ns/time")
    except FileNotFoundError:
        return not os.path.exists(f"{proc}/self/ns/time")
    except OSError:
        return False
