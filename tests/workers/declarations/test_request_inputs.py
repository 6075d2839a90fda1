"""Tests what a model asks of its requests: of which datatype, what is refused, and how it comes to the function."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tensord.config.model_config import empty
from tensord.config.options import Http, Options
from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import Parameter
from tensord.workers.declarations.request_inputs import KnownParameters, RequestInputs, request_inputs
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


@pytest.mark.parametrize("default", ["", b"", b"\xff"])
def test_a_default_text_may_be_bytes_as_the_model_gets_it(default: str | bytes) -> None:
    inputs = asked({"stop": ("BYTES", default)}, host=True)
    assert told(inputs)["request.stop"].tolist() == [[default or b""]]


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
        ({"t": "FP32[1]"}, "did you mean 'FP32'"),
        ({"t": ("I64", 1)}, "did you mean 'INT64'"),
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


def known(options: Options | None = None, **declared: Any) -> KnownParameters:
    module = ModuleType("model")
    module.__dict__.update(declared)
    return KnownParameters(empty("m"), module, options or Options())


def test_a_strict_model_refuses_parameters_that_it_does_not_know() -> None:
    strict = known(request={"temperature": "FP32", "seed": "INT64"}, strict_parameters=True)
    strict.check({"seed": 1, "tensord_parameters": True}, "")
    for name, words in (
        (
            "temprature",
            r"^\[request id: r\] parameter 'temprature' of .* is unknown to model 'm'; did you mean 'temperature'\?$",
        ),
        ("top_k", "it knows 'temperature', 'seed'$"),
        ("a" * 9000, f"parameter '{'a' * 64}' of"),
    ):
        for _ in range(2):
            with pytest.raises(InvalidArgument, match=words):
                strict.check({name: 1}, "[request id: r] ")
    with pytest.raises(InvalidArgument, match="it knows none"):
        known(strict_parameters=True).check({"seed": 1}, "")
    with pytest.raises(InvalidArgument, match=r"strict_parameters of model.py is 1, True or False is expected"):
        known(strict_parameters=1)


def test_others_are_told_once_and_a_few(caplog: pytest.LogCaptureFixture) -> None:
    lenient = known(request={"seed": "INT64"})
    for number in range(100):
        lenient.check({"seed": 1, "sed": 2, f"any\n{number}": 3}, "")
    said = [record.message for record in caplog.records]
    assert len(said) == 8
    assert said[0] == (
        "parameter 'sed' of a request is unknown to model 'm'; did you mean 'seed'? "
        "(request of model.py names them; strict_parameters = True refuses others)"
    )
    assert "parameter 'any\\n6' of" in said[-1]


def test_headers_that_fronts_forward_are_known() -> None:
    strict = known(Options(http=Http(header_forward_pattern="^x-user")), strict_parameters=True)
    strict.check({"X-User-Name": "me"}, "")
    with pytest.raises(InvalidArgument):
        strict.check({"X-Name": "me"}, "")
