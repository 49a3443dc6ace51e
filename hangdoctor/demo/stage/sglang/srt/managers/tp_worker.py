"""Between the scheduler and the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..model_executor.model_runner import ModelRunner

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from ..server_args import ServerArgs


class TpModelWorker:
    """A rank's model and what it needs."""

    def __init__(
        self, server_args: ServerArgs, rank: int, peers: Mapping[int, socket.socket]
    ) -> None:
        self.model_runner = ModelRunner(server_args, rank, peers)

    def forward_batch_generation(self) -> None:
        """Run the model for one batch."""
        self.model_runner.forward()
