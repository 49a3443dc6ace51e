"""Reads the machine: load, memory, pressure, /dev/shm, and the launch's cgroup.

The root of the world is the directory that holds /proc: its neighbours sys and dev are read too.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from hangdoctor.collect import kernel_log, procfs
from hangdoctor.model import Host

if TYPE_CHECKING:
    from hangdoctor.collect.look import Look

_SOME_AVG10 = re.compile(rb"^some avg10=([\d.]+)", re.MULTILINE)
_OOM_KILL = re.compile(rb"^oom_kill (\d+)", re.MULTILINE)


def read(look: Look) -> Host:
    """Read what the machine tells; what this kernel does not have stays None."""
    proc = look.proc
    world = str(Path(proc).parent)
    pid = next((pid for pid in (look.roots | look.known) if procfs.read_stat(proc, pid)), None)
    memory = parse_meminfo(_read(f"{proc}/meminfo") or b"")
    load = _read(f"{proc}/loadavg")
    used, total = _shm(proc, world, pid)
    memory_group = _memory_group(proc, world, pid)
    swap_total, swap_free = memory.get("SwapTotal"), memory.get("SwapFree")
    return Host(
        load_1m=float(load.split()[0]) if load else None,
        cpu_count=_cpu_count(proc, world, pid),
        memory_total_bytes=memory.get("MemTotal"),
        memory_available_bytes=memory.get("MemAvailable"),
        swap_used_bytes=None if swap_total is None or swap_free is None else swap_total - swap_free,
        pressure_pct={
            name: pressure
            for name in ("cpu", "io", "memory")
            if (pressure := parse_pressure(_read(f"{proc}/pressure/{name}") or b"")) is not None
        },
        oom_kills=_oom_kills(proc, world, pid),
        cgroup_used_bytes=memory_group.get("used"),
        cgroup_limit_bytes=memory_group.get("limit"),
        cgroup_limit_hits=memory_group.get("hits"),
        shm_used_bytes=used,
        shm_total_bytes=total,
        kernel_log=kernel_log.read(f"{world}/dev/kmsg"),
    )


def parse_meminfo(raw: bytes) -> dict[str, int]:
    r"""Parse /proc/meminfo into bytes.

    >>> parse_meminfo(b"MemTotal:       24684084 kB\nHugePages_Total:       0\n")
    {'MemTotal': 25276502016}
    """
    return {
        name: procfs.parse_kib(value) or 0
        for name, value in procfs.parse_status(raw).items()
        if value.endswith(" kB")
    }


def parse_pressure(raw: bytes) -> float | None:
    r"""Parse the share of the last 10 s in which someone waited, in percent.

    >>> parse_pressure(b"some avg10=12.50 avg60=3.10 avg300=0.70 total=99\nfull avg10=0.00\n")
    12.5
    """
    match = _SOME_AVG10.search(raw)
    return float(match[1]) if match else None


def parse_cgroups(raw: bytes) -> dict[str, str]:
    r"""Parse /proc/PID/cgroup: path by controller, "" for the unified hierarchy (version 2).

    >>> parse_cgroups(b"4:memory:/docker/b7e8\n1:cpu,cpuacct:/\n0::/user.slice\n")
    {'memory': '/docker/b7e8', 'cpu': '/', 'cpuacct': '/', '': '/user.slice'}
    """
    found = {}
    for line in raw.decode(errors="replace").splitlines():
        _, names, path = line.split(":", 2)
        found.update(dict.fromkeys(names.split(","), path))
    return found


def parse_cpu_list(text: str) -> int:
    """Count the CPUs of a list as in Cpus_allowed_list.

    >>> parse_cpu_list("0-3,8,10-11")
    7
    """
    count = 0
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    return count


def parse_cpu_max(raw: bytes) -> float | None:
    r"""Parse a cgroup's cpu.max into CPUs; None for no limit.

    >>> parse_cpu_max(b"250000 100000\n"), parse_cpu_max(b"max 100000\n")
    (2.5, None)
    """
    quota, _, period = raw.decode().partition(" ")
    return None if quota.strip() in ("max", "-1", "") else int(quota) / int(period or 100000)


def parse_counters(raw: bytes) -> dict[str, int]:
    r"""Parse lines of a name and a number, as in memory.events and memory.stat.

    >>> parse_counters(b"max 12\noom_kill 1\n")
    {'max': 12, 'oom_kill': 1}
    """
    pairs = (line.split() for line in raw.decode(errors="replace").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _memory_group(proc: str, world: str, pid: int | None) -> dict[str, int]:
    """Return used, limit and hits of the tightest cgroup of a process; {} where none has a limit.

    Used is without the page cache, which a load from files fills up to the limit, and which the
    kernel takes back before it kills.
    """
    found = []
    for directory, version in _memory_directories(proc, world, pid) if pid is not None else ():
        limit_name, used_name, cache_names = _MEMORY_FILES[version]
        limit, used = (_read(f"{directory}/{name}") or b"" for name in (limit_name, used_name))
        if not limit.strip().isdigit() or not used.strip().isdigit() or int(limit) > _NO_LIMIT:
            continue
        stat = parse_counters(_read(f"{directory}/memory.stat") or b"")
        group = {
            "limit": int(limit),
            "used": max(0, int(used) - sum(stat.get(name, 0) for name in cache_names)),
        }
        hits = (
            parse_counters(_read(f"{directory}/memory.events") or b"").get("max")
            if version == 2
            else int(_read(f"{directory}/memory.failcnt") or b"0")
        )
        found.append(group if hits is None else group | {"hits": hits})
    return max(found, key=lambda group: group["used"] / max(1, group["limit"]), default={})


_MEMORY_FILES = {
    1: (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
    2: ("memory.max", "memory.current", ("active_file", "inactive_file")),
}
_NO_LIMIT = 1 << 60
"""Version 1 writes a number near 2^63 where there is no limit."""


def _memory_directories(proc: str, world: str, pid: int) -> list[tuple[str, int]]:
    """Return the memory cgroup of a process and those above it, with their version."""
    groups = parse_cgroups(_read(f"{proc}/{pid}/cgroup") or b"")
    found = []
    for root in (f"{world}/sys/fs/cgroup", f"{proc}/{pid}/root/sys/fs/cgroup"):
        for name, base, version in (("memory", "/memory", 1), ("", "", 2), ("", "/unified", 2)):
            if name not in groups:
                continue
            parts = [part for part in groups[name].split("/") if part and part != ".."]
            found += [
                ("/".join([f"{root}{base}", *parts[:count]]), version)
                for count in range(len(parts), -1, -1)
            ]
    return found


def cgroup_file(proc: str, world: str, pid: int, controller: str, *, v1: str, v2: str) -> bytes:
    """Read a file of the process's cgroup, version 1 or 2, as seen from here or from inside."""
    groups = parse_cgroups(_read(f"{proc}/{pid}/cgroup") or b"")
    tries = []
    for root in (f"{world}/sys/fs/cgroup", f"{proc}/{pid}/root/sys/fs/cgroup"):
        if controller in groups:
            # In a container the path is the host's, while the mount begins at the container.
            tries += [f"{root}/{controller}{groups[controller]}/{v1}", f"{root}/{controller}/{v1}"]
        if "" in groups:
            tries += [f"{root}{groups['']}/{v2}", f"{root}/unified{groups['']}/{v2}"]
            tries += [f"{root}/{v2}"]
    return next((data for path in tries if (data := _read(path))), b"")


def _oom_kills(proc: str, world: str, pid: int | None) -> int | None:
    if pid is None:
        return None
    raw = cgroup_file(proc, world, pid, "memory", v1="memory.oom_control", v2="memory.events")
    match = _OOM_KILL.search(raw)
    return int(match[1]) if match else None


def _cpu_count(proc: str, world: str, pid: int | None) -> int | None:
    """Return the CPUs that the process may use, by affinity and by its cgroup's quota."""
    if pid is None:
        return None
    status = procfs.parse_status(_read(f"{proc}/{pid}/status") or b"")
    allowed = status.get("Cpus_allowed_list")
    if allowed is None:
        return None
    raw = cgroup_file(proc, world, pid, "cpu", v1="cpu.cfs_quota_us", v2="cpu.max")
    quota = parse_cpu_max(raw) if raw else None
    return min(parse_cpu_list(allowed), math.ceil(quota) if quota else 1 << 20)


def _shm(proc: str, world: str, pid: int | None) -> tuple[int | None, int | None]:
    """Return the used and total bytes of the launch's own /dev/shm, else of ours."""
    for path in ((f"{proc}/{pid}/root/dev/shm",) if pid else ()) + (f"{world}/dev/shm",):  # noqa: S108  # only its size is asked
        try:
            info = os.statvfs(path)
        except OSError:
            continue
        total = info.f_blocks * info.f_frsize
        return total - info.f_bfree * info.f_frsize, total
    return None, None


def _read(path: str) -> bytes | None:
    try:
        return procfs.read(path)
    except OSError:
        return None
