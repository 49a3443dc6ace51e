"""Rules over the machine and the launch's cgroup: what they lack explains, and decides nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.findings import Evidence, Finding
from hangdoctor.host_memory import memory_uses
from hangdoctor.rules.exits import NEARLY_FULL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hangdoctor.model import Host
    from hangdoctor.rules.case import Case

MEMORY_PRESSURE_PCT = 20.0
"""PSI "some avg10" of memory: for a fifth of the last 10 s something waited for memory."""
IO_PRESSURE_PCT = 60.0
SWAPPED_BYTES = 1 << 30
"""Swapped out while we watched: what swaps is slow, and looks hung."""
SHM_FULL = 0.98


def machine_short(case: Case) -> Iterator[Finding]:
    """The machine, or the launch's cgroup, runs out of something.

    What it sees: memory nearly full without the page cache (the cgroup's limit or the machine's),
    memory or I/O pressure (PSI), swap that grows, /dev/shm nearly full.
    Why it matters: a launch that swaps or reclaims is slow and looks hung; the next thing is a
    SIGKILL by the kernel, or a SIGBUS where /dev/shm is full. By itself it decides nothing.
    What to do: raise the limit, give /dev/shm more room (docker run --shm-size), load with less.
    """
    facts = case.facts
    host, first = facts.host, facts.host_first
    if host is None or first is None or facts.launch_log_phase == "ready":
        return
    short = [
        f"memory of {use.of} is {100 * use.share:.0f} % full "
        f"({use.used_bytes / 1e9:.1f} of {use.limit_bytes / 1e9:.1f} GB)"
        for use in memory_uses(host, facts.at_s or 0.0)
        if use.share >= NEARLY_FULL
    ]
    for name, limit in (("memory", MEMORY_PRESSURE_PCT), ("io", IO_PRESSURE_PCT)):
        pressure = host.pressure_pct.get(name, 0.0)
        if pressure >= limit:
            short.append(f"something waits for {name} {pressure:.0f} % of the time")
    swapped = (host.swap_used_bytes or 0) - (first.swap_used_bytes or 0)
    if first.swap_used_bytes is not None and swapped >= SWAPPED_BYTES:
        short.append(f"{swapped / 1e9:.1f} GB were swapped out while it was watched")
    if full := _full_shm(host):
        short.append(full)
    if not short:
        return
    yield Finding(
        rule="machine-short",
        verdict="found",
        title="; ".join(short),
        confidence="low",
        because=tuple(Evidence(text=text, at_s=facts.at_s) for text in short),
        advice=("see what takes it: ps -eo pid,rss,args --sort=-rss | head; df -h /dev/shm",),
    )


def _full_shm(host: Host) -> str:
    used, total = host.shm_used_bytes, host.shm_total_bytes
    if not total or used is None or used < SHM_FULL * total:
        return ""
    return f"shared memory (/dev/shm) is full ({used / 1e9:.1f} of {total / 1e9:.1f} GB)"
