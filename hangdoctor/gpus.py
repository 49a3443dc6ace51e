"""Reading a card: idle, copying, computing or spinning.

*Spinning* is busy near 100 % with the memory interface idle and power a few watts above what this
card draws with a context and nothing to do: kernels that wait, for a peer or for ever. Healthy
first prefills show it for seconds, so it is never a verdict.

Measured on an H200, whose idle power with a context was 121 W (utilisation, use of the memory
interface, power, PCIe traffic that the card receives):

    kernels that spin on the card's memory    100 %   0 %   122 to 134 W     0.1 MB/s
    kernels that spin on the host's memory    100 %   0 %          122 W      59 MB/s
    copies from pinned memory, at full rate   100 %   2 %          128 W    > 960 MB/s
    copies of 160 MB/s from pageable memory     0 %   0 %          121 W     180 MB/s
    copies between two cards                   83 %   1 %          128 W   sends > 650 MB/s
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Literal

import msgspec

from hangdoctor.model import Gpu, GpuProcess, Missing, Struct

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
COPY_BYTES_PER_S = 100e6
"""A card that receives or sends so much over PCIe copies; a kernel that polls the host's memory
was seen to receive 59 MB/s."""
RATE_WITHIN_S = 30.0
"""Counters that are further apart give no rate."""
FULL_BYTES = 256 << 20
"""A card with less memory left is full."""
UNTOLD_BYTES = 4 << 30
"""Memory that is in use without a process: more than the 0.6 GiB that driver and context take."""
TENANT_BYTES = 512 << 20
"""A context alone takes about this much of an H200."""
OWN_DESCRIPTORS = 8
"""A process has 20 descriptors on the device file of its own card and 4 on that of another."""
_COUNTER_BYTES = 1 << 32
_MPS = "nvidia-cuda-mps"


class Card(Struct, frozen=True):
    """One card over time.

    Attributes:
        gpu: as it was last seen; last: as it was when it last answered; held: as it was when the
            launch was last seen on it.
        at_s: when it last answered.
        peak_bytes: the most memory that was used when it last grew; peaks_bytes: of each process.
        idle_powers_w: what it drew in the last looks in which a process held memory on it and it
            was not busy; idle_power_w is their median.
        received_per_s, sent_per_s: bytes over PCIe, at least: the counters are 32 bits wide.
        linked_per_s: bytes over NVLink, both ways.
        errors_first: uncorrected memory errors at the first look.
        reading: what it does now; since_s: since when that holds.
        shared: a process outside the launch is on it as well, or was at the look before: what the
            card does may be that one's work.
        memory_grew_at_s: when its used memory last exceeded all before; grew_of: whose memory
            grew in this look.
    """

    gpu: Gpu | Missing
    last: Gpu | None = None
    held: Gpu | None = None
    at_s: float = 0.0
    peak_bytes: int = 0
    peaks_bytes: dict[int, int] = {}
    idle_powers_w: tuple[float, ...] = ()
    received_per_s: float | None = None
    sent_per_s: float | None = None
    linked_per_s: float | None = None
    errors_first: int | None = None
    reading: Reading = "unknown"
    since_s: float = 0.0
    shared: bool = False
    memory_grew_at_s: float | None = None
    grew_of: frozenset[int] = frozenset()

    @property
    def idle_power_w(self) -> float | None:
        """What it draws with a context and nothing to do; None if it was hardly seen so."""
        return median(self.idle_powers_w) if len(self.idle_powers_w) >= 3 else None

    @property
    def copies_per_s(self) -> float | None:
        """Bytes over PCIe in the direction that has more."""
        rates = [rate for rate in (self.received_per_s, self.sent_per_s) if rate is not None]
        return max(rates, default=None)


def see_card(card: Card | None, gpu: Gpu | Missing, at_s: float, ours: Collection[int]) -> Card:
    """Take in a card's readings of now; `ours` are the PIDs of the launch."""
    if isinstance(gpu, Missing):
        lost: Reading = "lost" if gpu.reason == "gone" else "unknown"
        since_s = card.since_s if card and card.reading == lost else at_s
        return msgspec.structs.replace(
            card or Card(gpu=gpu), gpu=gpu, reading=lost, since_s=since_s, grew_of=frozenset()
        )
    before = card or Card(gpu=gpu)
    used = gpu.memory_used_bytes or 0
    idle_powers_w = before.idle_powers_w
    if gpu.power_w is not None and gpu.util_pct == 0 and gpu.processes:
        idle_powers_w = (*idle_powers_w, gpu.power_w)[-IDLE_SAMPLES:]
    # Blocks add up: a slow load asks for one of them every few seconds.
    grew = 0 < before.peak_bytes <= used - MEMORY_GROWTH_BYTES
    peaks_bytes, grew_of = _grown(before.peaks_bytes, gpu)
    received, sent, linked = _rates(before, gpu, at_s)
    seen = Card(
        gpu=gpu,
        last=gpu,
        held=before.held,
        at_s=at_s,
        peak_bytes=used if grew or not before.peak_bytes else before.peak_bytes,
        peaks_bytes=peaks_bytes,
        idle_powers_w=idle_powers_w,
        received_per_s=received,
        sent_per_s=sent,
        linked_per_s=linked,
        errors_first=gpu.uncorrected_errors if before.errors_first is None else before.errors_first,
        shared=_is_shared(gpu, ours) or (before.last is not None and _is_shared(before.last, ours)),
        memory_grew_at_s=at_s if grew else before.memory_grew_at_s,
        grew_of=grew_of,
    )
    reading = _read(seen, gpu, grew=grew)
    since_s = before.since_s if card and before.reading == reading else at_s
    return msgspec.structs.replace(seen, reading=reading, since_s=since_s)


def cards_of(cards: dict[int, Card], pids: Collection[int]) -> tuple[int, ...]:
    """Return the indices of the cards on which one of the processes has memory.

    Where the driver names none of them (its PIDs are those of another namespace), the card whose
    device file they have open far more often than all others. Empty where neither tells. A card
    that is lost is still theirs.
    """
    last = {index: card.last for index, card in sorted(cards.items()) if card.last is not None}
    named = tuple(
        index
        for index, gpu in last.items()
        if any(process.pid in pids for process in gpu.processes or ())
    )
    if named:
        return named
    opened = {
        index: sum(count for pid, count in gpu.opened_by.items() if pid in pids)
        for index, gpu in last.items()
        if gpu.opened_by
    }
    most = max(opened.values(), default=0)
    if most < OWN_DESCRIPTORS or sum(2 * count > most for count in opened.values()) > 1:
        return ()
    return tuple(index for index, count in opened.items() if count == most)


def others_only(card: Card, ours: Collection[int]) -> bool:
    """Tell whether a card has processes that are seen here on it, and none of the launch."""
    processes = (card.last.processes if card.last else None) or ()
    return bool(processes) and all(each.name and _is_other(each, ours) for each in processes)


def moves_data_of(card: Card, pids: Collection[int], at_s: float) -> str:
    """Say by what a card shows that a rank moves, whose processes these are; "" for nothing.

    Of a card with others on it only the memory that the rank itself holds: `work_of` may be theirs.
    """
    gpu = card.gpu
    if isinstance(gpu, Missing):
        return ""
    if card.grew_of & set(pids):
        return f"memory of GPU {gpu.index} grows"
    sized = {process.pid for process in gpu.processes or () if process.used_bytes is not None}
    return "" if card.shared else work_of(card, at_s, memory=not sized & set(pids))


def work_of(card: Card, at_s: float, *, memory: bool = True) -> str:
    """Say what a card does that is work, whosesoever; "" for nothing.

    A kernel that spins can poll the host's memory over PCIe, but uses no memory of its own card and
    keeps it busy.

    Args:
        card: as it is now.
        at_s: now.
        memory: memory that grows counts.
    """
    gpu = card.gpu
    if isinstance(gpu, Missing):
        return ""
    if memory and card.memory_grew_at_s == at_s:
        return f"memory of GPU {gpu.index} grows"
    if card.reading == "computing":
        return f"GPU {gpu.index} computes"
    may_spin = (gpu.util_pct or 0) >= 50 and not gpu.memory_util_pct
    if card.reading == "copying" and (card.copies_per_s or 0) >= COPY_BYTES_PER_S and not may_spin:
        return f"GPU {gpu.index} copies {(card.copies_per_s or 0) / 1e6:.0f} MB/s or more"
    return ""


def strangers(card: Card, ours: Collection[int]) -> tuple[GpuProcess, ...]:
    """Return the processes outside the launch that hold memory on a card and are there."""
    processes = card.last.processes if card.last else None
    return tuple(
        process
        for process in processes or ()
        if process.name and process.pid not in ours and (process.used_bytes or 0) >= TENANT_BYTES
    )


def left_behind(card: Card, ours: Collection[int]) -> tuple[GpuProcess, ...]:
    """Return the processes that hold memory on a card and no longer exist."""
    processes = card.last.processes if card.last else None
    return tuple(
        process for process in processes or () if process.name == "" and process.pid not in ours
    )


def untold_bytes(card: Card) -> int:
    """Return how much memory is in use on a card without a process that the driver names."""
    return 0 if card.last is None else _untold_bytes(card.last)


def is_full(card: Card) -> bool:
    """Tell whether a card has no memory left worth speaking of."""
    gpu = card.gpu
    if isinstance(gpu, Missing) or gpu.memory_total_bytes is None or gpu.memory_used_bytes is None:
        return False
    return gpu.memory_total_bytes - gpu.memory_used_bytes < FULL_BYTES


def _untold_bytes(gpu: Gpu) -> int:
    if gpu.memory_used_bytes is None or gpu.processes is None:
        return 0
    named = [process.used_bytes for process in gpu.processes]
    if any(size is None for size in named):
        return 0
    rest = gpu.memory_used_bytes - sum(size or 0 for size in named)
    return rest if rest >= UNTOLD_BYTES else 0


def _is_shared(gpu: Gpu, ours: Collection[int]) -> bool:
    """Tell whether others are on a card beside the launch, by its processes and its memory.

    PIDs that name none of the launch may be another namespace's.
    """
    processes = gpu.processes or ()
    named = any(each.pid in ours for each in processes)
    return named and (any(_is_other(each, ours) for each in processes) or _untold_bytes(gpu) > 0)


def _is_other(process: GpuProcess, ours: Collection[int]) -> bool:
    """Tell whether a process outside the launch may use a card.

    One that is gone does not, and the MPS server works for its clients.
    """
    gone, of_mps = process.name == "", (process.name or "").startswith(_MPS)
    return process.pid not in ours and not gone and not of_mps


def _grown(peaks_bytes: dict[int, int], gpu: Gpu) -> tuple[dict[int, int], frozenset[int]]:
    """Return the most that each process has held, and whose memory exceeds that now."""
    now: dict[int, int] = {}
    grown = set()
    for process in gpu.processes or ():
        if process.used_bytes is None:
            continue
        peak = peaks_bytes.get(process.pid)
        more = peak is not None and process.used_bytes >= peak + MEMORY_GROWTH_BYTES
        if more:
            grown.add(process.pid)
        now[process.pid] = process.used_bytes if more or peak is None else peak
    return now, frozenset(grown)


def _rates(before: Card, gpu: Gpu, at_s: float) -> tuple[float | None, float | None, float | None]:
    """Return bytes a second that the card received and sent over PCIe, and over NVLink."""
    last, apart_s = before.last, at_s - before.at_s
    if last is None or not 0 < apart_s <= RATE_WITHIN_S:
        return gpu.pcie_received_per_s, None, None

    def rate(now: int | None, then: int | None) -> float | None:
        if now is None or then is None:
            return None
        return (now - then) % _COUNTER_BYTES / apart_s

    received = rate(gpu.pcie_received_bytes, last.pcie_received_bytes)
    sent = rate(gpu.pcie_sent_bytes, last.pcie_sent_bytes)
    links = [
        (now - then) / apart_s
        for now, then in (
            (gpu.nvlink_received_bytes, last.nvlink_received_bytes),
            (gpu.nvlink_sent_bytes, last.nvlink_sent_bytes),
        )
        if now is not None and then is not None and now >= then
    ]
    if received is None:
        received = gpu.pcie_received_per_s
    return received, sent, sum(links) if links else None


def _read(card: Card, gpu: Gpu, *, grew: bool) -> Reading:
    if gpu.util_pct is None:
        return "unknown"
    copies = (card.copies_per_s or 0) >= COPY_BYTES_PER_S
    if gpu.util_pct < 5:
        return "copying" if grew or copies else "idle"
    power_w, limit_w, idle_power_w = gpu.power_w, gpu.power_limit_w, card.idle_power_w
    near_idle = (
        power_w is not None
        and idle_power_w is not None
        and power_w <= idle_power_w + SPIN_ABOVE_IDLE_W
    )
    if copies and near_idle:
        return "copying"
    if (gpu.memory_util_pct or 0) > 1:
        return "computing"
    if power_w is None:
        return "busy"
    if idle_power_w is None:
        low = limit_w is not None and power_w < SPIN_BELOW_LIMIT * limit_w
        return "spinning" if low and gpu.util_pct >= 90 and not copies else "busy"
    if gpu.util_pct >= 90 and near_idle:
        return "spinning"
    compute_w = COMPUTE_PART * (limit_w - idle_power_w) if limit_w else COMPUTE_ABOVE_IDLE_W
    return "computing" if power_w > idle_power_w + compute_w else "busy"
