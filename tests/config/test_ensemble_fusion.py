"""Which ensembles can be one program, as far as configurations tell: a table of what does not allow it."""

from __future__ import annotations

from typing import Any

import pytest

from tensord.config import ensemble_fusion, ensemble_graph, model_checks
from tensord.config.model_config import parse_pbtxt
from tensord.shm.errors import InvalidArgument

MEMBER = """
    name: 'm' backend: 'jax' max_batch_size: 8
    input { name: 'x' data_type: TYPE_FP32 dims: [4] } output { name: 'y' data_type: TYPE_FP32 dims: [4] }
"""
ASKED = "parameters { key: 'tensord_fuse' value { string_value: 'VALUE' } }"


def ensemble(value: str = "true", most: int = 8, more: str = "") -> Any:
    return parse_pbtxt(
        f"""
        name: 'e' platform: 'ensemble' max_batch_size: {most} {ASKED.replace("VALUE", value)}
        input {{ name: 'x' data_type: TYPE_FP32 dims: [4] {more} }} output {{ name: 'y' data_type: TYPE_FP32 dims: [4] }}
        ensemble_scheduling {{ step {{ model_name: 'm' model_version: -1
          input_map {{ key: 'x' value: 'x' }} output_map {{ key: 'y' value: 'y' }} }} }}
        """,
        "e",
    )


def check(message: Any, member: str) -> None:
    found = parse_pbtxt(member, "m")
    ensemble_graph.check(message, lambda name, number: found)


@pytest.mark.parametrize(
    ("value", "wanted"), [("true", True), ("TRUE", True), ("1", True), ("false", False), ("0", False)]
)
def test_what_it_may_say(value: str, wanted: bool) -> None:
    assert ensemble_fusion.is_wanted(ensemble(value)) is wanted
    check(ensemble(value), MEMBER)


def test_what_says_neither_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="model 'e': parameter tensord_fuse is 'perhaps'; expected true or false"):
        model_checks.check(ensemble("perhaps"), whole=True)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("'jax'", "'python'", "is of backend 'python', not 'jax'"),
        ("max_batch_size: 8", "max_batch_size: 8 sequence_batching {}", "keeps sequences"),
        (
            "max_batch_size: 8",
            "max_batch_size: 8 model_transaction_policy { decoupled: true }",
            "may answer with several responses",
        ),
        (
            "max_batch_size: 8",
            "max_batch_size: 8 response_cache { enable: true }",
            "has a response cache, which would not be asked",
        ),
        ("dims: [4] }", "dims: [4] allow_ragged_batch: true }", "has ragged inputs"),
        ("dims: [4] }", "dims: [4] reshape { shape: [2, 2] } }", "reshapes 'x'"),
        ("dims: [4] }", "dims: [-1] }", "has no fixed shape: 'x' is [-1]"),
        (
            "dims: [4] } output",
            "dims: [4] } input { name: 'z' data_type: TYPE_FP32 dims: [4] optional: true } output",
            "has an input that no step gives it: 'z'",
        ),
    ],
)
def test_what_does_not_allow_it(old: str, new: str, why: str) -> None:
    member = MEMBER.replace(old, new, 1)
    check(ensemble("false"), member)
    with pytest.raises(InvalidArgument) as caught:
        check(ensemble(), member)
    assert caught.value.message == f"ensemble 'e' cannot be one program, as tensord_fuse asks for: model 'm' {why}"


def test_an_optional_input_of_its_own() -> None:
    with pytest.raises(InvalidArgument, match="asks for: its input 'x' is optional"):
        check(ensemble(more="optional: true"), MEMBER.replace("dims: [4] }", "dims: [4] optional: true }", 1))


def test_one_batches_and_the_other_does_not() -> None:
    with pytest.raises(InvalidArgument, match="model 'm' batches, and the ensemble does not"):
        check(ensemble(most=0), MEMBER.replace("dims: [4]", "dims: [4]"))
