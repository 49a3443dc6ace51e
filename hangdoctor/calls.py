"""The system calls that a thread can be blocked in, and how /proc/TID/syscall tells them.

The numbers differ between machines; here are the calls that can block, of the two that servers run,
and some that a loop is made of.
"""

from __future__ import annotations

from typing import NamedTuple

PAGE_FAULT = "page fault"
"""A thread that is blocked outside of any call: the kernel fetches a page for it."""

READS = frozenset({"read", "readv", "pread64", "recvfrom", "recvmsg", "recvmmsg"})
WRITES = frozenset({"write", "writev", "pwrite64", "sendto", "sendmsg", "sendmmsg", "sendfile"})
POLLS = frozenset({"poll", "ppoll", "select", "pselect6"})
EPOLLS = frozenset({"epoll_wait", "epoll_pwait", "epoll_pwait2"})
OPENS = frozenset({"open", "openat", "openat2"})
LOCKS = frozenset({"flock", "fcntl"})
SLEEPS = frozenset({"nanosleep", "clock_nanosleep"})
CHILDREN = frozenset({"wait4", "waitid"})
ON_ONE = READS | WRITES | LOCKS | {"connect", "accept", "accept4", "ioctl", "fsync", "fdatasync"}
"""Calls whose first argument is the one descriptor that they wait for."""
TAKE_FD = ON_ONE | EPOLLS | {"close", "fstat", "lseek"}
"""Calls whose first argument is a descriptor."""

# Source: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of Linux 6.
_X86_64 = {
    0: "read", 1: "write", 2: "open", 3: "close", 4: "stat", 5: "fstat", 6: "lstat", 7: "poll",
    8: "lseek", 12: "brk", 24: "sched_yield", 39: "getpid", 96: "gettimeofday", 186: "gettid",
    219: "restart_syscall", 228: "clock_gettime",
    9: "mmap", 10: "mprotect", 11: "munmap", 16: "ioctl", 17: "pread64", 18: "pwrite64",
    19: "readv", 20: "writev", 21: "access", 23: "select", 26: "msync", 28: "madvise",
    34: "pause", 35: "nanosleep", 40: "sendfile", 42: "connect", 43: "accept", 44: "sendto",
    45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 56: "clone", 57: "fork", 58: "vfork",
    59: "execve", 61: "wait4", 65: "semop", 72: "fcntl", 73: "flock", 74: "fsync",
    75: "fdatasync", 82: "rename", 83: "mkdir", 87: "unlink", 89: "readlink",
    128: "rt_sigtimedwait", 130: "rt_sigsuspend", 137: "statfs", 162: "sync", 202: "futex",
    208: "io_getevents", 217: "getdents64", 220: "semtimedop", 230: "clock_nanosleep",
    231: "exit_group", 232: "epoll_wait", 247: "waitid", 257: "openat", 262: "newfstatat",
    270: "pselect6", 271: "ppoll", 275: "splice", 281: "epoll_pwait", 288: "accept4",
    299: "recvmmsg", 307: "sendmmsg", 332: "statx", 333: "io_pgetevents", 426: "io_uring_enter",
    435: "clone3", 437: "openat2", 441: "epoll_pwait2", 449: "futex_waitv",
}  # fmt: skip
_AARCH64 = {
    4: "io_getevents", 22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 43: "statfs",
    128: "restart_syscall",
    56: "openat", 57: "close", 61: "getdents64", 63: "read", 64: "write", 65: "readv",
    66: "writev", 67: "pread64", 68: "pwrite64", 71: "sendfile", 72: "pselect6", 73: "ppoll",
    76: "splice", 79: "newfstatat", 80: "fstat", 81: "sync", 82: "fsync", 83: "fdatasync",
    94: "exit_group", 95: "waitid", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep",
    133: "rt_sigsuspend", 137: "rt_sigtimedwait", 192: "semtimedop", 193: "semop", 202: "accept",
    203: "connect", 206: "sendto", 207: "recvfrom", 211: "sendmsg", 212: "recvmsg",
    215: "munmap", 220: "clone", 221: "execve", 222: "mmap", 226: "mprotect", 227: "msync",
    233: "madvise", 242: "accept4", 243: "recvmmsg", 260: "wait4", 269: "sendmmsg",
    291: "statx", 292: "io_pgetevents", 426: "io_uring_enter", 435: "clone3", 437: "openat2",
    441: "epoll_pwait2", 449: "futex_waitv",
}  # fmt: skip
_CLOCKS = 16
"""More than there are clocks, and less than any address."""
_CALLS = {"x86_64": _X86_64, "aarch64": _AARCH64}


class Call(NamedTuple):
    """A call that a thread is blocked in.

    Attributes:
        name: as in the manual; "call 512" for one that is not listed here, PAGE_FAULT for none.
        arguments: the six, as they stand in the registers; none for a page fault.
        stack_pointer: where the thread's stack ends.
    """

    name: str
    arguments: tuple[int, ...]
    stack_pointer: int

    @property
    def fd(self) -> int:
        """The first argument as a descriptor: an int, whatever the register's upper half holds."""
        return (self.arguments[0] & 0xFFFF_FFFF) if self.arguments else -1


def parse_syscall(line: str, machine: str) -> Call | None:
    """Parse a line of /proc/TID/syscall; None for a thread that runs.

    >>> parse_syscall("45 0x6 0x7f7c 0x1 0x0 0x0 0x0 0x7ffcf8 0x7f7c1d", "x86_64")
    Call(name='recvfrom', arguments=(6, 32636, 1, 0, 0, 0), stack_pointer=8387832)
    >>> parse_syscall("-1 0x7ffcf8 0x7f7c1d", "x86_64").name, parse_syscall("running", "x86_64")
    ('page fault', None)
    """
    words = line.split()
    if not words or words[0] == "running":
        return None
    try:
        numbers = [int(word, 16) for word in words[1:]]
        number = int(words[0])
    except ValueError:
        return None
    if number < 0:
        return Call(PAGE_FAULT, (), numbers[0] if numbers else 0)
    name = name_of_call(number, machine)
    return Call(name, tuple(numbers[:6]), numbers[6] if len(numbers) > 6 else 0)


def resumed(call: Call, kernel: str) -> Call:
    """Return the call that goes on after a signal or a stop, by where the kernel waits in it.

    A wait of a given length is entered anew as `restart_syscall`, with the same registers. It is
    of three kinds (Linux: include/linux/restart_block.h), of which a sleep has no place of its own.

    >>> again = Call("restart_syscall", (1, 0, 0x7FFC, 0, 0, 0), 0)
    >>> resumed(again, "hrtimer_nanosleep").name, resumed(again, "futex_do_wait").name
    ('clock_nanosleep', 'futex')
    >>> resumed(again, "").name
    'restart_syscall'
    """
    if call.name != "restart_syscall" or kernel in ("", "0"):
        return call
    # The first argument of the one is a clock, that of the other an address.
    name = "clock_nanosleep" if call.arguments[0] < _CLOCKS else "nanosleep"
    named = next((each for each in ("futex", "poll") if kernel.startswith(each)), name)
    return call._replace(name=named)


def name_of_call(number: int, machine: str) -> str:
    """Return the name of a system call.

    >>> name_of_call(24, "x86_64"), name_of_call(512, "x86_64")
    ('sched_yield', 'call 512')
    """
    return _CALLS.get(machine, {}).get(number, f"call {number}")
