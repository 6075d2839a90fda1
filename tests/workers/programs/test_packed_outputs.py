"""Outputs as bytes side by side: all datatypes, where each begins, and which programs have them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tensord.shm.arrays import DTYPES
from tensord.shm.errors import Internal
from tensord.workers.devices.host_staging import TOGETHER
from tensord.workers.jax_internals.wide import precision
from tensord.workers.programs.lowering import Lowering
from tensord.workers.programs.packed_outputs import PACKED, starts
from tensord.workers.programs.placement import Placement
from tensord.workers.tensors.signature import Signature
from tests.workers.parameters.made_sets import loaded
from tests.workers.programs.test_executables import of

NUMERIC = sorted(set(DTYPES) - {"BYTES"})


def made_by(signature: Signature, apply: Any, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    """Compiles and runs a program on one row; returns its outputs."""
    rows, lead = 1, 1 if signature.max_batch_size else 0
    shapes = tuple(array.shape[lead:] for array in inputs.values())
    lowering, here = Lowering(signature, apply, pack=True), Placement(loaded(None))
    lowered = lowering.lower(rows, shapes, here)
    lowering.check(rows, shapes, lowered)
    with precision(signature.wide):
        return {name: np.asarray(array) for name, array in here.compile(lowered)(None, inputs).items()}


def test_every_datatype_begins_at_a_multiple_of_64() -> None:
    signature = of({"x": "FP32[n]"}, {f"y{datatype}": f"{datatype}[n]" for datatype in NUMERIC}, 0)
    dtypes = {f"y{datatype}": DTYPES[datatype] for datatype in NUMERIC}

    def apply(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        return {name: inputs["x"].astype(dtype) for name, dtype in dtypes.items()}

    made = made_by(signature, apply, x=np.array([0, 1, 3.5], np.float32))
    packed = made.pop(PACKED).tobytes()
    begins = starts({name: made[name] for name in signature.outputs})
    assert len(packed) == 64 * len(NUMERIC)
    for name, array in made.items():
        assert begins[name] % 64 == 0
        assert packed[begins[name] :][: array.nbytes] == array.tobytes()
        assert array.dtype == dtypes[name]


def test_sums_are_what_they_are_alone() -> None:
    """Bit for bit: what packs them is computed after them."""
    weights = np.random.default_rng(0).standard_normal((64, 64), np.float32)

    def apply(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        y = jnp.tanh(inputs["x"] @ weights) * 3 + 1
        return {"y": y, "sum": y.sum(keepdims=True), "none": y[:0]}

    signature = of({"x": "FP32[64]"}, {"y": "FP32[64]", "sum": "FP32[1]", "none": "FP32[n]"}, 0)
    x = np.random.default_rng(1).standard_normal(64, np.float32)
    made, alone = made_by(signature, apply, x=x), jax.jit(apply)(None, {"x": x})
    begins = starts({name: made[name] for name in signature.outputs})
    for name, array in alone.items():
        expected = np.asarray(array)
        assert made[name].tobytes() == expected.tobytes()
        assert made[PACKED].tobytes()[begins[name] :][: expected.nbytes] == expected.tobytes()


@pytest.mark.parametrize(
    ("outputs", "count", "packs"),
    [(1, 16, False), (2, 16, True), (2, TOGETHER // 8, True), (2, TOGETHER // 8 + 1, False), (2, 0, False)],
)
def test_which_programs_have_them(outputs: int, count: int, packs: bool) -> None:
    """Programs with several outputs that fit into one transfer pack them."""
    names = [f"y{number}" for number in range(outputs)]
    signature = of({"x": "FP32[n]"}, dict.fromkeys(names, "FP32[n]"), 0)
    made = made_by(signature, lambda _, inputs: dict.fromkeys(names, inputs["x"] + 1), x=np.zeros(count, np.float32))
    assert (PACKED in made) == packs


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (lambda x: [x], "apply returned a list"),
        (lambda x: {"y": x}, "output 'z' is declared but not computed"),
        (lambda x: {"y": x, "z": x.astype(jnp.int32)}, "output 'z' is computed as INT32"),
    ],
)
def test_what_is_wrong_is_said_as_ever(made: Any, sentence: str) -> None:
    signature = of({"x": "FP32[4]"}, {"y": "FP32[4]", "z": "FP32[4]"}, 0)
    with pytest.raises(Internal, match=sentence):
        made_by(signature, lambda _, inputs: made(inputs["x"]), x=np.zeros(4, np.float32))
