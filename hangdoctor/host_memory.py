"""How full host memory is, and how ranks fill what they have said to allocate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hangdoctor.model import Host, Struct
from hangdoctor.weights import SAMPLES_KEPT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hangdoctor.logs.timeline import Timeline
    from hangdoctor.tracks import Track


class MemoryUse(Struct, frozen=True):
    """How full a memory was at a time, without the page cache that the kernel takes back first."""

    of: str
    used_bytes: int
    limit_bytes: int
    at_s: float

    @property
    def share(self) -> float:
        """The part that is used, from 0 to 1."""
        return self.used_bytes / self.limit_bytes


class HostMemory(Struct, frozen=True):
    """Host memory that a rank has said to allocate.

    Attributes:
        id: of the allocation; number: of its line.
        total_bytes: that it will be.
        base_bytes: what the process had when that was first seen; late: it may have had less.
        samples: times, and what it has grown by since; the newest last.
    """

    id: str
    number: int
    total_bytes: int
    base_bytes: int
    late: bool = False
    samples: tuple[tuple[float, int], ...] = ()


def see_allocations(
    before: dict[str, HostMemory],
    tracks: Iterable[Track],
    timeline: Timeline,
    at_s: float,
    *,
    first: bool,
) -> dict[str, HostMemory]:
    """Follow the growth of ranks whose last word was how much host memory they allocate.

    Args:
        before: what was followed so far, by rank.
        tracks: all processes, as seen now.
        timeline: the log.
        at_s: now.
        first: this is the first look.
    """
    found: dict[str, HostMemory] = {}
    for track in tracks:
        log = timeline.ranks.get(track.rank or "")
        rss_bytes = track.process.rss_bytes
        if track.rank is None or not track.present or log is None or rss_bytes is None:
            continue
        if log.allocates is None or log.last is None or log.last.number > log.allocates[2]:
            continue  # it has gone on since
        identity, total_bytes, number = log.allocates
        memory = before.get(track.rank)
        if memory is None or memory.number != number:
            memory = HostMemory(
                id=identity,
                number=number,
                total_bytes=total_bytes,
                base_bytes=rss_bytes,
                late=first,
            )
        grown = max(0, rss_bytes - memory.base_bytes)
        samples = (*memory.samples[-SAMPLES_KEPT:], (at_s, grown))
        found[track.rank] = msgspec.structs.replace(memory, samples=samples)
    return found


def see_peak(peak: MemoryUse | None, host: Host, at_s: float) -> MemoryUse | None:
    """Return the tightest that memory was, up to now."""
    for use in memory_uses(host, at_s):
        if peak is None or use.share >= peak.share:
            peak = use
    return peak


def memory_uses(host: Host, at_s: float) -> list[MemoryUse]:
    """Return how full the memory is that the launch may use: its cgroup's and the machine's."""
    uses = []
    if host.cgroup_limit_bytes and host.cgroup_used_bytes is not None:
        used, limit = host.cgroup_used_bytes, host.cgroup_limit_bytes
        uses.append(MemoryUse(of="the cgroup", used_bytes=used, limit_bytes=limit, at_s=at_s))
    if host.memory_total_bytes and host.memory_available_bytes is not None:
        total = host.memory_total_bytes
        used = total - host.memory_available_bytes
        uses.append(MemoryUse(of="the machine", used_bytes=used, limit_bytes=total, at_s=at_s))
    return uses
