"""What can go wrong in the pretend launch, and where: names for the command line."""

from __future__ import annotations

from typing import Literal

Fault = Literal[
    "none",
    "slow",
    "barrier",
    "lock",
    "eventfd",
    "fifo",
    "stopped",
    "killed",
    "compile",
    "stale-lock-file",
]
FAULTS: tuple[Fault, ...] = Fault.__args__  # type: ignore[attr-defined]  # Literal's values

StallPhase = Literal[
    "start", "distributed-init", "weights", "kv-cache", "graph-capture", "server", "warmup"
]
STALL_PHASES: tuple[StallPhase, ...] = StallPhase.__args__  # type: ignore[attr-defined]
