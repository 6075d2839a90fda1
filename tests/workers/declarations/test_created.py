"""Tests that what ``create`` of a model.py returns is refused with a sentence that says what to write."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tensord.shm.errors import InvalidArgument
from tensord.workers.declarations.created import created
from tensord.workers.tensors.signature import Signature


@pytest.mark.parametrize(
    ("apply", "words"),
    [
        (
            lambda params, inputs, state: None,
            '\'state\' takes state = {"h": "FP32[8]"} in model.py, and sequence_batching',
        ),
        (lambda params, inputs, request: None, '\'request\' takes request = {"seed": "INT64"} in model.py'),
        (
            lambda inputs, params: None,
            "the function of create() takes (inputs, params), it is called with (params, inputs), in this order",
        ),
        (lambda inputs: None, "takes (inputs), it is called with (params, inputs)"),
    ],
)
def test_other_arguments(apply: Callable[..., Any], words: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        created(ModuleType("m"), Signature("m", {}, {}, 0), (apply, None), None)
    assert words in refused.value.message


@pytest.mark.parametrize(
    "apply",
    [
        lambda params, inputs: None,
        lambda params, inputs, state=None, request=None: None,
        lambda inputs, parts: None,
        lambda network, params: None,
        lambda *given: None,
    ],
)
def test_arguments_that_may_be(apply: Callable[..., Any]) -> None:
    assert created(ModuleType("m"), Signature("m", {}, {}, 0), (apply, None), None) == (apply, None, None)


def test_what_else_is_returned() -> None:
    for returned, words in (
        (((print, print, print), None), "several functions are a stepped model's, which says slots = 64 in model.py"),
        ((print, None, {}), 'none is declared; it takes state = {"h": "FP32[8]"} in model.py'),
    ):
        with pytest.raises(InvalidArgument) as refused:
            created(ModuleType("m"), Signature("m", {}, {}, 0), returned, None)
        assert words in refused.value.message
