"""GPUs that fail, at whatever call of the driver, on a host without one: driver and JAX's plugin are the tests' stand-ins."""

from __future__ import annotations

import contextlib
import json
import os
import re
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

LARGE = 200_000
#: Errors after which a context is of no use, in turn: an illegal address, memory that cannot be corrected, a failed launch.
STICKY = (700, 214, 719)
#: What a worker calls where nothing can be lost yet, or where nothing of the device is reached.
_NO_CONTEXT = {
    "cuCtxGetCurrent", "cuCtxGetDevice", "cuDeviceGet", "cuDeviceGetCount", "cuDeviceGetUuid_v2", "cuDriverGetVersion", "cuInit",
    "cuCtxGetFlags", "cuDeviceGetAttribute", "cuDeviceGetPCIBusId",
}  # fmt: skip


@pytest.fixture
def stub(tmp_path: Path) -> CudaStub:
    folder = tmp_path / "cuda"
    folder.mkdir()
    return CudaStub(folder, devices=2, delay_us=500)


def test_an_error_that_passes(daemon: DaemonProcess, stub: CudaStub) -> None:
    """It costs its own request at most, which is told what the driver said; the worker goes on."""
    (worker,) = daemon.workers
    said = "model 'scale': the GPU's driver refused a call for this request (CUDA_ERROR_OUT_OF_MEMORY)"
    with asking(daemon) as client:
        for number, function in enumerate(("cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuStreamSynchronize") * 3):
            stub.fail(function, 2, of_workers=True)
            # What fails on the short way is tried once more on the long one.
            try:
                small(client, number)
            except InferenceServerException as error:
                assert (error.status(), error.message()) == ("503", said)
            assert stub.failed
            small(client, number)
    assert [one.pid for one in daemon.workers] == [worker.pid]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    made = tmp_path / "repository"
    repositories.scale_model(made)
    return made


@contextlib.contextmanager
def serving(stub: CudaStub, repository: Path, visible: str = "0") -> Iterator[DaemonProcess]:
    environment = stub.gpu_environment | {"CUDA_VISIBLE_DEVICES": visible}
    folder = repository.parent / "daemon"
    folder.mkdir()
    with DaemonProcess(folder, [repository], {"workers": GPU_WORKERS}, environment=environment) as running:
        # A device that is lost before is one that never was: the daemon would stop.
        running.wait_log(r"ready: \d+ models")
        yield running


@pytest.fixture
def daemon(stub: CudaStub, repository: Path) -> Iterator[DaemonProcess]:
    repositories.echo_models(repository, ["FP32"])
    with serving(stub, repository) as running:
        yield running


@contextlib.contextmanager
def asking(daemon: DaemonProcess) -> Iterator[httpclient.InferenceServerClient]:
    with httpclient.InferenceServerClient(daemon.url, network_timeout=PATIENCE, connection_timeout=PATIENCE) as client:
        yield client


def small(client: Any, number: int) -> None:
    """Sends a request of three rows, in a bucket that has room for more, and checks the answer."""
    values = np.full((3, 4), number, np.float32)
    given = httpclient.InferInput("x", [3, 4], "FP32")
    given.set_data_from_numpy(values)
    assert np.array_equal(client.infer("scale", [given]).as_numpy("y"), 3 * values + 1)


def large(client: Any, number: int) -> None:
    values = np.full(LARGE, number, np.float32)
    given = httpclient.InferInput("x", [LARGE], "FP32")
    given.set_data_from_numpy(values)
    assert np.array_equal(client.infer("echo_fp32", [given]).as_numpy("y"), values)


def in_regions(client: Any, owner: CudaOwner, name: str, number: int) -> None:
    """Sends a request whose input has to be copied on the device, and whose output stays there."""
    values = np.full((1, 4), number, np.float32)
    handle = owner.create(name, 4096)

    def registered() -> bool:
        try:
            client.register_cuda_shared_memory(name, handle, 0, 4096)
        except InferenceServerException as error:
            if not error.message().endswith("no worker of GPU 0 is running"):
                raise
            return False
        return True

    wait_until(registered, "a worker to register it on")
    owner.put(name, np.zeros(16, np.uint8), values)
    client.infer("scale", [in_region("x", "FP32", (1, 4), name, 16, 16)], outputs=[out_region("y", name, 16, 512)])
    assert np.array_equal(owner.get(name, np.float32, (1, 4), 512), 3 * values + 1)
    client.unregister_cuda_shared_memory(name)


def test_in_the_middle_of_a_load(stub: CudaStub, tmp_path: Path) -> None:
    """1. XLA fails while a model is made; 2. its worker says nothing of the model and ends; 3. the next one loads it."""
    repository = repositories.scale_model(tmp_path / "repository")
    environment = stub.gpu_environment | {"CUDA_VISIBLE_DEVICES": "0"}
    folder = tmp_path / "daemon"
    folder.mkdir()
    options = {"workers": GPU_WORKERS, "repository": {"control_mode": "explicit"}}
    with DaemonProcess(folder, [repository], options, environment=environment) as running:
        (worker,) = running.workers
        stub.fail("cuMemcpyAsync", STICKY[0], of_workers=True)
        with asking(running) as client:
            client.load_model("scale")
            assert stub.failed
            assert [one.pid for one in running.workers] != [worker.pid]
            small(client, 1)


def test_at_each_call_of_the_driver(daemon: DaemonProcess, stub: CudaStub) -> None:
    """
    1. Three clients ask without pause, each in its way: small bodies, large ones, memory on the GPU.
    2. The device is lost at a call of the driver; and so on, for each function that the worker has ever called.
    Result: each loss costs each client at most one request, which is told so; the worker is replaced, and all answers are right.
    """
    failed: list[tuple[str, str]] = []
    asked = [0, 0, 0]
    ends, at = threading.Event(), [""]

    def client(who: int) -> None:
        with asking(daemon) as client, CudaOwner(os.environ | stub.environment) as owner:
            while not ends.is_set():
                asked[who] += 1
                name = f"g{who}-{asked[who]}"
                try:
                    if who == 2:
                        in_regions(client, owner, name, asked[who])
                    else:
                        (small, large)[who](client, asked[who])
                except InferenceServerException as error:
                    failed.append((at[0], f"{error.status()} {error.message()}"))
                    with contextlib.suppress(InferenceServerException):
                        client.unregister_cuda_shared_memory(name)

    def rounds(or_ends: bool = False) -> None:
        """Run until each client has been answered, or a device is lost."""
        seen = list(asked)

        def done() -> bool:
            for one in clients:
                if one.done():
                    one.result()
            return all(now > 1 + before for now, before in zip(asked, seen, strict=True)) or (or_ends and stub.failed)

        wait_until(done, "answers", daemon)

    with ThreadPoolExecutor(3) as pool:
        clients = [pool.submit(client, who) for who in range(3)]
        try:
            rounds()
            (worker,) = daemon.workers
            tried: set[str] = set()
            while left := sorted(set(stub.calls(worker.pid)) - _NO_CONTEXT - tried):
                at[0] = left[0]
                tried.add(at[0])
                stub.fail(at[0], STICKY[len(tried) % 3], of_workers=True)
                rounds(or_ends=True)
                if not stub.failed:
                    # Only at a worker's beginning.
                    worker.kill()
                wait_until(lambda: stub.failed, f"{at[0]} to fail", daemon)
                wait_until(lambda gone=worker.pid: gone not in [one.pid for one in daemon.workers], "its end", daemon)
                rounds()
                (worker,) = daemon.workers
            rounds()
        finally:
            ends.set()
        for one in clients:
            one.result()
    assert {"cuMemcpyHtoDAsync_v2", "cuStreamSynchronize", "cuIpcOpenMemHandle_v2", "cuMemHostRegister_v2"} <= tried
    for function in tried:
        told = [text for where, text in failed if where == function]
        assert len(told) <= 3, (function, set(told), daemon.log[-6000:])
        for text in told:
            assert re.match(r"503 the GPU failed \(CUDA_ERROR_\w+\); its worker is being restarted", text), (
                function,
                text,
            )


def test_memory_freed_under_a_copy_that_takes_the_context_along(tmp_path: Path, repository: Path) -> None:
    """
    1. Two clients ask, each with memory of its own on the GPU. 2. One frees it, and the next copy of it is an illegal address.
    Result: the other one loses at most the request that met it. The first is told, then and afterwards, what its region is.
    """
    folder = tmp_path / "cuda"
    folder.mkdir()
    stub = CudaStub(folder, delay_us=500, freed="fault")
    with (
        serving(stub, repository) as daemon,
        asking(daemon) as client,
        CudaOwner(os.environ | stub.environment) as owner,
        CudaOwner(os.environ | stub.environment) as other,
    ):
        for who, name in ((owner, "freed"), (other, "kept")):
            client.register_cuda_shared_memory(name, who.create(name, 4096), 0, 4096)
            who.put(name, np.zeros(16, np.uint8), np.ones((1, 4), np.float32))

        def ask(name: str) -> str:
            given, wanted = in_region("x", "FP32", (1, 4), name, 16, 16), out_region("y", name, 16, 512)
            try:
                client.infer("scale", [given], outputs=[wanted])
            except InferenceServerException as error:
                return f"{error.status()} {error.message()}"
            return ""

        assert (ask("freed"), ask("kept")) == ("", "")
        (worker,) = daemon.workers
        owner.destroy("freed")
        assert ask("freed").startswith("503 the GPU failed (CUDA_ERROR_ILLEGAL_ADDRESS); its worker is being restarted")
        wait_until(lambda: ask("kept") == "", "the replacement to serve", daemon)
        assert not worker.is_running()
        daemon.wait_log("region 'freed' could not be registered on worker-0: .* the CUDA handle cannot be opened")
        for _ in range(2):
            assert ask("freed").startswith("404 Unable to find shared memory region: 'freed'")
            assert ask("kept") == ""
        client.unregister_cuda_shared_memory()


def test_where_memory_of_another_gpu_is_used(tmp_path: Path, repository: Path) -> None:
    """
    1. A model has the second GPU, a client's memory lies on the first. 2. A call by which the second one opens or copies it fails
    for once. 3. The second GPU is lost at each of these calls in turn.
    Result: each costs one request, which is told so. The region stays registered, and whoever takes the worker's place opens it
    anew; the first GPU's worker goes on.
    """
    folder = tmp_path / "cuda"
    folder.mkdir()
    stub = CudaStub(folder, devices=2, delay_us=300, peers=True)
    source = (repository / "scale" / "1" / "model.py").read_text()
    repositories.write_model(repository, "second", source, "instance_group { kind: KIND_GPU gpus: [ 1 ] }")
    with (
        serving(stub, repository, "0,1") as daemon,
        asking(daemon) as client,
        CudaOwner(os.environ | stub.environment | {"CUDA_VISIBLE_DEVICES": "0,1"}) as owner,
    ):
        kept, lost = (worker.pid for worker in sorted(daemon.workers, key=lambda worker: worker.cmdline()[-1]))
        handle = owner.create("g", 4096, 0)
        client.register_cuda_shared_memory("g", handle, 0, 4096)
        values = np.ones((1, 4), np.float32)
        owner.put("g", np.zeros(16, np.uint8), values)

        def ask() -> str:
            given, wanted = in_region("x", "FP32", (1, 4), "g", 16, 16), out_region("y", "g", 16, 512)
            try:
                client.infer("second", [given], outputs=[wanted])
            except InferenceServerException as error:
                return f"{error.status()} {error.message()}"
            assert np.array_equal(owner.get("g", np.float32, (1, 4), 512), 3 * values + 1)
            return ""

        stub.fail("cuIpcOpenMemHandle_v2", 2, of_workers=True)
        assert re.match(
            r"400 shared memory region 'g' is on GPU 0, .* cannot open it \(CUDA_ERROR_OUT_OF_MEMORY\)", ask()
        )
        assert (ask(), lost in [worker.pid for worker in daemon.workers]) == ("", True)
        for function in ("cuMemcpyDtoDAsync_v2", "cuIpcOpenMemHandle_v2", "cuMemGetAddressRange_v2"):
            # The second GPU's worker opens it when it is first asked.
            client.unregister_cuda_shared_memory("g")
            client.register_cuda_shared_memory("g", handle, 0, 4096)
            stub.fail(function, STICKY[0], of_workers=True)
            assert ask().startswith("503 the GPU failed (CUDA_ERROR_ILLEGAL_ADDRESS); its worker is being restarted"), (
                function
            )
            wait_until(lambda: ask() == "", "the replacement to serve", daemon)
        assert kept in [worker.pid for worker in daemon.workers]
        client.unregister_cuda_shared_memory()


def test_one_that_is_lost_while_another_one_loads(stub: CudaStub, repository: Path, tmp_path: Path) -> None:
    """
    1. The daemon starts, both GPUs are in use, and a model takes its time. 2. The GPU of another model falls off the bus.
    Result: the daemon does not stop; it is ready when the model is there, and says which one is not.
    """
    source = (repository / "scale" / "1" / "model.py").read_text()
    for name, gpu in (("slow", 0), ("second", 1)):
        repositories.write_model(repository, name, source, f"instance_group {{ kind: KIND_GPU gpus: [ {gpu} ] }}")
    given = tmp_path / "given"
    slow = f"import pathlib, time\nwhile not pathlib.Path({str(given)!r}).exists():\n    time.sleep(0.01)\n"
    (repository / "slow" / "1" / "model.py").write_text(slow + source)
    environment = stub.gpu_environment | {"CUDA_VISIBLE_DEVICES": "0,1"}
    folder = tmp_path / "daemon"
    folder.mkdir()
    with DaemonProcess(folder, [repository], {"workers": GPU_WORKERS}, environment=environment, ready=False) as running:
        running.wait_log("model 'second' version 1 is ready")
        stub.lose(1)
        running.wait_log(r"worker-1\] the worker ends, to be replaced: the GPU failed \(CUDA_ERROR_UNKNOWN\)")
        running.wait_log(r"worker-1 \(process \d+\) exited with status \d+", 2)
        given.touch()
        running.wait_log(r"ready: 2 models \(scale 1, slow 1\).*; 1 of 3 models are not served: second")
        with asking(running) as client:
            small(client, 1)


ONES = [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 1, 1, 1]}]


def test_one_that_stays_broken(stub: CudaStub, repository: Path) -> None:
    """
    1. Two GPUs, a model on both and one on the second, which falls off the bus while nobody asks anything.
    2. It is there again.
    Result: its worker ends by itself. The second model is not served and says why, at once, the other one is, and the daemon is
    ready; then everything is as before.
    """
    source = (repository / "scale" / "1" / "model.py").read_text()
    repositories.write_model(repository, "second", source, "instance_group { kind: KIND_GPU gpus: [ 1 ] }")
    with serving(stub, repository, "0,1") as daemon:
        kept, lost = (worker.pid for worker in sorted(daemon.workers, key=lambda worker: worker.cmdline()[-1]))
        stub.lose(1)
        daemon.wait_log(
            rf"{lost} worker-1\] the worker ends, to be replaced: the GPU failed \(CUDA_ERROR_UNKNOWN\), though"
        )
        wait_until(lambda: daemon.get("/v2/models/second/ready")[0] == 400, "the model to be gone", daemon)
        status, answer = daemon.infer("second", ONES)
        assert (status, "'second' cannot be served now" in answer["error"]) == (503, True), answer
        (entry,) = [one for one in index(daemon) if one["name"] == "second"]
        assert (entry["state"], entry["reason"]) == ("UNAVAILABLE", "no worker can use cuda:1 at present")
        daemon.wait_ready()
        daemon.wait_log(r"\] ready: 1 of 2 models are served; not served now: second")
        for _ in range(5):
            assert daemon.infer("scale", ONES)[0] == 200
        stub.find()
        wait_until(lambda: daemon.get("/v2/models/second/ready")[0] == 200, "the model to be back", daemon)
        assert daemon.infer("second", ONES)[0] == 200
        assert kept in [worker.pid for worker in daemon.workers]


def index(daemon: DaemonProcess) -> list[dict[str, Any]]:
    return list(json.loads(daemon.request("POST", "/v2/repository/index", b"")[1]))
