"""JAX's CUDA plugin on a host without a GPU: a back end named "cuda" that computes on the CPU, over the stand-in for the driver.

Copied to a folder ``jax_plugins``, where JAX finds it as it finds the real one. Both back ends are one client, so that the
stand-in's device memory is known to either.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any


def initialize() -> None:
    """As JAX calls it, before a back end is open."""
    import jax
    from jax._src import hardware_utils, xla_bridge
    from jax.extend.backend import register_backend_factory

    # There is no /dev/nvidia0, without which JAX does not even try.
    hardware_utils.has_visible_nvidia_gpu = lambda: True
    # Results are waited for by the thread that asks, as the stand-in has no stream of XLA's.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    cpu = functools.cache(xla_bridge.make_cpu_client)

    def cuda() -> Any:
        if os.environ.get("CUDA_STUB_PLUGIN") == "broken":
            raise RuntimeError("the plugin needs CUDA 13 or later, the driver has 12.8")
        if ctypes.CDLL("libcuda.so.1").cuInit(0):
            raise RuntimeError("no visible GPU devices")
        return cpu()

    register_backend_factory("cpu", cpu, priority=0, fail_quietly=False)
    register_backend_factory("cuda", cuda, priority=500)
