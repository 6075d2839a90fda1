"""Which worker has which model and which memory where there are several kinds of them, on the tests' stand-ins for GPUs."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests import repositories
from tests.cuda_owner import CudaOwner
from tests.cuda_stub.library import CudaStub
from tests.daemon_process import PATIENCE, DaemonProcess
from tests.on_stub import GPU_WORKERS
from tests.protocol.test_system_regions import in_region, out_region

SCALE = """
    inputs = {"x": "FP32[4]"}
    outputs = {"y": "FP32[4]"}
    max_batch_size = 8

    def create(path, config, device):
        return (lambda params, inputs: {"y": 3 * inputs["x"] + 1}), {}
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    return folder


def stub_of(tmp_path: Path, **options: Any) -> CudaStub:
    (tmp_path / "cuda").mkdir()
    return CudaStub(tmp_path / "cuda", **options)


@contextlib.contextmanager
def serving(stub: CudaStub, repository: Path, visible: str, **workers: Any) -> Iterator[DaemonProcess]:
    folder = repository.parent / "daemon"
    folder.mkdir()
    environment = stub.gpu_environment | {"CUDA_VISIBLE_DEVICES": visible}
    options = {"workers": GPU_WORKERS | workers}
    with DaemonProcess(folder, [repository], options, environment=environment) as running:
        running.wait_ready()
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
    """An input and an output in a region of that name."""
    values = np.full((1, 4), number, np.float32)
    owner.put(name, np.zeros(offset, np.uint8), values)
    client.infer(model, [in_region("x", "FP32", (1, 4), name, 16, offset)], outputs=[out_region("y", name, 16, 512)])
    assert np.array_equal(owner.get(name, np.float32, (1, 4), 512), 3 * values + 1)


def devices(daemon: DaemonProcess) -> dict[str, int]:
    """Device -> process of its worker."""
    return {device: int(pid) for pid, device in re.findall(r"\(process (\d+)\) is up on (\S+)", daemon.log)}


def test_memory_that_no_worker_of_a_model_can_open(tmp_path: Path, repository: Path) -> None:
    """The model is on GPU 1, the region on GPU 0, without access to each other: one clear error, and nobody else notices."""
    repositories.write_model(repository, "second", SCALE, "instance_group { kind: KIND_GPU gpus: [ 1 ] }")
    repositories.write_model(repository, "both", SCALE)
    stub = stub_of(tmp_path, devices=2)
    with serving(stub, repository, "0,1") as daemon, asking(daemon) as client, owning(stub, "0,1") as owner:
        pids = devices(daemon)
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
        assert devices(daemon) == pids
