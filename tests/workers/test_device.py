"""Names of devices, and what of the host each may see."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from workers.device import DeviceName


def test_names() -> None:
    assert DeviceName.parse("cpu:0") == DeviceName("cpu", 0)
    assert str(DeviceName.parse("cuda:12")) == "cuda:12"
    assert (DeviceName("cpu", 3).gpu, DeviceName("cuda", 3).gpu) == (None, 3)
    for text in ("", "cpu", "cpu:", "cpu:-1", "tpu:0", "cpu:0 ", "cuda:1x", "cuda:99999"):
        with pytest.raises(ValueError, match="expected cpu:N or cuda:N"):
            DeviceName.parse(text)


@pytest.mark.parametrize(
    ("device", "visible", "platforms", "chosen"),
    [
        ("cpu:1", "0,1", "cpu", "0,1"),
        ("cuda:1", "", "cuda", "1"),
        ("cuda:1", "GPU-aa,GPU-bb", "cuda", "GPU-bb"),
        ("cuda:0", "3", "cuda", "3"),
    ],
)
def test_environment(monkeypatch: pytest.MonkeyPatch, device: str, visible: str, platforms: str, chosen: str) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    DeviceName.parse(device).prepare_environment()
    assert os.environ["JAX_PLATFORMS"] == platforms
    assert os.environ["CUDA_VISIBLE_DEVICES"] == chosen


def test_the_thread_that_asks_computes() -> None:
    """Of a process's processor time for a program, most is that thread's."""
    script = (
        "import time\nfrom workers.device import DeviceName\n"
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
