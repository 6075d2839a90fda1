"""Samples of model_warmup: the tensors they come to, and what becomes of a model that cannot run them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensord.config.model_config import parse_pbtxt
from tensord.shm.errors import Internal, InvalidArgument, Unavailable
from tensord.workers.models import warmup
from tensord.workers.models.execution import Execution
from tensord.workers.tensors.signature import signature

TENSORS = """
input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }
input { name: "w" data_type: TYPE_STRING dims: [ -1 ] reshape { shape: [ -1, 1 ] } optional: true }
output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
"""


class AModel:
    """Keeps what it is given; fails when told to."""

    def __init__(self, trouble: Exception | None = None, result: Any = None) -> None:
        self.given: list[dict[str, Any]] = []
        self.rows: list[int] = []
        self._trouble = trouble
        self._result = {} if result is None else result

    def execute(self, execution: Execution) -> None:
        if self._trouble is not None:
            raise self._trouble
        (request,) = execution.requests
        self.given.append(request.arrays)
        self.rows.append(request.rows)
        execution.results = [self._result]

    def describe(self, error: BaseException) -> str:
        return f"it raised {type(error).__name__}"


def samples(warmup_text: str, folder: Path = Path("/nowhere"), batch: int = 0) -> list[warmup.Sample]:
    return several(f"name: 's' {warmup_text}", folder=folder, batch=batch)


def several(*texts: str, folder: Path = Path("/nowhere"), batch: int = 2) -> list[warmup.Sample]:
    settings = " ".join(f"model_warmup {{ {text} }}" for text in texts)
    message = parse_pbtxt(f"max_batch_size: {batch} {TENSORS} {settings}", "m")
    message.name = "m"
    return warmup.samples(message, signature(message, {}, {}), folder)


def x(source: str, dims: str = "2", data_type: str = "TYPE_FP32") -> str:
    return f"inputs {{ key: 'x' value {{ data_type: {data_type} dims: [ {dims} ] {source} }} }}"


def w(source: str, dims: str = "3") -> str:
    return f"inputs {{ key: 'w' value {{ data_type: TYPE_STRING dims: [ {dims} ] {source} }} }}"


def test_zeros_for_a_batch() -> None:
    model = AModel()
    (sample,) = samples("batch_size: 3 count: 2 " + w("zero_data: true") + x("zero_data: true"), batch=4)
    sample.run(model, "m")
    assert model.rows == [3, 3]
    assert [(name, array.tolist()) for name, array in model.given[0].items()] == [
        ("x", [[0, 0]] * 3),
        ("w", [[[b""]] * 3] * 3),
    ]


def test_random_values_are_in_range_and_the_same_each_time() -> None:
    made = []
    for _ in range(2):
        model = AModel()
        (sample,) = samples(w("random_data: true") + x("random_data: true"))
        sample.run(model, "m")
        made.append(model.given[0])
    assert (made[0]["x"] == made[1]["x"]).all()
    assert ((made[0]["x"] >= 0) & (made[0]["x"] < 1)).all()
    assert all(len(element) == 1 for element in made[0]["w"].ravel())
    assert made[0]["w"].shape == (3, 1)


@pytest.mark.parametrize("datatype", ["BOOL", "INT8", "UINT64", "INT64", "FP16", "BF16", "FP64"])
def test_every_datatype_has_random_values(datatype: str) -> None:
    message = parse_pbtxt(
        f"""input {{ name: "x" data_type: TYPE_{datatype} dims: [ 100 ] }}
        model_warmup {{ inputs {{ key: "x" value {{ data_type: TYPE_{datatype} dims: [ 100 ] random_data: true }} }} }}""",
        "m",
    )
    described = signature(message, {}, {})
    model = AModel()
    warmup.samples(message, described, Path())[0].run(model, "m")
    array = model.given[0]["x"]
    assert array.dtype == described.inputs["x"].dtype
    assert len(np.unique(array)) > 1


def test_a_file_holds_wire_bytes(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "x.bin").write_bytes(np.array([1.5, 2.5], np.float32).tobytes())
    model = AModel()
    (sample,) = samples(x("input_data_file: 'x.bin'"), tmp_path)
    sample.run(model, "m")
    assert model.given[0]["x"].tolist() == [1.5, 2.5]


@pytest.mark.parametrize(
    ("text", "batch", "told"),
    [
        (w("zero_data: true"), 0, "input 'x' is missing"),
        (x("zero_data: true", "3"), 0, r"input 'x' is FP32\[3\], the model takes FP32\[2\]"),
        (x("zero_data: true", "2", "TYPE_INT32"), 0, r"is INT32\[2\], the model takes FP32"),
        (x(""), 0, "has none of zero_data, random_data and input_data_file"),
        (x("zero_data: true") + w("zero_data: true").replace("'w'", "'q'"), 0, "the model has no input 'q'"),
        ("batch_size: 5 " + x("zero_data: true"), 4, "batch_size 5, max_batch_size is 4"),
        ("count: 4000000000 " + x("zero_data: true"), 0, "are to be run 4000000000 times, at most 10000 are"),
        (
            x("zero_data: true") + w("zero_data: true", str(1 << 40)),
            0,
            f"{1 << 46} bytes; all samples together may have 536870912",
        ),
        (x("input_data_file: 'x.bin'"), 0, "file 'x.bin' cannot be read: No such file"),
        (x("input_data_file: '../x.bin'"), 0, "must be a file name, without folders"),
    ],
)
def test_samples_that_are_refused(text: str, batch: int, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        samples(text, batch=batch)


def test_samples_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (f"name: '{name}' batch_size: 2 " + x("zero_data: true") for name in "ab")
    monkeypatch.setattr(warmup, "MAX_BYTE_SIZE", 31)
    with pytest.raises(
        InvalidArgument, match=r"model_warmup 'b': input 'x': 16 bytes; all samples together may have 31"
    ):
        several(one, other)
    monkeypatch.setattr(warmup, "MAX_BYTE_SIZE", 32)
    assert [sample.byte_size for sample in several(one, other)] == [16, 16]
    with pytest.raises(InvalidArgument, match="are to be run 10001 times, at most 10000 are"):
        several("count: 10000 " + one, other)


def test_a_file_of_another_size_is_refused(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "x.bin").write_bytes(b"123")
    with pytest.raises(InvalidArgument, match=r"3 bytes given, FP32\[2\] needs 8"):
        samples(x("input_data_file: 'x.bin'"), tmp_path)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (AModel(ValueError("secret")), "warmup sample 's' failed: it raised ValueError"),
        (AModel(Internal("a sentence")), "warmup sample 's' failed: a sentence"),
        (AModel(result=Unavailable("not now")), "warmup sample 's' failed: not now"),
    ],
)
def test_a_model_that_fails(model: AModel, told: str) -> None:
    (sample,) = samples(x("zero_data: true"))
    with pytest.raises(InvalidArgument) as caught:
        sample.run(model, "m")
    assert caught.value.message == told
