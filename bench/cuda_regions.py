"""Measures the rows that need a GPU: a stock client sends a tensor from GPU memory through a model and back into GPU memory.

Where there is no GPU a line says so. Figures count only from a real GPU: absolute, and beside the time of the same copy within
the device, which is the largest part of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

_SIZES = {"1MiB-http-cuda-c1": 1 << 20, "16MiB-http-cuda-c1": 16 << 20}
_WARM = 5


def report(address: str, seconds: float) -> None:
    """Measures and prints a line for each row: median latency, that of the bare copy, and bytes a second."""
    try:
        import tritonclient.utils.cuda_shared_memory as cuda
        from cuda.bindings import runtime
    except (ImportError, RuntimeError) as error:
        print(f"{'cuda rows':22} skipped: cuda-python is not installed ({type(error).__name__})")
        return
    for name, byte_size in _SIZES.items():
        try:
            region = cuda.create_shared_memory_region(name, 2 * byte_size, 0)
        except Exception as error:  # the module lets the driver's own exceptions through
            print(f"{'cuda rows':22} skipped: there is no CUDA device here ({type(error).__name__})")
            return
        try:
            row_us, copy_us = _measure(cuda, runtime, region, address, name, byte_size, seconds)
        except InferenceServerException as error:
            print(f"{name:22} skipped: {error.message()}")
        else:
            rate = 2 * byte_size / row_us / 1e3
            print(f"{name:22} p50 {row_us:8.0f} us   bare copy {copy_us:8.0f} us   {rate:6.1f} GB/s read and written")
        finally:
            cuda.destroy_shared_memory_region(region)
            del region


def _measure(
    cuda: Any, runtime: Any, region: Any, address: str, name: str, byte_size: int, seconds: float
) -> tuple[float, float]:
    values = np.random.default_rng(byte_size).random(byte_size // 4, np.float32)
    cuda.set_shared_memory_region(region, [values])
    given = httpclient.InferInput("INPUT0", list(values.shape), "FP32")
    wanted = httpclient.InferRequestedOutput("OUTPUT0")
    given.set_shared_memory(name, byte_size, offset=0)
    wanted.set_shared_memory(name, byte_size, offset=byte_size)
    with httpclient.InferenceServerClient(address) as client:
        client.register_cuda_shared_memory(name, cuda.get_raw_handle(region), 0, 2 * byte_size)
        try:
            row_us = _median_us(lambda: client.infer("identity", [given], outputs=[wanted]), seconds)
            if not np.array_equal(
                cuda.get_contents_as_numpy(region, np.float32, [2 * len(values)])[len(values) :], values
            ):
                raise SystemExit(f"{name}: a wrong answer")
        finally:
            client.unregister_cuda_shared_memory(name)

    def bare() -> None:
        runtime.cudaMemcpy(
            region._base_addr + byte_size, region._base_addr, byte_size, runtime.cudaMemcpyKind.cudaMemcpyDefault
        )
        runtime.cudaDeviceSynchronize()

    return row_us, _median_us(bare, seconds / 4)


def _median_us(run: Callable[[], Any], seconds: float) -> float:
    lasted: list[float] = []
    end = time.perf_counter() + seconds
    while len(lasted) <= _WARM or time.perf_counter() < end:
        began = time.perf_counter()
        run()
        lasted.append(time.perf_counter() - began)
    return 1e6 * statistics.median(lasted[_WARM:])
