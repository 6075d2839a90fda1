"""Many sets of one model: batches never mix them, and those that nobody asks leave the device and come back."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from tensord.config.options import Options
from tensord.shm.arrays import address_of
from tensord.shm.errors import InvalidArgument, Unavailable
from tensord.shm.figures import Figures, ParameterFigures
from tensord.shm.operations import WorkerFigures
from tensord.workers.devices import host_put
from tensord.workers.native.extensions import available as native_is_there
from tensord.workers.programs import placed_sets
from tests.records import Tensor
from tests.repositories import write_model
from tests.workers.parameters.made_sets import unaligned
from tests.workers.parameters.pushing import PushingLoop, numbered, said, value, write_chain, write_numbered
from tests.workers.worker_loop import OPTIONS, ever_queued

BATCHES, GROUPED = "max_batch_size: 8", ""
#: As the model of ``write_numbered``, whose batches mix sets.
MIXED = """
    import jax.numpy as jnp
    import numpy as np

    inputs = {{"x": "FP32[8]"}}
    outputs = {{"y": "FP32[8]"}}
    {more}

    def create(path, config, device):
        parameters = {{"w": np.zeros(4, np.float32), "deep": [{{"v": np.zeros(4, np.float32)}}]}}

        def apply(stacked, inputs, index):
            w, v = stacked["w"][index], stacked["deep"][0]["v"][index]
            return {{"y": inputs["x"] + jnp.concatenate([w, v], axis=1)}}

        return apply, parameters
"""


def of_workers(**fields: Any) -> Options:
    return msgspec.structs.replace(OPTIONS, workers=msgspec.structs.replace(OPTIONS.workers, **fields))


def figures(loop: PushingLoop) -> ParameterFigures:
    found = msgspec.json.decode(msgspec.json.encode(loop.call(WorkerFigures())), type=Figures)
    (version,) = found.versions
    assert version.parameters is not None
    return version.parameters


@pytest.mark.parametrize("config", [BATCHES, GROUPED], ids=["batches", "grouped"])
def test_batches_never_mix_sets(loop: PushingLoop, tmp_path: Path, config: str) -> None:
    """Requests of all sets wait together, traced or not, while sets are pushed anew; in Python at first, then in C."""
    loop.load(write_numbered(tmp_path, "m", config))
    names = ["main", "a", "b", "c"]
    newest = dict.fromkeys(names, 0)
    for number, name in enumerate(names[1:], 1):
        loop.push("m", numbered(number), number, name)
        newest[name] = number
    chance = random.Random(1)
    for turn in range(300):
        asked: dict[int, tuple[str, bool, int]] = {}
        for _ in range(12):
            name, tells, trace = chance.choice(names), chance.random() < 0.2, int(chance.random() < 0.2)
            given = None if name == "main" and chance.random() < 0.5 else name
            number = loop.submit_value("m", 0.0, 1, given, tells, batches=bool(config), own={"trace": trace})
            asked[number] = name, tells, trace
        for answer in loop.answers(len(asked)):
            name, tells, trace = asked.pop(answer.request_id)
            assert value(answer) == newest[name]
            assert said(answer) == ((name, newest[name]) if tells else (None, None))
            assert (answer.trace is not None) == bool(trace)
            if answer.trace is not None:
                assert answer.trace.parameters == ((name, newest[name]) if newest[name] else None)
        name = chance.choice(names)
        loop.push("m", numbered(100 + turn), 100 + turn, name)
        newest[name] = 100 + turn


@pytest.mark.parametrize("more", [None, "batch_sets = True\n    resident_sets = 30"], ids=["apart", "mixed"])
def test_requests_of_many_sets_have_one_number_and_are_answered_in_c(
    loop: PushingLoop, tmp_path: Path, more: str | None
) -> None:
    """Also of sets that were never asked for, and of those that are pushed later."""
    if more is None:
        loop.load(write_numbered(tmp_path, "m", BATCHES))
    else:
        write_model(tmp_path, "m", MIXED.format(more=more), 'name: "m" max_batch_size: 8')
        loop.load(tmp_path / "m")
    (version,) = loop.worker._models
    for number in range(1, 11):
        loop.push("m", numbered(number), number, f"c{number}")
    settled = 0
    while settled < 20:
        queued = ever_queued(version.queue)
        for together in (1, 2, 8):
            for _ in range(together):
                loop.submit_value("m", 0.0)
            loop.answers(together)
        settled = settled + 1 if ever_queued(version.queue) == queued else 0
    numbers, queued = loop.numbers.assigned, ever_queued(version.queue)
    for number in range(11, 21):
        loop.push("m", numbered(number), number, f"c{number}")
    before = version.statistics.counts().execution
    asked = {
        loop.submit_value("m", 0.0, 1, f"c{number}"): number
        for _ in range(2)
        for number in (*range(7, 11), *range(17, 21))
    }
    for answer in loop.answers(len(asked)):
        assert value(answer) == asked[answer.request_id]
    assert version.statistics.counts().execution - before == (8 if more is None else 2)
    if native_is_there:
        assert ever_queued(version.queue) == queued
    assert loop.numbers.assigned == numbers


def test_a_set_that_is_not_there_or_was_dropped(loop: PushingLoop, tmp_path: Path) -> None:
    loop.load(write_numbered(tmp_path, "m", BATCHES))
    unknown = "parameter set 'a' of model 'm' is not found"
    for _ in range(3):
        assert loop.ask_value("m", set="a").message == unknown
        loop.push("m", numbered(4), 4, "a")
        for _ in range(5):
            assert value(loop.ask_value("m", set="a")) == 4
        loop.drop("m", "a")
    assert loop.ask_value("m", set="a").message == unknown
    assert value(loop.ask_value("m")) == 0
    with pytest.raises(InvalidArgument, match="parameter set 'main' of model 'm' cannot be dropped"):
        loop.drop("m", "main")


def test_a_set_that_is_dropped_while_its_requests_wait(loop: PushingLoop, tmp_path: Path) -> None:
    loop.load(
        write_numbered(tmp_path, "m", "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 50000 }")
    )
    loop.push("m", numbered(4), 4, "a")
    for _ in range(2):
        loop.submit_value("m", 0.0, 1, "a")
    loop.front.flush()
    loop.worker.iterate()
    loop.drop("m", "a")
    messages = {answer.message for answer in loop.answers(2)}
    assert messages == {"parameter set 'a' of model 'm' is not found"}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"own": {"parameter_set": "a" * 129}}, "parameter 'parameter_set' has 129 bytes, at most 128 are allowed"),
        ({"own": {"parameter_set": "\u00e4" * 65}}, "parameter 'parameter_set' has 130 bytes, at most 128 are allowed"),
        ({"own": {"parameter_set": "\u00e4" * 64}}, f"parameter set '{64 * chr(228)}' of model 'm' is not found"),
        ({"parameters": {"parameter_set": "a"}}, "'parameter_set' is a field of the request, and no parameter"),
        (
            {"parameters": {"tensord_parameters": "yes"}},
            "parameter 'tensord_parameters' is 'yes', true or false is expected",
        ),
    ],
)
def test_what_is_no_name(loop: PushingLoop, tmp_path: Path, said: dict[str, Any], message: str) -> None:
    loop.load(write_numbered(tmp_path, "m", BATCHES))
    loop.submit("m", [Tensor("x", "FP32", (1, 8), bytes(32))], **said)
    assert loop.answers(1)[0].message.endswith(message)


def test_sets_leave_the_device_and_come_back(tmp_path: Path) -> None:
    """With room for three: every answer is right whoever has to come back, and those that were asked last stay."""
    width = 1 << 10
    with contextlib.closing(PushingLoop(of_workers(parameter_byte_size=3 * 4 * width))) as loop:
        loop.load(write_numbered(tmp_path, "m", BATCHES, width=width))
        for number in range(1, 11):
            loop.push("m", unaligned(numbered(number, width)), number, f"c{number}")
        found = figures(loop)
        assert [each.name for each in found.sets if each.on_device] == ["main", "c8", "c9", "c10"]
        assert (found.pushes, found.evictions, found.misses) == (10, 7, 0)
        chance = random.Random(2)
        for _ in range(300):
            number = chance.randint(1, 10)
            assert value(loop.ask_value("m", set=f"c{number}")) == number
        for _ in range(5):
            for number in (2, 5, 9):
                assert value(loop.ask_value("m", set=f"c{number}")) == number
        found = figures(loop)
        assert {each.name for each in found.sets if each.on_device} == {"main", "c2", "c5", "c9"}
        assert found.misses == found.evictions - 7 > 100
        # Main takes its part of the room once it was pushed, and never leaves.
        loop.push("m", unaligned(numbered(50, width)), 50)
        for number in range(1, 11):
            assert value(loop.ask_value("m", set=f"c{number}")) == number
            assert value(loop.ask_value("m")) == 50
        on_device = [each.name for each in figures(loop).sets if each.on_device]
        assert on_device == ["main", "c9", "c10"]


def test_a_set_that_comes_back_is_copied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes to the placement that asked for it, and not to the other one as well."""
    width = 1 << 10
    with contextlib.closing(PushingLoop(of_workers(parameter_byte_size=3 * 4 * width))) as loop:
        loop.load(write_numbered(tmp_path, "m", BATCHES, width=width))
        for number in range(1, 6):
            loop.push("m", unaligned(numbered(number, width)), number, f"c{number}")
        for number in (*range(1, 6), *range(1, 6)):
            assert value(loop.ask_value("m", set=f"c{number}")) == number
        before, copied, copies = figures(loop).misses, placed_sets._aligned, 0

        def counted(array: Any, dtype: Any) -> Any:
            nonlocal copies
            made = copied(array, dtype)
            copies += made is not array
            return made

        if host_put._interface() is not None:
            monkeypatch.setattr(jax, "device_put", None)
        monkeypatch.setattr(placed_sets, "_aligned", counted)
        for number in (*range(1, 6), *range(1, 6)):
            assert value(loop.ask_value("m", set=f"c{number}")) == number
        assert copies == 2 * (figures(loop).misses - before) == 20


def test_sets_that_are_used_where_they_lie_take_no_room(tmp_path: Path) -> None:
    """On a processor, what lies aligned in the memory that was pushed is not copied: nothing would be gained if it left."""
    width = 1 << 10
    with contextlib.closing(PushingLoop(of_workers(parameter_byte_size=3 * 4 * width))) as loop:
        loop.load(write_numbered(tmp_path, "m", BATCHES, width=width))
        for number in range(1, 11):
            loop.push("m", numbered(number, width), number, f"c{number}")
        for _ in range(3):
            for number in range(1, 11):
                assert value(loop.ask_value("m", set=f"c{number}")) == number
        (version,) = loop.worker._models
        assert version.sets is not None
        for number in range(1, 11):
            parameters = version.sets.find(f"c{number}")
            pairs = zip(jax.tree.leaves(parameters.on(0)), parameters.hosted(), strict=True)
            assert all(leaf.unsafe_buffer_pointer() == address_of(array) for leaf, array in pairs if array is not None)
            del parameters, pairs
        found = figures(loop)
        assert ({each.on_device for each in found.sets}, found.misses, found.evictions) == ({True}, 0, 0)
        # Three that have to be copied fill the room, and only those leave it.
        for number in range(20, 25):
            loop.push("m", unaligned(numbered(number, width)), number, f"c{number}")
        found = figures(loop)
        assert [each.name for each in found.sets if not each.on_device] == ["c20", "c21"]
        assert (found.misses, found.evictions) == (0, 2)


def test_room_and_count_are_bounded(tmp_path: Path) -> None:
    with contextlib.closing(PushingLoop(of_workers(parameter_byte_size=100, max_parameter_sets=3))) as loop:
        loop.load(write_numbered(tmp_path, "m", BATCHES))
        loop.push("m", unaligned(numbered(1)), 1)
        message = (
            "number 2 of parameter set 'main' of model 'm' has 32 bytes beside 96 of other sets that stay on the device, "
            "workers.parameter_byte_size allows 100"
        )
        loop.stage("m", unaligned(numbered(9)), 9, "a")
        loop.stage("m", unaligned(numbered(9)), 9, "b")
        with pytest.raises(Unavailable, match=message):
            loop.stage("m", unaligned(numbered(2)), 2)
        for push in (2, 3):
            loop.abort(push)
        loop.push("m", unaligned(numbered(2)), 2)
        loop.push("m", unaligned(numbered(3)), 3, "a")
        loop.push("m", unaligned(numbered(3)), 3, "b")
        with pytest.raises(InvalidArgument, match=r"has 3 parameter sets, workers.max_parameter_sets allows 3"):
            loop.stage("m", unaligned(numbered(3)), 3, "c")
        assert [value(loop.ask_value("m", set=name)) for name in ("main", "a", "b")] == [2, 3, 3]


def test_a_shape_that_is_compiled_for_requests_of_several_sets(loop: PushingLoop, tmp_path: Path) -> None:
    path = write_numbered(tmp_path, "m", BATCHES)
    source = path / "1" / "model.py"
    source.write_text(source.read_text().replace('"FP32[8]"', '"FP32[n, 8]"'))
    loop.load(path)
    for number, name in enumerate(("a", "b"), 1):
        loop.push("m", numbered(number), number, name)
    asked = {}
    for turn in range(12):
        name = ("main", "a", "b")[turn % 3]
        content = np.zeros((1, 3, 8), np.float32)
        id = loop.submit("m", [Tensor("x", "FP32", content.shape, content.tobytes())], own={"parameter_set": name})
        asked[id] = float(turn % 3)
    for answer in loop.answers(12):
        assert value(answer) == asked[answer.request_id]


def test_the_response_cache_has_the_set_in_its_key(tmp_path: Path) -> None:
    options = msgspec.structs.replace(
        OPTIONS, response_cache=msgspec.structs.replace(OPTIONS.response_cache, byte_size=1 << 20)
    )
    with contextlib.closing(PushingLoop(options)) as loop:
        loop.load(write_numbered(tmp_path, "m", "max_batch_size: 8 response_cache { enable: true }"))
        for number in range(1, 6):
            loop.push("m", numbered(number), number)
            loop.push("m", numbered(-number), number, "a")
            for _ in range(3):
                for name, wanted in (("main", number), ("a", -number)):
                    answer = loop.ask_value("m", set=name, tells=True)
                    assert (value(answer), said(answer)) == (wanted, (name, number))
        (version,) = loop.worker._models
        assert version.statistics.counts().cache_hit == 5 * 2 * 2


def test_steps_of_an_ensemble_take_the_set_that_they_have(loop: PushingLoop, tmp_path: Path) -> None:
    for name in ("first", "second"):
        loop.load(write_numbered(tmp_path, name, BATCHES))
    loop.load(write_chain(tmp_path, "both", "first", "second"))
    loop.push("first", numbered(1), 1)
    loop.push("second", numbered(10), 1)
    assert "no model of the ensemble has a parameter set 'a'" in loop.ask_value("both", set="a").message
    loop.push("second", numbered(500), 2, "a")
    assert [value(loop.ask_value("both", set=name)) for name in (None, "a", "a", None)] == [11, 501, 501, 11]
    loop.push("first", numbered(7), 3, "a")
    assert value(loop.ask_value("both", set="a")) == 507


def test_an_ensemble_says_the_parameters_of_its_steps(loop: PushingLoop, tmp_path: Path) -> None:
    """By the model's name, also of an ensemble in it; what is said is what the values show, whatever is pushed."""
    for name in ("first", "second"):
        loop.load(write_numbered(tmp_path, name, BATCHES))
    loop.load(write_chain(tmp_path, "both", "first", "second"))
    loop.load(write_chain(tmp_path, "outer", "both", "first"))
    loop.push("second", numbered(5000), 5000, "a")
    for number in range(1, 40):
        loop.push("first", numbered(number), number)
        loop.push("second", numbered(100 * number), number)
        assert value(loop.ask_value("both")) == 101 * number
        answer = loop.ask_value("both", tells=True)
        assert value(answer) == 101 * number
        assert answer.parameters == {
            "parameter_set.first": "main",
            "parameter_version.first": number,
            "parameter_set.second": "main",
            "parameter_version.second": number,
        }
        answer = loop.ask_value("outer", set="a", tells=True)
        assert value(answer) == 5000 + 2 * number
        assert answer.parameters == {
            "parameter_set.first": "main",
            "parameter_version.first": number,
            "parameter_set.second": "a",
            "parameter_version.second": 5000,
        }
