"""Arrays of our own client on a GPU: the worker uses them where they are, and JAX's arrays are copied on the device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.client.test_device_memory import SCRIPT
from tests.daemon_process import PATIENCE, DaemonProcess

#: An array that JAX has made on the GPU goes in and one comes out, without a copy through the host.
_FROM_JAX = """
import sys
import jax, jax.numpy as jnp, numpy as np
import tensord_client

with tensord_client.connect(sys.argv[1]) as client:
    model = client.model("scale", timeout=120)
    x = client.empty((2, 4), np.float32, device="cuda:0")
    y = client.empty((2, 4), np.float32, device="cuda:0")
    call = model.prepare({"x": x}, out={"y": y})
    made = jax.jit(lambda number: jnp.full((2, 4), number, jnp.float32))
    for number in range(100):
        x.copy_from(made(number))
        call()
        seen = jax.dlpack.from_dlpack(y)
        assert seen.device.platform == "gpu", seen.device
        np.testing.assert_array_equal(np.asarray(seen + 0), np.full((2, 4), 3 * number + 1, np.float32))
        del seen
print("good")
"""


@pytest.mark.parametrize("script", [SCRIPT, _FROM_JAX], ids=["of-ours", "of-jax"])
def test_arrays_on_a_gpu(daemon: DaemonProcess, gpu_variables: dict[str, str], script: str) -> None:
    if script is _FROM_JAX and gpu_variables:
        pytest.skip("the stand-in has no JAX on a GPU")
    done = subprocess.run(
        [sys.executable, "-c", script, str(daemon.folder / "clients.sock"), f"127.0.0.1:{daemon.port}"],
        env={**os.environ, "XLA_CLIENT_MEM_FRACTION": "0.05", **gpu_variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "good\n"), done.stderr
