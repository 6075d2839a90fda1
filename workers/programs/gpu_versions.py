"""Finds the versions of the software that compiles and runs programs on a GPU: a stored executable is valid for these only."""

from __future__ import annotations

import functools
import re
import sys
from importlib import metadata
from pathlib import Path

from jax.extend.backend import backends

from tensord.shm.cuda_regions import driver_version

#: Packages of JAX's plugin and of NVIDIA's libraries.
_PACKAGE = re.compile(r"(jax[-_]cuda|nvidia[-_])", re.IGNORECASE)
#: The plugin's own module that asks the libraries it has loaded, which need not come from a package.
_ASKED = re.compile(r"(jax_cuda\d+_plugin|jaxlib\.cuda)\._versions")
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")


@functools.cache
def gpu_versions() -> tuple[str, ...]:
    """Returns the versions of JAX's GPU plugin, the driver, cuDNN and NVIDIA's other libraries; empty without a GPU."""
    if "cuda" not in backends():
        return ()
    found = {f"{name}=={one.version}" for one in metadata.distributions() if _PACKAGE.match(name := one.name or "")}
    for module_name, module in list(sys.modules.items()):
        if _ASKED.fullmatch(module_name):
            for name in dir(module):
                if name.endswith("_get_version"):
                    found.add(f"{name}={_ask(getattr(module, name))}")
    return (f"driver={driver_version()}", _first_line(_KERNEL_MODULE), *sorted(found))


def _ask(function: object) -> object:
    try:
        return function() if callable(function) else function
    except Exception as error:  # a library that is not there has no version
        return type(error).__name__


def _first_line(path: Path) -> str:
    try:
        return path.read_text().partition("\n")[0]
    except OSError:
        return ""
