"""The server's arguments, which the log begins with."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class ServerArgs:
    """What the command line says, with SGLang's names; its text is the log's first line."""

    model_path: str
    tokenizer_path: str
    load_format: str
    dtype: str
    device: str
    tp_size: int
    pp_size: int
    dp_size: int
    nnodes: int
    node_rank: int


def prepare_server_args(arguments: Sequence[str]) -> ServerArgs:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="sglang.launch_server")
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args(arguments)
    return ServerArgs(
        model_path=given.model_path,
        tokenizer_path=given.model_path,
        load_format="auto",
        dtype="float32",
        device=given.device,
        tp_size=given.tp,
        pp_size=1,
        dp_size=1,
        nnodes=1,
        node_rank=0,
    )
