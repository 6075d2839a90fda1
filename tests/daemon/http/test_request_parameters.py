"""Parameters of a request: those that mean something to the server, those of the model, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tensord.daemon.http.request_codec import part
from tensord.shm.common.scheduling import PARAMETERS, Scheduling
from tensord.shm.errors import InvalidArgument, Unsupported
from tests.daemon.http.heads import decode, request_of


def test_reserved_parameters_are_taken_out() -> None:
    decoded = decode(
        request_of(
            id="abc",
            parameters={
                "sequence_id": 2**64 - 1,
                "sequence_start": True,
                "sequence_end": True,
                "priority": 3,
                "timeout": 5,
                "tensord_replace": "camera",
                "parameter_set": "customer-7",
                "binary_data_output": True,
                "a": "text",
                "b": False,
                "c": -(2**63),
                "d": 1.5,
                "e": 2**63,
            },
        ),
        0,
    )
    assert decoded.id == "abc"
    assert decoded.scheduling == Scheduling(
        3, 5, 2**64 - 1, sequence_start=True, sequence_end=True, replace_key="camera", parameter_set="customer-7"
    )
    assert decoded.all_binary
    assert decoded.parameters == {"a": "text", "b": False, "c": -(2**63), "d": 1.5, "e": float(2**63)}


@pytest.mark.parametrize("value", ["", "s" * 128, 0])
def test_sequence_ids(value: int | str) -> None:
    assert decode(request_of(parameters={"sequence_id": value}), 0).scheduling.sequence_id == value


def test_a_sequence_id_that_is_too_long() -> None:
    with pytest.raises(Unsupported, match="cannot be longer than 128"):
        decode(request_of(parameters={"sequence_id": "ä" * 65}), 0)


@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        ({"n": None}, "parameter 'n' has invalid type"),
        ({"n": {}}, "parameter 'n' has invalid type"),
        ({"n": []}, "parameter 'n' has invalid type"),
        ({"triton_x": 1}, "parameter keys starting with 'triton_' are reserved"),
        ({"binary_data_output": 1}, "'binary_data_output': attempt to access JSON non-boolean as boolean"),
        ({"sequence_start": "true"}, "'sequence_start': attempt to access JSON non-boolean as boolean"),
        ({"sequence_end": 0}, "'sequence_end': attempt to access JSON non-boolean as boolean"),
        ({"sequence_id": -1}, "'sequence_id': attempt to access JSON non-string as string"),
        ({"sequence_id": 1.0}, "'sequence_id': attempt to access JSON non-string as string"),
        ({"sequence_id": 2**64}, "'sequence_id': attempt to access JSON non-string as string"),
        ({"priority": -1}, "'priority': attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ({"priority": True}, "'priority': attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ({"timeout": "5"}, "'timeout': attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ({"tensord_replace": 5}, "'tensord_replace': attempt to access JSON non-string as string"),
        ({"parameter_set": 5}, "'parameter_set': attempt to access JSON non-string as string"),
        ({"parameter_set": ""}, "parameter 'parameter_set' is empty, the name of a parameter set is expected"),
        ({"n": 10**400}, "out of the range"),
    ],
)
def test_parameters_that_are_refused(parameters: dict[str, Any], found: str) -> None:
    with pytest.raises(InvalidArgument, match=found):
        decode(request_of(parameters=parameters), 0)
    rest = part(parameters)[1]
    assert rest == parameters, "what is wrong is nobody's own"


def test_what_is_a_request_s_own_is_parted_from_what_it_has_in_common_with_others() -> None:
    own = {"priority": 3, "timeout": 5, "sequence_id": "s", "sequence_start": True, "sequence_end": False}
    own |= {"tensord_replace": "k", "parameter_set": "a"}
    assert own.keys() == PARAMETERS.keys()
    assert part({"a": 1, **own, "b": 2}) == (Scheduling(3, 5, "s", True, False, "k", "a"), {"a": 1, "b": 2})
    assert part({**own, "priority": -1})[1] == {"priority": -1}
