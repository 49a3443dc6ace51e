"""Asks the kernel for all sockets of a network namespace: peers, queues, silences.

Netlink's sock_diag(7) answers for the namespace that asks, in about a millisecond, and needs no
right. Another namespace is entered by a thread that does nothing else and ends; that needs
CAP_SYS_ADMIN. Without it there are the tables of /proc/PID/net, which tell no peer of a unix
socket and no silence.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import threading
from typing import TYPE_CHECKING, NamedTuple

from hangdoctor.collect import procfs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NOT_ACCEPTED = "not accepted"
"""The connection stands, and the listener has not taken it from its queue."""

_DIAG, _BY_FAMILY, _REQUEST_DUMP, _ERROR, _DONE = 4, 20, 0x301, 2, 3
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_SHOW_NAME, _SHOW_PEER, _SHOW_ICONS, _SHOW_QUEUES = 1, 4, 8, 16
_NAME, _PEER, _ICONS, _QUEUES = 0, 2, 3, 4
_TCP_INFO = 2
_CLONE_NEWNET = 0x4000_0000
_TCP_STATES = {
    1: "established", 2: "syn-sent", 3: "syn-received", 4: "fin-wait-1", 5: "fin-wait-2",
    7: "closed", 8: "close-wait", 9: "last-ack", 10: "listen", 11: "closing",
}  # fmt: skip
_NOT_TIME_WAIT = 0xFFF & ~(1 << 6)  # thousands of them, and nobody's


class Socket(NamedTuple):
    """One socket, as its namespace tells.

    Attributes:
        family: "unix" or "tcp".
        state: one of TCP's states in small letters; of unix sockets "established", "listen" or
            "closed".
        local, remote: "address:port"; of a unix socket its name, and "".
        peer: inode of a unix socket's other end; 0 where none is open.
        waiting: inodes of the connections that a unix listener has not accepted.
        received_bytes: not yet read by the owner; connections that wait, for a listener.
        unsent_bytes: not yet taken by the other end.
        since_received_ms, since_sent_ms: of TCP.
        retransmits: of the segment that is under way now.
    """

    family: str
    state: str
    local: str = ""
    remote: str = ""
    peer: int = 0
    waiting: tuple[int, ...] = ()
    received_bytes: int = 0
    unsent_bytes: int = 0
    since_received_ms: int | None = None
    since_sent_ms: int | None = None
    retransmits: int = 0


class Table(NamedTuple):
    """The sockets of a namespace.

    Attributes:
        by_inode: all that a descriptor leads to.
        not_accepted: remote and local address of TCP connections that wait to be accepted.
        whole: False where unix peers are not told.
    """

    by_inode: dict[int, Socket]
    not_accepted: frozenset[tuple[str, str]] = frozenset()
    whole: bool = True


def read(proc: str, pid: int | None) -> Table:
    """Read the sockets of our own namespace, or of the one that a process is in.

    Raises:
        OSError: there is no way to read them.
    """
    if pid is None:
        return _ask()
    try:
        return _within(f"{proc}/{pid}/ns/net", _ask)
    except PermissionError:
        return _from_files(f"{proc}/{pid}/net")


def _ask() -> Table:
    found = dict(_unix())
    pending = set()
    for family in (socket.AF_INET, socket.AF_INET6):
        for inode, one in _tcp(family):  # without IPv6 there are none
            if inode:
                found[inode] = one
            elif one.state == "established":
                pending.add((one.remote, one.local))
    return Table(found, frozenset(pending))


def _within(path: str, function: Callable[[], Table]) -> Table:
    """Run a function in another network namespace, in a thread that never comes back from it."""
    answers: list[Table] = []
    errors: list[OSError] = []

    def work() -> None:
        try:
            fd = os.open(path, os.O_RDONLY)
            try:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(fd, _CLONE_NEWNET):
                    number = ctypes.get_errno()
                    raise OSError(number, os.strerror(number), path)
            finally:
                os.close(fd)
            answers.append(function())
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return answers[0]


def _dump(request: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield the buffer, the beginning and the end of each answer."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _DIAG) as kernel:
        size = _HEADER.size + len(request)
        kernel.send(_HEADER.pack(size, _BY_FAMILY, _REQUEST_DUMP, 1, 0) + request)
        while True:
            data = kernel.recv(1 << 18)
            at = 0
            while at + _HEADER.size <= len(data):
                length, kind, *_ = _HEADER.unpack_from(data, at)
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    number = -struct.unpack_from("=i", data, at + _HEADER.size)[0]
                    raise OSError(number or errno.EIO, os.strerror(number or errno.EIO))
                yield data, at + _HEADER.size, at + length
                at += (length + 3) & ~3


def _attributes(data: bytes, at: int, end: int) -> dict[int, bytes]:
    found = {}
    while at + _ATTRIBUTE.size <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size:
            break
        found[kind] = data[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3
    return found


def _unix() -> Iterator[tuple[int, Socket]]:
    """unix_diag.h: a request of 24 bytes, answers of 16 and attributes."""
    show = _SHOW_NAME | _SHOW_PEER | _SHOW_ICONS | _SHOW_QUEUES
    request = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFF_FFFF, 0, show, 0, 0)
    for data, at, end in _dump(request):
        _, _, state, _, inode = struct.unpack_from("=BBBBI", data, at)
        attributes = _attributes(data, at + 16, end)
        queues = attributes.get(_QUEUES, bytes(8))
        received, unsent = struct.unpack_from("=II", queues)
        waiting = attributes.get(_ICONS, b"")
        yield (
            inode,
            Socket(
                family="unix",
                state=_TCP_STATES.get(state, ""),
                local=_unix_name(attributes.get(_NAME, b"")),
                peer=int.from_bytes(attributes.get(_PEER, b""), "little"),
                waiting=struct.unpack(f"={len(waiting) // 4}I", waiting[: len(waiting) // 4 * 4]),
                received_bytes=received,
                unsent_bytes=0 if state == 10 else unsent,
            ),
        )


def _tcp(family: socket.AddressFamily) -> Iterator[tuple[int, Socket]]:
    """inet_diag.h: a request of 56 bytes, answers of 72 and attributes."""
    request = struct.pack(
        "=BBBBI48x", family, socket.IPPROTO_TCP, 1 << (_TCP_INFO - 1), 0, _NOT_TIME_WAIT
    )
    for data, at, end in _dump(request):
        state = data[at + 1]
        ports = struct.unpack_from("!HH", data, at + 4)
        received, unsent, _, inode = struct.unpack_from("=IIII", data, at + 56)
        info = _attributes(data, at + 72, end).get(_TCP_INFO, b"")
        # struct tcp_info: eight bytes, then numbers of four: 9 last_data_sent, 11 last_data_recv.
        times = struct.unpack_from("=12I", info, 8) if len(info) >= 56 and state != 10 else None
        yield (
            inode,
            Socket(
                family="tcp",
                state=_TCP_STATES.get(state, ""),
                local=address(family, data[at + 8 : at + 24], ports[0]),
                remote=address(family, data[at + 24 : at + 40], ports[1]),
                received_bytes=received,
                unsent_bytes=0 if state == 10 else unsent,
                since_received_ms=times[11] if times else None,
                since_sent_ms=times[9] if times else None,
                retransmits=info[2] if times else 0,
            ),
        )


def address(family: socket.AddressFamily, raw: bytes, port: int) -> str:
    r"""Return an address as people write it; IPv4 in IPv6's clothes is IPv4.

    >>> address(socket.AF_INET, bytes([127, 0, 0, 1]) + bytes(12), 80)
    '127.0.0.1:80'
    >>> address(socket.AF_INET6, bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 7]), 80)
    '10.0.0.7:80'
    >>> address(socket.AF_INET6, bytes(15) + b"\1", 80)
    '[::1]:80'
    """
    if family == socket.AF_INET6 and raw[:12] == bytes(10) + b"\xff\xff":
        family, raw = socket.AF_INET, raw[12:]
    if family == socket.AF_INET:
        return f"{socket.inet_ntop(socket.AF_INET, raw[:4])}:{port}"
    return f"[{socket.inet_ntop(socket.AF_INET6, raw[:16])}]:{port}"


def _unix_name(raw: bytes) -> str:
    """Return a unix socket's path; a name outside of the file system begins with @."""
    text = raw.rstrip(b"\0").decode(errors="replace")
    return "@" + text[1:] if text.startswith("\0") else text


def _from_files(net: str) -> Table:
    """Read the tables of a namespace that may not be entered."""
    found: dict[int, Socket] = {}
    pending = set()
    for name in ("tcp", "tcp6"):
        if not os.path.exists(f"{net}/{name}"):  # no IPv6 here
            continue
        for line in procfs.read_table(f"{net}/{name}").decode(errors="replace").splitlines()[1:]:
            inode, one = parse_tcp_line(line)
            if inode:
                found[inode] = one
            elif one.state == "established":
                pending.add((one.remote, one.local))
    for line in procfs.read_table(f"{net}/unix").decode(errors="replace").splitlines()[1:]:
        words = line.split(maxsplit=7)
        state = "listen" if int(words[3], 16) & 0x10000 else "established"
        if words[5] == "01":
            state = "closed" if state != "listen" else state
        name = words[7] if len(words) > 7 else ""
        found[int(words[6])] = Socket(family="unix", state=state, local=name)
    return Table(found, frozenset(pending), whole=False)


def parse_tcp_line(line: str) -> tuple[int, Socket]:
    """Parse a line of /proc/net/tcp or tcp6 into the inode and the socket.

    >>> inode, one = parse_tcp_line(
    ...     "   1: 0100007F:9C40 0100007F:1F90 01 00000000:00000003 00:00000000 00000000     0"
    ...     "        0 48213 1 0000000000000000 20 4 0 10 -1"
    ... )
    >>> inode, one.state, one.local, one.remote, one.received_bytes
    (48213, 'established', '127.0.0.1:40000', '127.0.0.1:8080', 3)
    """
    words = line.split()
    unsent, received = (int(part, 16) for part in words[4].split(":"))
    state = _TCP_STATES.get(int(words[3], 16), "time-wait")
    return int(words[9]), Socket(
        family="tcp",
        state=state,
        local=_hex_address(words[1]),
        remote=_hex_address(words[2]),
        received_bytes=received,
        unsent_bytes=0 if state == "listen" else unsent,
        retransmits=int(words[6], 16),
    )


def _hex_address(word: str) -> str:
    """The kernel prints an address as numbers of four bytes in the machine's own order."""
    host, _, port = word.partition(":")
    raw = b"".join(struct.pack("=I", int(host[at : at + 8], 16)) for at in range(0, len(host), 8))
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    return address(family, raw, int(port, 16))
