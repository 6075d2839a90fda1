"""Host-side functions: joined rows are given back to their requests; outputs are what was declared, or an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensord.config.model_config import parse_pbtxt
from tensord.shm.errors import Internal
from tensord.workers.calls.caller import ModelPort
from tensord.workers.models.execution import Execution
from tensord.workers.models.host_model import HostModel
from tensord.workers.tensors.buckets import shapes_key
from tensord.workers.tensors.signature import signature
from tests.workers.made_requests import request_of
from tests.workers.parameters.made_sets import loaded


def model_of(apply: Any, max_batch_size: int = 0, reshape: str = "") -> HostModel:
    text = f"""name: "m" max_batch_size: {max_batch_size}
        input {{ name: "x" data_type: TYPE_STRING dims: [ -1 ] }}
        output {{ name: "y" data_type: TYPE_STRING dims: [ 2 ] {reshape} }}"""
    return HostModel(1, signature(parse_pbtxt(text, "m"), {}, {}), apply, loaded("parameter"), ModelPort("m", 1, None))


def words(*rows: list[str]) -> Any:
    return np.array([[word.encode() for word in row] for row in rows], np.object_)


def execute(model: HostModel, *arrays: Any) -> list[Any]:
    execution = Execution([request_of({"x": array}, len(array)) for array in arrays], 0)
    model.execute(execution)
    return execution.results


def test_batched_rows_go_back_to_their_requests() -> None:
    model = model_of(lambda p, i: {"y": i["x"] + b"!"}, 8)
    found = execute(model, words(["a", "b"]), words(["c", "d"], ["e", "f"]))
    assert [result["y"].tolist() for result in found] == [[[b"a!", b"b!"]], [[b"c!", b"d!"], [b"e!", b"f!"]]]


def test_strings_of_any_kind_become_bytes() -> None:
    (result,) = execute(model_of(lambda p, i: {"y": np.array([p, "ß"])}), words(["a"])[0])
    assert result["y"].dtype == np.object_


def test_reshape() -> None:
    (result,) = execute(
        model_of(lambda p, i: {"y": words(["a", "b"])}, reshape="reshape { shape: [ 1, 2 ] }"), words([])[0]
    )
    assert result["y"].shape == (2,)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (None, "returned NoneType"),
        ({}, "did not compute its output 'y'"),
        ({"y": words(["a"])[0]}, r"computed as BYTES\[1\], declared as BYTES\[2\]"),
        ({"y": np.zeros(2)}, r"computed as FP64\[2\], declared as BYTES\[2\]"),
        ({"y": 3}, "computed as"),
    ],
)
def test_wrong_outputs(made: Any, text: str) -> None:
    with pytest.raises(Internal, match=text):
        execute(model_of(lambda p, i: made), words([])[0])


def test_outputs_that_are_not_declared_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(lambda p, i: {"y": i["x"], "score": i["x"], "aux": 1}, 8)
    for _ in range(2):
        execute(model, words(["a", "b"]))
    assert [record.message for record in caplog.records] == [
        "model 'm': its function computes 'aux', 'score', which no client gets: outputs of model.py do not declare it"
    ]


def test_key() -> None:
    a = {"x": np.zeros((1, 3)), "w": np.zeros((1, 2))}
    b = {"w": np.zeros((4, 2)), "x": np.zeros((4, 3))}
    text = 'name: "m" max_batch_size: %d input { name: "x" data_type: TYPE_FP32 dims: -1 %s }'
    batches, alone, ragged = (
        signature(parse_pbtxt(text % each, "m"), {}, {}) for each in ((4, ""), (0, ""), (4, "allow_ragged_batch: true"))
    )
    assert shapes_key(a, batches) == shapes_key(b, batches)
    assert shapes_key(a, alone) != shapes_key(b, alone)
    assert shapes_key(a, batches) != shapes_key({"x": a["x"]}, batches)
    longer = {**a, "x": np.zeros((1, 9))}
    assert shapes_key(a, ragged) == shapes_key(longer, ragged) != shapes_key({**a, "w": np.zeros((1, 9))}, ragged)
    assert shapes_key(a, batches) != shapes_key(longer, batches)
