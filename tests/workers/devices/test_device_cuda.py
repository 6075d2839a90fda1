"""A GPU worker's way through a model, over the tests' stand-in for the driver; XLA:CPU plays XLA on the GPU.

What it proves: which bytes are copied, from where to where, in which order. What XLA does on a GPU is for ``tests/gpu``.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import jax
import ml_dtypes
import numpy as np
import pytest

from tensord.config.options import Workers
from tensord.shm.arena import Arena
from tensord.shm.cuda_regions import CudaRegion, Driver
from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import PreparedAnswer, RegionSlice, RequestedOutput, Slice, placed
from tensord.workers.devices import device_cuda
from tensord.workers.devices.device_cuda import CudaDevice
from tensord.workers.devices.host_staging import StagingPool
from tensord.workers.devices.late_tensor import CudaTensor
from tensord.workers.devices.pinned_memory import PinnedBudget
from tensord.workers.dispatch.answers import complete
from tensord.workers.gpu.gpu import Gpu
from tensord.workers.models.execution import Execution
from tensord.workers.models.jax_model import JaxModel
from tensord.workers.programs.executable import Wanted
from tensord.workers.programs.executable_cache import ExecutableCache
from tensord.workers.programs.executables import Executables
from tensord.workers.programs.load_progress import LoadProgress
from tensord.workers.programs.placed_sets import placed_sets
from tensord.workers.tensors.buckets import Buckets
from tests.cuda_owner import CudaOwner
from tests.cuda_stub.library import CudaStub
from tests.workers.made_requests import ALane, request_of
from tests.workers.programs.test_executables import of

FP32 = np.dtype(np.float32)
MIB = 1 << 20


@pytest.fixture
def device(driver: Driver) -> Iterator[CudaDevice]:
    pieces = StagingPool(driver.context(0), PinnedBudget(MIB))
    made = CudaDevice(driver.context(0), jax.devices()[0], pieces)
    yield made
    made.close()
    pieces.close()


@pytest.fixture
def region(driver: Driver, cuda_owner: CudaOwner) -> Iterator[CudaRegion]:
    made = CudaRegion("g", driver.context(0), base64.b64decode(cuda_owner.create("g", 4 * MIB)), 4 * MIB)
    yield made
    made.close()


def model_of(
    device: CudaDevice,
    apply: Any,
    inputs: dict[str, str],
    outputs: dict[str, str],
    max_batch_size: int = 0,
    **more: Any,
) -> JaxModel:
    signature = of(inputs, outputs, max_batch_size)
    buckets = Buckets(signature, more.get("batch", (1,)), more.get("axes", {}))
    executables = Executables(
        signature, buckets, apply, placed_sets(signature, None, remote=True), ExecutableCache(None), b"", 4, Gpu(device)
    )
    model = JaxModel(1, signature, buckets, executables)
    executables.warm(LoadProgress("m", 1))
    return model


def run(model: JaxModel, *each: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Runs a batch; returns the results, and the bytes copied for the inputs."""
    requests = []
    for arrays in each:
        rows = next(iter(arrays.values())).shape[0] if model._signature.batches else 1
        requests.append(request_of(arrays, rows, model.key(arrays)))
    if model.find(requests) is None:
        model.executables.add(model.executables.compile(model.wanted_by(requests)))
    execution = Execution(requests, 0)
    model.execute(execution)
    return cast(Any, execution.results), execution.copied_byte_size


def twice(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return {"y": inputs["x"] * 2}


def test_an_aligned_region_is_used_where_it_lies(device: CudaDevice, region: CudaRegion, cuda_owner: CudaOwner) -> None:
    model = model_of(device, twice, {"x": "FP32[4]"}, {"y": "FP32[4]"}, 8, batch=(2,))
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    for changed in (values, -values):
        # Looked at when it is its turn, each time: what was there before is not remembered.
        cuda_owner.put("g", np.zeros(256, np.uint8), changed)
        (result,), copied = run(model, {"x": CudaTensor(region, 256, FP32, (2, 4))})
        assert copied == 0
        assert np.array_equal(result["y"], 2 * changed)


@pytest.mark.parametrize("rows", [2, 1 << 18])
def test_what_another_model_made_does_not_leave_the_device(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """A whole array is passed as it is; rows of it are copied on the device."""
    model = model_of(device, twice, {"x": "FP32[4]"}, {"y": "FP32[4]"}, rows, batch=(rows,))
    values = np.arange(4 * rows, dtype=np.float32).reshape(rows, 4)
    made = device.keep(jax.device_put(values))

    def leaves(*_: Any) -> None:
        raise AssertionError("it was copied to the host")

    def gathered(*each: Any) -> tuple[Any, int]:
        requests = [request_of({"x": array}, array.shape[0], model.key({"x": array})) for array in each]
        executable = model.find(requests)
        assert executable is not None
        with monkeypatch.context() as watched:
            watched.setattr(type(device.context), "to_host", leaves)
            arguments, copied = executable.gather(requests)
        return np.array(arguments["x"]), copied

    whole, copied = gathered(made)
    assert copied == 0
    assert np.array_equal(whole, values)
    cut, copied = gathered(made[1:2], made[:1])
    assert copied == 32
    assert np.array_equal(cut[:2], values[[1, 0]])


@pytest.mark.parametrize("offset", [4, 64, 128])
def test_less_aligned_ones_are_copied_once(
    device: CudaDevice, region: CudaRegion, cuda_owner: CudaOwner, offset: int
) -> None:
    model = model_of(device, twice, {"x": "FP32[4]"}, {"y": "FP32[4]"}, 8, batch=(2,))
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    cuda_owner.put("g", np.zeros(offset, np.uint8), values)
    (result,), copied = run(model, {"x": CudaTensor(region, offset, FP32, (2, 4))})
    assert copied == 32
    assert np.array_equal(result["y"], 2 * values)


def test_a_batch_of_both_memories(device: CudaDevice, region: CudaRegion, cuda_owner: CudaOwner) -> None:
    """Rows of three requests in one bucket of eight, of which two rows are padding; each gets its own rows back."""
    model = model_of(
        device,
        lambda parameters, inputs: {"y": inputs["x"] + inputs["x"].sum()},
        {"x": "FP32[4]"},
        {"y": "FP32[4]"},
        8,
        batch=(8,),
    )
    values = np.arange(24, dtype=np.float32).reshape(6, 4)
    cuda_owner.put("g", values)
    # Whatever lay in the staging buffer before.
    run(model, {"x": np.full((8, 4), 1e30, np.float32)})
    results, copied = run(
        model,
        {"x": CudaTensor(region, 0, FP32, (2, 4))},
        {"x": values[2:3]},
        {"x": CudaTensor(region, 48, FP32, (3, 4))},
    )
    assert copied == values.nbytes
    made = np.concatenate([np.asarray(result["y"]) for result in results])
    assert [result["y"].shape[0] for result in results] == [2, 1, 3]
    assert np.array_equal(made, values + values.sum())


def test_padded_axes(device: CudaDevice, region: CudaRegion, cuda_owner: CudaOwner) -> None:
    model = model_of(
        device,
        lambda parameters, inputs: {"y": inputs["x"] * 2, "s": inputs["x"].sum(axis=1, keepdims=True)},
        {"x": "FP32[s]"},
        {"y": "FP32[s]", "s": "FP32[1]"},
        4,
        batch=(4,),
        axes={"s": (8,)},
    )
    values = np.arange(10, dtype=np.float32).reshape(2, 5)
    cuda_owner.put("g", values)
    results, _ = run(model, {"x": CudaTensor(region, 0, FP32, (2, 5))}, {"x": 10 * values[:1]})
    assert np.array_equal(results[0]["y"], 2 * values)
    assert np.asarray(results[0]["s"]).ravel().tolist() == values.sum(axis=1).tolist()
    assert np.array_equal(results[1]["y"], 20 * values[:1])


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("INT64", np.array([2**40 + 5, -1], np.int64)),
        ("FP64", np.array([1e300, -0.5])),
        ("BF16", np.array([1.5, -2], ml_dtypes.bfloat16)),
        ("FP16", np.array([1.5, -2], np.float16)),
        ("UINT8", np.array([255, 3], np.uint8)),
        ("BOOL", np.array([True, False])),
    ],
)
@pytest.mark.parametrize("offset", [0, 8])
def test_datatypes(
    device: CudaDevice, region: CudaRegion, cuda_owner: CudaOwner, datatype: str, values: np.ndarray, offset: int
) -> None:
    """Nothing is narrowed; an input that is handed through is not overwritten by the next batch."""
    model = model_of(
        device, lambda parameters, inputs: {"y": inputs["x"]}, {"x": f"{datatype}[n]"}, {"y": f"{datatype}[n]"}
    )
    cuda_owner.put("g", np.zeros(offset, np.uint8), values.view(np.uint8))
    (first,), _ = run(model, {"x": CudaTensor(region, offset, values.dtype, values.shape)})
    (second,), _ = run(model, {"x": values[::-1].copy()})
    for result, expected in ((first, values), (second, values[::-1])):
        assert result["y"].dtype == values.dtype
        assert np.asarray(result["y"]).tolist() == expected.tolist()


def test_the_staging_buffer_grows(device: CudaDevice) -> None:
    model = model_of(device, twice, {"x": "FP32[n]"}, {"y": "FP32[n]"})
    for count in (10, 1 << 19, 3, 1 << 20, 7):
        values = np.random.default_rng(count).random(count, np.float32)
        (result,), copied = run(model, {"x": values})
        assert copied == values.nbytes
        assert np.array_equal(result["y"], 2 * values)
    assert "staging 4194304 bytes" in repr(device)


@pytest.mark.parametrize("count", [1, 5, 32])
def test_a_batch_of_small_requests_crosses_the_bus_together(
    device: CudaDevice, cuda_stub: CudaStub, count: int
) -> None:
    """One transfer of all inputs and one of all outputs, and a wait for each, for any number of requests; the rest is zeros."""

    def apply(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"sum": inputs["a"] + inputs["b"], "all": inputs["a"].sum(keepdims=True) + 0 * inputs["a"]}

    names = {"a": "FP32[3]", "b": "FP32[3]"}
    model = model_of(device, apply, names, {"sum": "FP32[3]", "all": "FP32[3]"}, 64, batch=(40,))
    each = [{name: np.random.default_rng(seed).random((1, 3), np.float32) for name in names} for seed in range(count)]
    run(model, *[{name: np.full((1, 3), 9, np.float32) for name in names}] * 40)
    before = cuda_stub.host(os.getpid())
    results, copied = run(model, *each)
    after = cuda_stub.host(os.getpid())
    assert (after.queued - before.queued, after.waited - before.waited) == (2, 2)
    assert after.other_copied == before.other_copied
    assert copied == count * 24
    total = np.concatenate([inputs["a"] for inputs in each]).sum(dtype=np.float32)
    for inputs, result in zip(each, results, strict=True):
        assert np.array_equal(result["sum"], inputs["a"] + inputs["b"])
        assert np.allclose(result["all"], total)


def test_gathered_by_others(device: CudaDevice, cuda_stub: CudaStub) -> None:
    """Bytes laid into an executable's memory are sent when it runs, and read in one wait."""
    model = model_of(device, twice, {"x": "FP32[4]"}, {"y": "FP32[4]"}, 8, batch=(2, 8))
    two, eight = (model.executables.made.get(Wanted(rows, ((4,),))) for rows in (2, 8))
    assert two is not None
    assert eight is not None
    for program in (two, eight, two):
        assert program.gathers
        values = np.random.default_rng(program.rows).random((program.rows, 4), np.float32)
        program.gathered["x"][...] = values
        before = cuda_stub.host(os.getpid())
        (made,) = program.run()
        after = cuda_stub.host(os.getpid())
        assert made == (2 * values).tobytes()
        assert (after.queued - before.queued, after.waited - before.waited) == (2, 2)
    both = model_of(
        device,
        lambda parameters, inputs: {"y": inputs["x"] * 2, "up": inputs["x"] > 0},
        {"x": "FP32[4]"},
        {"y": "FP32[4]", "up": "BOOL[4]"},
        8,
        batch=(2,),
    )
    program = both.executables.made.get(Wanted(2, ((4,),)))
    assert program is not None
    values = np.arange(-4, 4, dtype=np.float32).reshape(2, 4)
    program.gathered["x"][...] = values
    before = cuda_stub.host(os.getpid())
    made = program.run()
    after = cuda_stub.host(os.getpid())
    assert made == [(2 * values).tobytes(), (values > 0).tobytes()]
    assert (after.queued - before.queued, after.waited - before.waited) == (2, 2)
    large = model_of(device, twice, {"x": "FP32[100000]"}, {"y": "FP32[100000]"}, 8, batch=(2,))
    assert large.programs(((100000,),), 2) == [None, None]


def test_requests_that_share_a_call_cross_the_bus_together(device: CudaDevice, cuda_stub: CudaStub) -> None:
    """With their number among the inputs, and each gets what it gets alone."""
    model = model_of(device, twice, {"x": "FP32[4]"}, {"y": "FP32[4]"})
    single = model.executables.made.get(Wanted(1, ((4,),)))
    assert model.grouped is not None
    assert single is not None
    assert model.grouped.wants(single)
    programs = model.grouped.compile(single)
    assert [program.rows for program in programs] == [8, 4, 2, 1]
    for program in programs:
        each = [np.random.default_rng(seed).random(4, np.float32) for seed in range(program.rows)]
        execution = Execution([request_of({"x": x}, 1, ((4,),)) for x in each], 0, program)
        before = cuda_stub.host(os.getpid())
        model.execute(execution)
        after = cuda_stub.host(os.getpid())
        assert (after.queued - before.queued, after.waited - before.waited) == (2, 2)
        assert [cast(Any, result)["y"].tolist() for result in execution.results] == [(2 * x).tolist() for x in each]
        assert execution.runs == program.rows


def test_two_threads_do_not_gather_in_one_buffer(device: CudaDevice) -> None:
    """The loader's samples and the loop's requests have buffers of their own: arguments stay until they are used."""
    beside = device.beside()
    values = np.arange(8, dtype=np.float32)
    mine, _ = device.gather([("x", FP32, (8,), [values])])
    other, _ = beside.gather([("x", FP32, (8,), [-values])])
    assert np.array_equal(mine["x"], values)
    assert np.array_equal(other["x"], -values)
    beside.close()
    assert np.array_equal(mine["x"], values)


def test_memory_that_is_gone_costs_its_own_request(
    device: CudaDevice, region: CudaRegion, cuda_owner: CudaOwner
) -> None:
    model = model_of(device, twice, {"x": "FP32[4]"}, {"y": "FP32[4]"}, 8, batch=(2,))
    cuda_owner.destroy("g")
    with pytest.raises(InvalidArgument, match="its owner has freed it or is gone"):
        run(model, {"x": CudaTensor(region, 4, FP32, (2, 4))})
    (result,), _ = run(model, {"x": np.ones((2, 4), np.float32)})
    assert np.array_equal(result["y"], np.full((2, 4), 2))


def test_outputs_go_where_they_are_wanted(device: CudaDevice, region: CudaRegion, cuda_owner: CudaOwner) -> None:
    """To a region within the device, to the response arena and the record from it; all of it is there when it is announced."""
    model = model_of(
        device,
        lambda parameters, inputs: {"a": inputs["x"] * 2, "b": inputs["x"] * 3, "c": inputs["x"][:2]},
        {"x": "FP32[n]"},
        {"a": "FP32[n]", "b": "FP32[n]", "c": "FP32[m]"},
    )
    values = np.random.default_rng(1).random(1 << 17, np.float32)
    (result,), _ = run(model, {"x": values})
    arena = Arena(MIB, 4 * MIB, 0)
    wanted = {
        "a": RequestedOutput("a", RegionSlice("g", 64, values.nbytes)),
        "b": RequestedOutput("b"),
        "c": RequestedOutput("c"),
    }
    version = SimpleNamespace(version=1, signature=model._signature)
    request = request_of({}, outputs=wanted, version=version, submitter=ALane(arena))
    request.regions = [region]
    completion = complete(request, result, 4096)
    assert completion is not None
    assert np.array_equal(cuda_owner.get("g", np.float32, values.shape, 64), 2 * values)
    assert isinstance(completion.prepared, PreparedAnswer)
    places = {tensor.name: place for tensor, place in placed(completion.prepared.outputs, completion.contents)}
    assert isinstance(places["b"], Slice)
    view = arena.segments[places["b"].segment].view[places["b"].offset :][: values.nbytes]
    assert np.array_equal(np.frombuffer(view, np.float32), 3 * values)
    assert isinstance(places["c"], bytes)
    assert places["c"] == values[:2].tobytes()
    del view
    arena.close()


def test_what_xla_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    device_cuda.prepare_environment(Workers(gpu_memory_fraction=0.5, gpu_preallocate=False))
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.5"
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    device_cuda.prepare_environment(Workers(gpu_memory_fraction=0.9))
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.5"
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION")
    device_cuda.prepare_environment(Workers(gpu_memory_fraction=0.9, per_gpu=3))
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.3"
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.1")
    device_cuda.prepare_environment(Workers())
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ
