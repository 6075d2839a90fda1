"""Reads the state of this host's GPUs from the driver's management library, in a separate process that may hang with the driver.

Run as a program, it writes lines of JSON: a ``Look`` each time it has read all GPUs, and an ``Event`` for each error of a GPU.
It ends when nobody reads its output any more. Source: NVML API reference; nvidia-ml-py.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable
from typing import Any

import msgspec


class GpuState(msgspec.Struct, frozen=True):
    """The state of one GPU. Sizes are in bytes. A value that the GPU does not report is None."""

    uuid: str
    #: The part of the last moment in which a kernel ran.
    utilization: float | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    #: Watts.
    power_usage: float | None = None
    power_limit: float | None = None
    #: Joules since the driver was loaded.
    energy: float | None = None


class Look(msgspec.Struct, frozen=True, tag="look"):
    """The state of all GPUs of this host at one time."""

    gpus: tuple[GpuState, ...]


class Event(msgspec.Struct, frozen=True, tag="event"):
    """An error of a GPU."""

    uuid: str
    #: The kind, "xid" or "ecc" (an error of two bits, which was not corrected).
    kind: str
    #: The number of an XID.
    number: int = 0


def main(seconds: float) -> str:
    """Writes the state of the GPUs every ``seconds`` seconds, and each error of a GPU at once, to standard output.

    Returns "" once nobody reads standard output any more. Returns an error message as soon as the GPUs cannot be read.
    """
    try:
        import pynvml
    except ImportError:
        return "nvidia-ml-py is not installed (pip install nvidia-ml-py)"
    try:
        # A host without GPUs is no error.
        pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)
        return _watch(pynvml, seconds)
    except pynvml.NVMLError as error:
        return str(error)


def _watch(nvml: Any, seconds: float) -> str:
    handles, uuids = [], []
    for number in range(nvml.nvmlDeviceGetCount()):
        # A GPU that has fallen off the bus hides no other.
        with contextlib.suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            uuids.append(nvml.nvmlDeviceGetUUID(handle))
            handles.append(handle)
    events = nvml.nvmlEventSetCreate()
    kinds = {nvml.nvmlEventTypeXidCriticalError: "xid", nvml.nvmlEventTypeDoubleBitEccError: "ecc"}
    for handle in handles:
        for kind in kinds:
            # Some GPUs know only some of the kinds.
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlDeviceRegisterEvents(handle, kind, events)
    by_address = {_address(handle): uuid for handle, uuid in zip(handles, uuids, strict=True)}
    while _say(Look(tuple([_look(nvml, handle, uuid) for handle, uuid in zip(handles, uuids, strict=True)]))):
        try:
            met = nvml.nvmlEventSetWait_v2(events, int(1000 * seconds))
        except nvml.NVMLError_Timeout:
            continue
        kind = kinds.get(met.eventType, "")
        number = met.eventData if kind == "xid" else 0
        if not _say(Event(by_address.get(_address(met.device), ""), kind, number)):
            break
    return ""


def _look(nvml: Any, handle: Any, uuid: str) -> GpuState:
    def ask(function: Callable[..., Any], of: Callable[[Any], float]) -> Any:
        try:
            return of(function(handle))
        except nvml.NVMLError:
            return None

    return GpuState(
        uuid,
        ask(nvml.nvmlDeviceGetUtilizationRates, lambda found: found.gpu / 100),
        ask(nvml.nvmlDeviceGetMemoryInfo, lambda found: found.total),
        ask(nvml.nvmlDeviceGetMemoryInfo, lambda found: found.used),
        ask(nvml.nvmlDeviceGetPowerUsage, lambda found: found / 1000),
        ask(nvml.nvmlDeviceGetEnforcedPowerLimit, lambda found: found / 1000),
        ask(nvml.nvmlDeviceGetTotalEnergyConsumption, lambda found: found / 1000),
    )


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _say(report: Look | Event) -> bool:
    """Writes ``report`` to standard output as a line of JSON. Returns False if the reader has closed it."""
    try:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])) or 0)
