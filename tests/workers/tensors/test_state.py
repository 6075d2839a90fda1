"""With what a sequence's state begins, as ``create`` returned it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensord.config import model_config
from tensord.shm.arrays import DTYPES
from tensord.shm.errors import InvalidArgument
from tensord.workers.tensors.state import StateSpec, initial_state

MESSAGE = model_config.parse_pbtxt(
    'sequence_batching { state { input_name: "h" output_name: "h" data_type: TYPE_FP32 dims: 2 } }', "m"
)


def first(value: Any, datatype: str, dims: tuple[int, ...]) -> Any:
    spec = StateSpec("h", datatype, DTYPES[datatype], dims, dims, tuple(None for _ in dims), output="h")
    return initial_state(MESSAGE, (spec,), {"h": value}, Path())["h"]


@pytest.mark.parametrize(
    ("value", "datatype", "dims", "expected"),
    [
        (0.5, "FP32", (2,), [0.5, 0.5]),
        (np.float32(0.5), "FP32", (2,), [0.5, 0.5]),
        (np.array(1), "FP32", (1, 2), [[1, 1]]),
        ([0.5], "FP32", (1,), [0.5]),
        ([[1, 2], [3, 4]], "INT8", (2, 2), [[1, 2], [3, 4]]),
        (3, "BF16", (), 3),
        (True, "BOOL", (2,), [True, True]),
        (np.full(2, 7, np.float32), "FP32", (2,), [7, 7]),
        (0.1, "FP32", (-1,), np.float32(0.1)),
    ],
)
def test_arrays_lists_and_numbers(value: Any, datatype: str, dims: tuple[int, ...], expected: Any) -> None:
    found = first(value, datatype, dims)
    assert found.dtype == DTYPES[datatype]
    assert found.tolist() == np.asarray(expected).tolist()


@pytest.mark.parametrize(
    ("value", "datatype", "dims"),
    [
        (0.5, "INT32", (2,)),
        (0.5, "INT32", (-1,)),
        (300, "UINT8", (2,)),
        (float("nan"), "INT32", (1,)),
        (1e40, "FP32", (1,)),
        ([0.5, 0.5], "FP32", (3,)),
        (np.zeros(2), "FP32", (2,)),
        ("1", "FP32", (1,)),
        (["1"], "FP32", (1,)),
        (None, "FP32", (1,)),
    ],
)
def test_what_does_not_fit(value: Any, datatype: str, dims: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument, match=r"state 'h' begins as .* from create"):
        first(value, datatype, dims)
