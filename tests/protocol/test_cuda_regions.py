"""CUDA regions through the stock client, on a host whose driver is the tests' stand-in: bookkeeping, not hardware.

The worker is a CPU worker, which copies GPU memory through the host; device pointers are unreadable to host code, queued copies
take their time, and the owner of the memory is a process of its own.
"""

from __future__ import annotations

import base64
import json
import os
import re
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from tests import repositories
from tests.cuda_owner import CudaOwner
from tests.cuda_stub.library import CudaStub
from tests.daemon_process import PATIENCE, DaemonOf, DaemonProcess, wait_until
from tests.protocol.tensors import same
from tests.protocol.test_system_regions import ClientRegion, in_region, out_region

ILLEGAL_ADDRESS = 700
OUT_OF_MEMORY = 2
ITS_CALLS = pytest.mark.cpu_workers("the calls that it makes, tests/faults/test_lost_devices.py has the others'")
SEES_BOTH = pytest.mark.cpu_workers("one sees every GPU")


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> CudaStub:
    return CudaStub(tmp_path_factory.mktemp("cuda"), devices=2, delay_us=2000)


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, stub: CudaStub, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    repository = tmp_path_factory.mktemp("repository")
    repositories.echo_models(repository)
    repositories.scale_model(repository)
    repositories.sleepy_model(repository)
    # Registered at one front, used at another, as the clients' connections happen to fall.
    options = {"http": {"port": 0, "processes": 2}, "grpc": {"port": 0, "processes": 2}}
    return daemon_of(repository, options, environment=stub.environment)


@pytest.fixture
def owner(stub: CudaStub) -> Iterator[CudaOwner]:
    with CudaOwner(os.environ | stub.environment) as owner:
        yield owner


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[httpclient.InferenceServerClient]:
    with httpclient.InferenceServerClient(daemon.url, network_timeout=PATIENCE) as client:
        yield client
        client.unregister_cuda_shared_memory()


def register(client: Any, owner: CudaOwner, byte_size: int = 1 << 16, device: int = 0) -> str:
    """Registers a new region of the owner process; returns its name."""
    name = f"g-{uuid.uuid4().hex}"
    client.register_cuda_shared_memory(name, owner.create(name, byte_size, device), device, byte_size)
    return name


def put(owner: CudaOwner, name: str, values: Any, offset: int = 0) -> None:
    owner.put(name, np.zeros(offset, np.uint8), values)


def scale(client: Any, region: str, **arguments: Any) -> Any:
    return client.infer("scale", [in_region("x", "FP32", (1, 4), region, 16, 0)], **arguments)


def test_every_way_in_and_out(client: Any, owner: CudaOwner) -> None:
    """Each input and each output goes its own way: GPU memory, system memory, body."""
    region, system = register(client, owner), ClientRegion(client, 4096)
    a = np.arange(4, dtype=np.float32).reshape(1, 4)
    put(owner, region, a)
    shm.set_shared_memory_region(system.handle, [10 * a])
    body = httpclient.InferInput("x", [1, 4], "FP32")
    body.set_data_from_numpy(100 * a)
    try:
        scale(client, region, outputs=[out_region("y", system.name, 16, 64)])
        assert same(shm.get_contents_as_numpy(system.handle, np.float32, [1, 4], offset=64), 3 * a + 1)
        client.infer(
            "scale", [in_region("x", "FP32", (1, 4), system.name, 16, 0)], outputs=[out_region("y", region, 16, 256)]
        )
        assert same(owner.get(region, np.float32, (1, 4), 256), 30 * a + 1)
        client.infer("scale", [body], outputs=[out_region("y", region, 16, 512)])
        assert same(owner.get(region, np.float32, (1, 4), 512), 300 * a + 1)
        assert same(scale(client, region).as_numpy("y"), 3 * a + 1)
    finally:
        system.close()


@SEES_BOTH
def test_names_and_status(client: Any, owner: CudaOwner) -> None:
    region = register(client, owner, 4096, device=1)
    entry = {"name": region, "device_id": 1, "byte_size": 4096}
    assert client.get_cuda_shared_memory_status() == [entry]
    assert client.get_cuda_shared_memory_status(region) == [entry]
    with pytest.raises(InferenceServerException, match=f"shared memory region '{region}' already in manager"):
        client.register_cuda_shared_memory(region, owner.create("other", 64), 0, 64)
    system = ClientRegion(client, 4096)
    try:
        with pytest.raises(InferenceServerException, match="registered as system shared memory, not CUDA shared"):
            client.get_cuda_shared_memory_status(system.name)
        with pytest.raises(InferenceServerException, match="registered as CUDA shared memory, not system shared"):
            client.get_system_shared_memory_status(region)
        with pytest.raises(InferenceServerException, match="Unable to find cuda shared memory region: 'nope'"):
            client.get_cuda_shared_memory_status("nope")
        client.unregister_cuda_shared_memory("nope")
        client.unregister_cuda_shared_memory(system.name)
        client.unregister_cuda_shared_memory()
        assert client.get_cuda_shared_memory_status() == []
        assert client.get_system_shared_memory_status(system.name)[0]["name"] == system.name
    finally:
        system.close()


def test_a_region_that_was_renewed_is_listed_until_the_request_that_uses_it_ends(
    daemon: DaemonProcess, client: Any, owner: CudaOwner, tmp_path: Path
) -> None:
    """
    1. A request runs, and its output is to lie in a region. 2. The owner registers the same handle again. 3. It unregisters the
    region. 4. The request ends.
    Result: the region is listed until then, has the output, and is gone.
    """
    name = f"g-{uuid.uuid4().hex}"
    handle = owner.create(name, 4096)
    client.register_cuda_shared_memory(name, handle, 0, 4096)
    listed = client.get_cuda_shared_memory_status(name)
    began, until = tmp_path / "began", tmp_path / "until"
    delay = httpclient.InferInput("DELAY_MS", [1], "INT32")
    delay.set_data_from_numpy(np.array([7], np.int32))

    def ask() -> None:
        # The client's connections belong to the thread that makes them.
        with httpclient.InferenceServerClient(daemon.url, network_timeout=PATIENCE) as mine:
            parameters = {"began": str(began), "until": str(until)}
            mine.infer("sleepy", [delay], outputs=[out_region("OUTPUT", name, 4, 64)], parameters=parameters)

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(ask)
        wait_until(began.exists, "the slow request to run")
        try:
            client.register_cuda_shared_memory(name, handle, 0, 4096)
            client.unregister_cuda_shared_memory(name)
            assert client.get_cuda_shared_memory_status() == listed
        finally:
            until.touch()
        slow.result()
    assert owner.get(name, np.int32, (1,), 64).tolist() == [7]
    wait_until(lambda: client.get_cuda_shared_memory_status() == [], "the region to be gone", daemon)


@pytest.mark.parametrize(
    ("device", "byte_size", "handle", "error"),
    [
        (0, 4097, None, "4097 bytes, the allocation has 4096"),
        (0, 0, None, "byte_size 0 must be at least 1"),
        (0, 2**63 - 1, None, "at most"),
        pytest.param(1, 4096, None, "cannot be opened", marks=SEES_BOTH),
        pytest.param(7, 4096, None, "failed to register shared memory region: invalid args", marks=SEES_BOTH),
        pytest.param(2**62, 4096, None, "failed to register shared memory region: invalid args", marks=SEES_BOTH),
        (0, 64, base64.b64encode(bytes(64)), "cannot be opened"),
        (0, 64, base64.b64encode(bytes(63)), "must be a valid base64 encoded cudaIpcMemHandle_t"),
    ],
)
def test_what_cannot_be_registered(
    client: Any, owner: CudaOwner, device: int, byte_size: int, handle: bytes | None, error: str
) -> None:
    made = owner.create("g", 4096)
    with pytest.raises(InferenceServerException, match=error) as raised:
        client.register_cuda_shared_memory("bad", handle or made, device, byte_size)
    assert raised.value.status() == "400"
    assert made.decode() not in str(raised.value)
    assert client.get_cuda_shared_memory_status() == []


def test_a_handle_that_was_freed_before(client: Any, owner: CudaOwner) -> None:
    handle = owner.create("g", 4096)
    owner.destroy("g")
    with pytest.raises(InferenceServerException, match="the CUDA handle cannot be opened"):
        client.register_cuda_shared_memory("g", handle, 0, 4096)


@pytest.mark.cpu_workers("a GPU worker uses inputs where they lie, so no copy fails")
@pytest.mark.parametrize("end", ["freed", "killed"])
def test_memory_that_goes_away_costs_its_own_requests(
    daemon: DaemonProcess, client: Any, stub: CudaStub, owner: CudaOwner, end: str
) -> None:
    """1. two owners register; 2. one frees its memory, or dies; 3. its requests fail, the other's do not, no worker dies."""
    workers = {worker.pid for worker in daemon.workers}
    values = np.arange(4, dtype=np.float32).reshape(1, 4)
    kept = register(client, owner)
    put(owner, kept, values)
    other = CudaOwner(os.environ | stub.environment)
    with other:
        lost = register(client, other)
        put(other, lost, values)
        assert same(scale(client, lost).as_numpy("y"), 3 * values + 1)
        if end == "freed":
            other.destroy(lost)
        else:
            other.kill()
        for _ in range(2):
            with pytest.raises(InferenceServerException, match="its owner has freed it or is gone") as raised:
                scale(client, lost)
            assert raised.value.status() == "400"
            with pytest.raises(InferenceServerException, match="its owner has freed it or is gone"):
                scale(client, kept, outputs=[out_region("y", lost, 16, 64)])
        assert same(scale(client, kept).as_numpy("y"), 3 * values + 1)
        client.unregister_cuda_shared_memory(lost)
    assert {worker.pid for worker in daemon.workers} == workers


@ITS_CALLS
@pytest.mark.parametrize(
    "function", ["cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuStreamSynchronize"], ids=lambda name: name
)
def test_an_error_that_passes(
    daemon: DaemonProcess, client: Any, stub: CudaStub, owner: CudaOwner, function: str
) -> None:
    workers = {worker.pid for worker in daemon.workers}
    values = np.arange(4, dtype=np.float32).reshape(1, 4)
    region = register(client, owner)
    put(owner, region, values)
    stub.fail(function, OUT_OF_MEMORY)
    with pytest.raises(InferenceServerException, match="cannot be used"):
        scale(client, region, outputs=[out_region("y", region, 16, 256)])
    assert stub.failed
    scale(client, region, outputs=[out_region("y", region, 16, 256)])
    assert same(owner.get(region, np.float32, (1, 4), 256), 3 * values + 1)
    assert {worker.pid for worker in daemon.workers} == workers


@ITS_CALLS
@pytest.mark.parametrize(
    "function", ["cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuStreamSynchronize"], ids=lambda name: name
)
def test_a_sticky_error_restarts_the_worker(
    daemon: DaemonProcess, client: Any, stub: CudaStub, owner: CudaOwner, function: str
) -> None:
    """1. the GPU fails; 2. that request is told so; 3. the worker is replaced and the log says why; 4. regions are back."""
    (worker,) = daemon.workers
    values = np.arange(4, dtype=np.float32).reshape(1, 4)
    region = register(client, owner)
    put(owner, region, values)
    lines = daemon.log.count("the worker ends, to be replaced: the GPU failed (CUDA_ERROR_ILLEGAL_ADDRESS)")
    stub.fail(function, ILLEGAL_ADDRESS)
    with pytest.raises(
        InferenceServerException, match=r"CUDA_ERROR_ILLEGAL_ADDRESS.* its worker is being restarted"
    ) as raised:
        scale(client, region, outputs=[out_region("y", region, 16, 256)])
    assert raised.value.status() == "503"
    # Waits for the replacement, which has the region again.
    scale(client, region, outputs=[out_region("y", region, 16, 256)])
    assert same(owner.get(region, np.float32, (1, 4), 256), 3 * values + 1)
    assert not worker.is_running()
    daemon.wait_log(r"the worker ends, to be replaced: the GPU failed \(CUDA_ERROR_ILLEGAL_ADDRESS\)", lines + 1)


def test_a_worker_that_is_killed_gets_its_regions_back(daemon: DaemonProcess, client: Any, owner: CudaOwner) -> None:
    values = np.arange(4, dtype=np.float32).reshape(1, 4)
    region = register(client, owner)
    put(owner, region, values)
    (worker,) = daemon.workers
    worker.kill()
    worker.wait()
    assert same(scale(client, region).as_numpy("y"), 3 * values + 1)


def test_rounds_leave_nothing(daemon: DaemonProcess, client: Any, stub: CudaStub, owner: CudaOwner) -> None:
    values = np.arange(4, dtype=np.float32).reshape(1, 4)
    handle = owner.create("round", 4096)
    put(owner, "round", values)

    def rounds(count: int) -> None:
        for _ in range(count):
            client.register_cuda_shared_memory("round", handle, 0, 4096)
            assert same(scale(client, "round").as_numpy("y"), 3 * values + 1)
            client.unregister_cuda_shared_memory("round")

    rounds(20)
    (worker,) = daemon.workers
    held = worker.num_fds(), stub.allocations
    rounds(100)
    wait_until(
        lambda: worker.num_fds() <= held[0] + 10 and stub.allocations <= held[1] + 10,
        f"about {held} descriptors and allocations",
        daemon,
    )
    assert not [mapped for mapped in worker.memory_maps() if re.match(rf"{stub.folder}/\d", mapped.path)]


def test_refused_registrations_leave_nothing(daemon: DaemonProcess, client: Any, owner: CudaOwner) -> None:
    handle = owner.create("refused", 4096)
    register(client, owner)
    (worker,) = daemon.workers

    def refuse(count: int) -> None:
        for _ in range(count):
            with pytest.raises(InferenceServerException):
                client.register_cuda_shared_memory("refused", handle, 0, 8192)

    refuse(10)
    held = worker.num_fds()
    refuse(100)
    wait_until(lambda: worker.num_fds() <= held + 10, f"about {held} descriptors", daemon)


def test_the_handle_is_told_to_nobody(daemon: DaemonProcess, client: Any, owner: CudaOwner) -> None:
    handle = owner.create("secret", 4096)
    client.register_cuda_shared_memory("secret", handle, 0, 4096)
    assert handle.decode() not in json.dumps(client.get_cuda_shared_memory_status())
    assert handle.decode() not in daemon.log
