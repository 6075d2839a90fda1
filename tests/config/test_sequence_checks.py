"""What a model's ``sequence_batching`` may not say, in the words that a Triton has for it."""

from __future__ import annotations

import pytest

from tensord.config import model_checks
from tensord.config.model_config import parse_pbtxt
from tensord.shm.errors import InvalidArgument

START = "kind: CONTROL_SEQUENCE_START"
CORRID = "kind: CONTROL_SEQUENCE_CORRID"


def control(name: str, *controls: str) -> str:
    return f"control_input {{ name: '{name}' {' '.join(f'control {{ {each} }}' for each in controls)} }}"


@pytest.mark.parametrize(
    ("says", "text"),
    [
        (control("", f"{START} int32_false_true: [0, 1]"), "control tensor must have a name for m"),
        (
            control("C", f"{START} int32_false_true: [0, 1]", "kind: CONTROL_SEQUENCE_END int32_false_true: [0, 1]"),
            "control tensor 'C' is specified for multiple control kinds for m",
        ),
        (
            control("C", f"{START} int32_false_true: [0, 1]") + control("D", f"{START} fp32_false_true: [0, 1]"),
            "specifies multiple CONTROL_SEQUENCE_START tensors for m",
        ),
        (
            control("C", START),
            "must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for CONTROL_SEQUENCE_START for m",
        ),
        (
            control("C", f"{START} int32_false_true: [0, 1] bool_false_true: [false, true]"),
            "specifies more than one from 'int32_false_true', 'fp32_false_true' and 'bool_false_true' for CONTROL_SEQUENCE_START",
        ),
        (
            control("C", f"{START} fp32_false_true: [1]"),
            "control 'fp32_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_START for m",
        ),
        (
            control("C", f"{CORRID} int32_false_true: [0, 1] data_type: TYPE_INT32"),
            "must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for CONTROL_SEQUENCE_CORRID",
        ),
        (
            control("C", f"{CORRID} data_type: TYPE_FP32"),
            "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types are TYPE_UINT64, TYPE_INT64, "
            "TYPE_UINT32, TYPE_INT32 and TYPE_STRING",
        ),
        (control("x", f"{START} int32_false_true: [0, 1]"), "control tensor 'x' is an input as well for m"),
        ("oldest { preferred_batch_size: 0 }", "sequence batching preferred batch size must be positive for m"),
        (
            "oldest { preferred_batch_size: 5 }",
            "sequence batching preferred batch size must be <= max batch size for m",
        ),
        ("oldest { max_candidate_sequences: -1 }", "max_candidate_sequences is -1, it must not be negative for m"),
        (
            "direct { minimum_slot_utilization: 1.5 }",
            "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m",
        ),
    ],
)
def test_refused(says: str, text: str) -> None:
    message = parse_pbtxt(
        f'name: "m" max_batch_size: 4 input {{ name: "x" data_type: TYPE_FP32 dims: 1 }} sequence_batching {{ {says} }}',
        "m",
    )
    with pytest.raises(InvalidArgument) as caught:
        model_checks.check(message)
    assert text in caught.value.message


def test_all_kinds_may_be_asked_for_at_once() -> None:
    kinds = {
        "START": "int32_false_true: [0, 1]",
        "END": "fp32_false_true: [-1, 1]",
        "READY": "bool_false_true: [true, false]",
    }
    says = [control(kind, f"kind: CONTROL_SEQUENCE_{kind} {values}") for kind, values in kinds.items()]
    says.append(control("ID", f"{CORRID} data_type: TYPE_STRING"))
    model_checks.check(parse_pbtxt(f'name: "m" sequence_batching {{ {" ".join(says)} oldest {{ }} }}', "m"))
