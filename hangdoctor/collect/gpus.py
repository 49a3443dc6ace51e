"""Reads the cards through NVML, NVIDIA's own library, by way of nvidia-ml-py (module pynvml).

The library stays initialised for the worker's life: on a machine without persistence mode each
initialisation wakes the cards up, which takes seconds.

What the calls cost on an H200 (driver 580.159): 1 to 5 microseconds each, but 150 for each PCIe
counter, the same for the MIG mode, and 21 ms for each direction of nvmlDeviceGetPcieThroughput.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from hangdoctor.collect import procfs
from hangdoctor.model import Gpu, GpuProcess, Gpus, Missing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from hangdoctor.collect.look import Look

_T = TypeVar("_T")

MOST_XIDS = 16
"""Faults that are kept of a card: a broken one reports without end."""
MOST_DESCRIPTORS = 20_000
"""A process with more is not searched for the device files it holds."""
SEARCH_EVERY_S = 5.0
"""How often the launch's descriptors are searched where the driver names none of its processes."""
THROUGHPUT_EVERY_S = 10.0
"""How often a card's PCIe traffic is sampled where there are no counters; a sample takes 21 ms, so
that a look samples one card only."""

_SLOWED = {  # nvmlClocksEventReason...: what holds the clocks down against the will of its users
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
# NVML_FI_DEV_...: fields that older versions of the binding have no names for, see nvml.h.
_PCIE_SENT, _PCIE_RECEIVED = 197, 198
_NVLINK_SENT, _NVLINK_RECEIVED = 138, 139
_ALL_LINKS = 0xFFFFFFFF
_DEVICE_FILE = re.compile(r"/dev/nvidia(\d+)$")


class _Card(msgspec.Struct):
    """What stays the same of a card, and what adds up."""

    handle: Any
    bus: str
    name: str
    minor: int | None
    power_limit_w: float | None
    xids: list[int] | None
    throughput_at_s: float = 0.0


class _Session(msgspec.Struct):
    """The library's state in this process."""

    driver: str
    cards: dict[int, _Card] = {}
    events: Any = None
    opened_by: dict[int, dict[int, int]] = {}  # by the device file's number
    opened_at_s: float = 0.0


_session: _Session | None = None


def read(look: Look) -> Gpus | Missing:
    """Read all cards, whoever uses them. A card that answers with an error has its reason."""
    global _session  # noqa: PLW0603  # the library's own state is the process's
    try:
        import pynvml  # 16 ms that machines without GPUs need not spend
    except ImportError as error:
        return Missing(reason="not-installed", detail=str(error), hint="pip install nvidia-ml-py")
    try:
        if _session is None:
            pynvml.nvmlInit()
            _session = _Session(driver=_text(pynvml.nvmlSystemGetDriverVersion()))
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        _session = None
        return _no_driver(pynvml, error)
    # First, so that a card that is lost has said why.
    lost = {
        index: missing
        for index in range(count)
        if index not in _session.cards
        and isinstance(missing := _meet(pynvml, _session, index), Missing)
    }
    _hear_faults(pynvml, _session)
    sampled = _to_be_sampled(_session)
    cards = {
        index: lost.get(index)
        or _read_card(pynvml, _session.cards[index], index, sample=index == sampled)
        for index in range(count)
    }
    ours = look.known.keys() | look.roots.keys()
    return Gpus(cards=_with_processes(_session, cards, look.proc, ours), driver=_session.driver)


def open_device_files(proc: str, pids: Collection[int]) -> dict[int, dict[int, int]]:
    """Count the descriptors of processes on each card's device file, by its number, then by pid.

    A process of CUDA opens all cards that it sees and its own far more often: 20 against 4
    descriptors on a machine with two H200.
    """
    found: dict[int, dict[int, int]] = {}
    for pid in pids:
        folder = f"{proc}/{pid}/fd"
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names if len(names) <= MOST_DESCRIPTORS else ():
            try:
                match = _DEVICE_FILE.match(os.readlink(f"{folder}/{name}"))
            except OSError:
                continue
            if match:
                counts = found.setdefault(int(match[1]), {})
                counts[pid] = counts.get(pid, 0) + 1
    return found


def _meet(nvml: Any, session: _Session, index: int) -> Missing | None:
    """Ask what stays the same of a card."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return _lost(nvml, index, error)
    try:
        pci = _ask(nvml, nvml.nvmlDeviceGetPciInfo, handle)
        limit_mw = _ask(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        session.cards[index] = _Card(
            handle=handle,
            bus=_text(pci.busId) if pci else "",
            name=_text(_ask(nvml, nvml.nvmlDeviceGetName, handle) or ""),
            minor=_ask(nvml, nvml.nvmlDeviceGetMinorNumber, handle),
            power_limit_w=limit_mw / 1000 if limit_mw is not None else None,
            xids=[] if _listen(nvml, session, handle) else None,
        )
    except nvml.NVMLError as error:
        return _lost(nvml, index, error)
    return None


def _listen(nvml: Any, session: _Session, handle: Any) -> bool:
    """Have the driver tell of the card's faults; tell whether it will."""
    try:
        if session.events is None:
            session.events = nvml.nvmlEventSetCreate()
        nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, session.events)
    except nvml.NVMLError:  # not this card, not this user, not this driver
        return False
    return True


def _hear_faults(nvml: Any, session: _Session) -> None:
    if session.events is None:
        return
    for _ in range(MOST_XIDS * max(1, len(session.cards))):
        try:
            event = nvml.nvmlEventSetWait_v2(session.events, 0)
            index = nvml.nvmlDeviceGetIndex(event.device)
        except nvml.NVMLError:  # a time-out: there is none
            return
        card = session.cards.get(index)
        if card and card.xids is not None and len(card.xids) < MOST_XIDS:
            card.xids.append(event.eventData)


def _to_be_sampled(session: _Session) -> int | None:
    """Return the card whose PCIe traffic is longest due to be sampled; None if none is."""
    index = min(session.cards, key=lambda index: session.cards[index].throughput_at_s, default=None)
    if index is None:
        return None
    card, now_s = session.cards[index], time.monotonic()
    if now_s - card.throughput_at_s < THROUGHPUT_EVERY_S:
        return None
    card.throughput_at_s = now_s
    return index


def _read_card(nvml: Any, card: _Card, index: int, *, sample: bool) -> Gpu | Missing:
    handle = card.handle

    def ask(function: Callable[..., _T], *arguments: object) -> _T | None:
        return _ask(nvml, function, handle, *arguments)

    try:
        # Asked first, since every card answers it, but integrated ones (GB10) without memory of
        # their own: one that does not is lost.
        memory = ask(nvml.nvmlDeviceGetMemoryInfo)
        rates = ask(nvml.nvmlDeviceGetUtilizationRates)
        if rates is None and (shared := _shared(nvml, ask, index)):
            return shared
        power_mw = ask(nvml.nvmlDeviceGetPowerUsage)
        reasons = ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        running = _running(nvml, ask)
        errors = ask(
            nvml.nvmlDeviceGetTotalEccErrors,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        )
        clock = ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)
        temperature = ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
        counters = _counters(nvml, ask)
    except nvml.NVMLError as error:
        return _lost(nvml, index, error)
    received_per_s = None
    if counters[0] is None and sample:
        kib_per_s = ask(nvml.nvmlDeviceGetPcieThroughput, nvml.NVML_PCIE_UTIL_RX_BYTES)
        received_per_s = None if kib_per_s is None else kib_per_s * 1024.0
    return Gpu(
        index=index,
        name=card.name,
        bus=card.bus,
        util_pct=rates.gpu if rates else None,
        memory_util_pct=rates.memory if rates else None,
        memory_used_bytes=memory.used if memory else None,
        memory_total_bytes=memory.total if memory else None,
        power_w=power_mw / 1000 if power_mw is not None else None,
        power_limit_w=card.power_limit_w,
        sm_clock_mhz=clock,
        temperature_c=temperature,
        slowed_by=None
        if reasons is None
        else tuple(reason for bit, reason in _SLOWED.items() if reasons & bit),
        pcie_received_bytes=counters[0],
        pcie_sent_bytes=counters[1],
        pcie_received_per_s=received_per_s,
        nvlink_received_bytes=counters[2],
        nvlink_sent_bytes=counters[3],
        uncorrected_errors=errors,
        xids=None if card.xids is None else tuple(card.xids),
        processes=None
        if running is None
        else tuple(GpuProcess(pid=one.pid, used_bytes=one.usedGpuMemory) for one in running),
    )


def _running(nvml: Any, ask: Callable[..., Any]) -> list[Any] | None:
    """Return the processes on a card: those that compute, as MPS' clients, or only draw."""
    found = ask(nvml.nvmlDeviceGetComputeRunningProcesses)
    if found is None:
        return None
    by_pid = {one.pid: one for one in found}
    for more in (
        nvml.nvmlDeviceGetMPSComputeRunningProcesses,
        nvml.nvmlDeviceGetGraphicsRunningProcesses,
    ):
        # A card that is lost has told that already; the second is of a driver that lacks them.
        with suppress(nvml.NVMLError, getattr(nvml, "NVMLLibraryMismatchError", nvml.NVMLError)):
            by_pid = {one.pid: one for one in ask(more) or ()} | by_pid
    return list(by_pid.values())


def _counters(nvml: Any, ask: Callable[..., Any]) -> tuple[int | None, ...]:
    """Read PCIe received and sent, NVLink received and sent, in bytes; None where not supported.

    NVLink's are in KiB (nvml.h); where there are no links, or only a bridge, they stand at 0.
    """
    wanted: list[tuple[Any, int]] = [
        (_PCIE_RECEIVED, 1),
        (_PCIE_SENT, 1),
        ((_NVLINK_RECEIVED, _ALL_LINKS), 1024),
        ((_NVLINK_SENT, _ALL_LINKS), 1024),
    ]
    values = ask(nvml.nvmlDeviceGetFieldValues, [field for field, _ in wanted])
    if values is None:
        return (None,) * len(wanted)
    return tuple(
        None
        if value.nvmlReturn != nvml.NVML_SUCCESS
        else factor
        * (
            value.value.uiVal
            if value.valueType == nvml.NVML_VALUE_TYPE_UNSIGNED_INT
            else value.value.ullVal
        )
        for value, (_, factor) in zip(values, wanted, strict=True)
    )


def _shared(nvml: Any, ask: Callable[..., Any], index: int) -> Missing | None:
    """Say why a card that tells no utilisation does not: it is split between several users."""
    mig = ask(nvml.nvmlDeviceGetMigMode)
    if mig and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE:
        return Missing(
            reason="unsupported",
            detail=f"GPU {index} is split by MIG, and NVML does not tell what its parts do",
            hint="nvidia-smi mig -lgi",
        )
    mode = ask(nvml.nvmlDeviceGetVirtualizationMode)
    if mode == nvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU:
        return Missing(
            reason="unsupported",
            detail=f"GPU {index} is a virtual one, whose driver does not tell what it does",
            hint="ask whoever runs the host for nvidia-smi vgpu",
        )
    return None


def _with_processes(
    session: _Session, cards: dict[int, Gpu | Missing], proc: str, ours: Collection[int]
) -> dict[int, Gpu | Missing]:
    """Look up who the processes on the cards are: strangers by name, ours by device file.

    In a container the driver's PIDs are often the host's, and name nobody here.
    """
    here = {index: gpu for index, gpu in cards.items() if isinstance(gpu, Gpu)}
    pids = {process.pid for gpu in here.values() for process in gpu.processes or ()}
    names = {pid: _name(proc, pid) for pid in pids if pid not in ours}
    opened = {} if not here or pids & set(ours) else _device_files(session, proc, ours)
    return cards | {
        index: msgspec.structs.replace(
            gpu,
            processes=None
            if gpu.processes is None
            else tuple(
                msgspec.structs.replace(process, name=names.get(process.pid))
                for process in gpu.processes
            ),
            opened_by=opened.get(minor, {})
            if opened and (minor := session.cards[index].minor) is not None
            else None,
        )
        for index, gpu in here.items()
    }


def _name(proc: str, pid: int) -> str | None:
    """Return a process's short name, for which the kernel takes no lock of it; "" for none."""
    try:
        stat = procfs.read_stat(proc, pid)
        if stat is None:
            os.kill(pid, 0)  # asks only whether it is there: hidepid hides it from /proc
    except ProcessLookupError:
        return ""
    except OSError:
        return None
    return stat.comm if stat else None


def _device_files(session: _Session, proc: str, pids: Collection[int]) -> dict[int, dict[int, int]]:
    now_s = time.monotonic()
    if now_s - session.opened_at_s >= SEARCH_EVERY_S:
        session.opened_at_s = now_s
        session.opened_by = open_device_files(proc, pids)
    return session.opened_by


def _ask(nvml: Any, function: Callable[..., _T], *arguments: object) -> _T | None:
    """Ask, with None for an answer that this card, driver or user does not get."""
    try:
        return function(*arguments)
    except (
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_NoPermission,
        nvml.NVMLError_FunctionNotFound,
    ):
        return None


def _lost(nvml: Any, index: int, error: Exception) -> Missing:
    if isinstance(error, nvml.NVMLError_GpuIsLost):
        return Missing(
            reason="gone",
            detail=f"GPU {index} is lost: {error}",
            hint="dmesg | grep -i xid; the machine needs a reset of that card, or a reboot",
        )
    if isinstance(error, nvml.NVMLError_NoPermission):
        return Missing(reason="permission", detail=str(error), hint="run hangdoctor as root (sudo)")
    return Missing(reason="failed", detail=str(error), hint=f"nvidia-smi -i {index} -q")


def _no_driver(nvml: Any, error: Exception) -> Missing:
    if isinstance(error, nvml.NVMLError_LibraryNotFound):
        return Missing(
            reason="not-installed",
            detail=f"{error}: libnvidia-ml.so.1 cannot be loaded",
            hint="in a container: docker run --gpus all, or the pod's runtimeClassName: nvidia",
        )
    if isinstance(error, nvml.NVMLError_DriverNotLoaded):
        return Missing(
            reason="not-installed", detail=str(error), hint="lsmod | grep nvidia; nvidia-smi"
        )
    return Missing(reason="failed", detail=str(error), hint="nvidia-smi")


def _text(name: str | bytes) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name
