"""Reads what the kernel's log says of deaths: OOM kills, and faults that the driver reports.

/dev/kmsg gives one record a read(), from the oldest that is still there, and never waits with
O_NONBLOCK. It stays open between two looks, so that only what is new is read.
"""

from __future__ import annotations

import os
import re
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from hangdoctor.collect.permissions import refused
from hangdoctor.model import KernelMessage, Missing

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_MESSAGES = 20
"""The newest that are kept."""

_TELLING = re.compile(rb"Killed process \d+|NVRM: Xid")
_RECORD = re.compile(rb"^\d+,\d+,(\d+),[^;]*;(.*)$")
_RECORD_BYTES = 8192
_TEXT_BYTES = 400


class _Reader(msgspec.Struct):
    """An open log, and what it told so far."""

    fd: int
    kept: deque[KernelMessage]


_readers: dict[str, _Reader] = {}


def read(path: str) -> tuple[KernelMessage, ...] | Missing:
    """Return the newest telling lines, oldest first.

    Only root or CAP_SYSLOG may read it where kernel.dmesg_restrict is set; a container that has
    no /dev/kmsg has none to show.
    """
    reader = _readers.get(path)
    if reader is None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except PermissionError as error:
            return refused(f"{error.strerror}: {path}", None)
        except OSError as error:
            return Missing(reason="unsupported", detail=f"{error.strerror}: {path}")
        reader = _readers[path] = _Reader(fd, deque(maxlen=MOST_MESSAGES))
    try:
        for record in _records(reader.fd):
            if message := parse_record(record):
                reader.kept.append(message)
    except OSError as error:
        return Missing(reason="failed", detail=f"{error.strerror}: {path}")
    return tuple(reader.kept)


def parse_record(raw: bytes) -> KernelMessage | None:
    r"""Parse a record of /dev/kmsg; None for one that tells of no death.

    >>> parse_record(b"3,812,9869164768,-;Out of memory: Killed process 4748 (sglang::schedul) "
    ...     b"total-vm:9kB\n SUBSYSTEM=memory\n").text
    'Out of memory: Killed process 4748 (sglang::schedul) total-vm:9kB'
    >>> parse_record(b"6,1,2,-;EXT4-fs (vda): mounted\n")
    """
    line = raw.split(b"\n", 1)[0]
    match = _RECORD.match(line)
    if match is None or not _TELLING.search(match[2]):
        return None
    text = match[2][:_TEXT_BYTES].decode(errors="replace")
    return KernelMessage(boot_s=int(match[1]) / 1e6, text=text)


def _records(fd: int) -> Iterator[bytes]:
    while True:
        try:
            data = os.read(fd, _RECORD_BYTES)
        except BlockingIOError:
            return
        except BrokenPipeError:  # overwritten before we came: the next read goes on after it
            continue
        if not data:
            return
        # One record a read; the lines of a record that follow its first begin with a blank.
        yield data
