"""Names of devices, and what of the host each may see."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tensord.workers.devices.device import DeviceName
from tests.cuda_stub.library import CudaStub


def test_names() -> None:
    assert DeviceName.parse("cpu:0") == DeviceName("cpu", 0)
    assert str(DeviceName.parse("cuda:12")) == "cuda:12"
    assert str(DeviceName.parse("cuda:1/2")) == "cuda:1/2"
    assert DeviceName.parse("cuda:1/2").gpu == 1
    assert DeviceName.parse("cuda:1#a,b").model == "a,b"
    assert str(DeviceName.parse("cpu:3#m")) == "cpu:3#m"
    assert (DeviceName("cpu", 3).gpu, DeviceName("cuda", 3).gpu) == (None, 3)
    for text in ("", "cpu", "cpu:", "cpu:-1", "tpu:0", "cpu:0 ", "cuda:1x", "cuda:99999", "cpu:0/1", "cuda:0/"):
        with pytest.raises(ValueError, match="expected cpu:N, cuda:N, cuda:N/M, or one of these with #MODEL"):
            DeviceName.parse(text)


@pytest.mark.parametrize(
    ("device", "visible", "platforms"),
    [("cpu:1", "0,1", "cpu"), ("cuda:1", "GPU-bb", "cuda,cpu"), ("cuda:0", "3", "cuda,cpu")],
)
def test_environment(monkeypatch: pytest.MonkeyPatch, device: str, visible: str, platforms: str) -> None:
    """The process that starts a worker decides which GPU it sees."""
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    DeviceName.parse(device).prepare_environment()
    assert os.environ["JAX_PLATFORMS"] == platforms
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


def opened(environment: dict[str, str], device: str) -> str:
    """Opens a device in a process as a worker does; returns what it prints."""
    script = (
        "import sys\nfrom tensord.workers.devices.device import DeviceName, NoDevice\nname = DeviceName.parse(sys.argv[1])\n"
        "name.prepare_environment()\ntry:\n    print(name.open())\nexcept NoDevice as error:\n    print(error)\n"
        "    sys.exit()\nimport jax\nimport numpy as np\n"
        "same = jax.jit(lambda x: jax.pure_callback(np.sort, x, x))\n"
        "print(same(np.array([3, 1, 2], np.float32)), jax.devices()[0] in jax.devices('cuda'), jax.devices('cpu'))\n"
    )
    command = [sys.executable, "-c", script, device]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True).stdout


def test_a_gpu_worker_has_the_cpu_beside_it(cuda_stub: CudaStub) -> None:
    """JAX computes on the GPU unless told otherwise, and callbacks have where to run."""
    assert "[1. 2. 3.] True" in opened(cuda_stub.gpu_environment | {"CUDA_VISIBLE_DEVICES": "1"}, "cuda:1")


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"PYTHONPATH": ""}, "JAX cannot use cuda:1: "),
        ({"CUDA_STUB_PLUGIN": "broken"}, "the plugin needs CUDA 13 or later, the driver has 12.8"),
        ({"CUDA_VISIBLE_DEVICES": "7"}, "no visible GPU devices"),
    ],
    ids=["no-plugin", "broken-plugin", "no-such-gpu"],
)
def test_it_never_computes_on_the_cpu_instead(cuda_stub: CudaStub, environment: dict[str, str], reason: str) -> None:
    said = opened(cuda_stub.gpu_environment | environment, "cuda:1")
    assert said.startswith("JAX cannot use cuda:1: ")
    assert reason in said
    assert said.count("\n") == 1
    assert "JAX_PLATFORMS" not in said


def test_the_thread_that_asks_computes() -> None:
    """That thread takes most of the process's processor time for a program."""
    script = (
        "import time\nfrom tensord.workers.devices.device import DeviceName\n"
        "name = DeviceName('cpu', 0)\nname.prepare_environment()\nimport jax, numpy as np\nname.open()\n"
        "x = np.eye(64, dtype=np.float32)\n"
        "run = jax.jit(lambda x: jax.lax.fori_loop(0, 2000, lambda _, y: y @ x, x)).lower(x).compile()\n"
        "jax.block_until_ready(run(x))\n"
        "process, thread = time.process_time(), time.thread_time()\njax.block_until_ready([run(x) for _ in range(5)])\n"
        "print((time.thread_time() - thread) / (time.process_time() - process))\n"
    )
    # With one thread to compute with, so that the program is not divided.
    environment = os.environ | {"PJRT_NPROC": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert float(done.stdout) > 0.5
