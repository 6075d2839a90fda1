"""Declarations, their agreement with config.pbtxt, and the two shapes of a reshaped tensor."""

from __future__ import annotations

import pytest

from tensord.config.model_config import complete, parse_pbtxt
from tensord.shm.errors import InvalidArgument
from tensord.workers.tensors.signature import Declared, declare, parse_declaration, signature


@pytest.mark.parametrize(
    ("text", "datatype", "dims", "axes"),
    [
        ("FP32[64]", "FP32", (64,), (None,)),
        ("INT64[sequence]", "INT64", (-1,), ("sequence",)),
        ("BF16[ 3, n, -1 ]", "BF16", (3, -1, -1), (None, "n", None)),
        ("BYTES[]", "BYTES", (), ()),
    ],
)
def test_declarations(text: str, datatype: str, dims: tuple[int, ...], axes: tuple[str | None, ...]) -> None:
    assert parse_declaration("input 'x'", text) == Declared(datatype, dims, axes)


@pytest.mark.parametrize(
    "text",
    ["", "FP32", "fp32[1]", "FP33[1]", "FP32[0]", f"FP32[{'9' * 5000}]", "FP32[-2]", "FP32[1,]", "FP32[1][2]", 7, None],
)
def test_bad_declarations_name_the_tensor(text: object) -> None:
    with pytest.raises(InvalidArgument, match="input 'x'"):
        parse_declaration("input 'x'", text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("F32[4]", "did you mean 'FP32[4]'?"),
        ("U8[4]", "did you mean 'UINT8[4]'?"),
        ("STRING[n]", "did you mean 'BYTES[n]'?"),
        ("TYPE_STRING[1]", "did you mean 'BYTES[1]'?"),
        ("TYPE_FP32[-1, 4]", "did you mean 'FP32[-1,4]'?"),
        ("FP32(4)", "did you mean 'FP32[4]'?"),
        ("FP32[4", "did you mean 'FP32[4]'?"),
        ("float32[4]", "did you mean 'FP32[4]'?"),
        ("bfloat16[4]", "did you mean 'BF16[4]'?"),
        ("fp16", "did you mean 'FP16[4]', or 'FP16[]' for a single number?"),
        ("FP8[4]", "tensors have no floats of 8 bits, but of 16: FP16, BF16"),
        ("F8_E4M3[4]", "tensors have no floats of 8 bits"),
        ("float8_e4m3fn[4]", "tensors have no floats of 8 bits"),
    ],
)
def test_what_was_meant(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_declaration("input 'x'", text)
    assert refused.value.message.startswith(f"input 'x': declared as '{text}'; expected a datatype with dims, such as ")
    assert words in refused.value.message


@pytest.mark.parametrize("text", ["FP33[4]", "complex64[4]", "[4]", "tokens", "FP32[1][2]"])
def test_what_nobody_can_guess(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"such as 'FP32\[8, n\]'$"):
        parse_declaration("input 'x'", text)


def test_declared_where_the_configuration_is_silent() -> None:
    message = parse_pbtxt('name: "m" max_batch_size: 4', "m")
    declare(message, {"x": parse_declaration("x", "INT32[n, 2]")}, {"y": parse_declaration("y", "FP32[]")})
    complete(message)
    found = signature(message, {"x": ("n", None)}, {})
    assert found.inputs["x"].dims == (-1, 2)
    assert found.inputs["x"].axes == ("n", None)
    assert found.outputs["y"].dims == ()
    assert found.batches
    assert not found.wide


def test_the_configuration_fixes_what_is_declared_as_varying() -> None:
    message = parse_pbtxt('name: "m" input { name: "x" data_type: TYPE_INT64 dims: [ 7 ] }', "m")
    declare(message, {"x": parse_declaration("x", "INT64[n]")}, {})
    found = signature(message, {"x": ("n",)}, {})
    assert found.inputs["x"].dims == (7,)
    assert found.inputs["x"].axes == (None,)
    assert found.wide


@pytest.mark.parametrize("text", ["INT32[7]", "INT64[8]", "INT64[7, 1]"])
def test_contradictions(text: str) -> None:
    message = parse_pbtxt('name: "m" input { name: "x" data_type: TYPE_INT64 dims: [ 7 ] }', "m")
    with pytest.raises(InvalidArgument, match=r"model 'm': input 'x'.*in model.py.*in config.pbtxt"):
        declare(message, {"x": parse_declaration("x", text)}, {})


def test_a_tensor_that_config_does_not_know() -> None:
    message = parse_pbtxt('name: "m" input { name: "x" data_type: TYPE_INT64 dims: [ 7 ] }', "m")
    with pytest.raises(InvalidArgument, match=r"input 'z' is declared in model\.py and missing"):
        declare(message, {"z": parse_declaration("z", "INT64[7]")}, {})


def test_reshape() -> None:
    message = parse_pbtxt(
        'name: "m" input { name: "x" data_type: TYPE_FP32 dims: [ -1, 6, -1 ] reshape { shape: [ -1, 2, 3, -1 ] } }',
        "m",
    )
    spec = signature(message, {}, {}).inputs["x"]
    assert spec.to_model((5, 6, 7)) == (5, 2, 3, 7)
    assert spec.to_client((5, 2, 3, 7)) == (5, 6, 7)
    assert spec.fits((0, 6, 1))
    assert not spec.fits((0, 6))
    assert not spec.fits((-1, 6, 1))
    assert spec.fits_model((5, 2, 3, 7))
