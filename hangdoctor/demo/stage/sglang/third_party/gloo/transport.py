"""Objects over a socket; whoever waits for one stands in its recv()."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

_LENGTH = struct.Struct("=I")


def put(peer: socket.socket, data: Any) -> None:
    """Send one object."""
    body = json.dumps(data).encode()
    peer.sendall(_LENGTH.pack(len(body)) + body)


def take(peer: socket.socket) -> Any:
    """Receive one object; wait for it."""
    (length,) = _LENGTH.unpack(_take_exactly(peer, _LENGTH.size))
    return json.loads(_take_exactly(peer, length))


def _take_exactly(peer: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        block = peer.recv(length - len(data))
        if not block:
            raise ConnectionError("Connection closed by peer")
        data += block
    return data
