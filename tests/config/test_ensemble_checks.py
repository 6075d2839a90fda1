"""Tests what is refused in an ensemble's configuration, alone and together with its members': a table of Triton's sentences."""

from __future__ import annotations

from typing import Any

import pytest

from tensord.config import ensemble_checks, model_checks
from tensord.config.model_config import parse_pbtxt
from tensord.shm.errors import InvalidArgument

IN, OUT = "input { name: 'x' data_type: TYPE_FP32 dims: [4] }", "output { name: 'y' data_type: TYPE_FP32 dims: [4] }"


def step(takes: str, gives: str, model: str = "m", version: int = -1) -> str:
    """Formats a step of an ensemble. ``takes``, ``gives``: ``"a=t b=u"`` maps input or output a to tensor t."""
    maps = [
        f"{field} {{ key: '{pair.partition('=')[0]}' value: '{pair.partition('=')[2]}' }}"
        for field, told in (("input_map", takes), ("output_map", gives))
        for pair in told.split()
    ]
    return f"step {{ model_name: '{model}' model_version: {version} {' '.join(maps)} }}"


def config(*steps: str, more: str = f"{IN} {OUT}", name: str = "e") -> Any:
    return parse_pbtxt(f"name: '{name}' platform: 'ensemble' {more} ensemble_scheduling {{ {' '.join(steps)} }}", name)


GOOD = step("x=x", "y=y")


def test_good_ones() -> None:
    model_checks.check(config(GOOD), whole=True)
    model_checks.check(config(step("x=x", "y=mid"), step("x=mid", "y=y")), whole=True)
    # Without the platform, which the scheduling says.
    message = config(GOOD)
    message.platform = ""
    model_checks.check(message)


@pytest.mark.parametrize("most", [0, 1, (1 << 32) - 1])
@pytest.mark.parametrize("version", [-(1 << 63), -2, -1, 0, 1, (1 << 63) - 1])
def test_numbers_at_their_ends(version: int, most: int) -> None:
    message = config(step("x=x", "y=y", version=version))
    message.ensemble_scheduling.max_inflight_requests = most
    if version == -1 or version > 0:
        model_checks.check(message, whole=True)
    else:
        with pytest.raises(InvalidArgument, match=f"asks for version {version} of 'm'"):
            model_checks.check(message, whole=True)


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (
            parse_pbtxt(f"name: 'e' platform: 'ensemble' {IN} {OUT}", "e"),
            "ensemble scheduling must be set for ensemble e whose platform is ensemble",
        ),
        (
            config(GOOD, more=f"{IN} {OUT} backend: 'jax'"),
            "Ensemble model 'e' must have platform type 'ensemble' and empty backend type",
        ),
        (
            config(GOOD, more=f"{IN} {OUT} instance_group {{ count: 1 }}"),
            "instance group should not be specified for ensemble 'e'",
        ),
        (config(GOOD, more=f"{IN} {OUT} optimization {{ }}"), "optimization should not be specified for ensemble 'e'"),
        (
            config(GOOD, more=f"{IN} {OUT} model_warmup {{ name: 'w' }}"),
            "model_warmup can not be specified for ensemble 'e'",
        ),
        (
            config(GOOD, more=f"{IN} {OUT} parameters {{ key: 'derivatives' value {{ string_value: '1' }} }}"),
            "ensemble 'e' cannot have derivatives; its members can",
        ),
        (
            config(GOOD, more=f"{IN} {OUT} parameters {{ key: 'tensord_fuse' value {{ string_value: 'true' }} }}"),
            "ensemble 'e' has the parameter tensord_fuse, which is no more: requests go through the programs of compiled models "
            "together without it; remove it",
        ),
        (config(), "must specify 'step' for ensemble 'e'"),
        (config(step("x=x", "y=y", model="")), "must specify 'model_name' in step 0 of ensemble 'e'"),
        (config(GOOD, step("", "y=z")), "must specify 'input_map' in step 1 of ensemble 'e'"),
        (config(step("x=x", "")), "must specify 'output_map' in step 0 of ensemble 'e'"),
        (config(GOOD, GOOD), "ensemble tensor 'y' can appear in an output map only once for ensemble 'e' step 1"),
        (
            config(step("x=x", "y=x z=y")),
            "ensemble tensor 'x' can appear in an output map only once for ensemble 'e' step 0",
        ),
        (
            config(GOOD, more=f"{IN} {OUT} input {{ name: 'w' data_type: TYPE_FP32 dims: [4] }}"),
            "ensemble input 'w' for ensemble e' is not used",
        ),
        (
            config(GOOD, more=f"{IN} {OUT} output {{ name: 'w' data_type: TYPE_FP32 dims: [4] }}"),
            "ensemble output 'w' for ensemble e' is not used",
        ),
        (
            config(step("x=x", "y=t"), step("x=t w=loop", "y=y"), step("x=y", "w=loop")),
            "output 'y' for ensemble 'e' is not written: at least one of its depending tensors, "
            "'loop', is not connected",
        ),
        (config(GOOD, step("x=y", "y=more")), "ensemble tensor 'more' is unused in ensemble 'e'"),
    ],
)
def test_what_is_refused_by_itself(message: Any, sentence: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        model_checks.check(message)
    assert caught.value.message == sentence


def test_scheduling_without_the_platform_is_refused() -> None:
    message = config(GOOD)
    message.platform = "other"
    with pytest.raises(
        InvalidArgument, match="ensemble scheduling cannot be set for model 'e' whose platform is not ensemble"
    ):
        model_checks.check(message)


def member(name: str, takes: str = "x FP32 4", gives: str = "y FP32 4", batch: int = 0, decoupled: bool = False) -> Any:
    def tensors(field: str, told: str) -> str:
        found = []
        for one in told.split(", "):
            tensor, datatype, *dims = one.split()
            found.append(f"{field} {{ name: '{tensor}' data_type: TYPE_{datatype} dims: [{', '.join(dims)}] }}")
        return " ".join(found)

    message = parse_pbtxt(
        f"name: '{name}' max_batch_size: {batch} {tensors('input', takes)} {tensors('output', gives)}", name
    )
    message.model_transaction_policy.decoupled = decoupled
    return message


TWO = (step("x=x", "y=mid", model="a"), step("x=mid", "y=y", model="b"))
DECOUPLED = (step("x=x", "y=one", model="a"), step("x=x", "y=two", model="a"), step("p=one q=two", "y=y", model="c"))


@pytest.mark.parametrize(
    ("message", "members", "sentence"),
    [
        (config(*TWO), [member("a"), member("b")], ""),
        # A batch of one, or a dimension that varies.
        (config(*TWO), [member("a", batch=8), member("b")], ""),
        # One that does not batch, with what a batch is for it.
        (
            config(*TWO, more=f"max_batch_size: 8 {IN} {OUT}"),
            [member("a", batch=8), member("b", takes="x FP32 -1 4", gives="y FP32 -1 4")],
            "",
        ),
        (config(*TWO), [member("a", gives="y FP32 -1"), member("b")], ""),
        (
            config(*TWO),
            [member("a"), member("b", takes="x INT32 4")],
            "in ensemble e, ensemble tensor mid: inconsistent data type: TYPE_FP32 is inferred from model a "
            "while TYPE_INT32 is inferred from model b",
        ),
        (
            config(*TWO),
            [member("a"), member("b", takes="x FP32 5")],
            "in ensemble e, ensemble tensor mid: inconsistent shape: [4] is inferred from model a while [5] is "
            "inferred from model b",
        ),
        (
            config(*TWO),
            [member("a"), member("b", takes="z FP32 4")],
            "in ensemble e, ensemble tensor mid is mapping to non-existing input x in model b",
        ),
        (
            config(*TWO),
            [member("a", gives="z FP32 4"), member("b")],
            "in ensemble e, ensemble tensor mid is mapped from non-existing output y in model a",
        ),
        (
            config(*TWO),
            [member("a"), member("b", takes="x FP32 4, z FP32 4")],
            "in ensemble e, input z in model b is not mapped to any ensemble tensors",
        ),
        (
            config(*TWO, more=f"max_batch_size: 8 {IN} {OUT}"),
            [member("a", batch=8), member("b", batch=4)],
            "ensemble e allows maximum batch size 8, but it contains model b which only allows maximum batch "
            "size to be 4",
        ),
        (
            config(*TWO),
            [member("a"), member("b", gives="y INT32 4")],
            "in ensemble e, ensemble tensor y: inconsistent data type: TYPE_FP32 is inferred from model e "
            "while TYPE_INT32 is inferred from model b",
        ),
        (
            config(*DECOUPLED),
            [member("a", decoupled=True), member("c", takes="p FP32 4, q FP32 4")],
            "in ensemble e, step of model 'c' receives inputs originated from different decoupled models",
        ),
    ],
)
def test_what_is_refused_beside_the_members(message: Any, members: list[Any], sentence: str) -> None:
    known = {one.name: one for one in members}
    if not sentence:
        ensemble_checks.completed(message.SerializeToString(), lambda name, _: known[name])
        return
    with pytest.raises(InvalidArgument) as caught:
        ensemble_checks.completed(message.SerializeToString(), lambda name, _: known[name])
    assert caught.value.message == sentence


def test_an_ensemble_streams_as_soon_as_a_member_does() -> None:
    for decoupled in (False, True):
        known = {"a": member("a"), "b": member("b", decoupled=decoupled)}
        found = ensemble_checks.completed(config(*TWO).SerializeToString(), lambda name, _, known=known: known[name])
        assert found.model_transaction_policy.decoupled is decoupled
