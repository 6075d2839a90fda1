"""Small requests on hardware: what leaves the device together is what was computed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests import repositories
from tests.daemon_process import DaemonProcess
from tests.protocol.test_gpu_workers import THREE

#: Takes XLA a while, so that a copy that does not wait for it is early.
_SLOW = """
    import jax
    import jax.numpy as jnp

    inputs = {"x": "FP32[4]"}
    outputs = {"y": "FP32[4]", "z": "FP32[4]"}
    max_batch_size = 8

    def create(path, config, device):
        # The stand-in for XLA on a GPU is XLA for the CPU, and takes its time by itself.
        size = 2048 if device.platform == "gpu" else 64

        def apply(params, inputs):
            x = inputs["x"]
            large = jnp.full((size, size), 1 / size, jnp.bfloat16)
            ones = jax.lax.fori_loop(0, 50, lambda _, ones: ones @ large, jnp.ones((size, size), jnp.bfloat16))
            return {"y": x + ones[0, 0], "z": x - ones[0, 0]}
        return apply, None
"""

#: Light, without a batch dimension, and what is rounded between two operations or not depends on what they are compiled with.
_ALONE = repositories.applying(
    """
    product = inputs["x"] * inputs["x"]
    return {"y": product, "z": product * 1.1 + inputs["x"]}
    """,
    "x FP32[4]",
    "y FP32[4], z FP32[4]",
)


#: Enough operations for a CUDA graph, and two copies of what comes in.
_COPIES = """
    import jax.numpy as jnp

    inputs = {"x": "FP32[n]", "w": "FP32[n]"}
    outputs = {name: "FP32[n]" for name in ("same", "sums", "sorted", "raised")} | {"all": "FP32[1]"}
    max_batch_size = 4

    def create(path, config, device):
        def apply(params, inputs):
            x, w = inputs["x"], inputs["w"]
            sums = jnp.cumsum(x, 1)
            ordered = jnp.sort(w, 1)
            made = {"same": x, "sums": sums, "sorted": ordered, "raised": jnp.cumsum(ordered, 1) + 1}
            return made | {"all": (sums @ ordered.T).sum(1, keepdims=True) * 0 + x.sum(1, keepdims=True)}
        return apply, None
"""


@pytest.fixture(scope="module")
def small_daemon(gpu_repository: Path, start_gpu_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    repositories.write_model(gpu_repository, "three", THREE)
    repositories.write_model(gpu_repository, "slow", _SLOW)
    repositories.write_model(gpu_repository, "alone", _ALONE, 'backend: "jax"')
    repositories.write_model(gpu_repository, "copies", _COPIES, "instance_group { count: 2 }")
    names = ("three", {"x": "x"}, {"y": "mid"}), ("three", {"x": "mid"}, {"y": "y"})
    repositories.ensemble(gpu_repository, "twice", ["x FP32 4"], ["y FP32 4"], names, 8)
    return start_gpu_daemon()


@pytest.mark.parametrize("model", ["three", "slow"])
def test_each_gets_its_own_rows(small_daemon: DaemonProcess, model: str) -> None:
    def ask(who: int) -> None:
        with grpcclient.InferenceServerClient(small_daemon.grpc_url) as client:
            for number in range(50):
                values = np.full((1, 4), 100 * who + number - 50, np.float32)
                given = grpcclient.InferInput("x", [1, 4], "FP32")
                given.set_data_from_numpy(values)
                answer = client.infer(model, [given])
                if model == "three":
                    assert np.array_equal(answer.as_numpy("y"), 3 * values + 1)
                    assert np.array_equal(answer.as_numpy("up"), values > 0)
                    assert answer.as_numpy("sum").tolist() == [[values.sum()]]
                else:
                    assert np.array_equal(answer.as_numpy("y"), values + 1)
                    assert np.array_equal(answer.as_numpy("z"), values - 1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))


def test_what_shares_calls_gets_bit_by_bit_what_it_gets_alone(small_daemon: DaemonProcess) -> None:
    def ask(who: int, times: int = 50) -> list[bytes]:
        with grpcclient.InferenceServerClient(small_daemon.grpc_url) as client:
            given = grpcclient.InferInput("x", [4], "FP32")
            given.set_data_from_numpy(np.random.default_rng(who).random(4, np.float32))
            answers = [client.infer("alone", [given]) for _ in range(times)]
            return [answer.as_numpy("y").tobytes() + answer.as_numpy("z").tobytes() for answer in answers]

    alone = [ask(who, 1)[0] for who in range(8)]
    with ThreadPoolExecutor(8) as clients:
        together = list(clients.map(ask, range(8)))
    assert [set(answers) for answers in together] == [{expected} for expected in alone]


def test_programs_of_an_ensemble_run_one_after_the_other(small_daemon: DaemonProcess) -> None:
    def ask(who: int) -> None:
        with grpcclient.InferenceServerClient(small_daemon.grpc_url) as client:
            for number in range(20):
                values = np.full((1, 4), 20 * who + number, np.float32)
                given = grpcclient.InferInput("x", [1, 4], "FP32")
                given.set_data_from_numpy(values)
                assert np.array_equal(client.infer("twice", [given]).as_numpy("y"), 3 * (3 * values + 1) + 1)

    with ThreadPoolExecutor(8) as clients:
        list(clients.map(ask, range(8)))


@pytest.mark.parametrize("size", [16, 1 << 18])
def test_a_program_copies_from_wherever_its_inputs_lie(small_daemon: DaemonProcess, size: int) -> None:
    """In the staging memory of either instance; XLA would run such a program as a CUDA graph, which takes only one of them."""

    def ask(who: int) -> None:
        with grpcclient.InferenceServerClient(small_daemon.grpc_url) as client:
            for number in range(30):
                x, w = np.full((1, size), who + 1, np.float32), np.arange(size, 0, -1, np.float32)[None] * 0 + number
                given = [grpcclient.InferInput(name, [1, size], "FP32") for name in ("x", "w")]
                for each, array in zip(given, (x, w), strict=True):
                    each.set_data_from_numpy(array)
                answer = client.infer("copies", given)
                assert np.array_equal(answer.as_numpy("same"), x)
                assert np.array_equal(answer.as_numpy("sorted"), w)
                assert answer.as_numpy("all").item() == size * (who + 1)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))
