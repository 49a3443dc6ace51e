"""Reading a card: idle, copying, computing or spinning.

*Spinning* is busy near 100 % with the memory interface idle and power a few watts above what this
card draws with a context and nothing to do: kernels that wait, for a peer or for ever. Measured on
an H200: 118 W idle with a context, 2 W more for one spinning thread, 10 W more for a custom
all-reduce that waits. Healthy first prefills show it for seconds, so it is never a verdict.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Literal

import msgspec

from hangdoctor.model import Gpu, Missing, Struct

if TYPE_CHECKING:
    from collections.abc import Collection

Reading = Literal["idle", "copying", "computing", "spinning", "busy", "lost", "unknown"]

SPIN_ABOVE_IDLE_W = 20.0
"""Twice the highest that was measured for spinning kernels; computing adds hundreds."""
SPIN_BELOW_LIMIT = 0.3
"""Where the card was never seen idle (we came late): less than this part of its power limit, of
which an H200 draws 0.17 with an idle context and 0.18 while it spins."""
COMPUTE_PART = 0.15
COMPUTE_ABOVE_IDLE_W = 100.0
"""Computing draws this part of what lies between idle and the limit, or this much."""
IDLE_SAMPLES = 15
"""The median of so many is the idle power: the driver averages, so that the first reading after a
context came up is still low (77 W instead of 119 W, seen)."""
MEMORY_GROWTH_BYTES = 2 << 20
"""Allocations come in steps of 2 MiB."""


class Card(Struct, frozen=True):
    """One card over time.

    Attributes:
        peak_bytes: the most memory that was used when it last grew.
        idle_powers_w: what it drew in the last looks in which a process held memory on it and it
            was not busy; idle_power_w is their median.
        reading: what it does now; since_s: since when that holds.
        memory_grew_at_s: when its used memory last exceeded all before.
    """

    gpu: Gpu | Missing
    peak_bytes: int = 0
    idle_powers_w: tuple[float, ...] = ()
    reading: Reading = "unknown"
    since_s: float = 0.0
    memory_grew_at_s: float | None = None

    @property
    def idle_power_w(self) -> float | None:
        """What it draws with a context and nothing to do; None if it was hardly seen so."""
        return median(self.idle_powers_w) if len(self.idle_powers_w) >= 3 else None


def see_card(card: Card | None, gpu: Gpu | Missing, at_s: float) -> Card:
    """Take in a card's readings of now."""
    if isinstance(gpu, Missing):
        lost: Reading = "lost" if gpu.reason == "gone" else "unknown"
        since_s = card.since_s if card and card.reading == lost else at_s
        return msgspec.structs.replace(
            card or Card(gpu=gpu), gpu=gpu, reading=lost, since_s=since_s
        )
    used = gpu.memory_used_bytes or 0
    idle_powers_w = card.idle_powers_w if card else ()
    if gpu.power_w is not None and gpu.util_pct == 0 and gpu.processes:
        idle_powers_w = (*idle_powers_w, gpu.power_w)[-IDLE_SAMPLES:]
    # Blocks add up: a slow load asks for one of them every few seconds.
    grew = card is not None and 0 < card.peak_bytes <= used - MEMORY_GROWTH_BYTES
    idle_power_w = median(idle_powers_w) if len(idle_powers_w) >= 3 else None
    reading = _read(gpu, idle_power_w, grew=grew)
    return Card(
        gpu=gpu,
        peak_bytes=used if grew or card is None or not card.peak_bytes else card.peak_bytes,
        idle_powers_w=idle_powers_w,
        reading=reading,
        since_s=card.since_s if card and card.reading == reading else at_s,
        memory_grew_at_s=at_s if grew else (card.memory_grew_at_s if card else None),
    )


def cards_of(cards: dict[int, Card], pids: Collection[int]) -> tuple[int, ...]:
    """Return the indices of the cards on which one of the processes has memory.

    Empty where the driver names no process, or names pids of another namespace.
    """
    return tuple(
        index
        for index, card in sorted(cards.items())
        if isinstance(card.gpu, Gpu)
        and any(process.pid in pids for process in card.gpu.processes or ())
    )


def _read(gpu: Gpu, idle_power_w: float | None, *, grew: bool) -> Reading:
    if gpu.util_pct is None:
        return "unknown"
    if gpu.util_pct < 5:
        return "copying" if grew else "idle"
    if (gpu.memory_util_pct or 0) > 1:
        return "computing"
    power_w, limit_w = gpu.power_w, gpu.power_limit_w
    if power_w is None:
        return "busy"
    if idle_power_w is None:
        low = limit_w is not None and power_w < SPIN_BELOW_LIMIT * limit_w
        return "spinning" if low and gpu.util_pct >= 90 else "busy"
    if gpu.util_pct >= 90 and power_w <= idle_power_w + SPIN_ABOVE_IDLE_W:
        return "spinning"
    compute_w = COMPUTE_PART * (limit_w - idle_power_w) if limit_w else COMPUTE_ABOVE_IDLE_W
    return "computing" if power_w > idle_power_w + compute_w else "busy"
