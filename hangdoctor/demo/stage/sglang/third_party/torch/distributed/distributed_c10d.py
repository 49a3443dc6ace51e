"""Collectives over real sockets: a rank that does not come keeps its peers in recv().

The first rank gathers from all and answers all. Sockets stay open in the launcher as well, so that
a peer's death is not noticed: so it is with NCCL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ...gloo.transport import put, take
from .rendezvous import _create_c10d_store

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping


class ProcessGroup(NamedTuple):
    """A rank's view of its group: the first rank has a socket to each peer, all others to it."""

    rank: int
    peers: Mapping[int, socket.socket]


def init_process_group(rank: int, peers: Mapping[int, socket.socket]) -> ProcessGroup:
    """Wait until all ranks are there."""
    group = ProcessGroup(rank, peers)
    _create_c10d_store(group)
    return group


def monitored_barrier(group: ProcessGroup) -> None:
    """Wait until all ranks are here."""
    _gather_and_answer(group, 0)


def all_reduce(value: float, group: ProcessGroup) -> float:
    """Return the least of all ranks' values."""
    return float(min(_gather_and_answer(group, value)))


def broadcast(data: Any, group: ProcessGroup) -> Any:
    """Return the first rank's data; it does not wait for the others to take it."""
    if group.rank == 0:
        for peer in group.peers.values():
            put(peer, data)
        return data
    return take(group.peers[0])


def _gather_and_answer(group: ProcessGroup, value: Any) -> list[Any]:
    if group.rank:
        put(group.peers[0], value)
        answer: list[Any] = take(group.peers[0])
        return answer
    values = [value]
    for peer in group.peers.values():
        values.append(take(peer))  # noqa: PERF401  # its own frame would stand in the stacks
    for peer in group.peers.values():
        put(peer, values)
    return values
