"""Sequences, stepped requests and generators keep the set that they began with, unless a push moves them."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from tests.fakes import whole_answers
from tests.records import Tensor, WholeAnswer
from tests.repositories import write_model
from tests.workers.parameters.pushing import PushingLoop, numbered, said, value, write_numbered

STATEFUL = """
    import jax.numpy as jnp
    import numpy as np

    inputs = {"x": "FP32[8]"}
    outputs = {"y": "FP32[8]"}
    state = {"count": "FP32[1]"}

    def create(path, config, device):
        parameters = {"w": np.zeros(4, np.float32), "deep": [{"v": np.zeros(4, np.float32)}]}

        def apply(parameters, inputs, state):
            w, v = parameters["w"], parameters["deep"][0]["v"]
            sum = jnp.concatenate([w, v])
            return {"y": inputs["x"] + sum + 1000 * state["count"]}, {"count": state["count"] + 1}

        return apply, parameters
    """
DIRECT = "max_batch_size: 4 sequence_batching { max_sequence_idle_microseconds: 600000000 %s }"
OLDEST = "max_batch_size: 4 sequence_batching { oldest { max_candidate_sequences: 8 } max_sequence_idle_microseconds: 600000000 }"
INSTANCES = DIRECT % "" + " instance_group { count: 2 kind: KIND_CPU }"


def step(loop: PushingLoop, id: int, start: bool = False, end: bool = False, set: str | None = None) -> int:
    own = {"sequence_id": id, "sequence_start": start, "sequence_end": end}
    return loop.submit_value("m", 0.0, 1, set, tells=id % 3 == 0, own=own)


@pytest.mark.parametrize("config", [DIRECT % "", OLDEST, INSTANCES], ids=["direct", "oldest", "instances"])
@pytest.mark.parametrize("moves", [0, 1, 0.5], ids=["keep", "move", "some"])
def test_sequences(loop: PushingLoop, tmp_path: Path, config: str, moves: float) -> None:
    """Steps of several sequences wait together, in Python and in C, while parameters are exchanged.

    ``moves``: the part of the pushes that take along what has begun, whenever that was.
    """
    write_model(tmp_path, "m", STATEFUL, f'name: "m" {config}')
    loop.load(tmp_path / "m")
    chance = random.Random(3)
    #: Sequence -> its number, and its steps.
    live: dict[int, list[int]] = {}
    newest = {"main": 0}
    sets: dict[int, str] = {}
    ids = iter(range(1, 10000))
    for turn in range(1, 150):
        asked: dict[int, tuple[int, int, str]] = {}
        for id in list(live):
            number, steps = live[id]
            end = steps >= 5 + id % 4
            asked[step(loop, id, end=end)] = number, steps, sets[id]
            live[id][1] += 1
            if end:
                del live[id], sets[id]
        while len(live) < 4 and len(asked) < 4:
            id = next(ids)
            name = "a" if "a" in newest and chance.random() < 0.3 else "main"
            live[id], sets[id] = [newest[name], 1], name
            asked[step(loop, id, start=True, set=None if name == "main" else name)] = newest[name], 0, name
        for answer in loop.answers(len(asked)):
            number, steps, name = asked.pop(answer.request_id)
            assert value(answer) == number + 1000 * steps
            assert said(answer) in ((name, number), (None, None))
        if turn % 3 == 0:
            name = chance.choice(["main", "a"])
            newest[name] = turn
            all_move = chance.random() < moves
            if name == "a" and all_move and chance.random() < 0.3 and "a" in sets.values():
                # Those that go on with it do not know that it is another one.
                loop.drop("m", "a")
            loop.push("m", numbered(turn), turn, name, move_sequences=all_move)
            for id in live if all_move else ():
                if sets[id] == name:
                    live[id][0] = turn


def test_a_sequence_that_names_a_set_gets_it_each_time(loop: PushingLoop, tmp_path: Path) -> None:
    """It also gets it where the C part knows all about such requests but the set."""
    write_model(tmp_path, "m", STATEFUL, f'name: "m" {DIRECT % ""}')
    loop.load(tmp_path / "m")
    loop.push("m", numbered(5), 1, "a")
    for id in range(1, 40):
        name, number = ("a", 5) if id % 2 else (None, 0)
        for turn in range(3):
            own = {"sequence_id": id, "sequence_start": not turn, "sequence_end": turn == 2}
            # Only its first request names the set.
            loop.submit_value("m", 0.0, 1, name if not turn else None, own=own)
            (answer,) = loop.answers(1)
            assert value(answer) == number + 1000 * turn


@pytest.mark.parametrize("config", [DIRECT % "", INSTANCES], ids=["loop", "instances"])
def test_a_sequence_that_is_begun_anew_has_what_is_newest(loop: PushingLoop, tmp_path: Path, config: str) -> None:
    """1. A sequence begins, with main or a set. 2. A push to main. 3. A START of its id, which still lives."""
    write_model(tmp_path, "m", STATEFUL, f'name: "m" {config}')
    loop.load(tmp_path / "m")
    loop.push("m", numbered(5), 1, "a")
    for id, name in ((1, None), (2, "a")):
        for set, start, number in ((name, True, 5 if name else 0), (None, False, 5 if name else 0), (None, True, 7)):
            if number == 7:
                loop.push("m", numbered(7), 10 * id)
            step(loop, id, start=start, end=number == 7, set=set)
            (answer,) = loop.answers(1)
            assert value(answer) == number + 1000 * (not start)
        loop.push("m", numbered(0), 10 * id + 1)


STEPPED = """
    import jax.numpy as jnp
    import numpy as np

    slots, max_steps, inserts_per_step = 8, 64, 8
    inputs = {"count": "INT32[1]"}
    outputs = {"y": "FP32[8]"}

    def create(path, config, device):
        parameters = {"w": np.zeros(4, np.float32), "deep": [{"v": np.zeros(4, np.float32)}]}

        def row(parameters):
            return jnp.concatenate([parameters["w"], parameters["deep"][0]["v"]])

        def init(parameters, slots):
            return jnp.zeros(slots, jnp.int32)

        def insert(parameters, carry, slot, inputs):
            return carry.at[slot].set(inputs["count"][0]), {"y": row(parameters)}, jnp.array(True), jnp.array(False)

        def step(parameters, carry, active):
            left = carry - active
            outputs = {"y": jnp.broadcast_to(row(parameters), (len(active), 8))}
            return left, outputs, active, left <= 0

        return (init, insert, step), parameters
    """


def streams(answers: list[WholeAnswer], into: dict[int, list[float]]) -> int:
    """Adds the values of responses to those of their requests. Returns how many were final."""
    ended = 0
    for answer in answers:
        assert not answer.code, answer.message
        if answer.outputs:
            into.setdefault(answer.request_id, []).append(value(answer))
        ended += answer.final
    return ended


@pytest.mark.parametrize("moves", [False, True], ids=["keep", "move"])
def test_stepped_requests(loop: PushingLoop, tmp_path: Path, moves: bool) -> None:
    write_model(tmp_path, "m", STEPPED, 'name: "m"')
    loop.load(tmp_path / "m")
    began: dict[int, int] = {}
    found: dict[int, list[float]] = {}
    newest, ended, asked = 0, 0, 0
    for turn in range(1, 120):
        for _ in range(2):
            count = np.array([3 + turn % 9], np.int32)
            id = loop.submit("m", [Tensor("count", "INT32", (1,), count.tobytes())])
            began[id] = newest
            asked += 1
        loop.front.flush()
        for _ in range(3):
            loop.worker.iterate()
        # What was asked has a slot, or waits for one: then it begins with what is in use by then.
        while (received := loop.front.receive()) is not None:
            ended += streams(whole_answers(received), found)
        if turn % 4 == 0:
            newest = turn
            loop.push("m", numbered(turn), turn, move_sequences=moves)
    while ended < asked:
        ended += streams(loop.answers(1), found)
    assert found.keys() == began.keys()
    mixed = 0
    for id, values in found.items():
        assert values[0] >= began[id]
        if moves:
            assert values == sorted(values)
            mixed += len(set(values)) > 1
        else:
            assert len(set(values)) == 1
    assert (mixed > 0) == moves


def test_a_stepped_request_of_any_version_is_moved(loop: PushingLoop, tmp_path: Path) -> None:
    """Requests begin with the first, the second and the third set; the fourth push takes all of them along."""
    write_model(tmp_path, "m", STEPPED, 'name: "m"')
    loop.load(tmp_path / "m")
    found: dict[int, list[float]] = {}
    for number in range(4):
        loop.submit("m", [Tensor("count", "INT32", (1,), np.array([60], np.int32).tobytes())])
        streams(loop.answers(1), found)
        loop.push("m", numbered(number + 1), number + 1, move_sequences=number == 3)
    ended = 0
    while ended < 4:
        ended += streams(loop.answers(1), found)
    for number, values in enumerate(found.values()):
        assert (values[0], values[-1]) == (number, 4)
        assert set(values) == {number, 4}


def test_a_generator_keeps_what_it_began_with(loop: PushingLoop, tmp_path: Path) -> None:
    write_model(
        tmp_path,
        "m",
        """
        import numpy as np

        inputs = {"x": "FP32[8]"}
        outputs = {"y": "FP32[8]"}

        def create(path, config, device):
            parameters = {"w": np.zeros(4, np.float32), "deep": [{"v": np.zeros(4, np.float32)}], "name": "a text"}

            def apply(parameters, inputs):
                assert parameters["name"] == "a text"
                for _ in range(4):
                    yield {"y": inputs["x"] + np.concatenate([parameters["w"], parameters["deep"][0]["v"]])}

            return apply, parameters
        """,
    )
    loop.load(tmp_path / "m")
    for number in range(1, 40):
        loop.push("m", numbered(number), number)
        id = loop.submit_value("m", 0.0, batches=False, tells=number % 2 == 0)
        found: dict[int, list[float]] = {}
        answers: list[WholeAnswer] = []
        while not streams(answers, found):
            answers = loop.answers(1)
            if number % 2 == 0 and answers[0].outputs:
                assert said(answers[0]) == ("main", number)
        assert found == {id: [number] * 4}


def test_a_host_model_without_arrays_has_nothing_to_push(loop: PushingLoop, tmp_path: Path) -> None:
    path = write_numbered(tmp_path, "m", "max_batch_size: 8", "host = True")
    source = path / "1" / "model.py"
    text = (
        source.read_text()
        .replace("jnp.", "np.")
        .replace("return apply, parameters", "return apply, lambda: parameters")
    )
    source.write_text(text.replace("def apply(parameters, inputs):", "def apply(given, inputs):"))
    loop.load(path)
    with pytest.raises(Exception, match="model 'm' has no parameters that are arrays: there is nothing to push"):
        loop.push("m", numbered(1), 1)
    assert value(loop.ask_value("m")) == 0
