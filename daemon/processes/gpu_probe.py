"""How many GPUs the CUDA driver shows, asked in a process of its own: the driver stays out of the supervisor, and cannot hang it.

Run as a program, this file is that process. It prints one line: the number of devices, or why there are none.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

_LIBRARY = "libcuda.so.1"
#: This file by itself: it imports nothing of ours.
_COMMAND = [sys.executable, "-I", __file__]
#: Seconds. Without its persistence mode a driver takes a while for its first user.
_PATIENCE = 60.0
_NO_DEVICE = 100
_NO_LIBRARY = f"there is no {_LIBRARY}"


@dataclass(frozen=True, slots=True)
class Probed:
    """What the driver says."""

    #: Visible GPUs.
    count: int
    #: Why the driver cannot be used; "": it can.
    trouble: str = ""
    #: It is not installed.
    absent: bool = False


def probe(environment: Mapping[str, str]) -> Probed:
    """Asks the driver; ``CUDA_VISIBLE_DEVICES`` of that environment is obeyed as CUDA obeys it."""
    try:
        done = subprocess.run(
            _COMMAND, env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE
        )
    except subprocess.TimeoutExpired:
        return Probed(0, f"the CUDA driver did not answer within {_PATIENCE:g} s")
    said = done.stdout.strip()
    if said.isdecimal():
        return Probed(int(said))
    if said == _NO_LIBRARY:
        return Probed(0, said, absent=True)
    return Probed(0, said or f"the CUDA driver ended the process that asked it (status {done.returncode})")


def _ask() -> int | str:
    """The number of devices, or a reason."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        return _NO_LIBRARY if "cannot open shared object" in str(error) else f"{_LIBRARY} cannot be loaded: {error}"
    count = ctypes.c_int(0)
    code = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    if code == _NO_DEVICE:
        return 0
    if code:
        text = ctypes.c_char_p()
        library.cuGetErrorName(code, ctypes.byref(text))
        return f"the CUDA driver cannot be used ({(text.value or b'').decode() or f'CUDA error {code}'})"
    return count.value


if __name__ == "__main__":
    print(_ask())
