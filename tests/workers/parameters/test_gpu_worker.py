"""Parameters are exchanged in a GPU worker, over the tests' stand-in for the driver; XLA:CPU plays XLA on the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tensord.shm.cuda_regions import Driver
from tensord.workers.devices.device_cuda import CudaDevice
from tensord.workers.devices.host_staging import StagingPool
from tensord.workers.devices.pinned_memory import PinnedBudget
from tensord.workers.gpu.gpu import Gpu
from tensord.workers.models.execution import Execution
from tensord.workers.models.jax_model import JaxModel
from tensord.workers.parameters.device_room import DeviceRoom
from tensord.workers.parameters.parameter_set import ParameterSet
from tensord.workers.parameters.set_stack import SetDeclaration
from tensord.workers.programs.executable_cache import ExecutableCache
from tensord.workers.programs.executables import Executables
from tensord.workers.programs.load_progress import LoadProgress
from tensord.workers.programs.placed_sets import placed_sets
from tensord.workers.scheduling.queue import SetKey
from tensord.workers.tensors.buckets import Buckets
from tests.cuda_stub.library import CudaStub
from tests.workers.made_requests import request_of
from tests.workers.parameters.pushing import numbered
from tests.workers.programs.test_executables import of

ROOM = 3 * 32


@pytest.fixture
def device(cuda_stub: CudaStub) -> Iterator[CudaDevice]:
    driver = Driver()
    pieces = StagingPool(driver.context(0), PinnedBudget(1 << 20))
    device = CudaDevice(driver.context(0), jax.devices()[0], pieces)
    yield device
    device.close()
    pieces.close()
    driver.close()


@pytest.fixture
def model(device: CudaDevice) -> JaxModel:

    def apply(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"y": inputs["x"] + jnp.concatenate([parameters["w"], parameters["deep"][0]["v"]])}

    signature = of({"x": "FP32[8]"}, {"y": "FP32[8]"}, 8)
    buckets = Buckets(signature, (1, 8), {})
    zeros = np.zeros(4, np.float32)
    parameters = {"w": zeros, "deep": [{"v": zeros}]}
    sets = placed_sets(signature, parameters, room=DeviceRoom(ROOM), remote=True)
    executables = Executables(signature, buckets, apply, sets, ExecutableCache(None), b"", 4, Gpu(device))
    made = JaxModel(1, signature, buckets, executables)
    executables.warm(LoadProgress("m", 1))
    return made


def push(model: JaxModel, number: int, name: str = "main") -> None:
    """Pushes parameters as the worker does, in one thread."""
    made = ParameterSet(model.sets, name, number, model.sets.leaves.fitted(numbered(number), "these"))
    model.sets.staged.add(made)
    made.prepare()
    former = model.sets.commit(made).leaves
    if former is not None:
        former.hosted()
        former.leave()


def run(model: JaxModel, rows: int, name: str | None = None) -> tuple[float, int]:
    """Runs a batch; returns the one value in all outputs, and the bytes copied for its inputs."""
    requests = []
    for _ in range(rows):
        arrays = {"x": np.zeros((1, 8), np.float32)}
        key = model.key(arrays)
        request = request_of(arrays, 1, key if name is None else SetKey(key, name))
        request.chosen = name
        requests.append(request)
    execution = Execution(requests, 0)
    model.execute(execution)
    (value,) = {each for result in execution.results for each in np.asarray(result["y"]).ravel().tolist()}
    return value, execution.copied_byte_size


def test_every_answer_is_of_one_set_and_no_input_is_copied_once_more(model: JaxModel) -> None:
    assert run(model, 8) == (0, 8 * 32)
    for number in range(1, 100):
        push(model, number)
        for rows in (1, 8):
            assert run(model, rows) == (number, rows * 32)
    assert (model.sets.pushes, model.sets.misses, model.sets.evictions) == (99, 0, 0)


def test_sets_leave_the_device_and_come_back(model: JaxModel) -> None:
    for number in range(1, 6):
        push(model, number, f"c{number}")
    for _ in range(3):
        for number in range(1, 6):
            assert run(model, 8, f"c{number}") == (number, 8 * 32)
    assert model.sets.room.byte_size == ROOM
    assert (model.sets.misses, model.sets.evictions) == (15, 17)


def test_what_left_the_device_is_page_locked(model: JaxModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes back from there, not from the memory that was pushed; beyond what may be locked that is where it comes from."""
    sets, room = model.sets, model.sets.room
    room.pinned = PinnedBudget(4 * 32)
    given: list[set[str]] = []
    place = sets.placer.place

    def seen(host: Any, main: ParameterSet) -> Any:
        given.append({leaf.sharding.memory_kind if isinstance(leaf, jax.Array) else "pageable" for leaf in host})
        return place(host, main)

    monkeypatch.setattr(sets.placer, "place", seen)
    for number in range(1, 7):
        push(model, number, f"c{number}")
    # Two of those that leave for others find nothing left to lock.
    for _ in range(3):
        for number in range(1, 7):
            assert run(model, 8, f"c{number}") == (number, 8 * 32)
    assert room.pinned.byte_size == 4 * 32
    given.clear()
    for number in range(1, 7):
        assert run(model, 8, f"c{number}") == (number, 8 * 32)
    assert given == [{"pinned_host"}] * 4 + [{"pageable"}] * 2
    # Those that are replaced, dropped and forgotten give it back, whoever still has them.
    push(model, 10, "c1")
    assert room.pinned.byte_size == 4 * 32, "the one before may be put into use again"
    push(model, 11, "c1")
    assert room.pinned.byte_size == 3 * 32
    held = sets.find("c2")
    sets.drop("c2")
    assert room.pinned.byte_size == 2 * 32
    assert np.asarray(held.on(0)["w"]).tolist() == [2] * 4
    held.evict()
    assert room.pinned.byte_size == 2 * 32, "nobody asks for it any more"
    sets.close()
    assert room.pinned.byte_size == 0
    assert run(model, 1, "c3") == (3, 32)


def test_a_batch_of_several_sets_is_one_run(device: CudaDevice) -> None:
    """Each row is of its set, and inputs are copied as in any batch; a set that has a slot stays there."""

    def apply(given: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        stacked, index = given
        return {"y": inputs["x"] + jnp.concatenate([stacked["w"], stacked["deep"][0]["v"]], 1)[index]}

    signature = of({"x": "FP32[8]"}, {"y": "FP32[8]"}, 8)
    buckets = Buckets(signature, (1, 8), {})
    zeros = np.zeros(4, np.float32)
    parameters = {"w": zeros, "deep": [{"v": zeros}]}
    sets = placed_sets(signature, parameters, room=DeviceRoom(8 * 32), mixed=SetDeclaration((), 8), remote=True)
    executables = Executables(signature, buckets, apply, sets, ExecutableCache(None), b"", 4, Gpu(device))
    made = JaxModel(1, signature, buckets, executables)
    executables.warm(LoadProgress("m", 1))
    for number in range(1, 12):
        push(made, number, f"c{number}")
    for first in (1, 2, 1, 5):
        names = [f"c{number}" for number in range(first, first + 7)]
        requests = []
        for name in (None, *names):
            request = request_of({"x": np.zeros((1, 8), np.float32)}, 1, made.key({"x": np.zeros((1, 8))}))
            request.chosen = name
            requests.append(request)
        execution = Execution(requests, 0)
        made.execute(execution)
        found = [np.unique(np.asarray(result["y"])).tolist() for result in execution.results]
        assert found == [[0], *([number] for number in range(first, first + 7))]
        assert execution.copied_byte_size == 8 * 32
    # Eight slots: main and seven; each of the others takes that of the one that was asked for the longest time before.
    assert (made.sets.misses, made.sets.evictions) == (1 + 7 + 1 + 1 + 4, 6)


def test_models_on_demand_share_the_room(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their parameters leave the GPU and come back, one copy each time; inputs are copied as ever."""
    room, placed = DeviceRoom(2 * 32), dict.fromkeys(range(3), 0)

    def apply(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"y": inputs["x"] + jnp.concatenate([parameters["w"], parameters["deep"][0]["v"]])}

    models = []
    for number in range(3):
        signature = of({"x": "FP32[8]"}, {"y": "FP32[8]"}, 8)
        leaf = np.full(4, number, np.float32)
        parameters = {"w": leaf, "deep": [{"v": leaf}]}
        sets = placed_sets(signature, parameters, room=room, remote=True, on_demand=True)
        buckets = Buckets(signature, (1, 8), {})
        executables = Executables(signature, buckets, apply, sets, ExecutableCache(None), b"", 4, Gpu(device))
        models.append(JaxModel(1, signature, buckets, executables))
        executables.warm(LoadProgress("m", 1))
        place = sets.placer.place

        def counted(host: Any, main: ParameterSet, place: Any = place, number: int = number) -> Any:
            placed[number] += 1
            return place(host, main)

        monkeypatch.setattr(sets.placer, "place", counted)
    assert [model.sets.main.on_device for model in models] == [False, True, True]
    for number in (0, 1, 2) * 4:
        assert run(models[number], 8) == (number, 8 * 32)
    assert placed == dict.fromkeys(range(3), 4)
    for number in (1, 2) * 10:
        assert run(models[number], 8) == (number, 8 * 32)
    assert placed == {0: 4, 1: 4, 2: 4}
    assert (room.byte_size, [model.sets.misses for model in models]) == (64, [4, 4, 4])
