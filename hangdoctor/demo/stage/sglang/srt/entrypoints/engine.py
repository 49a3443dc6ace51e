"""Starts the ranks and the detokenizer, and waits until they are built."""

from __future__ import annotations

import multiprocessing
import socket
from typing import TYPE_CHECKING, NamedTuple

from ..managers.detokenizer_manager import run_detokenizer_process
from ..managers.scheduler import run_scheduler_process

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from ..server_args import ServerArgs


class Ports(NamedTuple):
    """The launcher's ends: requests to the first rank, and texts from the detokenizer."""

    requests: socket.socket
    texts: socket.socket
    kept: tuple[socket.socket, ...]
    """The ranks' own sockets: held open so that a rank's death closes none of them."""


def launch_subprocesses(server_args: ServerArgs) -> Ports:
    """Start all processes; return when every rank has said that it is ready."""
    context = multiprocessing.get_context("spawn")
    requests, first_rank = socket.socketpair()
    tokens_in, tokens_out = socket.socketpair()
    texts_in, texts_out = socket.socketpair()
    pairs = {rank: socket.socketpair() for rank in range(1, server_args.tp_size)}
    readers = []
    for rank in range(server_args.tp_size):
        reader, writer = context.Pipe(duplex=False)
        peers = {0: pairs[rank][1]} if rank else {peer: pair[0] for peer, pair in pairs.items()}
        ends = None if rank else (first_rank, tokens_out)
        context.Process(
            target=run_scheduler_process, args=(server_args, rank, peers, ends, writer)
        ).start()
        readers.append(reader)
    context.Process(target=run_detokenizer_process, args=(tokens_in, texts_out)).start()
    _wait_for_scheduler_ready(readers)
    kept = (
        first_rank,
        tokens_in,
        tokens_out,
        texts_out,
        *(end for p in pairs.values() for end in p),
    )
    return Ports(requests, texts_in, kept)


def _wait_for_scheduler_ready(readers: Sequence[Connection]) -> None:
    """Wait for the ranks in their order, as 0.5.9 does; one that has died is not noticed."""
    for reader in readers:
        reader.recv()
