"""Tests what a batch costs a GPU worker in calls of the driver, counted by the stand-in: copies, and how often it waits.

How long each of them takes is for hardware; how many there are is decided here.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from tests import repositories
from tests.cuda_owner import CudaOwner
from tests.cuda_stub.library import CudaStub
from tests.daemon_process import PATIENCE, DaemonOf, DaemonProcess
from tests.protocol.test_system_regions import ClientRegion, in_region, out_region

MIB = 1 << 20
COUNT = 10
LIBRARIES = {"http": httpclient, "grpc": grpcclient}
#: What a batch may call: the last lets our stream wait for XLA's, on the device.
IN, OUT, WITHIN, WAIT, FOLLOW = (
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
)
#: Which context is a thread's, without a word to the device; results of the stand-in for XLA; the look while there is no work.
BESIDE = {"cuCtxSetCurrent", "cuMemcpyAsync", "cuEventRecord", "cuEventQuery"}

_MODEL = """
    inputs = {"x": "FP32[SIZE]"}
    outputs = {"y": "FP32[SIZE]", "up": "BOOL[SIZE]"}
    max_batch_size = 32

    def create(path, config, device):
        return (lambda params, inputs: {"y": 2 * inputs["x"], "up": inputs["x"] > 0}), None
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> CudaStub:
    # With a delay results of XLA's are there later, so that a thread which waits for them is seen: cuEventSynchronize.
    return CudaStub(tmp_path_factory.mktemp("cuda"), delay_us=50)


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, stub: CudaStub, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    repository = tmp_path_factory.mktemp("repository")
    repositories.write_model(repository, "twice", _MODEL.replace("SIZE", "n"))
    batched = "dynamic_batching { max_queue_delay_microseconds: 20000 }"
    repositories.write_model(repository, "batched", _MODEL.replace("SIZE", "4"), batched)
    folder, options = tmp_path_factory.mktemp("daemon"), {"workers": {"device": "cuda", "single_thread_flops": 0}}
    environment = stub.gpu_environment | {"CUDA_VISIBLE_DEVICES": "0"}
    return daemon_of(repository, options, environment=environment, folder=folder)


@pytest.fixture
def several(tmp_path: Path) -> Iterator[tuple[CudaStub, DaemonProcess]]:
    """Runs a daemon on two GPUs with access to each other's memory, with a model on the second alone."""
    (tmp_path / "cuda").mkdir()
    stub, repository = CudaStub(tmp_path / "cuda", devices=2, delay_us=50, peers=True), tmp_path / "repository"
    repositories.write_model(repository, "twice", _MODEL.replace("SIZE", "n"), "instance_group { gpus: [ 1 ] }")
    (tmp_path / "daemon").mkdir()
    options = {"workers": {"device": "cuda", "single_thread_flops": 0}}
    environment = stub.gpu_environment | {"CUDA_VISIBLE_DEVICES": "0,1"}
    with DaemonProcess(tmp_path / "daemon", [repository], options, environment=environment) as running:
        running.wait_log(r"is up on cuda:\d", 2)
        yield stub, running


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[httpclient.InferenceServerClient]:
    with httpclient.InferenceServerClient(daemon.url, network_timeout=PATIENCE) as client:
        yield client


def connected(daemon: DaemonProcess, protocol: str) -> Any:
    """Returns a client of the protocol, as a context manager."""
    if protocol == "http":
        return httpclient.InferenceServerClient(daemon.url, network_timeout=PATIENCE)
    return grpcclient.InferenceServerClient(daemon.grpc_url)


def body(values: np.ndarray, library: Any) -> Any:
    given = library.InferInput("x", list(values.shape), "FP32")
    given.set_data_from_numpy(values)
    return given


def placed(tensor: Any, region: str, byte_size: int, offset: int) -> Any:
    """Puts an input or output of either client in a region; returns it."""
    tensor.set_shared_memory(region, byte_size, offset=offset)
    return tensor


class Calls:
    """Counts the driver calls of the daemon's workers since the last look."""

    def __init__(self, stub: CudaStub, daemon: DaemonProcess) -> None:
        pids = [worker.pid for worker in daemon.workers]
        self._look: Callable[[], Counter[str]] = lambda: sum(map(stub.calls, pids), Counter())
        self._seen = self._look()

    def made(self) -> dict[str, int]:
        before, self._seen = self._seen, self._look()
        since = self._seen - before
        return {name: count for name, count in since.items() if name not in BESIDE}


def executions(client: httpclient.InferenceServerClient, model: str) -> tuple[int, int]:
    """Returns how often a model ran, and how many bytes of tensors were copied."""
    (found,) = client.get_inference_statistics(model)["model_stats"]
    return int(found["execution_count"]), int(found["copied_byte_size"])


@pytest.mark.parametrize("together", [1, 32])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_small_requests(stub: CudaStub, daemon: DaemonProcess, client: Any, protocol: str, together: int) -> None:
    """A batch is four calls, whatever its size and however many outputs it has; no thread waits for XLA."""

    def ask(own: Any, number: int) -> None:
        values = np.full((1, 4), number - 1, np.float32)
        answer = own.infer("batched", [body(values, LIBRARIES[protocol])])
        assert np.array_equal(answer.as_numpy("y"), 2 * values)
        assert np.array_equal(answer.as_numpy("up"), values > 0)

    def several(who: int) -> None:
        with connected(daemon, protocol) as own:
            for number in range(64 // together):
                ask(own, who + number)

    with ThreadPoolExecutor(together) as pool:
        list(pool.map(several, range(together)))
        calls, (ran, _) = Calls(stub, daemon), executions(client, "batched")
        list(pool.map(several, range(together)))
    batches = executions(client, "batched")[0] - ran
    assert calls.made() == {IN: batches, OUT: batches, WAIT: 2 * batches, FOLLOW: batches}
    assert batches == 64 if together == 1 else batches < 64


@pytest.mark.parametrize("together", [1, 4])
def test_large_tensors_in_a_system_region(stub: CudaStub, daemon: DaemonProcess, client: Any, together: int) -> None:
    """A transfer for each tensor, and a wait each way, from where they lie and to where they are to be."""
    size, count = 16 * MIB, 3

    def several(region: str) -> None:
        given = [in_region("x", "FP32", (1, size // 4), region, size, 0)]
        wanted = [out_region("y", region, size, size), out_region("up", region, size // 4, 2 * size)]
        with connected(daemon, "http") as own:
            for _ in range(count):
                own.infer("twice", given, outputs=wanted)

    with ExitStack() as stack, ThreadPoolExecutor(together) as pool:
        regions = [stack.enter_context(closing(ClientRegion(client, 3 * size))) for _ in range(together)]
        several(regions[0].name)
        calls = Calls(stub, daemon)
        list(pool.map(several, [region.name for region in regions]))
        ran = count * together
        assert calls.made() == {IN: ran, OUT: 2 * ran, WAIT: 2 * ran, FOLLOW: 2 * ran}


@pytest.mark.parametrize(
    ("protocol", "size", "offset"),
    [("http", 1 << 10, 0), ("http", 1 << 10, 16), ("grpc", 16 * MIB, 0), ("grpc", 16 * MIB, 16)],
)
def test_tensors_on_the_device(
    stub: CudaStub, daemon: DaemonProcess, client: Any, protocol: str, size: int, offset: int
) -> None:
    """An aligned input is used where it lies; each output is one copy within the device, and all of it is counted."""
    environment = os.environ | stub.environment | {"CUDA_VISIBLE_DEVICES": "0"}
    with CudaOwner(environment) as owner, connected(daemon, protocol) as asker:
        y, up, end = 32 * MIB, 48 * MIB, 56 * MIB
        client.register_cuda_shared_memory("g", owner.create("g", end), 0, end)
        try:
            values = np.arange(size // 4, dtype=np.float32) - 1
            owner.put("g", np.zeros(offset, np.uint8), values)
            library = LIBRARIES[protocol]
            given = placed(library.InferInput("x", [1, size // 4], "FP32"), "g", size, offset)
            wanted = [
                placed(library.InferRequestedOutput("y"), "g", size, y),
                placed(library.InferRequestedOutput("up"), "g", size // 4, up),
            ]
            asker.infer("twice", [given], outputs=wanted)
            calls, (_, copied) = Calls(stub, daemon), executions(client, "twice")
            for _ in range(COUNT):
                asker.infer("twice", [given], outputs=wanted)
            staged = 1 if offset else 0
            assert calls.made() == {WITHIN: (2 + staged) * COUNT, WAIT: (1 + staged) * COUNT, FOLLOW: 2 * COUNT}
            assert executions(client, "twice")[1] - copied == COUNT * (size + size // 4 + staged * size)
            assert np.array_equal(owner.get("g", np.float32, values.shape, y), 2 * values)
            assert np.array_equal(owner.get("g", np.bool_, values.shape, up), values > 0)
        finally:
            client.unregister_cuda_shared_memory("g")


@pytest.mark.parametrize("size", [1 << 10, MIB])
def test_tensors_on_another_device(several: tuple[CudaStub, DaemonProcess], size: int) -> None:
    """A tensor on a GPU without an instance of the model is one copy between the two, and every copy is counted."""
    stub, daemon = several
    environment = os.environ | stub.environment | {"CUDA_VISIBLE_DEVICES": "0,1"}
    with (
        CudaOwner(environment) as owner,
        httpclient.InferenceServerClient(daemon.url, network_timeout=PATIENCE) as client,
    ):
        # The GPU of most bytes has no instance, and that is said of the model, not of the request.
        for name, device in (("far", 0), ("near", 1)):
            client.register_cuda_shared_memory(name, owner.create(name, 4 * MIB, device), device, 4 * MIB)
        values = np.arange(size // 4, dtype=np.float32) - 1
        owner.put("far", values)
        given = in_region("x", "FP32", (1, size // 4), "far", size, 0)
        for y, up in (("far", "far"), ("near", "far")):
            wanted = [out_region("y", y, size, 2 * MIB), out_region("up", up, size // 4, 3 * MIB)]
            client.infer("twice", [given], outputs=wanted)
            calls, (_, copied) = Calls(stub, daemon), executions(client, "twice")
            for _ in range(COUNT):
                client.infer("twice", [given], outputs=wanted)
            assert calls.made() == {WITHIN: 3 * COUNT, WAIT: 2 * COUNT, FOLLOW: 2 * COUNT}
            assert executions(client, "twice")[1] - copied == COUNT * (2 * size + size // 4)
            assert np.array_equal(owner.get(y, np.float32, values.shape, 2 * MIB), 2 * values)
            assert np.array_equal(owner.get(up, np.bool_, values.shape, 3 * MIB), values > 0)
        client.unregister_cuda_shared_memory()
