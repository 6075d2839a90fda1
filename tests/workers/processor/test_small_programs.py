"""Small programs run on the single-thread device, large ones and those that cannot where they always did; nobody sees which."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import jax._src.xla_bridge
import jax.numpy as jnp
import numpy as np
import pytest

from tensord.workers.models.execution import Execution
from tensord.workers.models.jax_model import JaxModel
from tensord.workers.processor.single_thread import SingleThreadDevice
from tensord.workers.programs.executable import Wanted
from tensord.workers.programs.executable_cache import ExecutableCache, cache_directory
from tests.workers.made_requests import request_of
from tests.workers.programs.test_executables import model_of, run

WIDTH = 32
WEIGHTS = np.random.default_rng(0).random((WIDTH, WIDTH), np.float32)
#: Of a product with them, for so many rows.
ROW_FLOPS = 2 * WIDTH * WIDTH
FEW, MANY = 4, 16


def product(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return {"y": inputs["x"] @ parameters["w"]}


def products(apply: Any = product, parameters: Any = None, **more: Any) -> JaxModel:
    """Returns a model whose programs are small up to ``FEW`` rows."""
    more.setdefault("single_thread", SingleThreadDevice(FEW * ROW_FLOPS))
    shape = f"FP32[{WIDTH}]"
    parameters = {"w": WEIGHTS} if parameters is None else parameters
    return model_of(apply, {"x": shape}, {"y": shape}, MANY, (1, FEW, MANY), parameters=parameters, **more)


def placed(model: JaxModel) -> list[bool]:
    """Returns for each bucket whether it is on the single-thread device, by its record and by its outputs."""
    found = []
    for rows in (1, FEW, MANY):
        executable = model.executables.find(Wanted(rows, ((WIDTH,),)))
        assert executable is not None
        (device,) = executable.call(executable.parameters(), {"x": np.zeros((rows, WIDTH), np.float32)})["y"].devices()
        assert device == (executable.placement.device or jax.devices()[0])
        found.append(executable.placement.device is not None)
    return found


def check(model: JaxModel, factor: float = 1) -> None:
    """Checks that every bucket computes the right result."""
    for rows in (1, 3, FEW, MANY):
        x = np.random.default_rng(rows).random((rows, WIDTH), np.float32)
        (result,) = run(model, {"x": x}, rows=(rows,))
        np.testing.assert_allclose(result["y"], x @ WEIGHTS * factor, rtol=1e-5)


def test_small_and_large() -> None:
    model = products()
    assert placed(model) == [True, True, False]
    check(model)


def test_none_without_a_device_for_them() -> None:
    model = products(single_thread=None)
    assert placed(model) == [False, False, False]
    check(model)


def test_nothing_is_opened_for_large_programs() -> None:
    device = SingleThreadDevice(1)
    assert placed(products(single_thread=device)) == [False, False, False]
    assert "_opened" not in vars(device)


def test_the_parameters_are_there_once() -> None:
    model = products(parameters={"w": WEIGHTS, "more": [np.ones(5, np.float32)]})
    small, large = [model.executables.find(Wanted(rows, ((WIDTH,),))) for rows in (1, MANY)]
    assert small is not None
    assert large is not None
    pointers = [
        [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(executable.placement.parameters)]
        for executable in (small, large)
    ]
    assert pointers[0] == pointers[1]


def test_64_bit_parameters() -> None:
    def shift(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"y": inputs["x"] + parameters}

    device = SingleThreadDevice(1000)
    model = model_of(shift, {"x": "INT64[2]"}, {"y": "INT64[2]"}, parameters=np.int64(1), single_thread=device)
    single = model.executables.find(Wanted(1, ((2,),)))
    assert single is not None
    assert single.placement.device is device.device
    assert run(model, {"x": np.array([2**40 + 4, -(2**62)])})[0]["y"].tolist() == [2**40 + 5, 1 - 2**62]


def test_on_demand_as_well() -> None:
    device = SingleThreadDevice(100)
    model = model_of(
        lambda p, i: {"y": i["x"] + 1}, {"x": "FP32[n]"}, {"y": "FP32[n]"}, parameters={}, single_thread=device
    )
    for size in (100, 101):
        assert run(model, {"x": np.ones(size, np.float32)})[0]["y"].tolist() == [2.0] * size
    singles = [model.executables.find(Wanted(1, ((size,),))) for size in (100, 101)]
    found = [None if single is None else single.placement.device for single in singles]
    assert found == [device.device, None]


def test_what_a_function_holds_on_to() -> None:
    """Arrays that were put on the worker's device, and what was computed there."""
    held = jax.device_put(WEIGHTS, jax.devices()[0])

    def apply(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"y": jax.jit(lambda x: x @ held)(inputs["x"]) * parameters}

    model = products(apply, np.float32(3), single_thread=SingleThreadDevice((ROW_FLOPS + WIDTH) * FEW))
    assert placed(model) == [True, True, False]
    check(model, 3)


def bound(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {"y": jax.lax.with_sharding_constraint(inputs["x"], where) @ parameters["w"]}


@pytest.mark.parametrize(
    ("apply", "parameters", "words"),
    [
        (bound, None, "ValueError: Received incompatible devices"),
        (product, {"w": WEIGHTS, "small": jnp.ones(3, jnp.int4)}, "a parameter of int4[3] would be copied"),
    ],
)
def test_a_version_that_cannot_be_there_serves_as_ever(
    apply: Any, parameters: Any, words: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Said once; and nothing is tried again at the second start."""
    folder = cache_directory(str(tmp_path / "cache"))
    for lines, counts in ((1, (0, 3)), (0, (3, 0))):
        caplog.clear()
        cache = ExecutableCache(folder)
        with caplog.at_level(logging.INFO, "tensord.workers.processor.single_thread"):
            model = products(apply, parameters, cache=cache)
        assert len(caplog.records) == lines
        assert not lines or ("its programs get all threads" in caplog.text and words in caplog.text)
        assert (cache.compiles.figures().cache_hits, cache.compiles.figures().count) == counts
        assert placed(model) == [False, False, False]
        check(model)


def test_a_second_start_finds_each_where_it_was(tmp_path: Path) -> None:
    folder = cache_directory(str(tmp_path / "cache"))

    def start(single_thread: SingleThreadDevice | None) -> tuple[tuple[int, int], list[bool]]:
        cache = ExecutableCache(folder)
        model = products(cache=cache, single_thread=single_thread)
        check(model)
        return (cache.compiles.figures().cache_hits, cache.compiles.figures().count), placed(model)

    assert start(SingleThreadDevice(FEW * ROW_FLOPS)) == ((0, 3), [True, True, False])
    assert start(SingleThreadDevice(FEW * ROW_FLOPS)) == ((3, 0), [True, True, False])
    # Another bound is another decision.
    assert start(SingleThreadDevice(ROW_FLOPS)) == ((0, 3), [True, False, False])
    assert start(None) == ((0, 3), [False, False, False])
    assert start(SingleThreadDevice(FEW * ROW_FLOPS)) == ((3, 0), [True, True, False])


def test_a_series_is_where_its_requests_are_when_they_are_alone() -> None:
    """Bit for bit: a sum over rows is added up in another order by several threads."""

    def apply(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"y": (parameters["w"] * inputs["x"]).sum(0)}

    weights = np.random.default_rng(1).normal(size=(2000, 100)).astype(np.float32)
    for flops in (1 << 20, 1):
        model = model_of(
            apply,
            {"x": "FP32[100]"},
            {"y": "FP32[100]"},
            parameters={"w": weights},
            single_thread=SingleThreadDevice(flops),
        )
        single = model.executables.find(Wanted(1, ((100,),)))
        assert single is not None
        assert (single.placement.device is None) == (flops == 1)
        assert model.grouped is not None
        (program,) = model.grouped.compile(single, lengths=[2])
        given = [{"x": np.random.default_rng(i).random(100, np.float32)} for i in range(2)]
        together = Execution([request_of(one, key=model.key(one)) for one in given], 0, program)
        model.execute(together)
        for one, both in zip(given, together.results, strict=True):
            assert isinstance(both, dict)
            assert both["y"].tobytes() == run(model, one)[0]["y"].tobytes()
