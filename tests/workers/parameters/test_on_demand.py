"""Models whose parameters leave the device while nobody asks for them (``memory_policy``), and whose programs stay."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tensord.shm.figures import Figures, VersionFigures
from tensord.shm.operations import WorkerFigures
from tests.records import Tensor
from tests.repositories import write_model
from tests.workers.parameters.made_sets import unaligned
from tests.workers.parameters.pushing import PushingLoop, numbered, said, value
from tests.workers.parameters.test_named_sets import of_workers
from tests.workers.parameters.test_what_goes_on import STEPPED, streams

#: Bytes of one model's parameters, which lie where XLA copies them from, as on a device with memory of its own.
SIZE = 4096
MODEL = """
    import jax.numpy as jnp
    import numpy as np

    inputs, outputs = {{"x": "FP32[8]"}}, {{"y": "FP32[8]"}}
    max_batch_size = 8
    memory_policy = "{policy}"
    {more}

    def create(path, config, device):
        def leaf():
            memory = np.zeros(512 + 16, np.float32)
            start = 1 + -(memory.ctypes.data // 4) % 16
            memory[:] = {number}
            return memory[start : start + 512]

        def apply(parameters, inputs):
            w, v = parameters["w"], parameters["deep"][0]["v"]
            return {{"y": inputs["x"] + jnp.repeat(jnp.stack([w.max(), v.min()]), 4)}}

        return apply, {{"w": leaf(), "deep": [{{"v": leaf()}}]}}
    """


def write(
    folder: Path, name: str, number: float, policy: str = "on_demand", more: str = "", config: str | None = None
) -> Path:
    write_model(folder, name, MODEL.format(number=number, policy=policy, more=more), config)
    return folder / name


@pytest.fixture
def loop() -> Iterator[PushingLoop]:
    """Yields a worker's loop with room for the parameters of two models."""
    worker = PushingLoop(of_workers(parameter_byte_size=2 * SIZE))
    yield worker
    worker.close()


def figures(loop: PushingLoop) -> dict[str, VersionFigures]:
    found = msgspec.json.decode(msgspec.json.encode(loop.call(WorkerFigures())), type=Figures)
    return {version.name: version for version in found.versions}


def on_device(loop: PushingLoop) -> list[str]:
    return sorted(
        name
        for name, each in figures(loop).items()
        if each.parameters is not None and each.parameters.sets[0].on_device
    )


def test_parameters_go_and_come_back(loop: PushingLoop, tmp_path: Path) -> None:
    """Five models where two have room: each answer is of its own model's, and those that were asked last are there."""
    for number in range(1, 6):
        loop.load(write(tmp_path, f"m{number}", number))
    assert on_device(loop) == ["m4", "m5"]
    compiled = {
        name: version.jitted.executables.made
        for version in loop.worker._models
        if (name := version.name) and version.jitted
    }
    programs = {name: [id(each) for each in made.values()] for name, made in compiled.items()}
    chance = random.Random(4)
    for _ in range(300):
        number = chance.randint(1, 5)
        for _ in range(chance.randint(1, 3)):
            assert value(loop.ask_value(f"m{number}")) == number
    for _ in range(4):
        for number in (1, 3):
            assert value(loop.ask_value(f"m{number}")) == number
    assert on_device(loop) == ["m1", "m3"]
    assert programs == {name: [id(each) for each in made.values()] for name, made in compiled.items()}
    before = {name: each.parameters.misses for name, each in figures(loop).items() if each.parameters is not None}
    for _ in range(20):
        for number in (1, 3):
            assert value(loop.ask_value(f"m{number}")) == number
    assert before == {
        name: each.parameters.misses for name, each in figures(loop).items() if each.parameters is not None
    }
    assert min(before.values()) > 10


def test_what_is_pushed_goes_and_comes_back_as_well(loop: PushingLoop, tmp_path: Path) -> None:
    for number in range(1, 4):
        loop.load(write(tmp_path, f"m{number}", number))
    chance, holds = random.Random(5), {f"m{number}": (0, float(number)) for number in range(1, 4)}
    for turn in range(1, 150):
        name = f"m{chance.randint(1, 3)}"
        if chance.random() < 0.3:
            leaves = numbered(10 + turn, SIZE // 4)
            loop.push(name, unaligned(leaves) if chance.random() < 0.5 else leaves, turn)
            holds[name] = turn, 10.0 + turn
        answer = loop.ask_value(name, tells=True)
        assert (said(answer), value(answer)) == (("main", holds[name][0]), holds[name][1])
    assert len(on_device(loop)) >= 2


def test_models_that_stay_are_asked_beside_it(loop: PushingLoop, tmp_path: Path) -> None:
    """Parameters of a model that is not on demand never leave, and take no room of the others."""
    loop.load(write(tmp_path, "stays", 9, "resident"))
    for number in range(1, 4):
        loop.load(write(tmp_path, f"m{number}", number))
    for number in (1, 2, 3) * 5:
        assert value(loop.ask_value(f"m{number}")) == number
        assert value(loop.ask_value("stays")) == 9
    assert on_device(loop) == ["m2", "m3", "stays"]


def test_a_model_that_goes_gives_its_room_up(loop: PushingLoop, tmp_path: Path) -> None:
    for number in range(1, 4):
        loop.load(write(tmp_path, f"m{number}", number))
    for _ in range(5):
        loop.load(write(tmp_path, "m1", 1))
    for number in (1, 2, 3) * 5:
        assert value(loop.ask_value(f"m{number}")) == number
    assert len(on_device(loop)) == 2


def test_stepped_models(loop: PushingLoop, tmp_path: Path) -> None:
    """Requests of three models are stepped while each one's parameters make room for those of the others."""
    for number in range(1, 4):
        leaf = f"(np.zeros(529, np.float32) + {number})[17:]"
        source = STEPPED.replace("slots, max_steps", 'memory_policy = "on_demand"\n    slots, max_steps')
        source = (
            source.replace("np.zeros(4, np.float32)", leaf).replace('["w"]', '["w"][:4]').replace('["v"]', '["v"][:4]')
        )
        write_model(tmp_path, f"m{number}", source, f'name: "m{number}"')
        loop.load(tmp_path / f"m{number}")
    asked: dict[int, int] = {}
    for turn in range(60):
        count = np.array([3 + turn % 5], np.int32)
        id = loop.submit(f"m{turn % 3 + 1}", [Tensor("count", "INT32", (1,), count.tobytes())])
        asked[id] = turn % 3 + 1
    found: dict[int, list[float]] = {}
    ended = 0
    while ended < len(asked):
        ended += streams(loop.answers(1), found)
    assert all(set(found[id]) == {number} for id, number in asked.items())
    assert sum(each.parameters.misses for each in figures(loop).values() if each.parameters is not None) > 0


def test_room_has_a_bound(tmp_path: Path) -> None:
    with contextlib.closing(PushingLoop(of_workers(parameter_byte_size=SIZE - 1))) as loop:
        message = (
            "'main' of model 'm' has 4096 bytes beside 0 of other sets that stay on the device, workers.parameter_byte"
        )
        assert message in loop.refused(write(tmp_path, "m", 1))


@pytest.mark.parametrize(
    ("policy", "more", "message"),
    [
        ("later", "", "memory_policy of model.py is 'later', 'resident' or 'on_demand' is expected"),
        ("on_demand", "host = True", "which is for models that are compiled"),
        ("on_demand", "devices = 2", "runs on 2 devices"),
        ("on_demand", "batch_sets = True", "whose batches do not mix parameter sets"),
    ],
)
def test_what_cannot_be(loop: PushingLoop, tmp_path: Path, policy: str, more: str, message: str) -> None:
    assert message in loop.refused(write(tmp_path, "m", 1, policy, more))


def test_config_says_the_same(loop: PushingLoop, tmp_path: Path) -> None:
    for number in range(1, 4):
        key = 'parameters { key: "memory_policy" value { string_value: "on_demand" } }'
        loop.load(write(tmp_path, f"m{number}", number, "resident", config=f'name: "m{number}" {key}'))
    assert on_device(loop) == ["m2", "m3"]
    assert value(loop.ask_value("m1")) == 1
