"""Requests of many strings: the thread that runs their model converts them, and never the worker's loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tensord.shm import strings
from tensord.shm.arrays import SLICE, byte_content
from tensord.workers.imports import import_system
from tests.records import Tensor
from tests.repositories import answering, applying, fields, of_x, write_model
from tests.workers.worker_loop import WorkerLoop

HOST = of_x("x[::-1]", "BYTES[n]", more="host = True")
GENERATOR = applying(
    """
    yield {"y": inputs["x"][::-1]}
    """,
    "x BYTES[n]",
    "y BYTES[n]",
    more="host = True",
)
PYTHON = answering("return response(y=given(request)[::-1])")
PYTHON_CONFIG = fields("x STRING -1", "y STRING -1")


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerLoop]:
    folder = tmp_path_factory.mktemp("models")
    import_system.prepare()
    worker = WorkerLoop()
    for name, source, config in (
        ("host", HOST, ""),
        ("generator", GENERATOR, ""),
        ("python", PYTHON, f'name: "python"{PYTHON_CONFIG}'),
    ):
        write_model(folder, name, source, config)
        worker.load(folder / name)
    yield worker
    worker.close()


@pytest.mark.parametrize("model", ["host", "python", "generator"])
def test_the_loop_converts_none(loop: WorkerLoop, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count, here = 5 * SLICE, threading.get_ident()
    elements = [str(number).encode() for number in range(count)]
    content = byte_content(np.array(elements, np.object_))
    converted: list[int] = []

    def watched(convert: Any) -> Any:
        def call(*arguments: Any) -> Any:
            assert threading.get_ident() != here
            converted.append(0)
            return convert(*arguments)

        return call

    monkeypatch.setattr(strings, "decode", watched(strings.decode))
    monkeypatch.setattr(strings, "encode", watched(strings.encode))
    loop.submit(model, [Tensor("x", "BYTES", (count,), content)])
    # A generator's last response says that no more follow.
    answer, *_ = loop.answers(2 if model == "generator" else 1)
    monkeypatch.undo()
    assert not answer.code, answer.message
    assert converted
    (output,) = answer.outputs
    place = output.place
    given = place if isinstance(place, bytes) else bytes(loop.front.view(place))
    assert given == byte_content(np.array(elements[::-1], np.object_))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\2\0\0\0ab" * (5 * SLICE - 1), f"expected {5 * SLICE} string elements"),
        (b"\2\0\0\0ab" * (5 * SLICE + 1), f"unexpected number of string elements {5 * SLICE + 1}"),
        (b"\2\0\0\0ab" * (5 * SLICE - 1) + b"\2\0\0\0a", "incomplete string data for inference"),
        (b"\2\0\0\0ab" * (5 * SLICE - 1) + b"\2\0", "incomplete string length indicator"),
    ],
)
def test_what_is_malformed_is_refused_before_it_is_queued(loop: WorkerLoop, content: bytes, message: str) -> None:
    loop.submit("python", [Tensor("x", "BYTES", (5 * SLICE,), content)])
    (answer,) = loop.answers(1)
    assert message in answer.message
