"""CUDA regions on hardware, through the stock client."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from tests.cuda_owner import CudaOwner
from tests.daemon_process import DaemonProcess, wait_until
from tests.protocol.tensors import TENSORS, same
from tests.protocol.test_system_regions import ClientRegion, in_region, out_region

MIB = 1 << 20


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[httpclient.InferenceServerClient]:
    with httpclient.InferenceServerClient(daemon.url, network_timeout=600) as client:
        yield client
        client.unregister_cuda_shared_memory()


def register(client: Any, owner: CudaOwner, byte_size: int = 2 * MIB, device: int = 0) -> str:
    name = f"g-{uuid.uuid4().hex}"
    client.register_cuda_shared_memory(name, owner.create(name, byte_size, device), device, byte_size)
    return name


@pytest.mark.parametrize("datatype", sorted(set(TENSORS) - {"BYTES"}))
@pytest.mark.parametrize("offset", [0, 256, 128, 16, 77])
def test_both_ways(client: Any, owner: CudaOwner, datatype: str, offset: int) -> None:
    region = register(client, owner)
    values = TENSORS[datatype]
    stored = values.view(np.uint16) if datatype == "BF16" else values
    owner.put(region, np.zeros(offset, np.uint8), stored)
    client.infer(
        f"echo_{datatype.lower()}",
        [in_region("x", datatype, values.shape, region, stored.nbytes, offset)],
        outputs=[out_region("y", region, stored.nbytes, MIB + offset)],
    )
    assert same(owner.get(region, stored.dtype, stored.shape, MIB + offset), stored)


def test_every_way_in_and_out(client: Any, owner: CudaOwner) -> None:
    region, system = register(client, owner), ClientRegion(client, 4096)
    a = np.arange(4, dtype=np.float32).reshape(1, 4)
    owner.put(region, a)
    shm.set_shared_memory_region(system.handle, [10 * a])
    body = httpclient.InferInput("x", [1, 4], "FP32")
    body.set_data_from_numpy(100 * a)
    given = {
        1: in_region("x", "FP32", (1, 4), region, 16, 0),
        10: in_region("x", "FP32", (1, 4), system.name, 16, 0),
        100: body,
    }
    try:
        for factor, tensor in given.items():
            client.infer("scale", [tensor], outputs=[out_region("y", region, 16, 256)])
            assert same(owner.get(region, np.float32, (1, 4), 256), 3 * factor * a + 1)
            client.infer("scale", [tensor], outputs=[out_region("y", system.name, 16, 64)])
            assert same(shm.get_contents_as_numpy(system.handle, np.float32, [1, 4], offset=64), 3 * factor * a + 1)
            assert same(client.infer("scale", [tensor]).as_numpy("y"), 3 * factor * a + 1)
    finally:
        system.close()


def test_the_answer_comes_after_the_bytes_under_load(daemon: DaemonProcess, new_owner: Callable[[], CudaOwner]) -> None:
    """Two owners, eight clients, large outputs: what an owner reads right after the answer is that answer's."""
    count = MIB // 4

    def ask(seed: int) -> None:
        with new_owner() as owner, httpclient.InferenceServerClient(daemon.url) as mine:
            region = register(mine, owner, 4 * MIB)
            for round_ in range(25):
                values = np.random.default_rng(100 * seed + round_).random(count, np.float32)
                owner.put(region, values)
                mine.infer(
                    "echo_fp32",
                    [in_region("x", "FP32", (count,), region, MIB, 0)],
                    outputs=[out_region("y", region, MIB, 2 * MIB)],
                )
                assert same(owner.get(region, np.float32, (count,), 2 * MIB), values)
            mine.unregister_cuda_shared_memory(region)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))


@pytest.mark.parametrize("end", ["freed", "killed"])
def test_an_owner_that_goes_away(client: Any, owner: CudaOwner, new_owner: Callable[[], CudaOwner], end: str) -> None:
    """The driver decides what the owner's requests get; everybody else's answers stay right."""
    values = np.arange(4, dtype=np.float32).reshape(1, 4)
    kept = register(client, owner)
    owner.put(kept, values)
    other = new_owner()
    with other:
        lost = register(client, other)
        other.put(lost, values)
        if end == "freed":
            other.destroy(lost)
        else:
            other.kill()
        for _ in range(10):
            try:
                client.infer("scale", [in_region("x", "FP32", (1, 4), lost, 16, 0)])
            except InferenceServerException as error:
                assert error.status() in ("400", "500", "503")
            answer = client.infer("scale", [in_region("x", "FP32", (1, 4), kept, 16, 0)])
            assert same(answer.as_numpy("y"), 3 * values + 1)
        client.unregister_cuda_shared_memory(lost)


def test_an_owner_killed_in_the_middle_of_a_request(
    daemon: DaemonProcess, client: Any, owner: CudaOwner, new_owner: Callable[[], CudaOwner], tmp_path: Path
) -> None:
    values = np.arange(4, dtype=np.float32).reshape(1, 4)
    kept = register(client, owner)
    owner.put(kept, values)
    began = tmp_path / "began"
    other = new_owner()
    with other, ThreadPoolExecutor(1) as pool:
        lost = register(client, other)
        other.put(lost, np.array([1500], np.int32))

        def ask() -> int:
            with httpclient.InferenceServerClient(daemon.url) as mine:
                try:
                    mine.infer(
                        "sleepy",
                        [in_region("DELAY_MS", "INT32", (1,), lost, 4, 0)],
                        outputs=[out_region("OUTPUT", lost, 4, 256)],
                        parameters={"began": str(began)},
                    )
                except InferenceServerException as error:
                    return int(error.status())
            return 200

        asked = pool.submit(ask)
        wait_until(began.exists, "the request to run")
        other.kill()
        assert asked.result() in (200, 400, 500, 503)
        answer = client.infer("scale", [in_region("x", "FP32", (1, 4), kept, 16, 0)])
        assert same(answer.as_numpy("y"), 3 * values + 1)
        client.unregister_cuda_shared_memory(lost)


def test_memory_of_the_client_is_not_spent(daemon: DaemonProcess, client: Any, owner: CudaOwner) -> None:
    """A thousand rounds of register, infer, unregister: the worker's descriptors stay as they are."""
    values = np.arange(4, dtype=np.float32).reshape(1, 4)
    handle = owner.create("round", 2 * MIB)
    owner.put("round", values)

    def rounds(count: int) -> None:
        for _ in range(count):
            client.register_cuda_shared_memory("round", handle, 0, 2 * MIB)
            answer = client.infer("scale", [in_region("x", "FP32", (1, 4), "round", 16, 0)])
            assert same(answer.as_numpy("y"), 3 * values + 1)
            client.unregister_cuda_shared_memory("round")

    rounds(50)
    held = daemon.workers[0].num_fds()
    rounds(1000)
    assert daemon.workers[0].num_fds() <= held + 10


def test_requests_go_to_the_gpu_of_their_regions(daemon: DaemonProcess, client: Any, owner: CudaOwner) -> None:
    if len(daemon.workers) < 2:
        pytest.skip("one GPU: nothing to choose from")
    values = np.arange(4, dtype=np.float32).reshape(1, 4)
    regions = [register(client, owner, device=device) for device in (0, 1)]
    for region in regions:
        owner.put(region, values)
        for _ in range(20):
            client.infer(
                "scale", [in_region("x", "FP32", (1, 4), region, 16, 0)], outputs=[out_region("y", region, 16, 256)]
            )
            assert same(owner.get(region, np.float32, (1, 4), 256), 3 * values + 1)
    # One worker uses memory of two GPUs where they have access to each other's.
    try:
        client.infer(
            "scale", [in_region("x", "FP32", (1, 4), regions[0], 16, 0)], outputs=[out_region("y", regions[1], 16, 512)]
        )
    except InferenceServerException as error:
        assert error.status() == "400"
        assert re.search(r"is on GPU \d, and the model runs on GPU \d, which cannot open it", str(error)), error
    else:
        assert same(owner.get(regions[1], np.float32, (1, 4), 512), 3 * values + 1)
