"""Figures of this host's GPU: printed (``pytest -s``), never asserted. Those of the stand-in say nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm

from tests.cuda_owner import CudaOwner
from tests.daemon_process import DaemonProcess
from tests.protocol.tensors import same
from tests.protocol.test_system_regions import in_region, out_region

MIB = 1 << 20
SIZE = 16 * MIB


def report(what: str, ask: Callable[[], Any], byte_size: int) -> None:
    """Prints the median of a hundred requests, after ten that do not count."""
    lasted = []
    for _ in range(110):
        began = time.perf_counter()
        ask()
        lasted.append(time.perf_counter() - began)
    median = statistics.median(lasted[10:])
    print(f"\n{what}: p50 {1e6 * median:.0f} us, {byte_size / median / 1e9:.1f} GB/s")


def test_identity_within_the_device(daemon: DaemonProcess, owner: CudaOwner) -> None:
    values = np.random.default_rng(3).random(SIZE // 4, np.float32)
    with httpclient.InferenceServerClient(daemon.url) as client:
        client.register_cuda_shared_memory("g", owner.create("g", 2 * SIZE), 0, 2 * SIZE)
        owner.put("g", values)
        given = [in_region("x", "FP32", values.shape, "g", SIZE, 0)]
        wanted = [out_region("y", "g", SIZE, SIZE)]
        report(
            "16 MiB identity, CUDA region in and out",
            lambda: client.infer("echo_fp32", given, outputs=wanted),
            2 * SIZE,
        )
        assert same(owner.get("g", np.float32, values.shape, SIZE), values)
        client.unregister_cuda_shared_memory("g")


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_system_memory_to_the_device_and_back(start_gpu_daemon: Callable[..., DaemonProcess], pinned: bool) -> None:
    daemon = start_gpu_daemon() if pinned else start_gpu_daemon(pinned_byte_size=0)
    values = np.random.default_rng(4).random(SIZE // 4, np.float32)
    with httpclient.InferenceServerClient(daemon.url) as client:
        name, key = "tensord-test-gpu", "/tensord-test-gpu"
        handle = shm.create_shared_memory_region(name, key, 2 * SIZE)
        try:
            # Its pages have to exist when it is registered, or they are not locked.
            shm.set_shared_memory_region(handle, [values, np.zeros_like(values)])
            client.register_system_shared_memory(name, key, 2 * SIZE)
            given = [in_region("x", "FP32", values.shape, name, SIZE, 0)]
            wanted = [out_region("y", name, SIZE, SIZE)]
            how = "page-locked" if pinned else "pageable"
            report(
                f"16 MiB identity, {how} system region",
                lambda: client.infer("echo_fp32", given, outputs=wanted),
                2 * SIZE,
            )
            assert same(shm.get_contents_as_numpy(handle, np.float32, values.shape, offset=SIZE), values)
            client.unregister_system_shared_memory(name)
        finally:
            shm.destroy_shared_memory_region(handle)
