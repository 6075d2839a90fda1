"""Responses that leave a worker many at a time are those that its model made, whatever they look like and whenever they come."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.shm.messages import RequestedOutput
from tests.generated import examples
from tests.records import Tensor, WholeAnswer
from tests.repositories import write_model
from tests.workers.worker_loop import WorkerLoop

#: What each number of a script stands for: the names of its outputs and the elements of each.
KINDS: list[dict[str, int]] = [
    {"y": 1},
    {"y": 2},
    {"y": 1, "z": 1},
    {"z": 1, "y": 1},
    {"s": 2},
    {"y": 1, "s": 1},
    {"y": 0},
    {},
]
#: A response with a parameter, and a moment without any.
TOLD, PAUSE = len(KINDS), len(KINDS) + 1
SCRIPTED = f"""
    import time

    import numpy as np

    host = True
    inputs = {{"script": "UINT8[n]"}}
    outputs = {{"y": "FP32[a]", "z": "INT32[b]", "s": "BYTES[c]"}}
    DATATYPES = {{"y": np.float32, "z": np.int32, "s": object}}

    def create(path, config, device):
        def apply(params, inputs):
            for number, kind in enumerate(inputs["script"].tolist()):
                if kind == {PAUSE}:
                    time.sleep(0.003)
                elif kind == {TOLD}:
                    yield {{"y": np.full(1, number, np.float32)}}, {{"told": number}}
                else:
                    outputs = {KINDS}[kind]
                    yield {{
                        name: np.array([b"%d" % number] * count, object)
                        if name == "s" else np.full(count, number, DATATYPES[name])
                        for name, count in outputs.items()
                    }}
        return apply, None
"""


@pytest.fixture(scope="module")
def loop(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerLoop]:
    folder = tmp_path_factory.mktemp("scripted")
    made = WorkerLoop()
    write_model(folder, "scripted", SCRIPTED, 'backend: "jax" model_transaction_policy { decoupled: true }')
    made.load(folder / "scripted")
    yield made
    made.close()


def content(name: str, number: int, count: int) -> bytes:
    if name == "s":
        return (len(str(number)).to_bytes(4, "little") + str(number).encode()) * count
    return np.full(count, number, np.float32 if name == "y" else np.int32).tobytes()


def expected(script: list[int], wanted: tuple[str, ...]) -> list[tuple[dict[str, bytes], int | None]]:
    """Returns the outputs and the parameter of each response."""
    return [
        (
            {
                name: content(name, number, count)
                for name, count in (KINDS[kind] if kind < TOLD else KINDS[0]).items()
                if not wanted or name in wanted
            },
            number if kind == TOLD else None,
        )
        for number, kind in enumerate(script)
        if kind != PAUSE
    ]


def shown(completion: WholeAnswer) -> tuple[dict[str, bytes], object]:
    assert completion.code == "", completion.message
    outputs = {}
    for tensor in completion.outputs:
        assert isinstance(tensor.place, bytes)
        outputs[tensor.name] = bytes(tensor.place)
    return outputs, completion.parameters.get("told")


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.lists(st.integers(0, PAUSE), max_size=30)
        | st.builds(list.__mul__, st.lists(st.integers(0, 5), max_size=2), st.just(12)),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([(), ("y",), ("z", "y"), ("s", "y", "z")]),
)
def test_each_response_in_its_order(loop: WorkerLoop, scripts: list[list[int]], wanted: tuple[str, ...]) -> None:
    asked = {}
    for script in scripts:
        tensor = Tensor("script", "UINT8", (len(script),), bytes(script))
        asked[loop.submit("scripted", [tensor], tuple(map(RequestedOutput, wanted)))] = script
    answers = loop.answers(sum(len(expected(script, wanted)) + 1 for script in scripts))
    for request_id, script in asked.items():
        *responses, last = [answer for answer in answers if answer.request_id == request_id]
        assert [shown(response) for response in responses] == expected(script, wanted)
        assert [response.final for response in (*responses, last)] == [False] * len(responses) + [True]
        assert last.outputs == ()


def test_what_came_while_the_loop_looked_by_itself_is_called_when_it_looks_no_more(loop: WorkerLoop) -> None:
    """
    1. The loop looks by itself as long as a request has several responses. 2. A thread that has more to do tells of the end of a
    run, and wakes nobody. 3. The request's last response leaves. Result: the end of the run is known in the next iteration.
    """
    worker, called = loop.worker, []
    while worker._dispatcher.responses.look_ns:
        worker.iterate()
    worker._gathers = True
    worker._inbox.look(True)
    worker._inbox.post(lambda: called.append(1), soon=False)
    worker.iterate()
    assert called == [1]
