"""Grouped calls: programs for several requests are made of what is light and small, and found by how many wait."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tensord.workers.models.jax_model import JaxModel
from tensord.workers.programs.cache_directory import CacheDirectory
from tensord.workers.programs.executable import Executable, Wanted
from tensord.workers.programs.executable_cache import ExecutableCache
from tensord.workers.programs.executables import Apply
from tensord.workers.programs.grouped_calls import LENGTHS, GroupedCalls
from tensord.workers.threads.cancellation import Cancellation
from tests.workers.programs.test_executables import model_of

KEY = ((3,), (2,))


def apply(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    a, b = inputs["a"], inputs["b"]
    return {"sum": parameters["scale"] * a + b.sum(), "largest": a.max(keepdims=True)}


def light(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Computes ``apply`` and about as much more as a call costs."""
    made = apply(parameters, inputs)
    square = jnp.outer(jnp.arange(100.0), jnp.arange(100.0)) + inputs["b"].sum()
    return made | {"largest": made["largest"] + 0 * jnp.sin(square).sum(keepdims=True)[0]}


def model(of: Apply = apply, size: int = 3, cache: ExecutableCache | None = None) -> JaxModel:
    return model_of(
        of,
        {"a": f"FP32[{size}]", "b": "FP32[2]"},
        {"sum": f"FP32[{size}]", "largest": "FP32[1]"},
        parameters={"scale": np.float32(3)},
        cache=cache,
    )


def series(made: JaxModel) -> tuple[GroupedCalls, Executable]:
    """Returns a model's grouped calls, and the executable that runs one of its requests."""
    assert made.grouped is not None
    ((_, shapes),) = made._buckets.planned()
    single = made.executables.find(Wanted(1, shapes))
    assert single is not None
    return made.grouped, single


def lengths_of(made: GroupedCalls) -> list[int]:
    """Returns how many requests go together, for each number of waiting requests from 0 to 11."""
    return [0 if program is None else program.rows for program in [made.find(KEY, waiting) for waiting in range(12)]]


@pytest.mark.parametrize(
    ("of", "lengths"),
    [
        (light, [0, 1, 2, 2, 4, 4, 4, 4, 8, 8, 8, 8]),
        # Rather in one call that is not full. Three are not worth one of four: with so few in flight, two batches keep client,
        # front and worker busy at a time.
        (apply, [0, 1, 2, 2, 4, 8, 8, 8, 8, 8, 8, 8]),
    ],
)
def test_how_many_go_together(of: Apply, lengths: list[int]) -> None:
    made, single = series(model(of))
    assert made.wants(single)
    assert lengths_of(made) == [0] * 12
    made.add(single, made.compile(single))
    assert lengths_of(made) == lengths
    assert not made.wants(single), "once"


def test_one_program_for_all_of_them() -> None:
    made, single = series(model())
    programs = made.compile(single)
    assert [program.rows for program in programs] == list(LENGTHS)
    assert len({program._program.call for program in programs}) == 1


def looping(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    made = apply(parameters, inputs)
    return made | {"sum": jax.lax.fori_loop(0, 5, lambda i, x: x + 1, made["sum"])}


def multiplying(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    square = jnp.outer(jnp.arange(200.0), jnp.arange(200.0)) + inputs["b"].sum()
    made = apply(parameters, inputs)
    return made | {"sum": made["sum"] + (square @ square).sum()}


@pytest.mark.parametrize(("of", "size"), [(looping, 3), (multiplying, 3), (apply, 1 << 14)])
def test_what_has_much_to_do_or_nobody_knows_how_much_goes_alone(of: Apply, size: int) -> None:
    made, single = series(model(of, size))
    assert not made.wants(single)


def test_shapes_that_are_known_at_load_have_their_programs_then_and_keep_them(tmp_path: Any) -> None:
    def traced(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        times.append(1)
        return apply(parameters, inputs)

    counts = []
    for _ in range(2):
        times: list[int] = []
        cache = ExecutableCache(CacheDirectory(tmp_path / "cache"))
        version = model(traced, cache=cache)
        before = len(times)
        version.prepare_grouped(Cancellation())
        counts.append(((cache.compiles.figures().cache_hits, cache.compiles.figures().count), len(times) - before))
        made, _ = series(version)
        assert lengths_of(made)[:4] == [0, 1, 2, 2]
    # One program for one request, and one for several; the second start traces nothing for these.
    assert counts == [((0, 2), 1), ((2, 0), 0)]


def test_what_is_not_compiled_any_more_is_forgotten() -> None:
    made, single = series(model())
    made.wants(single)
    made.add(single, made.compile(single))
    made.forget(KEY)
    assert lengths_of(made) == [0] * 12
    assert made.wants(single)
