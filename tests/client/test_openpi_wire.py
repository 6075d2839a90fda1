"""The messages of robots: bytes as openpi-client's packer writes them, bounds of what comes, and names and kinds of tensors."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensord_client.common.results import Tensor
from tensord_client.common.tensors import Tensors
from tensord_client.errors import InvalidArgument
from tensord_client.gateway import FILE
from tensord_client.openpi import METADATA, NotThisWire, Policy, read

from tests import openpi_gateway


@pytest.fixture(scope="module")
def packer() -> Iterator[Any]:
    """Yields the module with which openpi-client packs and unpacks arrays."""
    folder = str(openpi_gateway.package())
    sys.path.append(folder)
    try:
        from openpi_client import msgpack_numpy

        yield msgpack_numpy
    finally:
        sys.path.remove(folder)


def array(content: Any, dtype: Any = "<f4", shape: Any = (1,)) -> dict[bytes, Any]:
    return {b"__ndarray__": True, b"data": content, b"dtype": dtype, b"shape": shape}


def message(value: Any) -> bytes:
    return msgpack.packb({"x": value})


def policy(
    inputs: tuple[tuple[str, str, tuple[int, ...]], ...],
    outputs: tuple[tuple[str, str, tuple[int, ...]], ...] = (),
    batch: int = 0,
    config: dict[str, Any] | None = None,
    ignored: tuple[str, ...] = (),
) -> Policy:
    """Makes the policy of a model that is only described; shapes are with the batch dimension."""
    model = types.SimpleNamespace(name="m", version=3, max_batch_size=batch)
    model.inputs = Tensors(Tensor(*each) for each in inputs)
    model.outputs = Tensors(Tensor(*each) for each in outputs)
    return Policy(model, 0, config or {}, ignored)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------- messages

ARRAYS = [
    np.arange(6).astype(dtype).reshape(2, 3)
    for dtype in ("bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", ">f4", ">i8")
]


def test_arrays_as_the_packer_writes_them(packer: Any) -> None:
    for given_ in (
        *ARRAYS,
        np.zeros((0, 4), "f4"),
        np.array(2.5, "f4"),
        np.array(["a", "bcd"]),
        np.array([b"xy", b"z"]),
    ):
        got = read(packer.packb({"x": given_}))["x"]
        assert (got.dtype, got.shape, got.tobytes()) == (given_.dtype, given_.shape, given_.tobytes())


def test_scalars_as_the_packer_writes_them(packer: Any) -> None:
    scalars = {
        "f": np.float32(1.5),
        "d": np.float64(-2.25),
        "i": np.int8(-3),
        "u": np.uint64(2**63),
        "b": np.bool_(True),
    }
    got = read(packer.packb(scalars | {"s": np.str_("text"), "y": np.bytes_(b"\xff")}))
    assert {name: got[name] for name in scalars} == scalars
    assert (got["s"], got["y"]) == ("text", b"\xff")
    assert got["f"].dtype == np.float32
    assert got["u"].dtype == np.uint64


def test_the_robot_reads_actions_as_it_writes_arrays(packer: Any) -> None:
    for array_ in ARRAYS:
        answer = policy(()).actions({"a": array_})
        assert msgpack.packb(answer) == packer.packb({"a": array_})
        got = packer.unpackb(msgpack.packb(answer))["a"]
        assert (got.dtype, got.tolist()) == (array_.dtype, array_.tolist())


def test_both_versions_write_alike(packer: Any) -> None:
    before = openpi_gateway.package("openpi-client==0.1.1") / "openpi_client"
    after = openpi_gateway.package() / "openpi_client"
    for name in ("msgpack_numpy.py", "action_chunk_broker.py", "base_policy.py"):
        assert Path(before, name).read_bytes() == Path(after, name).read_bytes()


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\x81", b"\xc1", b"\x01", msgpack.packb([1]), msgpack.packb("text"), b"GET / HTTP/1.1"),
        *(b"\x81\xa1x\x01\x02", b"\x81\x01\x02", b"\x81\xa1\xff\x01"),
    ],
)
def test_what_is_not_this_wire(content: bytes) -> None:
    with pytest.raises(NotThisWire, match="an observation is a map in msgpack"):
        read(content)


def nested(depth: int, inner: Any = 1) -> Any:
    for _ in range(depth - 1):
        inner = [inner]
    return inner


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (message(array(b"abc")), r"<f4\[1\] takes 4 bytes, and 3 came"),
        (message(array(b"", shape=[2**31, 2**31, 2**31])), "takes 39614081257132168796771975168 bytes, and 0 came"),
        (
            message(array(b"", shape=[0, 2**31, 2**31, 2**31])),
            "has without its sizes of 0 39614081257132168796771975168 bytes",
        ),
        (message(array(b"", shape=[0, 2**40])), rf"sizes are from 0 to {2**31}"),
        (message(array(b"abcd", shape=[-1])), "sizes are from 0 to"),
        (message(array(b"abcd", shape=[True])), "sizes are from 0 to"),
        (message(array(b"abcd", shape=1)), "has the shape 1"),
        (message(array(b"abcd", shape=[1] * 9)), "has 9 dimensions, at most 8 may be"),
        (message(array("abcd")), r"<f4\[1\] takes 4 bytes, and str came"),
        (message(array([1, 2, 3, 4])), r"<f4\[1\] takes 4 bytes, and list came"),
        *(
            (message(array(b"12345678", dtype)), "came as a dtype")
            for dtype in ("|O", "O", "<M8[ns]", "f4,f4", "2f4", "|V8", "<c8", "|S0", b"<f4", 4, None, "<f4" * 9)
        ),
        (message({b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"}), "300 would become 44"),
        (message({b"__npgeneric__": True, b"data": "1", b"dtype": "<f4"}), "a scalar"),
        (message({b"__npgeneric__": True, b"data": [1] * 9, b"dtype": "|O"}), "came as a dtype"),
        (message({b"__npgeneric__": True}), "None came as a dtype"),
        (message(nested(17)), "has 17 maps and lists in each other, at most 16 may be"),
        (b"\x81\xa1x" + b"\x91" * 5000 + b"\x01", "is over 500 maps and lists deep, at most 16 may be"),
        (message([0] * 4097), r"4097 exceeds max_array_len\(4096\)"),
        (b"\x81\xa1x\xdd\xff\xff\xff\xff", r"4294967295 exceeds max_array_len\(4096\)"),
        (b"\x81\xa1x\xdf\xff\xff\xff\xff", r"4294967295 exceeds max_map_len\(4096\)"),
        (message([[0] * 4000] * 17), "has 68000 values, at most 65536 may be"),
        (message(array(b"a" * 70000, "|S1", [70000])), "has 70005 values, at most 65536 may be"),
        (message([array(b"abcd")] * 257), "has 257 arrays, at most 256 may be"),
    ],
)
def test_bounds(content: bytes, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        read(content)


def test_what_just_fits() -> None:
    read(message(nested(16)))
    read(message([0] * 4096))
    read(message([array(b"abcd")] * 256))
    read(message(array(b"abcd", shape=[1] * 8)))


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(content: bytes) -> None:
    for each in (content, b"\x81\xa1x" + content):
        try:
            assert isinstance(read(each), dict)
        except (InvalidArgument, NotThisWire):
            pass


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
        max_leaves=12,
    ),
    st.sampled_from(["FP32", "INT8", "BOOL", "BYTES", "BF16", "UINT64"]),
)
def test_any_value_fits_or_is_refused(value: Any, datatype: str) -> None:
    taken = policy((("x", datatype, (-1,)),))
    try:
        made = taken.inputs(read(message(value)))
    except InvalidArgument as error:
        assert "'x" in error.message or "observation" in error.message
    else:
        assert made["x"].ndim == 1


# -------------------------------------------------------------------------------------------------------------- tensors


def test_names_are_those_of_nested_maps_and_with_slashes() -> None:
    taken = policy(
        (("observation/state", "FP32", (2,)), ("observation.image", "UINT8", (1,)), ("prompt", "BYTES", (1,)))
    )
    state, image = np.ones(2, np.float32), np.ones(1, np.uint8)
    nested_ = {"observation": {"state": state, "image": image}, "prompt": "go"}
    flat_ = {"observation/state": state, "observation/image": image, "prompt": np.array(["go"])}
    for observation in (nested_, flat_):
        made = taken.inputs(observation)
        assert sorted(made) == ["observation.image", "observation/state", "prompt"]
        np.testing.assert_array_equal(made["observation/state"], state)
        assert made["prompt"].tolist() == ["go"]
    with pytest.raises(InvalidArgument, match="twice"):
        taken.inputs({**flat_, "observation.image": image})
    with pytest.raises(InvalidArgument, match="twice"):
        taken.inputs({**flat_, **nested_})


def test_the_batch_axis_is_added_and_taken_off() -> None:
    taken = policy((("x", "FP32", (-1, 3)),), (("y", "FP32", (-1, 2)),), batch=8)
    assert taken.inputs({"x": np.ones(3, np.float32)})["x"].shape == (1, 3)
    assert taken.actions({"y": np.ones((1, 2), np.float32)})["y"][b"shape"] == (2,)
    assert taken.metadata["tensord"]["inputs"] == {"x": {"datatype": "FP32", "shape": (3,)}}
    alone = policy((("x", "FP32", (3,)),), (("y", "FP32", (2,)),))
    assert alone.inputs({"x": np.ones(3, np.float32)})["x"].shape == (3,)
    assert alone.actions({"y": np.ones(2, np.float32)})["y"][b"shape"] == (2,)


@pytest.mark.parametrize(
    ("datatype", "value", "made"),
    [
        ("FP32", np.array([1.5], "f8"), np.array([1.5], "f4")),
        ("FP32", np.array([1.5], ">f4"), np.array([1.5], "f4")),
        ("FP16", np.array([1.5], "f8"), np.array([1.5], "f2")),
        ("FP64", np.array([1.5], "f2"), np.array([1.5], "f8")),
        ("INT32", np.array([-7], "i8"), np.array([-7], "i4")),
        ("UINT8", np.array([7], "i8"), np.array([7], "u1")),
        ("BOOL", True, np.array([True])),
        ("FP32", 3, np.array([3], "f4")),
        ("FP32", [3], np.array([3], "f4")),
        ("INT64", 3, np.array([3])),
        ("FP32", np.array(2.5), np.array([2.5], "f4")),
        ("BYTES", "text", np.array(["text"], object)),
        ("BYTES", b"\xff", np.array([b"\xff"], object)),
        ("BYTES", np.array(["text"]), np.array(["text"], object)),
    ],
)
def test_values_are_cast_within_their_kind(datatype: str, value: Any, made: Any) -> None:
    got = policy((("x", datatype, (1,)),)).inputs({"x": value})["x"]
    assert got.dtype == made.dtype
    np.testing.assert_array_equal(got, made)


@pytest.mark.parametrize(
    ("datatype", "value", "came"),
    [
        ("FP32", np.array([1], "i8"), r"int64\[1\]"),
        ("INT32", np.array([1.0], "f4"), r"float32\[1\]"),
        ("UINT8", np.array([True]), r"bool\[1\]"),
        ("BOOL", np.array([1], "u1"), r"uint8\[1\]"),
        ("BYTES", np.array([1], "u1"), r"uint8\[1\]"),
        ("FP32", np.array(["1.5"]), r"<U3\[1\]"),
        ("BF16", np.array([1], "u2"), r"uint16\[1\]"),
        ("FP32", np.ones((1, 1), "f4"), r"float32\[1, 1\]"),
        ("FP32", np.ones(2, "f4"), r"float32\[2\]"),
        ("INT8", np.array([300], "i8"), r"int64\[1\]"),
        ("FP16", np.array([1e6], "f4"), r"float32\[1\]"),
        ("INT8", [1.5], r"\[1.5\]"),
        ("FP32", "1.5", "'1.5'"),
        ("FP32", None, "None"),
        ("FP32", msgpack.ExtType(5, b"x"), r"ExtType\(code=5, data=b'x'\)"),
        ("BYTES", msgpack.ExtType(5, b"\xc7\x01\x05x"), r"ExtType\(code=\.\.\..*\)"),
        ("BYTES", [1], r"\[1\]"),
        ("FP32", [[1], [1, 2]], r"\[\[1\], \[1, 2\]\]"),
    ],
)
def test_what_does_not_fit_is_named_with_what_came_and_what_is_taken(datatype: str, value: Any, came: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"^'x' is {came}, and the model takes {datatype}\[1\]"):
        policy((("x", datatype, (1,)),)).inputs({"x": value})


def test_unknown_lacking_and_optional_names() -> None:
    inputs = (("x", "FP32", (1,)), ("y", "FP32", (1,)))
    x = np.ones(1, np.float32)
    with pytest.raises(InvalidArgument, match=r"the observation has 'debug/t', the model takes \['x', 'y'\]"):
        policy(inputs).inputs({"x": x, "y": x, "debug": {"t": 1}})
    with pytest.raises(InvalidArgument, match=r"the observation lacks \['y'\], the model takes \['x', 'y'\]"):
        policy(inputs).inputs({"x": x})
    assert list(policy(inputs, ignored=("debug/*", "z")).inputs({"x": x, "y": x, "debug": {"t": 1}, "z": None})) == [
        "x",
        "y",
    ]
    with pytest.raises(InvalidArgument, match=r"the observation has \"b'x'\", the model takes \['x'\]"):
        policy(inputs[:1]).inputs({b"x": x})
    config = {"input": [{"name": "y", "optional": True}, {"name": "x"}]}
    assert list(policy(inputs, config=config).inputs({"x": x})) == ["x"]


def test_bfloat16_and_texts_of_answers() -> None:
    taken = policy(
        (("x", "BF16", (2,)),), (("y", "BF16", (2,)), ("s", "BYTES", (1,)), ("t", "BYTES", (2,)), ("u", "BYTES", (1,)))
    )
    bits = taken.inputs({"x": np.array([1.5, -2], np.float32)})["x"].view(np.uint16)
    assert bits.tolist() == [0x3FC0, 0xC000]
    strings = {"s": np.array([b"go"], object), "t": np.array([b"a", b"b"], object), "u": np.array([b"\xff"], object)}
    told = taken.actions({"y": bits, **strings})
    assert told["y"] == array(np.array([1.5, -2], "<f4").tobytes(), shape=(2,))
    assert (told["s"], told["t"], told["u"]) == ("go", ["a", "b"], b"\xff")


@pytest.mark.parametrize("batch", [0, 4])
def test_scalars_of_answers(batch: int) -> None:
    row = (-1,) if batch else ()
    taken = policy((), (("y", "BF16", row), ("z", "FP32", row), ("s", "BYTES", row)), batch)
    answer = {"y": np.array(0x3FC0, np.uint16), "z": np.array(2, np.float32), "s": np.array(b"go", object)}
    told = taken.actions({name: value.reshape((1,) if batch else ()) for name, value in answer.items()})
    for name, value in (("y", 1.5), ("z", 2)):
        assert told[name] == array(np.float32(value).tobytes(), shape=())
    assert told["s"] == "go"


def test_metadata_are_the_model_s_own() -> None:
    own = {"parameters": {"openpi_metadata": {"string_value": '{"reset_pose": [0, 1.5], "tensord": 1}'}}}
    told = policy((("x", "FP32", (3,)),), (("y", "BYTES", (1,)),), config=own).metadata
    assert told["reset_pose"] == [0, 1.5]
    assert told["tensord"] == {
        "model": "m",
        "version": 3,
        "inputs": {"x": {"datatype": "FP32", "shape": (3,)}},
        "outputs": {"y": {"datatype": "BYTES", "shape": (1,)}},
    }
    for wrong in ("[1]", "{", "null"):
        own["parameters"][METADATA]["string_value"] = wrong
        with pytest.raises(InvalidArgument, match="parameter 'openpi_metadata' of model 'm' is no JSON object"):
            policy((), config=own)


def test_no_path_is_told() -> None:
    for text, told in (
        ("/run/tensord/clients.sock: it is gone", "(a path): it is gone"),
        ("the daemon at unix:/run/a b", "the daemon at (a path) b"),
        ("No such file or directory: '/etc/x'", "No such file or directory: '(a path)'"),
        ("'observation/state' is float32[3], 1/2", "'observation/state' is float32[3], 1/2"),
    ):
        assert FILE.sub("(a path)", text) == told
