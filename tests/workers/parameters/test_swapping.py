"""Parameters are exchanged between two batches: every answer is of exactly one set, and none older than what was committed."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from tensord.shm.errors import NotFound
from tests.records import Tensor
from tests.workers.parameters.pushing import PushingLoop, mapped, numbered, said, value, write_chain, write_numbered


def test_a_fused_ensemble_sees_the_new_sets_of_its_models_at_once(loop: PushingLoop, tmp_path: Path) -> None:
    for name in ("first", "second"):
        loop.load(write_numbered(tmp_path, name, "max_batch_size: 8"))
    loop.load(write_chain(tmp_path, "both", "first", "second"))
    for number in range(1, 200):
        loop.push("first", numbered(number), number)
        loop.push("second", numbered(1000 * number), number)
        for _ in range(3):
            assert value(loop.ask_value("both")) == 1001 * number


def test_what_was_staged_and_aborted_is_never_used(loop: PushingLoop, tmp_path: Path) -> None:
    loop.load(write_numbered(tmp_path, "m", "max_batch_size: 8"))
    loop.push("m", numbered(1), 1)
    push = loop.stage("m", numbered(2), 2)
    assert value(loop.ask_value("m")) == 1
    loop.abort(push)
    with pytest.raises(NotFound, match=f"nothing is staged for push {push}"):
        loop.commit(push)
    assert value(loop.ask_value("m")) == 1


def test_the_set_before_is_staged_again_without_memory(loop: PushingLoop, tmp_path: Path) -> None:
    loop.load(write_numbered(tmp_path, "m", "max_batch_size: 8"))
    loop.push("m", numbered(1), 1)
    for number in (0, 1, 0, 1):
        loop.commit(loop.stage("m", -1, number))
        answer = loop.ask_value("m", tells=True)
        assert (value(answer), said(answer)) == (number, ("main", number))
    with pytest.raises(NotFound, match="number 7 of parameter set 'main' of model 'm' is not kept"):
        loop.stage("m", -1, 7)


def test_memory_is_flat(loop: PushingLoop, tmp_path: Path) -> None:
    """A set that was replaced twice leaves no mapping, descriptor or page."""
    width = 1 << 18
    loop.load(write_numbered(tmp_path, "m", "max_batch_size: 2", width=width))

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = files = held = 0
    for number in range(1, 121):
        loop.push("m", numbered(number, width), number)
        assert value(loop.ask_value("m")) == number
        loop.stage("m", numbered(-1, width), number)
        loop.abort(loop.pushes)
        if number == 20:
            before, files = resident(), len(os.listdir("/proc/self/fd"))
            held = mapped()
    assert resident() - before < 40 * width
    assert mapped() <= held + 1
    assert len(os.listdir("/proc/self/fd")) <= files


def test_a_model_that_is_loaded_anew_has_its_own_parameters(loop: PushingLoop, tmp_path: Path) -> None:
    path = write_numbered(tmp_path, "m", "max_batch_size: 8")
    loop.load(path)
    loop.push("m", numbered(5), 5)
    push = loop.stage("m", numbered(6), 6)
    loop.load(path)
    assert value(loop.ask_value("m")) == 0
    # What was staged was for the load before.
    loop.commit(push)
    assert value(loop.ask_value("m")) == 0


def test_a_bucket_that_is_compiled_for_a_request_gets_the_newest(loop: PushingLoop, tmp_path: Path) -> None:
    path = write_numbered(tmp_path, "m", "max_batch_size: 8")
    source = path / "1" / "model.py"
    text = source.read_text().replace('"FP32[8]"', '"FP32[n, 8]"')
    source.write_text(text)
    loop.load(path)
    for number, rows in enumerate((3, 5, 3), 1):
        loop.push("m", numbered(number), number)
        content = np.zeros((1, rows, 8), np.float32)
        loop.submit("m", [Tensor("x", "FP32", content.shape, content.tobytes())])
        (answer,) = loop.answers(1)
        assert value(answer) == number
