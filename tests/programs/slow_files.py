"""Serves the files of a directory through FUSE, at a rate that can be changed, or not at all.

    slow_files.py SOURCE MOUNT RATE_FILE COMMAND ...

The mount stands in a mount namespace of its own, in which COMMAND runs; when that ends, or this is
killed, both are gone. RATE_FILE holds bytes a second: "" or "inf" for no limit, "0" for no answer
until it holds something else. Beside it, RATE_FILE.served says how many bytes went. It needs
CAP_SYS_ADMIN and /dev/fuse.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import stat
import struct
import sys
import time
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, MS_REC, MS_PRIVATE, PR_SET_PDEATHSIG = 0x20000, 0x4000, 0x40000, 1
IN, OUT = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE, FLUSH, INIT = 1, 2, 3, 14, 15, 17, 18, 25, 26
OPENDIR, READDIR, RELEASEDIR, INTERRUPT, BATCH_FORGET = 27, 28, 29, 36, 42
ENOENT, ENOSYS = 2, 38
ROOT = 1
FUSE_ASYNC_READ = 1
FOPEN_KEEP_CACHE = 2  # else each rank that opens a file makes the others read it once more
FOREVER = (3600, 0)
CHUNK = 128 << 10


def check(result):
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Server:
    def __init__(self, source, rate_file, fuse):
        self.files = [p for p in sorted(source.iterdir()) if p.is_file()]
        self.rate_file, self.fuse = rate_file, fuse
        self.since_s, self.served = time.monotonic(), 0

    def serve(self):
        handlers = {
            LOOKUP: self.lookup,
            GETATTR: lambda node, _: struct.pack("<QII", *FOREVER, 0) + self.attributes(node),
            OPEN: lambda *_: struct.pack("<QII", 0, FOPEN_KEEP_CACHE, 0),
            OPENDIR: lambda *_: struct.pack("<QII", 0, 0, 0),
            READ: self.read,
            READDIR: self.read_directory,
            STATFS: lambda *_: struct.pack("<QQQQQIIII24x", 1, 0, 0, 1, 0, 4096, 255, 4096, 0),
            RELEASE: lambda *_: b"",
            RELEASEDIR: lambda *_: b"",
            FLUSH: lambda *_: b"",
            INIT: lambda *_: struct.pack(
                "<IIIIHHIIHHII24x", 7, 31, CHUNK, FUSE_ASYNC_READ, 12, 9, CHUNK, 1, 32, 0, 0, 0
            ),
        }
        while True:
            try:
                request = os.read(self.fuse, CHUNK + 4096)
            except FileNotFoundError:  # a request that was interrupted meanwhile
                continue
            length, opcode, unique, node, *_ = IN.unpack_from(request)
            if opcode in (FORGET, BATCH_FORGET, INTERRUPT):
                continue
            handler = handlers.get(opcode)
            answer = handler(node, request[IN.size : length]) if handler else ENOSYS
            error, body = (-answer, b"") if isinstance(answer, int) else (0, answer)
            with contextlib.suppress(FileNotFoundError):
                os.write(self.fuse, OUT.pack(OUT.size + len(body), error, unique) + body)

    def attributes(self, node):
        info = self.files[node - 2].stat() if node != ROOT else None
        mode = stat.S_IFREG | 0o444 if info else stat.S_IFDIR | 0o555
        size = info.st_size if info else 4096
        return struct.pack(
            "<QQQQQQIIIIIIIIII",
            node,
            size,
            -(-size // 512),
            0,
            0,
            0,
            0,
            0,
            0,
            mode,
            1,
            0,
            0,
            0,
            4096,
            0,
        )

    def lookup(self, _, name):
        for node, path in enumerate(self.files, start=2):
            if path.name.encode() == name.rstrip(b"\0"):
                times = struct.pack("<QQII", *FOREVER[:1] * 2, 0, 0)
                return struct.pack("<QQ", node, 0) + times + self.attributes(node)
        return ENOENT

    def read_directory(self, _, body):
        offset = struct.unpack_from("<QQ", body)[1]
        found = b""
        for node, path in list(enumerate(self.files, start=2))[offset:]:
            name = path.name.encode()
            entry = struct.pack("<QQII", node, node - 1, len(name), 8) + name
            entry += b"\0" * (-len(entry) % 8)
            if len(found) + len(entry) > 4096:
                break
            found += entry
        return found

    def read(self, node, body):
        _, offset, size = struct.unpack_from("<QQI", body)
        with self.files[node - 2].open("rb") as file:
            data = os.pread(file.fileno(), size, offset)
        if self.files[node - 2].suffix == ".safetensors":  # the rest is as quick as can be
            self.wait(len(data))
        return data

    def wait(self, count):
        """Wait until so many bytes may go, by the rate as it stands meanwhile.

        What was not asked for in the last half second may go at once, so that the rate is the
        mean one.
        """
        left = float(count)
        self.since_s = max(self.since_s, time.monotonic() - 0.5)
        while left > 0:
            text = self.rate_file.read_text(encoding="ascii").strip()
            rate = float(text or "inf")
            if rate == float("inf"):
                break
            now_s = time.monotonic()
            left -= rate * (now_s - self.since_s)
            self.since_s = now_s
            if left > 0:
                time.sleep(min(0.05, left / rate) if rate else 0.05)
            elif rate:
                self.since_s += left / rate  # what was too much is the next one's
        self.served += count
        self.rate_file.with_suffix(".served").write_text(str(self.served), encoding="ascii")


def main():
    source, mount, rate_file = map(Path, sys.argv[1:4])
    check(LIBC.unshare(CLONE_NEWNS))
    check(LIBC.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0,allow_other"
    check(LIBC.mount(b"slow", str(mount).encode(), b"fuse.slow", 0, options.encode()))
    command = os.fork()
    if command == 0:
        LIBC.prctl(PR_SET_PDEATHSIG, 9)
        os.execvp(sys.argv[4], sys.argv[4:])  # noqa: S606
    child = os.pidfd_open(command)
    server = os.fork()
    if server == 0:
        LIBC.prctl(PR_SET_PDEATHSIG, 9)
        Server(source, rate_file, fuse).serve()
    select.select([child], [], [])
    os.kill(server, 9)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(command, 0)[1]) & 0xFF)


if __name__ == "__main__":
    main()
