"""Numbers of a launch: how many ranks there should be, and in which order they are named."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hangdoctor.engines import ONLY_RANK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hangdoctor.engines import Engine


Sizes = dict[str, int]
"""Numbers by the names of `Detect.sizes`; "dp_attention" is 1 where it is on."""


def sizes_of(engine: Engine, command: str, logged: Sizes) -> Sizes:
    """Return the sizes that the command line gives, and for the rest what the log tells."""
    found = dict(logged)
    for key, patterns in engine.detect.sizes.items():
        for pattern in patterns:
            match = re.search(pattern, command)
            if match is not None:
                found[key] = int(match[1]) if match.groups() else 1
                break
    return found


def expected_count(sizes: Sizes) -> int | None:
    """Return how many ranks this machine should have; None where the size is not known.

    >>> expected_count({"tp": 8}), expected_count({"tp": 8, "dp": 2, "dp_attention": 1})
    (8, 8)
    >>> expected_count({"tp": 8, "pp": 2, "nnodes": 2}), expected_count({"tp": 2, "dp": 2})
    (8, 4)
    """
    return len(_places(sizes)) or None


def expected_ranks(sizes: Sizes) -> tuple[str, ...]:
    """Return the names of the ranks that this machine should have; empty where it cannot be told.

    They are those of SGLang's prefix (managers/scheduler.py): a part for each size above 1, DP
    wherever dp is.

    >>> expected_ranks({"tp": 2}), expected_ranks({"tp": 1}), expected_ranks({"tp": 1, "dp": 2})
    (('TP0', 'TP1'), ('TP0',), ('DP0', 'DP1'))
    >>> expected_ranks({"tp": 4, "pp": 2, "nnodes": 4, "node_rank": 3})
    ('PP1 TP2', 'PP1 TP3')
    """
    if sizes.get("attn_cp", 1) > 1 or sizes.get("moe_dp", 1) > 1:
        return ()
    tp, pp, dp, ep = (max(1, sizes.get(name, 1)) for name in ("tp", "pp", "dp", "ep"))
    attention = bool(sizes.get("dp_attention")) and dp > 1
    ranks = []
    for replica, pp_rank, tp_rank in _places(sizes):
        dp_rank = tp_rank // max(tp // dp, 1) if attention else replica
        parts = (
            ("DP", dp_rank, dp > 1),
            ("PP", pp_rank, pp > 1),
            ("TP", tp_rank, tp > 1),
            ("EP", tp_rank // max(tp // ep, 1), ep > 1),
        )
        ranks.append(" ".join(f"{name}{value}" for name, value, shown in parts if shown))
    return tuple(rank or ONLY_RANK for rank in ranks)


def _places(sizes: Sizes) -> list[tuple[int, int, int]]:
    """Return replica, pipeline rank and tensor rank of each rank of this node.

    There are tp * pp / nnodes, times dp only without attention data parallelism, where dp lies
    inside tp; dealt out to the nodes as entrypoints/engine.py does it.
    """
    if "tp" not in sizes:
        return []
    tp, pp, dp = (max(1, sizes.get(name, 1)) for name in ("tp", "pp", "dp"))
    nnodes, node = max(1, sizes.get("nnodes", 1)), sizes.get("node_rank", 0)
    pp_per_node, nodes_per_pp = max(pp // nnodes, 1), max(nnodes // pp, 1)
    tp_per_node = max(tp // nodes_per_pp, 1)
    pp_start, tp_start = pp_per_node * (node // nodes_per_pp), tp_per_node * (node % nodes_per_pp)
    return [
        (replica, pp_rank, tp_rank)
        for replica in range(1 if sizes.get("dp_attention") else dp)
        for pp_rank in range(pp_start, pp_start + pp_per_node)
        for tp_rank in range(tp_start, tp_start + tp_per_node)
    ]


def rank_order(name: str) -> tuple[tuple[str, int], ...]:
    """Sort key: TP2 before TP10, DP0 TP1 before DP1 TP0.

    >>> sorted(["TP10", "TP2", "DP1 TP0", "DP0 TP1"], key=rank_order)
    ['DP0 TP1', 'DP1 TP0', 'TP2', 'TP10']
    """
    return tuple((kind, int(number)) for kind, number in re.findall(r"([A-Za-z_]+)(\d+)", name))


def ranges(names: Sequence[str], among: Sequence[str] = ()) -> list[str]:
    """Return names in their order, three and more neighbours as the first and the last of them.

    Args:
        names: of ranks, or of anything that ends with a number.
        among: all such names in their order: what follows each other there is neighbours. Without
            it, what differs by one in the last number.

    >>> ranges(["TP4", "TP2", "TP3", "TP0"])
    ['TP0', 'TP2-TP4']
    >>> ranges([f"DP{n // 2} TP{n}" for n in range(4)])
    ['DP0 TP0', 'DP0 TP1', 'DP1 TP2', 'DP1 TP3']
    >>> ranges([f"DP{n // 2} TP{n}" for n in range(4)], [f"DP{n // 2} TP{n}" for n in range(8)])
    ['DP0 TP0 to DP1 TP3']
    """
    at = {name: ("", index) for index, name in enumerate(among)}
    runs: list[list[str]] = []
    following = None
    for name in sorted(names, key=lambda name: (at.get(name, ("", 0)), rank_order(name))):
        head, number = at.get(name) or _head_and_number(name)
        if number is not None and (head, number) == following:
            runs[-1].append(name)
        else:
            runs.append([name])
        following = (head, (number or 0) + 1)
    found: list[str] = []
    for run in runs:
        to = " to " if " " in run[0] else "-"
        found += run if len(run) < 3 else [f"{run[0]}{to}{run[-1]}"]
    return found


def _head_and_number(name: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"(.*\D)(\d+)", name)
    return (match[1], int(match[2])) if match else (name, None)
