"""A rank: builds itself, tells the launcher, and then waits for requests."""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING, Any

from ...third_party.gloo.transport import put, take
from ..debug_utils.dumper import dumper
from ..utils.common import (
    PACE_S,
    broadcast_pyobj,
    get_available_cpu_memory,
    kill_itself_when_parent_died,
    log,
    setproctitle,
)
from .tp_worker import TpModelWorker

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping
    from multiprocessing.connection import Connection

    from ..server_args import ServerArgs

    Ends = tuple[socket.socket, socket.socket]

POLL_MS = 20
"""SGLang polls without a pause; that would cost whoever tries this a core."""


def run_scheduler_process(
    server_args: ServerArgs,
    rank: int,
    peers: Mapping[int, socket.socket],
    ends: Ends | None,
    pipe_writer: Connection,
) -> None:
    """Be a rank."""
    kill_itself_when_parent_died()
    setproctitle(f"sglang::scheduler_TP{rank}")
    scheduler = Scheduler(server_args, rank, peers, ends)
    pipe_writer.send({"status": "ready"})
    scheduler.event_loop_overlap()


class Scheduler:
    """A rank of the launch."""

    def __init__(
        self,
        server_args: ServerArgs,
        rank: int,
        peers: Mapping[int, socket.socket],
        ends: Ends | None,
    ) -> None:
        self.server_args = server_args
        self.rank = rank
        self._ends = ends
        self.init_tokenizer()
        self.init_tp_model_worker(peers)
        self.init_cache_with_memory_pool()

    def init_tokenizer(self) -> None:
        """Load the tokenizer."""
        time.sleep(PACE_S)
        dumper.on("start", self.rank)

    def init_tp_model_worker(self, peers: Mapping[int, socket.socket]) -> None:
        """Build the model."""
        self.tp_worker = TpModelWorker(self.server_args, self.rank, peers)

    def init_cache_with_memory_pool(self) -> None:
        """Build the prefix cache."""
        if self.rank == 0:
            log(
                "max_total_num_tokens=2048, chunked_prefill_size=4096, max_prefill_tokens=16384, "
                "max_running_requests=4, context_len=1024, "
                f"available_cpu_mem={get_available_cpu_memory():.2f} GB",
                self.rank,
            )
        time.sleep(PACE_S)
        dumper.on("server", self.rank)

    def event_loop_overlap(self) -> None:
        """Serve for ever."""
        while True:
            for request in self.recv_requests():
                self.run_batch(request)

    def recv_requests(self) -> list[Any]:
        """Return what has come in, the same on all ranks."""
        requests: list[Any] = []
        if self._ends:
            poll = select.poll()
            poll.register(self._ends[0], select.POLLIN)
            if poll.poll(POLL_MS):
                requests = [take(self._ends[0])]
        group = self.tp_worker.model_runner.tp_group
        received: list[Any] = broadcast_pyobj(requests, group)
        return received

    def run_batch(self, request: Any) -> None:
        """Answer a request."""
        if self._ends:
            log(
                "Prefill batch, #new-seq: 1, #new-token: 6, #cached-token: 0, token usage: 0.00, "
                "#running-req: 0, #queue-req: 0, input throughput (token/s): 0.00, "
                "cpu graph: False",
                self.rank,
            )
        self.tp_worker.forward_batch_generation()
        if self._ends:
            put(self._ends[1], request)
