"""Tests what a model asks of its requests: of which datatype, what is refused, and how it comes to the function."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tensord.config.model_config import empty
from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import Parameter
from tensord.workers.declarations.request_inputs import RequestInputs, request_inputs
from tests.records import WholeRequest


def of_module(declared: object, host: bool = False, batches: bool = True) -> RequestInputs | None:
    message, module = empty("m"), ModuleType("model")
    message.max_batch_size = 4 if batches else 0
    module.__dict__.update(request=declared, host=host)
    return request_inputs(message, module)


def asked(declared: object, host: bool = False, batches: bool = True) -> RequestInputs:
    made = of_module(declared, host, batches)
    assert made is not None
    return made


def told(inputs: RequestInputs, rows: int = 1, **parameters: Parameter) -> dict[str, Any]:
    request = WholeRequest(
        1, "m", 0, (), parameters=parameters, client_id="mine", priority=3, sequence_id="a", sequence_start=True
    )
    return inputs.arrays(request.prepared, request.record, rows)


def test_an_element_for_each_row() -> None:
    inputs = asked({"temperature": ("FP32", 0.5), "seed": "INT64", "priority": "UINT8", "sequence_start": "BOOL"})
    arrays = told(inputs, 3, seed=7)
    assert {name: (array.dtype.name, array.tolist()) for name, array in arrays.items()} == {
        "request.temperature": ("float32", [[0.5]] * 3),
        "request.seed": ("int64", [[7]] * 3),
        "request.priority": ("uint8", [[3]] * 3),
        "request.sequence_start": ("bool", [[True]] * 3),
    }
    assert {name: array.shape for name, array in inputs.nobody.items()} == dict.fromkeys(arrays, (1, 1))


def test_texts_for_host_models_and_no_batch_dimension() -> None:
    inputs = asked({"id": "BYTES", "sequence_id": "BYTES", "stop": ("BYTES", "")}, host=True, batches=False)
    assert {name: array.tolist() for name, array in told(inputs, stop="é").items()} == {
        "request.id": [b"mine"],
        "request.sequence_id": [b"a"],
        "request.stop": ["é".encode()],
    }


def test_the_function_gets_them_apart() -> None:
    inputs = asked({"temperature": "FP32"})
    apply = inputs.telling(lambda *given: given)
    assert apply("parameters", {"x": 1, "request.temperature": 2}, "state") == (
        "parameters",
        {"x": 1},
        "state",
        {"temperature": 2},
    )


def test_a_model_that_asks_nothing() -> None:
    assert of_module({}) is None


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ("FP32", "request of model.py must be a dict"),
        ({"t": "FP32[1]"}, r"declared as 'FP32\[1\]'; expected a datatype such as 'FP32', or a pair"),
        ({"t": ("FP32", 1, 2)}, "expected a datatype"),
        ({"t": 4}, "declared as 4; expected a datatype"),
        ({"t": "BYTES"}, "request 't': BYTES cannot be given to a jitted function"),
        ({"t": ("INT8", 400)}, "request 't': its default is 400, INT8 goes from -128 to 127"),
        ({"t": ("INT8", None)}, "request 't': its default is NoneType, INT8 is expected"),
        ({"priority": ("INT8", 1)}, "request 'priority': it needs no default"),
        ({"priority": "BOOL"}, "request 'priority' is a number, BOOL is expected"),
    ],
)
def test_what_cannot_be_asked(declared: object, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        of_module(declared)


@pytest.mark.parametrize(
    ("datatype", "given", "words"),
    [
        ("FP32", "hot", "'t' of the request is a text, FP32 is expected"),
        ("FP32", True, "'t' of the request is a truth value, FP32 is expected"),
        ("FP16", 1e6, "is 1000000.0, which FP16 cannot hold"),
        ("UINT8", -1, "is -1, UINT8 goes from 0 to 255"),
        ("INT32", 1.5, "is a number, INT32 is expected"),
        ("BOOL", 1, "is a number, BOOL is expected"),
        ("BYTES", 1, "is a number, BYTES is expected"),
        ("BYTES", None, "parameter 't' is missing, model 'm' needs it"),
    ],
)
def test_what_is_refused(datatype: str, given: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        told(asked({"t": datatype}, host=True), **({} if given is None else {"t": given}))


def test_numbers_that_are_none_are_kept() -> None:
    arrays = told(asked({"t": "FP16"}), t=float("inf"))
    assert np.isinf(arrays["request.t"]).all()
