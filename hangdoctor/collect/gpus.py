"""Reads the cards through NVML, NVIDIA's own library, by way of nvidia-ml-py (module pynvml).

The library stays initialised for the worker's life: on a machine without persistence mode each
initialisation wakes the cards up, which takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from hangdoctor.model import Gpu, GpuProcess, Gpus, Missing

if TYPE_CHECKING:
    from collections.abc import Callable

    from hangdoctor.collect.look import Look

_T = TypeVar("_T")

_ready = False


def read(look: Look) -> Gpus | Missing:  # noqa: ARG001  # all cards, whoever uses them
    """Read all cards. A card that answers with an error is there with its reason."""
    global _ready  # noqa: PLW0603  # the library's own state is the process's
    try:
        import pynvml  # 16 ms that machines without GPUs need not spend
    except ImportError as error:
        return Missing(reason="not-installed", detail=str(error), hint="pip install nvidia-ml-py")
    try:
        if not _ready:
            pynvml.nvmlInit()
            _ready = True
        count = pynvml.nvmlDeviceGetCount()
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        _ready = False
        return _no_driver(pynvml, error)
    return Gpus(cards={index: _card(pynvml, index) for index in range(count)}, driver=driver)


def _card(nvml: Any, index: int) -> Gpu | Missing:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        # Asked first, since every card answers it: one that does not is lost.
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError_NotSupported:  # integrated ones (GB10) have no memory of their own
        memory = None
    except nvml.NVMLError as error:
        return _lost(nvml, index, error)

    def ask(function: Callable[..., _T], *arguments: object) -> _T | None:
        try:
            return function(handle, *arguments)
        except (
            nvml.NVMLError_NotSupported,
            nvml.NVMLError_NoPermission,
            nvml.NVMLError_FunctionNotFound,
        ):
            return None

    try:
        rates = ask(nvml.nvmlDeviceGetUtilizationRates)
        power_mw = ask(nvml.nvmlDeviceGetPowerUsage)
        limit_mw = ask(nvml.nvmlDeviceGetEnforcedPowerLimit)
        name = ask(nvml.nvmlDeviceGetName)
        clock = ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)
        running = ask(nvml.nvmlDeviceGetComputeRunningProcesses)
    except nvml.NVMLError as error:
        return _lost(nvml, index, error)
    return Gpu(
        index=index,
        name=_text(name or ""),
        util_pct=rates.gpu if rates else None,
        memory_util_pct=rates.memory if rates else None,
        memory_used_bytes=memory.used if memory else None,
        memory_total_bytes=memory.total if memory else None,
        power_w=power_mw / 1000 if power_mw is not None else None,
        power_limit_w=limit_mw / 1000 if limit_mw is not None else None,
        sm_clock_mhz=clock,
        processes=None
        if running is None
        else tuple(GpuProcess(pid=one.pid, used_bytes=one.usedGpuMemory) for one in running),
    )


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
