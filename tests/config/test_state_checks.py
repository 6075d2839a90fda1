"""What a model's ``sequence_batching.state`` may not say, in Triton's words."""

from __future__ import annotations

import pytest

from tensord.config import model_checks
from tensord.config.model_config import parse_pbtxt
from tensord.shm.errors import InvalidArgument, ServingError, Unsupported

INITIAL = 'initial_state { name: "first" data_type: TYPE_FP32 dims: 2 zero_data: true }'


def state(says: str, taken: str = "in", given: str = "out") -> str:
    return f'state {{ input_name: "{taken}" output_name: "{given}" data_type: TYPE_FP32 {says} }}'


def check(sequences: str, more: str = "") -> None:
    model_checks.check(parse_pbtxt(f'name: "m" max_batch_size: 4 {more} sequence_batching {{ {sequences} }}', "m"))


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        (
            state(f"dims: 2 {INITIAL} {INITIAL}"),
            "initial_state field for state input 'in' must contain exactly one or zero element. Found '2' elements.",
        ),
        (
            state(f"dims: 2 {INITIAL.replace('FP32', 'INT32')}"),
            "The data type used for 'initial_state' field of state 'in' does not match the state data type.",
        ),
        (
            state(f"dims: 2 {INITIAL.replace('first', '')}"),
            "Field 'name' must be set when using initial_state for state input 'in'.",
        ),
        (
            state("dims: 2") + state("dims: 2", given="other"),
            "State input name 'in' specified more than once.",
        ),
        (
            state("dims: 2") + state("dims: 2", taken="other"),
            "State output name 'out' specified more than once.",
        ),
        (
            state(f"dims: [ 2, 2 ] {INITIAL}"),
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input 'in'. 1 != 2",
        ),
        (
            state(f"dims: -1 {INITIAL.replace('dims: 2', 'dims: -1')}"),
            "'initial_state' field for state input name 'in' contains variable dimensions.",
        ),
        (
            state(f"dims: 3 {INITIAL}"),
            "'initial_state' dim for input name 'in' doesn't match 'state' dim description. 2 != 3",
        ),
        (
            state(f"dims: 2 {INITIAL.replace('zero_data: true', '')}"),
            "initial_state of state input 'in' has neither zero_data nor data_file",
        ),
        (
            state("dims: 2 use_growable_memory: true"),
            "In order to 'use_growable_memory', you must also enable 'use_single_buffer' for state input name 'in'.",
        ),
        (state("dims: 2", given=""), "model 'm': state 'in': 'output_name' is missing"),
        (state("dims: 0"), "model 'm': state 'in': dim 0; a dim is at least 1, or -1 where it varies"),
    ],
)
def test_refused(says: str, sentence: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check(says)
    assert caught.value.message == sentence


@pytest.mark.parametrize(
    "says",
    [
        state(f"dims: 2 {INITIAL}"),
        state(f"dims: -1 {INITIAL}"),
        state("dims: 2 use_growable_memory: true use_same_buffer_for_input_output: true"),
    ],
)
def test_good_ones(says: str) -> None:
    check(says)


def test_a_triton_python_model_keeps_its_own() -> None:
    with pytest.raises(Unsupported, match="a Triton Python model keeps its own state"):
        check(state("dims: 2"), 'backend: "python"')


def test_what_a_binary_message_may_carry() -> None:
    """A number that names no datatype."""
    message = parse_pbtxt(f'name: "m" sequence_batching {{ {state("dims: 2")} }}', "m")
    message.sequence_batching.state[0].data_type = 99
    with pytest.raises(ServingError, match="'data_type' is missing or unknown"):
        model_checks.check(message)
