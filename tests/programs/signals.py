"""Writes to an eventfd without end, and answers each signal with how many it has got.

The answer tells also how often a call of its came back without having done its work.
"""

import ctypes
import os
import signal
import struct

from announce import announce

got, answers, odd = [], [], 0


def count(*_):
    got.append(1)
    answers.append(len(got))


signal.signal(signal.SIGUSR1, count)
fd = os.eventfd(0) if hasattr(os, "eventfd") else ctypes.CDLL(None).eventfd(0, 0)
one = struct.pack("=Q", 1)
announce(fd=fd)
while True:
    odd += os.write(fd, one) != 8
    if answers:
        announce(signals=answers.pop(), odd=odd)
