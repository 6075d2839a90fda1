"""What a model's ``batch_input`` and ``batch_output`` may not say, in Triton's words."""

from __future__ import annotations

import pytest

from tensord.config import model_checks
from tensord.config.model_config import parse_pbtxt
from tensord.shm.errors import InvalidArgument

TENSORS = """
    name: "m" max_batch_size: 4
    input { name: "x" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }
    output { name: "y" data_type: TYPE_FP32 dims: -1 }
"""
INPUT = 'batch_input { kind: BATCH_ELEMENT_COUNT target_name: "counts" data_type: TYPE_INT32 source_input: "x" }'
OUTPUT = 'batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "y" source_input: "x" }'


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        (
            INPUT.replace('source_input: "x"', 'source_input: [ "x", "x" ]'),
            "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 2 for m",
        ),
        (INPUT.replace("INT32", "INT64"), "batch input data type must be TYPE_INT32 or TYPE_FP32 for m"),
        (INPUT.replace('"x"', '"z"'), "unknown source input name 'z' for m"),
        (INPUT.replace('target_name: "counts"', ""), "batch input kind 'BATCH_ELEMENT_COUNT' has no target_name for m"),
        (
            OUTPUT.replace('source_input: "x"', ""),
            "batch output kind 'BATCH_SCATTER_WITH_INPUT_SHAPE' expects 1 source input, got 0 for m",
        ),
        (OUTPUT.replace('"y"', '"z"'), "unknown target output name 'z' for m"),
        (OUTPUT.replace('"y"', '[ "y", "y" ]'), "target output name 'y' can only be specified once for m"),
        (OUTPUT + OUTPUT, "target output name 'y' can only be specified once for m"),
    ],
)
def test_refused(says: str, sentence: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        model_checks.check(parse_pbtxt(TENSORS + says, "m"))
    assert caught.value.message == sentence


def test_good_ones() -> None:
    model_checks.check(parse_pbtxt(TENSORS + INPUT + OUTPUT, "m"))


def test_tensors_that_the_model_is_to_say_itself() -> None:
    """Where config.pbtxt lists none, names are looked at once they are known."""
    model_checks.check(parse_pbtxt('name: "m" max_batch_size: 4 ' + INPUT.replace('"x"', '"z"'), "m"))
