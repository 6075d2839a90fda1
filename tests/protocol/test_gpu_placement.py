"""Tests which worker has which model and which memory where there are several kinds of them, on the tests' stand-ins for GPUs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests import repositories
from tests.cuda_owner import CudaOwner
from tests.cuda_stub.library import CudaStub
from tests.daemon_process import PATIENCE, DaemonProcess, wait_until
from tests.on_stub import GPU_WORKERS
from tests.protocol.test_system_regions import in_region, out_region

SCALE = repositories.of_x("3 * x + 1", more="max_batch_size = 8")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    return folder


def stub_of(tmp_path: Path, **options: Any) -> CudaStub:
    (tmp_path / "cuda").mkdir()
    return CudaStub(tmp_path / "cuda", **options)


@contextlib.contextmanager
def serving(
    stub: CudaStub, repository: Path, visible: str, more: dict[str, Any] | None = None, **workers: Any
) -> Iterator[DaemonProcess]:
    """Runs a daemon on the stub's GPUs. ``more``: options besides those of workers."""
    folder = repository.parent / "daemon"
    folder.mkdir()
    environment = stub.gpu_environment | {"CUDA_VISIBLE_DEVICES": visible}
    options = {"workers": GPU_WORKERS | workers} | (more or {})
    with DaemonProcess(folder, [repository], options, environment=environment) as running:
        yield running


@contextlib.contextmanager
def owning(stub: CudaStub, visible: str) -> Iterator[CudaOwner]:
    with CudaOwner(os.environ | stub.environment | {"CUDA_VISIBLE_DEVICES": visible}) as owner:
        yield owner


@contextlib.contextmanager
def asking(daemon: DaemonProcess) -> Iterator[httpclient.InferenceServerClient]:
    with httpclient.InferenceServerClient(daemon.url, network_timeout=PATIENCE, connection_timeout=PATIENCE) as client:
        yield client


def scaled(client: Any, model: str, number: float) -> None:
    values = np.full((1, 4), number, np.float32)
    given = httpclient.InferInput("x", [1, 4], "FP32")
    given.set_data_from_numpy(values)
    assert np.array_equal(client.infer(model, [given]).as_numpy("y"), 3 * values + 1)


def scaled_in(client: Any, owner: CudaOwner, model: str, name: str, number: float, offset: int = 0) -> None:
    """Sends a request with input and output in a region, and checks the output."""
    values = np.full((1, 4), number, np.float32)
    owner.put(name, np.zeros(offset, np.uint8), values)
    client.infer(model, [in_region("x", "FP32", (1, 4), name, 16, offset)], outputs=[out_region("y", name, 16, 512)])
    assert np.array_equal(owner.get(name, np.float32, (1, 4), 512), 3 * values + 1)


def devices(daemon: DaemonProcess, count: int) -> dict[str, int]:
    """Waits for ``count`` workers and returns device -> process. The daemon is ready with one already."""
    wait_until(lambda: len(_devices(daemon)) >= count, f"{count} workers", daemon)
    return _devices(daemon)


def _devices(daemon: DaemonProcess) -> dict[str, int]:
    return {device: int(pid) for pid, device in re.findall(r"\(process (\d+)\) is up on (\S+)", daemon.log)}


def test_memory_that_no_worker_of_a_model_can_open(tmp_path: Path, repository: Path) -> None:
    """The model is on GPU 1, the region on GPU 0, without access to each other: one clear error, and nobody else notices."""
    repositories.write_model(repository, "second", SCALE, "instance_group { kind: KIND_GPU gpus: [ 1 ] }")
    repositories.write_model(repository, "both", SCALE)
    stub = stub_of(tmp_path, devices=2)
    with serving(stub, repository, "0,1") as daemon, asking(daemon) as client, owning(stub, "0,1") as owner:
        pids = devices(daemon, 2)
        wait_loaded(daemon, "both", 2)
        for number in (0, 1):
            client.register_cuda_shared_memory(f"g{number}", owner.create(f"g{number}", 4096, number), number, 4096)
        said = (
            "shared memory region 'g0' is on GPU 0, and the model runs on GPU 1, which cannot open it "
            "(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED): the two have no access to each other, or its owner has freed it or is gone"
        )
        for _ in range(2):
            with pytest.raises(InferenceServerException) as raised:
                scaled_in(client, owner, "second", "g0", 1)
            assert (raised.value.status(), said in raised.value.message()) == ("400", True), raised.value
            for model, name in (("both", "g0"), ("both", "g1"), ("second", "g1")):
                scaled_in(client, owner, model, name, 2)
        with pytest.raises(InferenceServerException, match="no worker has GPU 2, the server uses 2 GPUs"):
            client.register_cuda_shared_memory("g2", owner.create("g2", 4096, 0), 2, 4096)
        # A handle of GPU 0 that is said to be of GPU 1.
        with pytest.raises(InferenceServerException, match="the CUDA handle cannot be opened"):
            client.register_cuda_shared_memory("g2", owner.create("wrong", 4096, 0), 1, 4096)
        client.unregister_cuda_shared_memory()
        assert devices(daemon, 2) == pids


WHERE = repositories.applying(
    """
    rows = inputs["x"].shape[0]
    return {"y": 3 * inputs["x"] + 1, "pid": params["pid"][None].repeat(rows, axis=0)}
    """,
    "x FP32[4]",
    "y FP32[4], pid INT64[1]",
    more="import os\nmax_batch_size = 4",
    params='{"pid": np.array([os.getpid()])}',
)
GROUPS = {
    "gpu": "instance_group { kind: KIND_GPU gpus: [ 1 ] }",
    "cpu": "instance_group { kind: KIND_CPU count: 2 }",
    "both": "instance_group [ { kind: KIND_GPU }, { kind: KIND_CPU count: 2 } ]",
    "open": "instance_group [ { }, { kind: KIND_CPU } ]",
}


def wait_loaded(daemon: DaemonProcess, model: str, count: int) -> None:
    """Waits until so many workers have loaded a model."""
    daemon.wait_log(rf"worker-\d\] model '{model}' version 1 is ready", count)


def ran_on(daemon: DaemonProcess, model: str, count: int = 64) -> set[int]:
    """Returns the processes that answer when many requests come at once."""

    def ask(who: int) -> set[int]:
        found = set()
        with asking(daemon) as client:
            for number in range(count // 8):
                values = np.full((1, 4), 100 * who + number, np.float32)
                given = httpclient.InferInput("x", [1, 4], "FP32")
                given.set_data_from_numpy(values)
                answer = client.infer(model, [given])
                assert np.array_equal(answer.as_numpy("y"), 3 * values + 1)
                found.add(int(answer.as_numpy("pid").item()))
        return found

    with ThreadPoolExecutor(8) as pool:
        return set().union(*pool.map(ask, range(8)))


def test_cpu_workers_beside_gpu_workers(tmp_path: Path, repository: Path) -> None:
    """A model is where its groups say, and its requests go to all of these; memory on a GPU is used by whoever runs it."""
    for name, groups in GROUPS.items():
        repositories.write_model(repository, name, WHERE, groups)
    stub = stub_of(tmp_path, devices=2, delay_us=1000)
    with (
        serving(stub, repository, "0,1", cpu_beside_gpus=True) as daemon,
        asking(daemon) as client,
        owning(stub, "0,1") as owner,
    ):
        pids = devices(daemon, 3)
        assert set(pids) == {"cuda:0", "cuda:1", "cpu:0"}
        placed = {"gpu": {"cuda:1"}, "cpu": {"cpu:0"}, "both": {*pids}, "open": {*pids}}
        for name, where in placed.items():
            wait_loaded(daemon, name, len(where))
        for name in ("gpu", "cpu", "both"):
            assert ran_on(daemon, name) == {pids[device] for device in placed[name]}
        # The log of each worker has what it loaded.
        for device, pid in pids.items():
            loaded = set(re.findall(rf"{pid} worker-\d\] model '(\w+)' version 1 is ready", daemon.log))
            assert loaded == {name for name, where in placed.items() if device in where}
        for name in ("both", "open"):
            (group, other) = client.get_model_config(name)["instance_group"]
            assert (group["kind"], group["gpus"]) == ("KIND_GPU", [0, 1])
            assert (other["kind"], other["gpus"]) == ("KIND_CPU", [])
        client.register_cuda_shared_memory("g", owner.create("g", 4096, 0), 0, 4096)
        before = copied(client, "cpu"), copied(client, "both")
        for number in range(3):
            scaled_in(client, owner, "cpu", "g", number)
            scaled_in(client, owner, "both", "g", number)
        # Two copies of 16 bytes through the host; in place and out, on the region's own GPU. The pid is 8 bytes more.
        assert (copied(client, "cpu") - before[0], copied(client, "both") - before[1]) == (3 * 32, 3 * 16)
        assert stub.devices_of(pids["cpu:0"]) == set()
        client.unregister_cuda_shared_memory()


def copied(client: Any, model: str) -> int:
    (found,) = client.get_inference_statistics(model)["model_stats"]
    return int(found["copied_byte_size"])


def test_several_workers_of_a_gpu(tmp_path: Path, repository: Path) -> None:
    """All serve, and each has the memory of clients on their GPU; the death of one costs nobody an answer."""
    repositories.write_model(repository, "any", WHERE)
    stub = stub_of(tmp_path, delay_us=1000)
    with (
        serving(stub, repository, "0", per_gpu=2, gpu_memory_fraction=0.8) as daemon,
        asking(daemon) as client,
        owning(stub, "0") as owner,
    ):
        pids = devices(daemon, 2)
        assert set(pids) == {"cuda:0", "cuda:0/1"}
        wait_loaded(daemon, "any", 2)
        assert ran_on(daemon, "any") == {*pids.values()}
        client.register_cuda_shared_memory("g", owner.create("g", 4096, 0), 0, 4096)
        for device in pids:
            os.kill(pids[device], signal.SIGKILL)
            for number in range(20):
                scaled_in(client, owner, "any", "g", number)
            daemon.wait_log(rf"is up on {device}\n", 2)
        assert all(stub.calls(worker.pid)["cuIpcOpenMemHandle_v2"] == 1 for worker in daemon.workers)
        client.unregister_cuda_shared_memory()


LARGE = repositories.of_x("2 * x", "FP32[n]")


def test_gpu_workers_that_are_killed_under_load(tmp_path: Path, repository: Path) -> None:
    """
    1. Clients ask without pause, each in its way: small bodies, large ones, memory on either GPU, for a model on one of them.
    2. A worker is killed, and then the other, and so on.
    Result: no client sees an error, and no answer is wrong.
    """
    repositories.write_model(repository, "any", SCALE)
    repositories.write_model(repository, "second", SCALE, "instance_group { gpus: [ 1 ] }")
    repositories.write_model(repository, "large", LARGE)
    stub = stub_of(tmp_path, devices=2, delay_us=300, peers=True)
    asked, ends = [0] * 4, threading.Event()

    def ask(daemon: DaemonProcess, who: int) -> None:
        with asking(daemon) as client, owning(stub, "0,1") as owner:
            if who > 1:
                # Registered when all workers are there, and kept while they come and go.
                client.register_cuda_shared_memory(f"g{who}", owner.create(f"g{who}", 4096, 3 - who), 3 - who, 4096)
            while not ends.is_set():
                number = asked[who] = asked[who] + 1
                if who == 0:
                    scaled(client, "any", number)
                elif who == 1:
                    values = np.full(200_000, number, np.float32)
                    given = httpclient.InferInput("x", [values.size], "FP32")
                    given.set_data_from_numpy(values)
                    assert np.array_equal(client.infer("large", [given]).as_numpy("y"), 2 * values)
                else:
                    scaled_in(client, owner, ("any", "second")[number % 2], f"g{who}", number, 16 * (number % 2))
            if who > 1:
                client.unregister_cuda_shared_memory(f"g{who}")

    with serving(stub, repository, "0,1") as daemon, ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(ask, daemon, who) for who in range(4)]

        def rounds() -> None:
            seen = list(asked)

            def done() -> bool:
                for one in clients:
                    if one.done():
                        one.result()
                return all(now > 3 + before for now, before in zip(asked, seen, strict=True))

            wait_until(done, "answers", daemon)

        try:
            rounds()
            for turn in range(4):
                os.kill(devices(daemon, 2)[f"cuda:{turn % 2}"], signal.SIGKILL)
                daemon.wait_log(rf"is up on cuda:{turn % 2}\n", 2 + turn // 2)
                rounds()
        finally:
            ends.set()
        for one in clients:
            one.result()
