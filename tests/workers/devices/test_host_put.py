"""Arrays in host memory become a processor's arrays with the same values, and are copied only where XLA could not use them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tensord.shm.arrays import address_of
from tensord.workers.devices import host_put as module
from tensord.workers.devices.host_put import host_put
from tensord.workers.programs.gather_buffer import aligned

DTYPES = ["float64", "int64", "uint8", "bool", "bfloat16", "complex64", "float32"]


@pytest.fixture(params=["its own interface", "JAX's documented one"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param != "its own interface":
        monkeypatch.setattr(module, "_interface", lambda: None)
    elif module._interface() is None:
        pytest.skip("this JAX has no such interface")
    with jax.enable_x64(True):
        yield


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_types_and_memory_are_those_of_the_given_arrays(dtype: str, committed: bool) -> None:
    lies = aligned((3, 5), np.dtype(jnp.dtype(dtype)))
    lies[:] = np.arange(15).reshape(3, 5) % 2
    device = jax.local_devices()[0]
    whole, odd, known = host_put([lies, lies[1:], jnp.ones(3)], device, committed)
    expected = jax.device_put(lies, device if committed else None)
    assert (whole.dtype, whole.shape, whole.aval) == (lies.dtype, lies.shape, expected.aval)
    assert (whole.sharding, whole.committed) == (expected.sharding, expected.committed)
    assert whole.unsafe_buffer_pointer() == address_of(lies)
    assert np.array_equal(np.asarray(whole), lies)
    assert known.tolist() == [1, 1, 1]
    kept = np.array(odd)
    lies[:] = 0
    assert np.array_equal(np.asarray(odd), kept), "it has been copied"


@pytest.mark.usefixtures("_way")
def test_programs_take_them() -> None:
    given: list[Any] = [np.arange(6, dtype=np.float64), np.ones(3, np.int32)]
    made = host_put(given, jax.local_devices()[0], committed=False)
    assert jax.jit(lambda a, b: (a * 2, b.sum()))(*made)[0].tolist() == [0, 2, 4, 6, 8, 10]
