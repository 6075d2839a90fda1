"""Finds out which software a program compiled for a GPU depends on, and whether the program copies memory.

XLA runs a program's operations as CUDA graphs. A graph that copies an input fails with CUDA_ERROR_INVALID_VALUE if the input
lies in XLA's own memory in one run, and in memory that XLA has not allocated in another run, such as a client's region (seen
with jaxlib 0.11.2 on an H100 and an H200). Programs that copy are compiled without graphs.
"""

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
#: Part of the versions: executables that were stored before programs with copies were compiled in another way are not used.
_COPIES = "copies run outside of CUDA graphs"
#: XLA's options with which nothing runs as a CUDA graph.
WITHOUT_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
#: An instruction that copies memory, not as a part of a kernel.
_COPY = re.compile(r" +(?:ROOT )?%?[\w.\-]+ = .*? copy(?:-start)?\(")
#: The first line of a computation, and how an instruction names the computation that is its kernel.
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_KERNEL = re.compile(r"\bcalls=%?([\w.\-]+)")


@functools.cache
def gpu_versions() -> tuple[str, ...]:
    """Returns the versions of JAX's GPU plugin, the driver, cuDNN and NVIDIA's other libraries; empty: there is no GPU."""
    if "cuda" not in backends():
        return ()
    found = {f"{name}=={one.version}" for one in metadata.distributions() if _PACKAGE.match(name := one.name or "")}
    for module_name, module in list(sys.modules.items()):
        if _ASKED.fullmatch(module_name):
            for name in dir(module):
                if name.endswith("_get_version"):
                    found.add(f"{name}={_ask(getattr(module, name))}")
    return (_COPIES, f"driver={driver_version()}", _first_line(_KERNEL_MODULE), *sorted(found))


def copies_memory(text: str) -> bool:
    """Returns whether a compiled program copies memory outside of kernels. ``text``: the result of ``Compiled.as_text``."""
    kernels = set(_KERNEL.findall(text))
    name = ""
    for line in text.split("\n"):
        if (begun := _COMPUTATION.match(line)) is not None:
            name = begun[1]
        elif name not in kernels and _COPY.match(line):
            return True
    return False


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
