"""Asking a program about its rows: it is found out if they mix, and never accused if they do not, whatever its numbers are."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tensord.shm.arrays import datatype_of
from tensord.shm.errors import Internal
from tensord.workers.programs.executable import Wanted
from tensord.workers.programs.row_probe import find_fault, probe, rows_apart
from tensord.workers.tensors.signature import Signature, TensorSpec
from tests.generated import times
from tests.workers.programs.row_corpus import MIXED, ROW_WISE, Case

_SINGLE, _BFLOAT16 = 2.0**-23, 2.0**-7
#: In ordinary runs every third function is asked.
_EACH = times(1, 3)


def spec(name: str, dtype: np.dtype[Any], dims: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(name, datatype_of(dtype) or "", dtype, dims, dims, (None,) * len(dims))


def asked(case: Case, rows: int) -> tuple[str | None, str]:
    """Asks a compiled function of the corpus. Returns what was found, and the error that says so."""
    inputs = {name: spec(name, dtype, shape[1:]) for name, dtype, shape in case.inputs(rows)}
    executables, traced = {}, {}
    for count in (1, rows):
        arguments = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype, shape in case.inputs(count)}
        traced[count] = jax.jit(lambda _, given: case.apply(given)).trace((), arguments)
        call, shapes = traced[count].lower().compile(), tuple(each.dims for each in inputs.values())
        executables[count] = SimpleNamespace(
            wanted=Wanted(count, shapes),
            rows=count,
            call=call,
            program=call,
            parameters=tuple,
            sets=SimpleNamespace(stack=None),
        )
    outputs = {name: spec(name, np.dtype(made.dtype), made.shape[1:]) for name, made in traced[rows].out_info.items()}
    both: Any = [executables[rows], executables[1]]
    found: list[str | None] = []

    def ask() -> str | None:
        found.append(probe(Signature("m", inputs, outputs, 8), both, traced[rows], False, lambda: None))
        return found[0]

    try:
        apart = rows_apart("m", ask, lambda: None, traced[rows], rows, "batch", "")
        assert apart == bool(found), "one that fails has shown nothing"
    except Internal as error:
        return next(iter(found)), error.message
    return next(iter(found), "it fails"), ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ROW_WISE[::_EACH], ids=lambda case: case.name)
def test_no_row_wise_function_is_accused(case: Case) -> None:
    assert asked(case, 5)[0] is None


#: Functions whose rows depend on their place in the batch or on its number of rows, but not on the other rows' values.
_ELSEWHERE = {"one_noise": "place", "dropout": "place", "positions_of_rows": "place", "by_number_of_rows": "number"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", MIXED[::_EACH], ids=lambda case: case.name)
def test_functions_that_mix_rows_are_found_out(case: Case) -> None:
    found, message = asked(case, 5)
    assert found is not None
    one, other = re.fullmatch(
        r"a row of output 'y\d' depends on .+: generated inputs gave (\S+) and (\S+) .+", found
    ).groups()
    assert one != other
    assert _ELSEWHERE.get(case.name, "") in found
    assert message.startswith(f"model 'm': {found}")
    assert "rows_may_mix = True" in message


def test_programs_that_call_pure_python_are_asked() -> None:
    def called(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        # XLA does not know the work of a program that does nothing else, so that is not asked.
        return lambda x: 2 * jax.pure_callback(function, jax.typeof(x), x, vmap_method="expand_dims")

    def refuses(x: Any) -> Any:
        if (x > 0).any():
            raise ValueError("too large")
        return x

    def checked(x: Any) -> Any:
        """Checks as equinox.error_if does, and always fails."""
        return jax.lax.cond((x > 0).any(), called(refuses), lambda x: x, x) * 2

    def decays(x: Any) -> Any:
        return jax.lax.while_loop(lambda c: c[0] < 1000, lambda c: (c[0] + 1, c[1] * 0.999), (0, x))

    correct: list[Callable[[Any], Any]] = [
        called(np.sin), checked, lambda x: checked(decays(x)[1]),
    ]  # fmt: skip
    mixing: list[Callable[[Any], Any]] = [
        called(lambda x: x - np.mean(x, 0)), called(lambda x: np.sin(x) / len(x)), lambda x: called(np.sin)(x - x.mean(0)),
        lambda x: checked(x - x.mean(0)), lambda x: checked(decays(x)[1] - x.mean(0)),
    ]  # fmt: skip
    for at, function in enumerate(correct):
        assert asked(Case(f"correct {at}", function, (((3,), np.float32),)), 5) == (None, "")
    for at, function in enumerate(mixing):
        assert asked(Case(f"mixing {at}", function, (((3,), np.float32),)), 5)[1], at
    for refusing in (called(refuses), jax.vmap(checked)):  # which computes both branches
        # A run that fails says nothing.
        assert asked(Case("refuses", refusing, (((3,), np.float32),)), 5) == ("it fails", "")


def of(function: Callable[[Any], Any], dtype: Any = np.float32, epsilon: float = _SINGLE) -> str | None:
    """Asks a function of numpy's arrays."""
    run = lambda given: {"y": np.asarray(function(given["x"]))}  # noqa: E731
    return find_fault(dict.fromkeys((4, 1), run), [("x", np.dtype(dtype), (4, 3))], 4, epsilon)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_coarse_numbers_are_no_fault_and_no_excuse(dtype: Any) -> None:
    shifted = lambda x: jnp.exp(x - x.max()) / jnp.exp(x - x.max()).sum(1, keepdims=True)  # noqa: E731
    assert of(shifted, dtype, _BFLOAT16) is None
    assert of(lambda x: x - x.mean(0), dtype, _BFLOAT16) is not None


def test_what_is_not_finite_says_nothing() -> None:
    assert of(lambda x: np.log(x) / 0) is None
    assert of(lambda x: np.where(x > 0, np.nan, x)) is None
    assert of(lambda x: np.full(x.shape, np.nan) * x.sum()) is None


def test_noise_says_nothing() -> None:
    draws, calls = np.random.default_rng(), itertools.count()
    assert of(lambda x: draws.normal(size=x.shape)) is None
    assert of(lambda x: draws.integers(0, 9, x.shape)) is None
    assert of(lambda x: np.full(x.shape, next(calls))) is None
    # Sums in another order each time, as a GPU may have them.
    assert of(lambda x: x + draws.normal(size=x.shape) * 1e-6) is None


def test_what_another_program_rounds_otherwise_says_nothing() -> None:
    """Programs for other numbers of rows compute with other code, in which a sum may be a little more and a whole number jump."""
    assert of(lambda x: x * (1 + 1e-6 * len(x))) is None
    jumps = np.arange(300) == 7
    assert of(lambda x: np.repeat(x, 100, 1) + (jumps if len(x) == 1 else 0)) is None
    assert of(lambda x: x * (1 + 0.01 * len(x))) is not None


def test_rows_without_elements_and_single_numbers_are_compared() -> None:
    assert of(lambda x: np.zeros((len(x), 0))) is None
    assert of(lambda x: x[:, 0] * 2) is None
    assert of(lambda x: x[:, 0] - x[0, 0]) is not None
    assert of(lambda x: x > x.mean(0)) is not None
    assert of(lambda x: x + 1j * x[::-1]) is not None


def test_a_difference_has_to_show_each_time() -> None:
    """A function whose result jumps now and then, for another reason than the rows beside it, is not accused."""
    calls = itertools.count()
    assert of(lambda x: x + (next(calls) == 3)) is None


def test_inputs_are_small_integers_and_ordinary_numbers() -> None:
    seen: list[Any] = []
    inputs = [
        ("i", np.dtype(np.uint8), (2, 50)),
        ("b", np.dtype(np.bool_), (2, 50)),
        ("w", jnp.dtype("bfloat16"), (2, 50)),
    ]

    def run(given: Mapping[str, Any]) -> dict[str, Any]:
        seen.append(given)
        return {"y": given["w"]}

    assert find_fault({2: run}, inputs, 2, _SINGLE) is None
    for given in seen:
        assert given["i"].dtype == np.uint8
        assert given["i"].max() < 4
        assert given["b"].dtype == np.bool_
        assert given["w"].dtype == jnp.dtype("bfloat16")
        assert np.abs(given["w"].astype(float)).max() < 10
    # Once as it is, one row at each end beside others and zeros, and all at other places.
    assert len(seen) == 6
