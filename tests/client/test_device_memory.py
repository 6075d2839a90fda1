"""Arrays of the client on a GPU: workers use them where they are. On the stand-in, whose memory host code cannot touch."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.cuda_stub.library import CudaStub
from tests.daemon_process import PATIENCE, ROOT, DaemonProcess
from tests.repositories import scale_model

#: Asks the daemon whose socket and address it is told.
SCRIPT = """
import gc, json, sys, urllib.request, weakref
import numpy as np
import tensord_client

def regions():
    with urllib.request.urlopen(f"http://{sys.argv[2]}/v2/cudasharedmemory/status") as answer:
        return len(json.load(answer))

values = np.arange(8, dtype=np.float32).reshape(2, 4)
with tensord_client.connect(sys.argv[1]) as client:
    model = client.model("scale", timeout=120)
    x = client.empty(model.inputs["x"], shape=(2, 4), device="cuda:0")
    y = client.empty((2, 4), np.float32, device="cuda:0")
    assert (x.device, x.shape, regions()) == ("cuda:0", (2, 4), 2)
    call = model.prepare({"x": x}, out={"y": y})
    for number in range(4):
        x.copy_from(values + number)
        assert call()["y"] is y
        np.testing.assert_array_equal(y.numpy(), 3 * (values + number) + 1)
    # From a device array to the host, and as a framework's array on the device that is copied in.
    np.testing.assert_array_equal(model({"x": x})["y"], 3 * (values + 3) + 1)
    other = client.empty((2, 4), np.float32, device="cuda")
    other.copy_from(y)
    np.testing.assert_array_equal(other.numpy(), y.numpy())
    np.testing.assert_array_equal(model({"x": other})["y"], 3 * y.numpy() + 1)
    assert other.__dlpack_device__() == (2, 0)
    capsule, exported = other.__dlpack__(), weakref.ref(other)
    del other
    gc.collect()
    assert exported() is not None
    del capsule
    gc.collect()
    assert exported() is None
    scalar = client.empty((), np.float32, device="cuda:0")
    for one in (np.float32(3), np.array(4, np.float32), values.T[1, 1]):
        scalar.copy_from(one)
        assert (scalar.numpy().shape, scalar.numpy()) == ((), one)
    x.copy_from(np.asfortranarray(values))
    np.testing.assert_array_equal(x.numpy(), values)
    for wrong in (values.astype(np.float64), values[:1], values[0, 0], client.empty((2, 2), np.float32, device="cuda:0")):
        try:
            x.copy_from(wrong)
        except tensord_client.InvalidArgument as error:
            assert "cannot be copied to float32[2, 4]" in error.message, error.message
        else:
            raise AssertionError(wrong)
    del wrong, scalar
    for device, kind in (("cuda:7", tensord_client.Unavailable), ("tpu:0", tensord_client.InvalidArgument)):
        try:
            client.empty((2, 4), np.float32, device=device)
        except kind:
            pass
        else:
            raise AssertionError(device)
    try:
        model.prepare({"x": x}, out={"y": client.empty((1, 4), np.float32, device="cuda:0")})()
    except tensord_client.ServingError as error:
        assert "'y'" in error.message, error.message
    else:
        raise AssertionError
    del x, y, call
    gc.collect()
    kept = client.empty((2, 4), np.float32, device="cuda:0")
    assert regions() == 1, regions()
    # Without a lane they are named as well, but only by the connection that has registered them.
    with tensord_client.connect(f"http://{sys.argv[2]}") as over_http:
        model = over_http.model("scale", timeout=120)
        try:
            model({"x": kept})
        except tensord_client.InvalidArgument as error:
            assert "of another connection" in error.message
        else:
            raise AssertionError
        x = over_http.empty(model.inputs["x"], shape=(2, 4), device="cuda:0")
        y = over_http.empty((2, 4), np.float32, device="cuda:0")
        assert regions() == 3
        call = model.prepare({"x": x}, out={"y": y})
        for number in range(4):
            x.copy_from(values + number)
            assert call()["y"] is y
            np.testing.assert_array_equal(y.numpy(), 3 * (values + number) + 1)
            np.testing.assert_array_equal(model({"x": x})["y"], y.numpy())
        on_the_host = np.zeros((2, 4), np.float32)
        assert model.prepare({"x": x}, out={"y": on_the_host})()["y"] is on_the_host
        np.testing.assert_array_equal(on_the_host, y.numpy())
        np.testing.assert_array_equal(model.prepare({"x": values}, out={"y": y})()["y"].numpy(), 3 * values + 1)
        try:
            model.prepare({"x": x}, out={"y": over_http.empty((1, 4), np.float32, device="cuda:0")})()
        except tensord_client.ServingError as error:
            assert "'y'" in error.message, error.message
        else:
            raise AssertionError
        del x, y, call
        gc.collect()
    assert regions() == 1, regions()
    del kept
print("good")
"""

#: Uses a server of its own on the socket that it is told. The server goes away, or hangs, or memory cannot be freed.
ENDING = """
import gc, sys, threading
from pathlib import Path
import numpy as np
import pytest
import tensord_client
from tensord_client import device_memory
from tests.client.test_client import Server, usual

_, path, end = sys.argv
asked, hold = [], threading.Event()

def answer(path, connection):
    if path.endswith("/unregister"):
        asked.append(path)
        if end == "hangs":
            hold.wait()
    return usual(path, connection)

def refused(self, address):
    raise tensord_client.Unavailable("cuMemFree_v2 failed")

server, device_memory._LONGEST = Server(Path(path), answer), 0.1
client = tensord_client.connect(path, patience=1e9)
arrays = [client.empty((2, 4), np.float32, device="cuda:0") for _ in range(3)]
memory, pool = arrays[0].memory, client._connection._pool
if end == "gone":
    server.close()
if end == "refuses":
    device_memory.CudaLibrary.free = refused
arrays.clear()
gc.collect()
assert len(memory.returned) == 3
if end == "refuses":
    with pytest.raises(tensord_client.Unavailable, match="cuMemFree_v2 failed"):
        client.close()
else:
    client.close()
client.close()
# What workers may have still is kept. Where nobody is there, nobody has it.
assert (len(asked), len(memory.returned), pool.is_closed) == {
    "gone": (0, 0, True), "hangs": (1, 3, True), "refuses": (1, 2, True)
}[end]
hold.set()
server.close()
print("good")
"""


@pytest.fixture
def stub(tmp_path: Path) -> CudaStub:
    (folder := tmp_path / "cuda").mkdir()
    return CudaStub(folder, devices=1, delay_us=200)


def ran(script: str, stub: CudaStub, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, **stub.environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "good\n"), done.stderr


def test_arrays_on_a_gpu(stub: CudaStub, tmp_path: Path) -> None:
    repository = scale_model(tmp_path / "models")
    (folder := tmp_path / "daemon").mkdir()
    sections = {
        "workers": {"device": "cuda", "single_thread_flops": 0},
        "clients": {"socket": str(folder / "clients.sock")},
    }
    environment = stub.gpu_environment | {"CUDA_VISIBLE_DEVICES": "0"}
    with DaemonProcess(folder, [repository], sections, environment=environment) as daemon:
        ran(SCRIPT, stub, sections["clients"]["socket"], f"127.0.0.1:{daemon.port}")


@pytest.mark.parametrize("end", ["gone", "hangs", "refuses"])
def test_a_client_is_closed_wherever_its_arrays_cannot_be_given_back(stub: CudaStub, tmp_path: Path, end: str) -> None:
    """No such daemon is waited for as requests wait for one, which is for ever here; connections end in each case."""
    with tempfile.TemporaryDirectory(prefix="tensord-test-") as folder:
        ran(ENDING, stub, f"{folder}/http.sock", end)
