"""Reads the registers of one running thread, which says in which system call it is.

/proc/TID/syscall shows the call of a thread that is blocked, and of one that is at work no more
than "running". ptrace tells it at the price of a stop: 21 us of that thread alone, measured. The
thread is seized (PTRACE_SEIZE), so that the kernel lets go of it whatever happens to us; one in
state D, stopped, or traced is left alone.

A call that the thread begins to wait in at that very moment may come back with EINTR, as after
Ctrl-Z and `fg`; hence it is done with consent only.
"""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import struct
import threading
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from hangdoctor.calls import TAKE_FD, name_of_call
from hangdoctor.collect import procfs
from hangdoctor.collect.permissions import refused
from hangdoctor.model import Missing, Peek, PeekedCall

if TYPE_CHECKING:
    from collections.abc import Callable

PEEKS = 16
"""Looks at one thread: a loop is caught outside of its calls now and then."""
MOST_CALLS = 3
STOP_WITHIN_S = 0.02
"""A thread that has a CPU stops in microseconds; one that has just gone into state D does not."""

_BETWEEN_S = 0.001
_FIRST_PAUSE_S = 0.00001
_SEIZE, _INTERRUPT, _GETREGS, _DETACH = 0x4206, 0x4207, 12, 17
_EVENT_STOP = 128
_WALL = 0x4000_0000
_REGISTERS = struct.Struct("=27Q")  # struct user_regs_struct of sys/user.h, x86-64
_RDI, _ORIG_RAX, _CS = 14, 15, 17
_CODE_64_BIT = 0x33
_MACHINE = platform.machine()


class _Stop(NamedTuple):
    """What one stop told: number of the call, -1 for none, its first argument, its length."""

    number: int
    argument: int
    stopped_s: float


def supported() -> bool:
    """Tell whether registers can be read on this machine."""
    return _MACHINE == "x86_64"


def peek(
    proc: str, pid: int, tid: int, *, stop_within_s: float = STOP_WITHIN_S
) -> Peek | Missing | None:
    """Look at the registers of a running thread some times; None where it does not run any more.

    In a thread of its own: when that ends, the kernel lets go of whatever it still traces.

    Args:
        proc: root of the processes; only /proc numbers threads as ptrace does.
        pid: of the process.
        tid: of the thread.
        stop_within_s: a thread that does not stop in this time is let go, and not looked at again.
    """
    if not supported():
        return Missing(reason="unsupported", detail=f"registers are not read on {_MACHINE}")
    if proc != "/proc":
        return Missing(reason="unsupported", detail=f"{proc} numbers threads in another way")
    answers: list[Peek | Missing | None] = []

    def look() -> None:
        answers.append(_peek(proc, pid, tid, stop_within_s))

    tracer = threading.Thread(target=look, daemon=True)
    tracer.start()
    tracer.join()
    return answers[0] if answers else Missing(reason="failed", detail="the look at it broke off")


def _peek(proc: str, pid: int, tid: int, stop_within_s: float) -> Peek | Missing | None:
    libc, pause = _Libc(), _come_first()
    stops: list[_Stop] = []
    for _ in range(PEEKS):
        if not _may_be_stopped(proc, pid, tid):
            break
        try:
            stop = _stop_once(libc, tid, pause, stop_within_s)
        except PermissionError as error:
            return refused(f"{error.strerror} (ptrace of {tid})", _user(proc, pid))
        except (OSError, TimeoutError):  # it ended, or waits for the kernel by now
            break
        if stop is not None:
            stops.append(stop)
        time.sleep(_BETWEEN_S)
    if not stops:
        return None
    counts = Counter((stop.number, stop.argument) for stop in stops)
    return Peek(
        tid=tid,
        peeks=len(stops),
        calls=tuple(
            _call(number, argument, times)
            for (number, argument), times in counts.most_common()
            if number >= 0
        )[:MOST_CALLS],
        stopped_us=round(statistics.median(stop.stopped_s for stop in stops) * 1e6, 1),
        most_us=round(max(stop.stopped_s for stop in stops) * 1e6, 1),
    )


def _come_first() -> Callable[[], None]:
    """Let this thread run before others, if we may, and return a pause that fits to it.

    Without that, on a machine with more to run than CPUs, the one that lets the target go on may
    have to wait for a CPU itself: milliseconds in which the target stands.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:  # as most users, and root in a container
        return os.sched_yield
    return partial(time.sleep, _FIRST_PAUSE_S)


def _call(number: int, argument: int, times: int) -> PeekedCall:
    name = name_of_call(number, _MACHINE)
    fd = argument & 0xFFFF_FFFF if name in TAKE_FD else None
    return PeekedCall(call=name, times=times, fd=fd)


def _may_be_stopped(proc: str, pid: int, tid: int) -> bool:
    """Tell whether a thread is at work, and neither it nor its process is stopped or traced."""
    at = f"{proc}/{pid}/task/{tid}"
    try:
        status = procfs.parse_status(procfs.read(f"{at}/status"))
        main = procfs.read_stat(proc, pid)
        call = procfs.read(f"{at}/syscall")
    except OSError:
        return False
    free = status.get("TracerPid") == "0" and main is not None and main.state not in "TtZX"
    return free and status.get("State", "")[:1] == "R" and call.startswith(b"running")


def _stop_once(
    libc: _Libc, tid: int, pause: Callable[[], None], stop_within_s: float
) -> _Stop | None:
    """Stop a thread, read its registers, let it go on; None where these were not a call's.

    Args:
        libc: see there.
        tid: of the thread.
        pause: lets it run where it needs our CPU to come to its stop.
        stop_within_s: as in `peek`.

    Raises:
        OSError: it may not be traced, or has ended.
        TimeoutError: it does not stop. It is let go of when this thread ends.
    """
    registers = ctypes.create_string_buffer(_REGISTERS.size)
    libc.seize(tid)
    began_s = ran_s = asked_s = time.perf_counter()
    libc.ptrace(_INTERRUPT, tid)
    while (status := libc.status(tid)) is None:
        if asked_s - began_s > stop_within_s:
            raise TimeoutError
        ran_s = asked_s
        pause()
        asked_s = time.perf_counter()
    if not os.WIFSTOPPED(status):
        raise ProcessLookupError
    try:
        libc.ptrace(_GETREGS, tid, ctypes.addressof(registers))
    finally:
        # A signal that was on its way stops it as well: it gets it now, as if we were not there.
        libc.ptrace(_DETACH, tid, 0 if status >> 16 == _EVENT_STOP else os.WSTOPSIG(status))
    stopped_s = time.perf_counter() - ran_s
    values = _REGISTERS.unpack(registers.raw)
    if values[_CS] != _CODE_64_BIT:
        return None
    number = ctypes.c_int64(values[_ORIG_RAX]).value
    return _Stop(number, values[_RDI], stopped_s)


class _Libc:
    """The two calls that it takes.

    Python's own lock is kept over those that do not block: no other thread of ours may get between
    the stop and its end.
    """

    def __init__(self) -> None:
        waits, stays = ctypes.CDLL(None, use_errno=True), ctypes.PyDLL(None, use_errno=True)
        for library in (waits, stays):
            library.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, *[ctypes.c_void_p] * 2]
            library.ptrace.restype = ctypes.c_long
        self._waits, self._stays = waits, stays

    def seize(self, tid: int) -> None:
        """Begin to trace a thread, which goes on; waits for one that starts another program."""
        _check(self._waits.ptrace(_SEIZE, tid, None, None))

    def ptrace(self, request: int, tid: int, data: int = 0) -> None:
        """Make a request."""
        _check(self._stays.ptrace(request, tid, None, data))

    def status(self, tid: int) -> int | None:
        """Return what stopped or ended a thread that is traced; None as long as nothing has."""
        status = ctypes.c_int()
        found = _check(self._stays.waitpid(tid, ctypes.byref(status), _WALL | os.WNOHANG))
        return status.value if found else None


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _user(proc: str, pid: int) -> int | None:
    try:
        return os.stat(f"{proc}/{pid}").st_uid
    except OSError:
        return None
