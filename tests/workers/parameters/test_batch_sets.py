"""Batches that mix parameter sets (``batch_sets``): each answer is of the set that its request names, in however few calls."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

import numpy as np
import pytest

import tensord.testing
from tensord.shm.arrays import Array
from tensord.shm.errors import InvalidArgument, Unavailable
from tensord.shm.operations import MemorySource
from tensord.workers.parameters import layout
from tensord.workers.parameters.parameter_set import ParameterSet
from tensord.workers.parameters.sealed_memory import SealedMemory
from tests.repositories import applying, write_model
from tests.workers.parameters.made_sets import sealed
from tests.workers.parameters.pushing import PushingLoop, said, value, write_chain
from tests.workers.parameters.test_named_sets import figures, of_workers

#: Adds to each row what its set holds, in every element; ``base`` is of all sets.
MODEL = """
    import jax.numpy as jnp
    import numpy as np

    inputs, outputs = {{"x": "FP32[8]"}}, {{"y": "FP32[8]"}}
    max_batch_size = 4
    {more}

    def create(path, config, device):
        zeros = np.zeros(4, np.float32)
        parameters = {{"base": np.zeros(8, np.float32), "adapter": {{"w": zeros, "deep": [{{"v": zeros}}]}}}}

        def apply(parameters, inputs, index{arguments}):
            own = parameters["adapter"]
            assert own["w"].shape[1:] == (4,) and index.shape == (inputs["x"].shape[0],), (own["w"].shape, index.shape)
            rows = jnp.concatenate([own["w"][index], own["deep"][0]["v"][index]], axis=1)
            base = parameters["base"]
            return {{"y": inputs["x"] + rows + (base[index] if base.ndim == 2 else base){added}}}

        return apply, parameters
    """
ALL, SOME = "batch_sets = True", 'batch_sets = ("adapter",)'


def write(folder: Path, more: str, config: str = "", arguments: str = "", added: str = "") -> Path:
    source = MODEL.format(more=more, arguments=arguments, added=added)
    write_model(folder, "m", source, f'name: "m"\n{config}' if config else "")
    return folder / "m"


def own(number: float) -> dict[str, Array]:
    half = np.full(4, number, np.float32)
    return {"adapter.w": half, "adapter.deep.0.v": half}


def whole(number: float, base: float = 0) -> dict[str, Array]:
    return {**own(number), "base": np.full(8, base, np.float32)}


def executions(loop: PushingLoop) -> int:
    (version,) = loop.worker._models
    return version.statistics.counts().execution


@pytest.mark.parametrize("more", [ALL, SOME])
def test_requests_of_several_sets_run_in_one_call(loop: PushingLoop, tmp_path: Path, more: str) -> None:
    delays = "max_batch_size: 4 dynamic_batching { max_queue_delay_microseconds: 60000000 preferred_batch_size: 4 }"
    loop.load(write(tmp_path, more, delays))
    named = whole if more == ALL else own
    for number, name in enumerate("abc", 1):
        loop.push("m", named(number), number, name)
    before = executions(loop)
    asked = {loop.submit_value("m", 0.0, 1, name, True): (name or "main", n) for n, name in enumerate((None, *"abc"))}
    for answer in loop.answers(4):
        assert (answer.parameters["parameter_set"], value(answer)) == asked[answer.request_id]
        assert said(answer) == asked[answer.request_id]
    assert executions(loop) == before + 1
    # Of three requests of one, two and one rows: a row that no request fills is nobody's.
    for _ in range(2):
        asked = {loop.submit_value("m", 10.0, rows, name): 10 + n for n, rows, name in ((1, 2, "a"), (3, 2, "c"))}
        for answer in loop.answers(2):
            assert value(answer) == asked[answer.request_id]
    assert executions(loop) == before + 3


@pytest.mark.parametrize("more", [ALL, SOME + "\n    resident_sets = 6"])
def test_every_answer_is_of_its_set(loop: PushingLoop, tmp_path: Path, more: str) -> None:
    """Ten sets for few slots: they are pushed anew, dropped, and asked for in any order and in any company; main in C as well."""
    loop.load(write(tmp_path, more))
    every = ALL in more
    chance = random.Random(3)
    holds: dict[str, float] = {"main": 0}
    names, base = ["main", *(f"c{n}" for n in range(10))], 0.0
    for turn in range(1, 250):
        name = chance.choice(names)
        if chance.random() < 0.2 and name in holds and name != "main":
            loop.drop("m", name)
            del holds[name]
        elif name == "main":
            base = 0 if every else 1000.0 * chance.randint(0, 3)
            loop.push("m", whole(turn, base), turn)
            holds[name] = turn
        else:
            loop.push("m", whole(turn) if every else own(turn), turn, name)
            holds[name] = turn
        asked: dict[int, tuple[str, bool]] = {}
        for _ in range(chance.randint(1, 12)):
            name, tells = chance.choice(names), chance.random() < 0.2
            given = None if name == "main" and chance.random() < 0.8 else name
            asked[loop.submit_value("m", 0.0, chance.choice((1, 1, 2, 4)), given, tells)] = name, tells
        for answer in loop.answers(len(asked)):
            name, tells = asked.pop(answer.request_id)
            if name not in holds:
                assert answer.message == f"parameter set '{name}' of model 'm' is not found"
                continue
            assert value(answer) == holds[name] + base, name
            assert said(answer) == ((name, holds[name]) if tells else (None, None))
    found = figures(loop)
    assert found.misses > found.evictions > 20


def test_sets_that_have_slots_cost_no_copy(loop: PushingLoop, tmp_path: Path) -> None:
    """A push takes a slot when it is first asked for, gives that of the number before up, and a dropped set its own."""
    loop.load(write(tmp_path, SOME))
    for number, name in enumerate("abc", 1):
        loop.push("m", own(number), number, name)
    (version,) = loop.worker._models
    assert version.sets is not None
    before = figures(loop).misses
    for _ in range(10):
        for number, name in enumerate((None, *"abc")):
            assert value(loop.ask_value("m", set=name)) == number
    assert figures(loop).misses == before + 3
    assert {each.name for each in figures(loop).sets if each.on_device} == {"main", *"abc"}
    for turn in range(10):
        loop.push("m", own(50 + turn), 50 + turn, "b")
        assert [value(loop.ask_value("m", set=name)) for name in (None, "a", "b", "c")] == [0, 1, 50 + turn, 3]
    loop.drop("m", "c")
    loop.push("m", own(7), 7, "d")
    assert [value(loop.ask_value("m", set=name)) for name in (None, "a", "b", "d")] == [0, 1, 59, 7]
    assert (figures(loop).misses, figures(loop).evictions) == (before + 3 + 10 + 1, 0)


def test_a_set_that_is_dropped_while_it_waits_costs_its_own_requests(loop: PushingLoop, tmp_path: Path) -> None:
    loop.load(write(tmp_path, ALL, "max_batch_size: 4 dynamic_batching { max_queue_delay_microseconds: 50000 }"))
    for number, name in enumerate("ab", 1):
        loop.push("m", whole(number), number, name)
    asked = {loop.submit_value("m", 0.0, 1, name): name for name in ("a", "b", None)}
    loop.front.flush()
    loop.worker.iterate()
    loop.drop("m", "a")
    found = {asked[answer.request_id]: answer for answer in loop.answers(3)}
    assert found["a"].message == "parameter set 'a' of model 'm' is not found"
    assert [value(found[name]) for name in ("b", None)] == [2, 0]


def test_what_sets_have_in_common_is_mains(loop: PushingLoop, tmp_path: Path) -> None:
    loop.load(write(tmp_path, SOME, "max_batch_size: 4 response_cache { enable: true }"))
    loop.push("m", own(1), 1, "a")
    message = "leaf 'base' of model 'm' is not among its batch_sets: all sets have it of 'main', to which it is pushed"
    with pytest.raises(InvalidArgument, match=message):
        loop.push("m", whole(2), 2, "a")
    assert value(loop.ask_value("m", set="a")) == 1
    loop.push("m", whole(5, 100), 3)
    assert [value(loop.ask_value("m", set=name)) for name in (None, "a")] == [105, 101]
    sizes = {each.name: each.byte_size for each in figures(loop).sets}
    assert sizes == {"main": 64, "a": 32}


def test_a_part_of_what_a_set_has_of_its_own(loop: PushingLoop, tmp_path: Path) -> None:
    """The rest is main's for a set that is new, without what all sets share."""
    loop.load(write(tmp_path, SOME))
    loop.push("m", whole(5, 100), 1)
    fd = sealed({"adapter.w": own(9)["adapter.w"]})
    made = loop.make("m", MemorySource(os.fstat(fd).st_size), fd, set="a", partial=True)
    assert layout.read(SealedMemory(made).view, "these").keys() == own(9).keys()
    loop.push("m", made, 1, "a")
    (tensor,) = loop.ask_value("m", set="a").outputs
    assert isinstance(tensor.place, bytes)
    assert np.frombuffer(tensor.place, np.float32).tolist() == [109] * 4 + [105] * 4


def test_told_of_requests(loop: PushingLoop, tmp_path: Path) -> None:
    """The parameters of a request come behind the index."""
    more = SOME + '\n    request = {"more": ("FP32", 0.0)}'
    loop.load(write(tmp_path, more, arguments=", request", added=' + request["more"]'))
    loop.push("m", own(1), 1, "a")
    assert value(loop.ask_value("m", set="a")) == 1


def test_a_step_of_an_ensemble(loop: PushingLoop, tmp_path: Path) -> None:
    """An ensemble hands the set on to a model that mixes them."""
    loop.load(write(tmp_path, ALL))
    loop.load(write_chain(tmp_path, "both", "m"))
    loop.push("m", whole(3), 3)
    loop.push("m", whole(7), 7, "a")
    for _ in range(3):
        asked = {loop.submit_value("both", 0.0, 1, name): n for name, n in ((None, 3), ("a", 7), (None, 3))}
        for answer in loop.answers(3):
            assert value(answer) == asked[answer.request_id]


def test_the_stack_has_a_bound(tmp_path: Path) -> None:
    with contextlib.closing(PushingLoop(of_workers(parameter_byte_size=4 * 32 - 1))) as loop:
        message = "4 parameter sets side by side (resident_sets) have 128 bytes, workers.parameter_byte_size allows 127"
        assert message in loop.refused(write(tmp_path, SOME))
    with contextlib.closing(PushingLoop(of_workers(parameter_byte_size=4 * 32 + 64 - 1))) as loop:
        loop.load(write(tmp_path, SOME))
        for number in range(1, 9):
            loop.push("m", own(number), number, f"c{number}")
        loop.push("m", whole(9, 1), 9)
        with pytest.raises(Unavailable, match="beside 160 of other sets that stay"):
            loop.push("m", whole(10, 2), 10)
        assert [value(loop.ask_value("m", set=name)) for name in (None, "c1", "c8")] == [10, 2, 9]


@pytest.mark.parametrize(
    ("more", "config", "message"),
    [
        ("batch_sets = 3", "", "batch_sets of model.py is 3; True, False, or names of parameters are expected"),
        ("batch_sets = ()", "", "batch_sets of model.py is (); True"),
        ("resident_sets = 8", "", "resident_sets of model.py is given, but batch_sets is not"),
        (ALL + "; resident_sets = 3", "", "resident_sets of model.py is 3, between 4 (max_batch_size) and 65536"),
        (ALL + "; resident_sets = '9'", "", "resident_sets of model.py is '9', a number of sets is expected"),
        (
            'batch_sets = ("adapt",)',
            "",
            "batch_sets names 'adapt', and none of its parameters is called so or lies below",
        ),
        (ALL + "; max_batch_size = 0", "", "batch_sets is given, but max_batch_size is 0: it has no batch dimension"),
        (ALL + "; host = True", "", "a host model is none"),
        (ALL + "; slots = 4; max_steps = 2; max_batch_size = 0", "", "a stepped model is none"),
        (
            ALL,
            'sequence_batching { control_input { name: "START" control { kind: CONTROL_SEQUENCE_START '
            "fp32_false_true: [ 0, 1 ] } } }",
            "a sequence keeps the set that it began with",
        ),
        (
            "",
            'parameters { key: "batch_sets" value { string_value: "all," } }',
            "parameter 'batch_sets' is ('all', '')",
        ),
    ],
)
def test_what_cannot_be(loop: PushingLoop, tmp_path: Path, more: str, config: str, message: str) -> None:
    assert message in loop.refused(write(tmp_path, more, config))


def test_config_says_the_same(loop: PushingLoop, tmp_path: Path) -> None:
    both = " ".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}'
        for key, text in (("batch_sets", "adapter"), ("resident_sets", "9"))
    )
    loop.load(write(tmp_path, "batch_sets = False", f"max_batch_size: 4 instance_group {{ count: 2 }} {both}"))
    for number in range(1, 9):
        loop.push("m", own(number), number, f"c{number}")
    asked = {loop.submit_value("m", 0.0, 1, f"c{n}"): n for n in range(1, 9)}
    for answer in loop.answers(8):
        assert value(answer) == asked[answer.request_id]
    found = figures(loop)
    assert (found.evictions, {each.on_device for each in found.sets}) == (0, {True})


def test_tried_without_a_server(tmp_path: Path) -> None:
    with tensord.testing.load(write(tmp_path, SOME)) as model:
        ones = np.ones((3, 8), np.float32)
        assert np.array_equal(model({"x": ones})["y"], ones)


def test_a_function_that_takes_no_index(loop: PushingLoop, tmp_path: Path) -> None:
    source = MODEL.replace(", index{arguments}):", "):")
    write_model(tmp_path, "m", source.format(more=ALL, arguments="", added=""))
    assert "it is called with (params, inputs, index)" in loop.refused(tmp_path / "m")


def test_a_generator_mixes_nothing(loop: PushingLoop, tmp_path: Path) -> None:
    source = applying(
        'yield {"y": inputs["x"]}',
        "x FP32[8]",
        "y FP32[8]",
        more="max_batch_size = 4\nbatch_sets = True",
        arguments="parameters, inputs, index",
    )
    write_model(tmp_path, "m", source)
    assert "batch_sets is for jitted functions, a generator is none" in loop.refused(tmp_path / "m")


def test_a_slot_that_cannot_be_written(loop: PushingLoop, tmp_path: Path) -> None:
    """The device refuses a set: its request fails, and the next ones find every set where it belongs."""
    loop.load(write(tmp_path, SOME))
    for number, name in enumerate("ab", 1):
        loop.push("m", own(number), number, name)
    assert value(loop.ask_value("m", set="a")) == 1
    (version,) = loop.worker._models
    assert version.sets is not None
    stack = version.sets.stack
    assert stack is not None
    put = stack._put

    def refuses(*_: object) -> None:
        raise Unavailable("no memory")

    stack._put = refuses  # type: ignore[assignment]
    assert loop.ask_value("m", set="b").message == "no memory"
    stack._put = put
    assert [value(loop.ask_value("m", set=name)) for name in ("a", "b", None)] == [1, 2, 0]


def test_a_set_whose_values_find_no_memory_costs_no_slot(
    loop: PushingLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop.load(write(tmp_path, SOME))
    loop.push("m", own(1), 1, "a")
    (version,) = loop.worker._models
    assert version.sets is not None
    stack = version.sets.stack
    assert stack is not None

    def fails(_: ParameterSet) -> list[Array]:
        raise MemoryError

    loop.submit_value("m", 0.0, 1, None, False)
    loop.answers(1)
    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(ParameterSet, "hosted", fails)
            loop.submit_value("m", 0.0, 1, "a", False)
            (answer,) = loop.answers(1)
            assert answer.code
    assert len(stack._free) + len(stack._slots) == stack.slots
    loop.submit_value("m", 0.0, 1, "a", False)
    (answer,) = loop.answers(1)
    assert value(answer) == 1
