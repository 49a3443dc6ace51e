"""Learns how processes end that are not ours, through descriptors that outlive them.

A pidfd needs no right over the process. From Linux 6.15 on it tells the exit status even after the
parent has collected it (ioctl PIDFD_GET_INFO with PIDFD_INFO_EXIT, include/uapi/linux/pidfd.h);
before that only the parent knows, or a zombie's stat.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct

from hangdoctor.collect import procfs

MOST_HELD = 256
"""Descriptors that are held at most: a usual limit is 1024 for a process."""

_INFO = struct.Struct("=QQ11Ii")  # mask, cgroup, eleven ids, exit code
_EXIT = 1 << 3  # PIDFD_INFO_EXIT
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11  # _IOWR(PIDFS_IOCTL_MAGIC, 11, pidfd_info)


class Exits:
    """Holds a pidfd of each process that it is told of, and gives it up when it has ended."""

    def __init__(self, proc: str) -> None:
        # The numbers of another /proc are not those that pidfd_open takes.
        self._usable = proc == "/proc" and hasattr(os, "pidfd_open")
        self._held: dict[int, tuple[int, int]] = {}

    def hold(self, pid: int, start_ticks: int) -> None:
        """Hold a process from now on; nothing happens where it is held, gone, or too many are."""
        held = self._held.get(pid)
        if not self._usable or (held and held[0] == start_ticks):
            return
        if held:
            self._give_up(pid)
        if len(self._held) >= MOST_HELD:
            return
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return
        stat = procfs.read_stat("/proc", pid)
        if stat is None or stat.start_ticks != start_ticks:  # the number was in use again
            os.close(fd)
            return
        self._held[pid] = start_ticks, fd

    def status(self, pid: int) -> int | None:
        """Return how a process ended, as wait() encodes it, and give it up; None if not known."""
        held = self._held.get(pid)
        if held is None:
            return None
        info = bytearray(_INFO.pack(_EXIT, *[0] * 13))
        code = None
        with contextlib.suppress(OSError):  # an older kernel
            fcntl.ioctl(held[1], _GET_INFO, info)
            fields = _INFO.unpack(info)
            code = fields[-1] if fields[0] & _EXIT else None
        self._give_up(pid)
        return code

    def close(self) -> None:
        """Give up all."""
        for pid in list(self._held):
            self._give_up(pid)

    def _give_up(self, pid: int) -> None:
        os.close(self._held.pop(pid)[1])
