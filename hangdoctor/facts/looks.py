"""What to look at next, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.facts import launch_still_s, loaders

if TYPE_CHECKING:
    from hangdoctor.facts import Facts


RAS_S = 5.0
"""Counts that differ in a healthy job have moved on after so long."""
RAS_AGAIN_S = 10.0
"""Where RAS has not answered."""
WEIGHTS_S, WEIGHTS_SHARE = 2.0, 10.0
"""Between two looks at the weights, and how much longer than a look that is at the least."""
CHECKPOINT_S, GROWING_S, UNKNOWN_S = 60.0, 5.0, 15.0
"""The same for the model's files: found, still being downloaded, not found."""
CACHES_S = 5.0
DUMPS_S = 30.0
"""PyTorch writes its dumps once, minutes after a collective got stuck."""


def next_looks(facts: Facts) -> dict[str, float]:
    """Say how often each collector should look now, in seconds between two looks.

    Stacks come at once when something looks stuck: a quarter of the stillness that is suspicious.
    """
    stall_after_s = facts.header.stall_after_s
    still = launch_still_s(facts)
    stuck = still is not None and still >= stall_after_s / 4
    stacks_s = min(10.0, max(1.0, stall_after_s / (4 if stuck else 2)))
    looks = {
        "processes": 1.0,
        "gpus": 1.0,
        "files": 5.0,
        "stacks": stacks_s,
        "waits": stacks_s,
        "host": 2.0,
    }
    if any(
        rank.polls_per_s is not None or (rank.wait is not None and rank.wait.kind == "lock")
        for rank in facts.ranks
    ):
        looks["locks"] = stacks_s
    if loaders(facts):
        loading = facts.loading
        looks["weights"] = max(WEIGHTS_S, WEIGHTS_SHARE * loading.took_s if loading else 0.0)
        known = loading is not None and loading.checkpoint is not None
        growing = loading is not None and loading.unfinished
        looks["checkpoint"] = GROWING_S if growing else CHECKPOINT_S if known else UNKNOWN_S
    if any(rank.compiling for rank in facts.ranks):
        looks["caches"] = CACHES_S
    if stuck and facts.cards and not facts.cpu_launch:
        looks["nccl_ras"] = RAS_S if facts.ras else RAS_AGAIN_S
        looks["flight_recorder"] = DUMPS_S
    return looks
