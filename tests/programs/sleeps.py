"""Waits for time alone, or nearly, by the call argv[2], argv[3] seconds; says when that ends."""

import ctypes
import os
import select
import sys
import threading
import time

from announce import announce

KIND, SECONDS = sys.argv[2], float(sys.argv[3])
LIBC = ctypes.CDLL(None)
READING, _ = os.pipe()


class Two(ctypes.Structure):
    """A struct timespec or timeval."""

    _fields_ = (("seconds", ctypes.c_long), ("part", ctypes.c_long))


def moment(clock):
    until_s = time.clock_gettime(clock) + SECONDS
    return Two(int(until_s), int(until_s % 1 * 1e9))


FOR_A_WHILE = Two(int(SECONDS), 0)
CALLS = {
    "python": lambda: time.sleep(SECONDS),
    "monotonic": lambda: LIBC.clock_nanosleep(1, 1, ctypes.byref(moment(1)), None),
    "realtime": lambda: LIBC.clock_nanosleep(0, 1, ctypes.byref(moment(0)), None),
    "boottime": lambda: LIBC.clock_nanosleep(7, 1, ctypes.byref(moment(7)), None),
    "relative": lambda: LIBC.clock_nanosleep(1, 0, ctypes.byref(FOR_A_WHILE), None),
    "nanosleep": lambda: LIBC.nanosleep(ctypes.byref(FOR_A_WHILE), None),
    "select": lambda: LIBC.select(0, None, None, None, ctypes.byref(FOR_A_WHILE)),
    "ppoll": lambda: LIBC.ppoll(None, 0, ctypes.byref(FOR_A_WHILE), None),
    "poll": lambda: LIBC.poll(None, 0, int(1000 * SECONDS)),
    # Not for time alone, or without end.
    "descriptor": lambda: select.select([READING], [], [], SECONDS),
    "lock": lambda: threading.Event().wait(SECONDS),
    "for ever": lambda: LIBC.poll(None, 0, -1),
}
announce(ends_s=time.monotonic() + SECONDS)
CALLS[KIND]()
