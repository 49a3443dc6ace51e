"""Reads a little of a process's memory, without stopping it: what a blocked thread waits for.

All of it takes the target's memory map lock and may fetch pages from dead storage: callers must be
able to leave it behind.
"""

from __future__ import annotations

import os
import re
import struct
from bisect import bisect_right
from functools import lru_cache
from typing import NamedTuple

from hangdoctor.collect import procfs

STACK_BYTES = 2048
"""So much of a stack is searched for return addresses."""
MOST_LIBRARIES = 3

_PYTHON = re.compile(r"/(?:lib)?python[\d.]*[a-z]*(?:\.so[\d.]*)?$")
_DULL = re.compile(
    r"^(?:libc|libpthread|ld-linux[\w-]*|ld)[-.]|^(?:lib)?python[\d.]*[a-z]*(?:\.so|$)"
)
_RUNTIME = b"\0_PyRuntime\0"
_MOST_ELF_BYTES = 64 << 20


class Range(NamedTuple):
    """A part of the address space that is mapped from a file; `code` can be run."""

    start: int
    end: int
    offset: int
    path: str
    code: bool = True


class Maps:
    """Where a process has mapped its programs and libraries.

    Attributes:
        runtime: the range of Python's own state, `_PyRuntime`; None for what is not Python.
    """

    def __init__(self, proc: str, pid: int) -> None:
        ranges = parse_maps(procfs.read_table(f"{proc}/{pid}/maps"))
        code = [each for each in ranges if each.code]  # else it is data, a locale's say
        self._starts = [each.start for each in code]
        self._code = code
        self.runtime = _runtime(proc, pid, ranges)

    def library(self, address: int) -> str:
        """Return the file whose code is at an address, without its directory; "" for none."""
        index = bisect_right(self._starts, address) - 1
        if index >= 0 and address < self._code[index].end:
            return self._code[index].path.rpartition("/")[2]
        return ""

    def libraries(self, stack: bytes) -> tuple[str, ...]:
        """Return the libraries that words of a stack point into, innermost first.

        A word may be left over from an earlier call: it is a hint, not a stack.
        """
        found: dict[str, None] = {}
        for (word,) in struct.iter_unpack("=Q", stack[: len(stack) & ~7]):
            if (name := self.library(word)) and not _DULL.match(name):
                found[name] = None
                if len(found) == MOST_LIBRARIES:
                    break
        return tuple(found)


def parse_maps(raw: bytes) -> list[Range]:
    """Parse /proc/PID/maps: what holds code of a file, and where each file begins.

    >>> parse_maps(b"7f1c-7f1e r-xp 0000a000 08:01 5  /usr/lib/libzmq.so.5")
    [Range(start=32540, end=32542, offset=40960, path='/usr/lib/libzmq.so.5', code=True)]
    """
    found = []
    for line in raw.splitlines():
        words = line.split(maxsplit=5)
        if len(words) < 6 or not words[5].startswith(b"/"):
            continue
        executable = b"x" in words[1]
        if not executable and words[2].strip(b"0"):
            continue
        start, _, end = words[0].partition(b"-")
        path = words[5].decode(errors="replace")
        found.append(Range(int(start, 16), int(end, 16), int(words[2], 16), path, executable))
    return found


def read_memory(proc: str, pid: int, address: int, count: int) -> bytes:
    """Read bytes of a process's memory; fewer where the mapping ends.

    Raises:
        OSError: EACCES where refused, EIO where nothing is mapped.
    """
    fd = os.open(f"{proc}/{pid}/mem", os.O_RDONLY)
    try:
        return os.pread(fd, count, address)
    except OverflowError as error:  # an address beyond what an offset can say
        raise OSError(5, str(error)) from error
    finally:
        os.close(fd)


def _runtime(proc: str, pid: int, ranges: list[Range]) -> tuple[int, int] | None:
    """Find Python's state: in the library libpython where there is one, else in the program."""
    firsts: dict[str, int] = {}
    for each in ranges:
        if each.offset == 0 and _PYTHON.search(each.path):
            firsts.setdefault(each.path, each.start)
    for path in sorted(firsts, key=lambda path: "libpython" not in path):
        file = f"{proc}/{pid}/root{path}"
        try:
            info = os.stat(file)
            symbol = _symbol(file, info.st_dev, info.st_ino, info.st_size)
        except (OSError, struct.error, IndexError):
            continue
        if symbol:
            value, size, fixed = symbol
            start = value if fixed else firsts[path] + value
            return start, start + size
    return None


@lru_cache(maxsize=32)
def _symbol(file: str, device: int, inode: int, size: int) -> tuple[int, int, bool] | None:  # noqa: ARG001  # they name the file
    """Find `_PyRuntime` in an ELF file of 64 bits: its address, size, and whether that is fixed."""
    if size > _MOST_ELF_BYTES:
        return None
    with open(file, "rb") as opened:
        data = opened.read()
    if data[:6] != b"\x7fELF\x02\x01":
        return None
    fixed = struct.unpack_from("<H", data, 16)[0] == 2
    sections_at = struct.unpack_from("<Q", data, 40)[0]
    entry_bytes, count = struct.unpack_from("<HH", data, 58)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", data, sections_at + entry_bytes * number)
        for number in range(count)
    ]
    for _, kind, _, _, offset, length, link, *_ in sections:
        if kind not in (2, 11):  # SHT_SYMTAB, SHT_DYNSYM
            continue
        strings_at, strings_bytes = sections[link][4], sections[link][5]
        name = data[strings_at : strings_at + strings_bytes].find(_RUNTIME) + 1
        if not name:
            continue
        for at, _, _, _, value, size_bytes in struct.iter_unpack(
            "<IBBHQQ", data[offset : offset + length]
        ):
            if at == name:
                return value, size_bytes, fixed
    return None
