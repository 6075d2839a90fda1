"""Executables: gathered into buckets without mixing anything up, compiled once, found again, bounded in number."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.interpreters import pxla

from tensord.config.model_config import empty
from tensord.shm.arena import ALIGNMENT
from tensord.shm.errors import Internal, InvalidArgument
from tensord.workers.models import execution
from tensord.workers.models.execution import Execution
from tensord.workers.models.jax_model import JaxModel
from tensord.workers.processor.processor import Processor
from tensord.workers.processor.single_thread import SingleThreadDevice
from tensord.workers.programs.executable import Wanted
from tensord.workers.programs.executable_cache import ExecutableCache, cache_directory
from tensord.workers.programs.executables import Executables
from tensord.workers.programs.gather_buffer import aligned
from tensord.workers.programs.load_progress import LoadProgress
from tensord.workers.programs.lowering import Lowering
from tensord.workers.programs.placed_sets import placed_sets
from tensord.workers.programs.row_probe import probe
from tensord.workers.tensors.buckets import Buckets
from tensord.workers.tensors.signature import Signature, declare, parse_declaration, signature
from tests.generated import examples
from tests.workers.made_requests import request_of


def of(inputs: dict[str, str], outputs: dict[str, str], max_batch_size: int) -> Signature:
    message = empty("m")
    message.max_batch_size = max_batch_size
    declared = [{name: parse_declaration(name, text) for name, text in each.items()} for each in (inputs, outputs)]
    declare(message, *declared)
    return signature(message, {name: each.axes for group in declared for name, each in group.items()}, {})


def model_of(
    apply: Any,
    inputs: dict[str, str],
    outputs: dict[str, str],
    max_batch_size: int = 0,
    batch: tuple[int, ...] = (1,),
    axes: dict[str, tuple[int, ...]] | None = None,
    parameters: Any = None,
    cache: ExecutableCache | None = None,
    max_unexpected: int = 4,
    single_thread: SingleThreadDevice | None = None,
    rows_apart: bool = False,
) -> JaxModel:
    made = of(inputs, outputs, max_batch_size)
    buckets = Buckets(made, batch, axes or {})
    cache = cache or ExecutableCache(None)
    sets = placed_sets(made, parameters)
    device = Processor(single_thread)
    executables = Executables(made, buckets, apply, sets, cache, b"", max_unexpected, device, rows_apart=rows_apart)
    model = JaxModel(1, made, buckets, executables)
    executables.warm(LoadProgress("m", 1))
    return model


def run(model: JaxModel, *each: dict[str, Any], rows: tuple[int, ...] = (1,)) -> list[Any]:
    requests = [request_of(arrays, count, model.key(arrays)) for arrays, count in zip(each, rows, strict=True)]
    if model.find(requests) is None:
        model.executables.add(model.executables.compile(model.wanted_by(requests)))
    batch = Execution(requests, 0)
    model.execute(batch)
    return batch.results


def test_requests_of_a_failed_batch_run_alone_where_only_the_batch_has_a_program() -> None:
    """Each gets what it would have got alone, and not that its own program is missing."""

    def refuse(x: Any) -> Any:
        if (x < 0).any():
            raise ValueError("negative")
        return x

    def apply(_: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        x = inputs["x"]
        return {"y": jax.pure_callback(refuse, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + 1}

    model = model_of(apply, {"x": "FP32[s]"}, {"y": "FP32[s]"}, 4, (1, 2, 4))
    version: Any = SimpleNamespace(repeatable=True)
    arrays = [{"x": np.full((1, 3), value, np.float32)} for value in (1, -1, 2)]
    requests = [request_of(each, 1, model.key(each), version=version) for each in arrays]
    model.executables.add(model.executables.compile(model.wanted_by(requests)))
    assert model.find(requests[:1]) is None
    batch = Execution(requests, 0)
    execution.run(model, batch)
    first, second, third = batch.results
    assert (first["y"].tolist(), third["y"].tolist()) == ([[2.0] * 3], [[3.0] * 3])  # type: ignore[call-overload, index]
    assert isinstance(second, Internal)
    assert "LookupError" not in second.message


def masked_sum(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Computes each row's sum over its own sequence, and the sequence doubled."""
    return {"sum": (inputs["x"] * parameters).sum(axis=1, keepdims=True), "twice": inputs["x"] * 2}


@pytest.fixture(scope="module")
def sums() -> JaxModel:
    return model_of(
        masked_sum,
        {"x": "FP32[s]"},
        {"sum": "FP32[1]", "twice": "FP32[s]"},
        8,
        (1, 2, 4, 8),
        {"s": (4, 16)},
        np.float32(3),
    )


@settings(deadline=None, max_examples=examples(60))
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda rows: sum(rows) <= 8), st.data())
def test_every_request_of_a_batch_gets_its_own(sums: JaxModel, rows: list[int], data: st.DataObject) -> None:
    """Any rows and lengths that share a bucket: padding is zeros, and outputs come back in the lengths that were sent."""
    longest = data.draw(st.sampled_from([4, 16]))
    lengths = [data.draw(st.integers(1 if longest == 4 else 5, longest)) for _ in rows]
    rng = np.random.default_rng(sum(lengths))
    arrays = [rng.random((count, length), np.float32) for count, length in zip(rows, lengths, strict=True)]
    results = run(sums, *({"x": array} for array in arrays), rows=tuple(rows))
    for array, result in zip(arrays, results, strict=True):
        np.testing.assert_allclose(result["sum"], 3 * array.sum(axis=1, keepdims=True), rtol=1e-5)
        np.testing.assert_array_equal(result["twice"], 2 * array)


def test_planned_shapes_are_compiled_before(sums: JaxModel) -> None:
    assert all(sums.executables.find(Wanted(rows, ((s,),))) for rows in (1, 2, 4, 8) for s in (4, 16))
    assert sums.executables.limit(((16,),)) == 8
    assert sums.executables.limit(((17,),)) == 0


def test_axes_of_one_name_have_one_size() -> None:
    def both(_: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"y": inputs["a"] + inputs["b"]}

    model = model_of(both, {"a": "INT32[n]", "b": "INT32[n]"}, {"y": "INT32[n]"}, axes={"n": (4,)})
    assert run(model, {"a": np.arange(3, dtype=np.int32), "b": np.ones(3, np.int32)})[0]["y"].tolist() == [1, 2, 3]
    with pytest.raises(InvalidArgument, match="axis 'n' has size 2, 3 in another input"):
        model.key({"a": np.zeros(3, np.int32), "b": np.zeros(2, np.int32)})


def test_64_bit_elements_survive() -> None:
    def shift(_: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"y": inputs["x"] + jnp.int64(1)}

    model = model_of(shift, {"x": "INT64[2]"}, {"y": "INT64[2]"})
    assert run(model, {"x": np.array([2**40 + 4, -(2**62)])})[0]["y"].tolist() == [2**40 + 5, 1 - 2**62]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda p, i: {"y": i["x"].astype(jnp.int32)}, r"computed as INT32\[2\], declared as FP32\[2\]"),
        (lambda p, i: {"y": i["x"][:1]}, r"computed as FP32\[1\], declared as FP32\[2\]"),
        (lambda p, i: {"z": i["x"]}, "output 'y' is declared but not computed"),
        (lambda p, i: i["x"], "a dict of arrays is expected"),
    ],
)
def test_wrong_outputs_are_found_at_loading(made: Any, words: str) -> None:
    with pytest.raises(Internal, match=words):
        model_of(made, {"x": "FP32[2]"}, {"y": "FP32[2]"})


def test_the_oldest_unexpected_shape_makes_room() -> None:
    model = model_of(lambda p, i: {"y": i["x"]}, {"x": "FP32[n]"}, {"y": "FP32[n]"}, max_unexpected=2)
    for n in (1, 2, 1, 3):
        run(model, {"x": np.zeros(n, np.float32)})
    found = {n: model.executables.find(Wanted(1, ((n,),))) is not None for n in (1, 2, 3)}
    assert found == {1: True, 2: False, 3: True}


def test_an_aligned_single_request_is_not_copied(sums: JaxModel) -> None:
    executable = sums.executables.find(Wanted(2, ((16,),)))
    assert executable is not None
    whole = aligned((2, 16), np.dtype(np.float32))
    arguments, copied = executable.gather([request_of({"x": whole}, 2)])
    assert arguments["x"] is whole
    assert copied == 0


def test_a_large_unaligned_request_is_copied_once_by_us() -> None:
    model = model_of(lambda p, i: {"y": i["x"] + 1}, {"x": "FP32[4096]"}, {"y": "FP32[4096]"})
    memory = aligned((4097,), np.dtype(np.float32))
    memory[:] = 5
    batch = Execution([request_of({"x": memory[1:]}, key=((4096,),))], 0)
    model.execute(batch)
    assert batch.copied_byte_size == 4096 * 4
    (result,) = batch.results
    assert isinstance(result, dict)
    assert set(result["y"].tolist()) == {6}


def test_aligned() -> None:
    for shape in ((), (3,), (5, 0), (7, 9)):
        array = aligned(shape, np.dtype(np.float64))
        assert array.shape == shape
        assert array.size == 0 or array.__array_interface__["data"][0] % ALIGNMENT == 0


def test_a_second_start_finds_everything_in_the_cache(tmp_path: Path) -> None:
    """A model that closes over something else, or names parameters otherwise, does not find the first one's executables."""
    folder = cache_directory(str(tmp_path / "cache"))

    def start(constant: float, name: str = "w") -> tuple[ExecutableCache, float]:
        cache = ExecutableCache(folder)

        def apply(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
            return {"y": inputs["x"] * parameters[name] + constant}

        model = model_of(
            apply, {"x": "FP32[2]"}, {"y": "FP32[2]"}, 4, (1, 4), parameters={name: np.float32(2)}, cache=cache
        )
        return cache, float(run(model, {"x": np.ones((1, 2), np.float32)})[0]["y"][0, 0])

    first, value = start(1.0)
    assert (first.compiles.figures().cache_hits, first.compiles.figures().count, value) == (0, 2, 3.0)
    second, value = start(1.0)
    assert (second.compiles.figures().cache_hits, second.compiles.figures().count, value) == (2, 0, 3.0)
    third, value = start(5.0)
    assert (third.compiles.figures().cache_hits, third.compiles.figures().count, value) == (0, 2, 7.0)
    fourth, value = start(5.0, "scale")
    assert (fourth.compiles.figures().cache_hits, fourth.compiles.figures().count, value) == (0, 2, 7.0)


def test_what_is_known_of_rows_is_kept_with_the_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second start neither asks the programs again nor traces more of them: the first one is part of the key."""
    folder = cache_directory(str(tmp_path / "cache"))
    asked: list[int] = []
    traced: list[int] = []
    lower = Lowering.lower

    def probed(signature: Any, executables: Any, *others: Any) -> str | None:
        asked.extend(each.rows for each in executables)
        return probe(signature, executables, *others)

    def lowered(self: Lowering, rows: int, *others: Any) -> Any:
        traced.append(rows)
        return lower(self, rows, *others)

    monkeypatch.setattr("tensord.workers.programs.executables.probe", probed)
    monkeypatch.setattr(Lowering, "lower", lowered)

    def start() -> tuple[list[int], list[int]]:
        asked.clear()
        traced.clear()
        apply = lambda _, inputs: {"y": jnp.sin(inputs["x"])}  # noqa: E731
        shapes = {"x": "FP32[3]"}, {"y": "FP32[3]"}
        model = model_of(apply, *shapes, 4, (1, 2, 4), cache=ExecutableCache(folder), rows_apart=True)
        assert run(model, {"x": np.zeros((1, 3), np.float32)})
        return sorted(traced), list(asked)

    # The first program is traced twice, to be compared.
    assert start() == ([1, 1, 2, 4], [2, 1])
    assert start() == ([1], [])
    for note in (tmp_path / "cache").glob("*.rows"):
        note.unlink()
    assert start() == ([1, 2], [2, 1])


def test_postponed_programs_are_tried_with_the_first_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it takes one row. The program that is tried then serves later batches, and the next start tries nothing."""
    compiled: list[int] = []
    compile_it = Executables._compile

    def counted(self: Executables, wanted: Wanted, lowered: Any) -> Any:
        compiled.append(wanted.rows)
        return compile_it(self, wanted, lowered)

    monkeypatch.setattr(Executables, "_compile", counted)

    def start(*rows: int) -> list[int]:
        made = of({"x": "FP32[3]"}, {"y": "FP32[3]"}, 4)
        buckets, cache = Buckets(made, (1, 2, 4), {}), ExecutableCache(cache_directory(str(tmp_path / "cache")))
        apply = lambda _, inputs: {"y": jnp.sin(inputs["x"])}  # noqa: E731
        sets, device = placed_sets(made, None), Processor(None)
        executables = Executables(made, buckets, apply, sets, cache, b"", 4, device, rows_apart=True)
        executables.postpone(buckets)
        compiled.clear()
        for each in rows:
            executables.add(executables.compile(Wanted(each, ((3,),))))
        return sorted(compiled)

    for rows in ((1,), (1, 2, 4)):
        assert start(*rows) == [1, 2, 4][: len(rows) + 1]
        assert start(1) == [1]
        for note in (tmp_path / "cache").glob("*.rows"):
            note.unlink()
    assert start(4, 1) == [1, 4]


def test_a_function_whose_rows_mix_is_refused_each_time(tmp_path: Path) -> None:
    folder = cache_directory(str(tmp_path / "cache"))

    def centred(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"z": inputs["x"] * 2, "y": inputs["x"] - inputs["x"].mean(0)}

    for cache in (ExecutableCache(folder), ExecutableCache(folder)):
        with pytest.raises(Internal) as caught:
            model_of(
                centred, {"x": "FP32[3]"}, {"y": "FP32[3]", "z": "FP32[3]"}, 4, (1, 4), cache=cache, rows_apart=True
            )
        assert re.match(
            r"model 'm': a row of output 'y' depends on the other rows of its batch: generated inputs gave -?[\d.e-]+ and "
            r"-?[\d.e-]+ for the same row; probably by reduce_sum \(test_executables.py, line \d+, in centred\)",
            caught.value.message,
        )


@pytest.mark.parametrize("error", [ValueError("for now"), MemoryError()])
def test_a_program_that_failed_as_its_rows_were_tried_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """At the next start, or with the next shape: nothing is noted of its rows. It serves meanwhile."""
    cache = ExecutableCache(cache_directory(str(tmp_path / "cache")))
    compiled: list[Wanted] = []
    compile_it = Executables._compile

    def counted(self: Executables, wanted: Wanted, lowered: Any) -> Any:
        compiled.append(wanted)
        return compile_it(self, wanted, lowered)

    def start(axis: str) -> JaxModel:
        def centred(_: Any, inputs: dict[str, Any]) -> dict[str, Any]:
            return {"y": inputs["x"] - inputs["x"].mean(0)}

        shapes = {"x": f"FP32[{axis}]"}, {"y": f"FP32[{axis}]"}
        return model_of(centred, *shapes, 4, (1, 4), cache=cache, rows_apart=True)

    def failing(*_: Any) -> str | None:
        raise error

    monkeypatch.setattr(Executables, "_compile", counted)
    with monkeypatch.context() as patched:
        patched.setattr("tensord.workers.programs.executables.probe", failing)
        assert run(start("3"), {"x": np.zeros((1, 3), np.float32)})
        model = start("-1")
        compiled.clear()
        for rows, size in ((1, 3), (1, 3), (1, 5), (4, 5)):
            model.executables.compile(Wanted(rows, ((size,),)))
        assert [(each.rows, *each.shapes[0]) for each in compiled] == [(4, 3), (1, 3), (1, 3), (4, 5), (1, 5)]
    mixes = r"model 'm': a row of output 'y' depends on the other rows"
    with pytest.raises(Internal, match=mixes):
        model.executables.compile(Wanted(1, ((7,),)))
    with pytest.raises(Internal, match=mixes):
        start("3")


@pytest.mark.parametrize("rows", [1, 2])
def test_rows_that_mix_in_a_shape_without_a_bucket_are_found_when_a_batch_first_has_one(rows: int) -> None:
    model = model_of(
        lambda _, inputs: {"y": inputs["x"] - inputs["x"].mean(0)},
        {"x": "FP32[-1]"},
        {"y": "FP32[-1]"},
        4,
        (1, 2, 4),
        rows_apart=True,
    )
    for size in (3, 5):
        with pytest.raises(Internal, match=r"model 'm': a row of output 'y' depends on the other rows"):
            model.executables.compile(Wanted(rows, ((size,),)))
    good = model_of(
        lambda _, inputs: {"y": -inputs["x"]}, {"x": "FP32[-1]"}, {"y": "FP32[-1]"}, 4, (1, 2, 4), rows_apart=True
    )
    for size in (3, 5):
        assert good.executables.compile(Wanted(rows, ((size,),))).wanted == Wanted(rows, ((size,),))
    assert not good.executables._rows_apart


def test_what_was_traced_is_given_back() -> None:
    """JAX keeps it for as long as the function lives that it was traced from: megabytes for each program."""
    kept = pxla._cached_lowering_to_hlo.cache_info
    gc.collect()
    before = kept().currsize
    model = model_of(lambda _, inputs: {"y": jnp.sin(inputs["x"])}, {"x": "FP32[3]"}, {"y": "FP32[3]"}, 8, (1, 2, 4, 8))
    gc.collect()
    assert kept().currsize == before
    assert run(model, {"x": np.zeros((1, 3), np.float32)})


def test_a_function_is_traced_twice_unless_an_earlier_start_did(tmp_path: Path) -> None:
    """One that differs is compiled again at every start, and found to differ."""
    traced: list[int] = []

    def started(function: Any) -> str:
        traced.clear()

        def apply(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
            traced.append(inputs["x"].shape[0])
            return {"y": inputs["x"] * function(len(traced))}

        cache = ExecutableCache(cache_directory(str(tmp_path)))
        return model_of(apply, {"x": "FP32[4]"}, {"y": "FP32[4]"}, 8, (1, 8), cache=cache).executables.examined[0]

    assert (started(lambda count: 2.0), traced) == ("", [1, 1, 8])
    assert (started(lambda count: 2.0), traced) == ("", [1])
    for _ in range(2):
        assert started(float).startswith("its function is another one each time that it is traced")
        assert traced == [1, 1, 8]
