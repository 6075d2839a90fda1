"""Tests what a configuration says of a process for one model alone."""

from __future__ import annotations

import pytest

from tensord.config import model_checks
from tensord.config.model_config import ModelConfig, parse_pbtxt
from tensord.shm.errors import InvalidArgument

PARAMETER = 'parameters {{ key: "{}" value {{ string_value: "{}" }} }}'
ALONE = PARAMETER.format("isolated", "true")


def read(text: str) -> ModelConfig:
    message = parse_pbtxt(text, "m")
    message.name = "m"
    return message


def test_what_is_said() -> None:
    part = PARAMETER.format("isolated_memory_fraction", "0.25")
    assert model_checks.is_isolated(read(ALONE))
    assert not model_checks.is_isolated(read(ALONE.replace("true", "false") + part))
    assert model_checks.isolated_fraction(read(ALONE), 0.1) == 0.1
    assert model_checks.isolated_fraction(read(ALONE + part), 0.1) == 0.25
    model_checks.check(read(ALONE + part))


@pytest.mark.parametrize("said", ["", "0", "-0.5", "1.01", "nan", "inf", "much"])
def test_a_part_that_is_none(said: str) -> None:
    message = read(PARAMETER.format("isolated_memory_fraction", said))
    with pytest.raises(InvalidArgument) as caught:
        model_checks.check(message)
    assert caught.value.message == (
        f"model 'm': parameter isolated_memory_fraction is '{said}'; expected a number above 0, up to 1"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (ALONE.replace("true", "perhaps"), "model 'm': parameter isolated is 'perhaps'; expected true or false"),
        (
            ALONE + PARAMETER.format("tensord_together", "us"),
            "model 'm' is to have a worker to itself (isolated), and to share one with the models of 'us' (tensord_together)",
        ),
        (
            'platform: "ensemble" input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } '
            'output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } '
            'ensemble_scheduling { step { model_name: "n" model_version: -1 '
            'input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }' + ALONE,
            "ensemble 'm' cannot be isolated: it has no code of its own, and runs in the worker of its models",
        ),
    ],
)
def test_what_no_process_can_be(text: str, why: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        model_checks.check(read(text))
    assert caught.value.message == why
