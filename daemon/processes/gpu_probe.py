"""Asks the CUDA driver which GPUs it shows, in a separate process: the supervisor never loads the driver, nor hangs with it.

Run as a program, this file is that process. It prints one line of JSON: the GPUs' PCI addresses, or why there are none.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

_LIBRARY = "libcuda.so.1"
#: This file runs by itself: it imports nothing of ours.
_COMMAND = [sys.executable, "-I", __file__]
#: Seconds to wait: without its persistence mode a driver takes a while for its first user.
_PATIENCE = 60.0
_NO_DEVICE = 100
_NO_LIBRARY = f"there is no {_LIBRARY}"


@dataclass(frozen=True, slots=True)
class Probed:
    """The answer of the CUDA driver: the visible GPUs, or why the driver cannot be used."""

    #: The PCI addresses of the visible GPUs, in the driver's order; "" where it does not say.
    addresses: tuple[str, ...] = ()
    #: The reason why the driver cannot be used; "": it can.
    trouble: str = ""
    #: True if the driver is not installed.
    absent: bool = False

    @property
    def count(self) -> int:
        """Returns the number of visible GPUs."""
        return len(self.addresses)


def probe(environment: Mapping[str, str]) -> Probed:
    """Lists the GPUs that a process with this ``environment`` can use. If that fails or takes over 60 s, the result says why."""
    try:
        done = subprocess.run(
            _COMMAND, env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE
        )
    except subprocess.TimeoutExpired:
        return Probed(trouble=f"the CUDA driver did not answer within {_PATIENCE:g} s")
    try:
        said = json.loads(done.stdout)
    except ValueError:
        return Probed(trouble=f"the CUDA driver ended the process that asked it (status {done.returncode})")
    if isinstance(said, list):
        return Probed(tuple(said))
    return Probed(trouble=said, absent=said == _NO_LIBRARY)


def _ask() -> list[str] | str:
    """Returns the PCI addresses of the visible GPUs, or a sentence that says why the CUDA driver cannot be used."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        return _NO_LIBRARY if "cannot open shared object" in str(error) else f"{_LIBRARY} cannot be loaded: {error}"
    count = ctypes.c_int(0)
    code = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    if code == _NO_DEVICE:
        return []
    if code:
        text = ctypes.c_char_p()
        library.cuGetErrorName(code, ctypes.byref(text))
        return f"the CUDA driver cannot be used ({(text.value or b'').decode() or f'CUDA error {code}'})"
    return [_address(library, number) for number in range(count.value)]


def _address(library: ctypes.CDLL, number: int) -> str:
    text = ctypes.create_string_buffer(32)
    return text.value.decode() if library.cuDeviceGetPCIBusId(text, len(text), number) == 0 else ""


if __name__ == "__main__":
    print(json.dumps(_ask()))
