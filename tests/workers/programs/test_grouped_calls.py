"""Grouped calls: made of what is light and small, found by how many wait; each request gets, bit by bit, what it gets alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tensord.shm.arrays import DTYPES, Array
from tensord.workers.models.execution import Execution
from tensord.workers.models.jax_model import JaxModel
from tensord.workers.programs.cache_directory import CacheDirectory
from tensord.workers.programs.executable import Executable, Wanted
from tensord.workers.programs.executable_cache import ExecutableCache
from tensord.workers.programs.executables import Apply
from tensord.workers.programs.grouped_calls import LENGTHS, GroupedCalls, GroupedProgram, GroupedProgramMaker
from tensord.workers.requests.request import Request
from tensord.workers.threads.cancellation import Cancellation
from tests.records import Tensor, WholeRequest
from tests.workers.made_requests import request_of
from tests.workers.programs.test_executables import model_of, run

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


RNG = np.random.default_rng(5)
WEIGHTS = RNG.standard_normal((33, 17), np.float32)
_OTHERS = pytest.mark.release(
    "an ordinary run has the longest and one that is shorter, whose programs are compiled as well"
)


def scaled(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return {"y": inputs["a"] * parameters["w"][:, 0] + inputs["b"].sum(), "z": inputs["b"].max(keepdims=True)}


def product_and_sum(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Computes products and sums whose rounding depends on what else is compiled with them."""
    product = inputs["a"] * inputs["b"]
    return {"y": product, "z": product + inputs["c"], "w": jnp.sin(product) * inputs["c"] + product}


def normalised(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    a = inputs["a"]
    y = (a - a.mean()) / jnp.sqrt(a.var() + 1e-5) * inputs["b"] + inputs["c"]
    return {"y": y, "s": jax.nn.softmax(y), "v": a.var(), "kept": a * inputs["b"]}


def layers(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    w = parameters["w"]
    hidden = jnp.tanh((inputs["a"] + inputs["b"]) @ w)
    return {"y": hidden @ w.T, "z": jnp.dot(inputs["a"], inputs["b"]), "o": jnp.outer(inputs["c"], inputs["a"]) @ w}


def kinds(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    n, half, flag, one = inputs["n"], inputs["h"], inputs["t"], inputs["one"]
    return {
        "flag": ~flag,
        "n": n * 3 + (1 << 40),
        "h": half * half + half,
        "one": one + n.sum().astype(jnp.float32),
        "none": jnp.zeros((0, 2), jnp.int64),
        "d": jnp.where(flag, one.astype(jnp.float64) * 1.1, n[:2].astype(jnp.float64)),
    }


def nothing_in(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return {"y": parameters["w"][0] * 2}


def empty_in(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return {"y": inputs["e"] * 2, "s": inputs["e"].sum() + inputs["a"]}


THREE = {"a": "FP32[33]", "b": "FP32[33]", "c": "FP32[33]"}
MODELS: dict[str, tuple[Apply, dict[str, str], dict[str, str]]] = {
    "scaled": (scaled, {"a": "FP32[33]", "b": "FP32[2]"}, {"y": "FP32[33]", "z": "FP32[1]"}),
    "product-and-sum": (product_and_sum, THREE, {"z": "FP32[33]", "y": "FP32[33]", "w": "FP32[33]"}),
    "undeclared-output": (product_and_sum, THREE, {"z": "FP32[33]"}),
    "normalised": (normalised, THREE, {"y": "FP32[33]", "v": "FP32[]", "s": "FP32[33]"}),
    "layers": (layers, THREE, {"y": "FP32[33]", "z": "FP32[]", "o": "FP32[33,17]"}),
    "kinds": (
        kinds,
        {"n": "INT64[3]", "h": "INT16[4]", "t": "BOOL[2]", "one": "FP32[]"},
        {"flag": "BOOL[2]", "n": "INT64[3]", "h": "INT16[4]", "one": "FP32[]", "none": "INT64[-1,2]", "d": "FP64[2]"},
    ),
    "nothing-in": (nothing_in, {}, {"y": "FP32[17]"}),
    "empty-in": (empty_in, {"e": "FP32[-1,3]", "a": "FP32[1]"}, {"y": "FP32[-1,3]", "s": "FP32[1]"}),
}


def some(model: JaxModel) -> dict[str, Array]:
    made: dict[str, Array] = {}
    for spec in model._signature.inputs.values():
        values = RNG.standard_normal([max(0, dim) for dim in spec.dims]) * 10
        made[spec.name] = np.asarray(values > 0 if spec.datatype == "BOOL" else values).astype(spec.dtype)
    return made


def in_record(arrays: dict[str, Array], key: object) -> Request:
    """Returns a request as validation makes it when it knows its kind: with the tensors' bytes."""
    made = request_of({}, key=None)
    names = {dtype: name for name, dtype in DTYPES.items()}
    tensors = [Tensor(n, names[a.dtype], a.shape, a.tobytes()) for n, a in arrays.items()]
    contents = {name: array.tobytes() for name, array in arrays.items()}
    own = WholeRequest(1, "m", 0, tuple(tensors))
    return Request(made.version, made.submitter, own.prepared, own.record, key, 1, None, {}, [], 1, 0, contents)


def program_of(model: JaxModel, length: int) -> GroupedProgram:
    program = asked_of(model, length)
    assert program is not None
    return program


def asked_of(model: JaxModel, length: int) -> GroupedProgram | None:
    assert model.grouped is not None
    single = single_of(model, some(model))
    return next(iter(model.grouped.compile(single, lengths=[length])), None)


def single_of(model: JaxModel, given: dict[str, Array]) -> Executable:
    """Returns the executable that runs such requests one by one."""
    run(model, given)
    single = model.executables.find(Wanted(1, model.key(given)))
    assert single is not None
    return single


@pytest.mark.parametrize("one_for_each", [False, True], ids=["any-number", "one-for-each-number"])
@pytest.mark.parametrize(
    "lengths", [LENGTHS[::2], pytest.param(LENGTHS[1::2], marks=_OTHERS)], ids=lambda each: "-".join(map(str, each))
)
@pytest.mark.parametrize("name", MODELS)
def test_each_request_gets_what_it_would_get_alone(
    name: str, lengths: tuple[int, ...], one_for_each: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a GPU, whose own compiler tests/gpu asks the same.
    monkeypatch.setattr(GroupedProgramMaker, "one_for_each", one_for_each)
    apply, inputs, outputs = MODELS[name]
    model = model_of(apply, inputs, outputs, parameters={"w": WEIGHTS})
    for length in lengths:
        program = program_of(model, length)
        for round_ in range(6):
            # Not always full: then it holds what the round before left.
            count = max(1, length - round_ % 2)
            given = [some(model) for _ in range(count)]
            whole = sum([array.nbytes for array in given[0].values()])
            requests = [
                in_record(one, model.key(one)) if (i + round_) % 2 else request_of(one, key=model.key(one))
                for i, one in enumerate(given)
            ]
            together = Execution(requests, 0, program)
            model.execute(together)
            assert together.copied_byte_size == count * whole
            assert together.runs == count
            assert together.outputs is not None
            for i, one in enumerate(given):
                (expected,), result = run(model, one), together.results[i]
                assert isinstance(expected, dict)
                assert isinstance(result, dict)
                assert list(result) == list(expected) == list(outputs)
                for output, values in expected.items():
                    assert (result[output].dtype, result[output].shape) == (values.dtype, values.shape)
                    assert result[output].tobytes() == values.tobytes(), (output, length)
                # What small answers are cut from.
                for tensor, datatype, number, start, step, size, shape in together.outputs.layout.outputs:
                    assert together.outputs.contents[number][start + i * step :][:size] == expected[tensor].tobytes()
                    assert (DTYPES[datatype], shape) == (expected[tensor].dtype, expected[tensor].shape)


@pytest.mark.parametrize(
    ("datatype", "inside"), [("FP16", None), ("BF16", None), ("FP32", jnp.bfloat16), ("FP32", jnp.float16)]
)
def test_none_of_models_that_round_to_fewer_bits(datatype: str, inside: Any) -> None:
    """Inside a loop XLA rounds elsewhere, where the processor has instructions for such numbers."""

    def apply(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        a = inputs["a"] if inside is None else jax.jit(lambda a: a.astype(inside))(inputs["a"])
        return {"y": (a * a + a).astype(inputs["a"].dtype)}

    model = model_of(apply, {"a": f"{datatype}[4]"}, {"y": f"{datatype}[4]"}, parameters={})
    assert asked_of(model, 2) is None


def test_one_argument_and_one_result_for_each_dtype() -> None:
    for name, arguments, results in (("scaled", 1, 1), ("kinds", 4, 5), ("nothing-in", 0, 1)):
        apply, inputs, outputs = MODELS[name]
        program = program_of(model_of(apply, inputs, outputs, parameters={"w": WEIGHTS}), 2)
        # And how many requests there are.
        assert len(program._memory.send(2)) == arguments + 1
        assert len(program.run()) == results


def test_an_input_that_may_be_left_out() -> None:
    def apply(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"y": inputs["a"] * 2 if "b" not in inputs else inputs["a"] + inputs["b"]}

    model = model_of(apply, {"a": "FP32[2]", "b": "FP32[2]"}, {"y": "FP32[2]"}, parameters={})
    assert model.grouped is not None
    single = model.executables.compile(Wanted(1, ((2,), None)))
    (program,) = model.grouped.compile(single, lengths=[2])
    requests = [request_of({"a": np.full(2, i, np.float32)}) for i in (3, 4)]
    assert program.gather(requests) == 16
    assert [one["y"].tolist() for one in program.split(program.run()) if isinstance(one, dict)] == [[6, 6], [8, 8]]
