"""Tests what is refused in a configuration, and with which words."""

from __future__ import annotations

from typing import Any

import pytest

from tensord.config import model_checks, model_config
from tensord.config.model_config import ModelConfig, parse_pbtxt
from tensord.shm.errors import InvalidArgument, ServingError, Unsupported


def parsed(text: str) -> Any:
    return model_config.parse_pbtxt(text, "m")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_batch_size: -1", "max_batch_size is -1"),
        (
            'parameters { key: "replace_waiting" value { string_value: "yes" } }',
            "replace_waiting is 'yes'; expected true or",
        ),
        (
            'sequence_batching { } parameters { key: "replace_waiting" value { string_value: "true" } }',
            "parameter replace_waiting is true, and the requests of a sequence cannot replace one another",
        ),
        ('backend: "tensorrt"', "backend 'tensorrt' is not supported; supported are jax and python"),
        ('input { name: "a" dims: [ 0 ] }', "input 'a': dim 0"),
        ('input { name: "a" dims: [ -2 ] }', "input 'a': dim -2"),
        ("input { dims: [ 1 ] }", "'name' is missing"),
        ('input { name: "a" } input { name: "a" }', "input 'a' is configured more than once"),
        ('output { name: "a" reshape { } }', "cannot reshape to a scalar"),
        (
            'max_batch_size: 2 output { name: "a" dims: [ 4 ] reshape { shape: [ 3 ] } }',
            r"\[4\] and reshape \[3\] hold different",
        ),
        ('output { name: "a" label_filename: "../secret" }', "label_filename of output 'a'"),
        ('default_model_filename: "a/b.py"', "default_model_filename must be a file name"),
        ("version_policy { latest { } }", "num_versions of at least 1"),
        ("version_policy { specific { } }", "names no version"),
        ("version_policy { specific { versions: [ 0 ] } }", "versions start at 1"),
        ("instance_group { count: -1 }", "count is -1"),
        ("instance_group { count: 200 } instance_group { count: 57 }", "asks for 257 instances, at most 256"),
        ("instance_group { }" * 257, "asks for 257 instances, at most 256"),
        (
            'input { name: "a" dims: [ 1 ] reshape { shape: [' + ",".join("1" * 33) + "] } }",
            "33 dims given, at most 32",
        ),
        ('input { name: "a" format: FORMAT_NHWC dims: [ 1, 2 ] }', "model input NHWC/NCHW require 3 dims, 2 given"),
        ('parameters { key: "batch_buckets" value { string_value: "8,1" } }', "parameter batch_buckets is '8,1'"),
        ('parameters { key: "batch_buckets" value { string_value: "x" } }', "ascending whole numbers"),
        (
            'max_batch_size: 4 parameters { key: "batch_buckets" value { string_value: "1,8" } }',
            "between 1 and max_batch_size 4",
        ),
    ],
)
def test_checks(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as error:
        model_checks.check(parsed(f'name: "m" {text}'))
    assert "model 'm'" in error.value.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('model_repository_agents { agents { name: "checksum" } }', "no repository agents are run"),
        ('platform: "onnxruntime_onnx"', "platform 'onnxruntime_onnx' is not supported"),
    ],
)
def test_what_is_not_offered(text: str, words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        model_checks.check(parsed(f'name: "m" {text}'))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "max_batch_size: 4 dynamic_batching { preferred_batch_size: [ 8 ] }",
            "dynamic batching preferred size must be <= max batch size for m: 8 is given, of at most 4",
        ),
        (
            "dynamic_batching { preferred_batch_size: [ 0 ] }",
            "dynamic batching preferred size must be positive for m: 0 is given",
        ),
        ("dynamic_batching { priority_levels: 2 }", "default priority level must be in range [1, 2] for m: 0 is given"),
        (
            "dynamic_batching { priority_levels: 1 default_priority_level: 1 priority_queue_policy { key: 2 value { } } }",
            "priority queue policy must have priority level in range [1, 1] for m: 2 is given",
        ),
        (
            "instance_group { rate_limiter { resources [ { name: 'R' count: 1 }, { name: 'R' count: 1 global: true } ] } }",
            'Resource "R" is present as both global and device-specific resource in the model configuration.',
        ),
        (
            "instance_group [ { rate_limiter { resources { name: 'R' count: 1 } } }, "
            "{ rate_limiter { resources { name: 'r' count: 1 global: true } } } ]",
            'Resource "R" is present as both global and device-specific resource in the model configuration.',
        ),
        (
            "instance_group { } instance_group { kind: KIND_CPU gpus: [ 0 ] }",
            "instance group m_1 of model m has kind KIND_CPU but specifies one or more GPUs",
        ),
        (
            'instance_group { name: "g" kind: KIND_MODEL gpus: [ 0 ] }',
            "instance group g of model m has kind KIND_MODEL but specifies one or more GPUs",
        ),
        (
            "dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }",
            "Only one priority level is allowed when 'preserve_ordering' is true for m",
        ),
        (
            "dynamic_batching { preserve_ordering: true default_queue_policy "
            "{ timeout_action: DELAY default_timeout_microseconds: 1 } }",
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m",
        ),
        (
            "sequence_batching { } response_cache { enable: true }",
            "Response Cache does not currently support model m with sequence batching scheduler. Please disable the response "
            "cache.",
        ),
        (
            "model_transaction_policy { decoupled: true } response_cache { enable: true }",
            "Response Cache does not currently support model m with 'decoupled' transaction policy. Please disable the response "
            "cache.",
        ),
    ],
)
def test_what_triton_refuses_in_its_own_words(text: str, sentence: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        model_checks.check(parsed(f'name: "m" {text}'))
    assert caught.value.message == sentence


def test_kinds_and_devices() -> None:
    message = parsed('name: "m" instance_group { kind: KIND_GPU }')
    model_config.complete(message)
    with pytest.raises(
        InvalidArgument, match=r"^instance group m_0 of model m has kind KIND_GPU but no GPUs are available$"
    ):
        model_checks.check_device(message, None)
    model_checks.check_device(message, 0)
    # On a CPU worker beside GPU workers.
    message = parsed('name: "m" instance_group [ { kind: KIND_GPU }, { kind: KIND_CPU } ]')
    model_config.complete(message)
    model_checks.check_device(message, None)


def test_many_tensors_are_looked_at_once_each() -> None:
    """A search for each name among all of them took minutes."""
    message = model_config.empty("m")
    for number in range(40_000):
        message.input.add(name=str(number), dims=[1])
    model_checks.check(message)


@pytest.mark.parametrize(
    "text",
    ["", 'backend: "jax" input { name: "a" dims: [ 1 ] }', 'backend: "jax" input { name: "a" data_type: TYPE_FP32 }'],
)
def test_a_whole_configuration_says_more(text: str) -> None:
    message = parsed(f'name: "m" {text}')
    model_checks.check(message)
    with pytest.raises(InvalidArgument):
        model_checks.check(message, whole=True)


def test_batch_buckets() -> None:
    text = 'name: "m" max_batch_size: 32 parameters { key: "batch_buckets" value { string_value: "1, 8,32" } }'
    assert model_checks.batch_buckets(parsed(text)) == (1, 8, 32)
    assert model_checks.batch_buckets(parsed('name: "m"')) == ()


TENSORS = """
    name: "m" max_batch_size: 4
    input { name: "x" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }
    output { name: "y" data_type: TYPE_FP32 dims: -1 }
"""
INPUT = 'batch_input { kind: BATCH_ELEMENT_COUNT target_name: "counts" data_type: TYPE_INT32 source_input: "x" }'
OUTPUT = 'batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "y" source_input: "x" }'


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        (
            INPUT.replace('source_input: "x"', 'source_input: [ "x", "x" ]'),
            "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 2 for m",
        ),
        (INPUT.replace("INT32", "INT64"), "batch input data type must be TYPE_INT32 or TYPE_FP32 for m"),
        (INPUT.replace('"x"', '"z"'), "unknown source input name 'z' for m"),
        (INPUT.replace('target_name: "counts"', ""), "batch input kind 'BATCH_ELEMENT_COUNT' has no target_name for m"),
        (
            OUTPUT.replace('source_input: "x"', ""),
            "batch output kind 'BATCH_SCATTER_WITH_INPUT_SHAPE' expects 1 source input, got 0 for m",
        ),
        (OUTPUT.replace('"y"', '"z"'), "unknown target output name 'z' for m"),
        (OUTPUT.replace('"y"', '[ "y", "y" ]'), "target output name 'y' can only be specified once for m"),
        (OUTPUT + OUTPUT, "target output name 'y' can only be specified once for m"),
    ],
)
def test_ragged_refused(says: str, sentence: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        model_checks.check(parse_pbtxt(TENSORS + says, "m"))
    assert caught.value.message == sentence


def test_good_ragged() -> None:
    model_checks.check(parse_pbtxt(TENSORS + INPUT + OUTPUT, "m"))


def test_tensors_that_the_model_is_to_say_itself() -> None:
    """Names that config.pbtxt does not list are checked once the model has said them."""
    model_checks.check(parse_pbtxt('name: "m" max_batch_size: 4 ' + INPUT.replace('"x"', '"z"'), "m"))


START = "kind: CONTROL_SEQUENCE_START"
CORRID = "kind: CONTROL_SEQUENCE_CORRID"


def control(name: str, *controls: str) -> str:
    return f"control_input {{ name: '{name}' {' '.join(f'control {{ {each} }}' for each in controls)} }}"


@pytest.mark.parametrize(
    ("says", "text"),
    [
        (control("", f"{START} int32_false_true: [0, 1]"), "control tensor must have a name for m"),
        (
            control("C", f"{START} int32_false_true: [0, 1]", "kind: CONTROL_SEQUENCE_END int32_false_true: [0, 1]"),
            "control tensor 'C' is specified for multiple control kinds for m",
        ),
        (
            control("C", f"{START} int32_false_true: [0, 1]") + control("D", f"{START} fp32_false_true: [0, 1]"),
            "specifies multiple CONTROL_SEQUENCE_START tensors for m",
        ),
        (
            control("C", START),
            "must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for CONTROL_SEQUENCE_START for m",
        ),
        (
            control("C", f"{START} int32_false_true: [0, 1] bool_false_true: [false, true]"),
            "specifies more than one from 'int32_false_true', 'fp32_false_true' and 'bool_false_true' for CONTROL_SEQUENCE_START",
        ),
        (
            control("C", f"{START} fp32_false_true: [1]"),
            "control 'fp32_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_START for m",
        ),
        (
            control("C", f"{CORRID} int32_false_true: [0, 1] data_type: TYPE_INT32"),
            "must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for CONTROL_SEQUENCE_CORRID",
        ),
        (
            control("C", f"{CORRID} data_type: TYPE_FP32"),
            "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types are TYPE_UINT64, TYPE_INT64, "
            "TYPE_UINT32, TYPE_INT32 and TYPE_STRING",
        ),
        (control("x", f"{START} int32_false_true: [0, 1]"), "control tensor 'x' is an input as well for m"),
        ("oldest { preferred_batch_size: 0 }", "sequence batching preferred batch size must be positive for m"),
        (
            "oldest { preferred_batch_size: 5 }",
            "sequence batching preferred batch size must be <= max batch size for m",
        ),
        ("oldest { max_candidate_sequences: -1 }", "max_candidate_sequences is -1, it must not be negative for m"),
        (
            "direct { minimum_slot_utilization: 1.5 }",
            "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m",
        ),
    ],
)
def test_sequences_refused(says: str, text: str) -> None:
    message = parse_pbtxt(
        f'name: "m" max_batch_size: 4 input {{ name: "x" data_type: TYPE_FP32 dims: 1 }} sequence_batching {{ {says} }}',
        "m",
    )
    with pytest.raises(InvalidArgument) as caught:
        model_checks.check(message)
    assert text in caught.value.message


def test_all_kinds_may_be_asked_for_at_once() -> None:
    kinds = {
        "START": "int32_false_true: [0, 1]",
        "END": "fp32_false_true: [-1, 1]",
        "READY": "bool_false_true: [true, false]",
    }
    says = [control(kind, f"kind: CONTROL_SEQUENCE_{kind} {values}") for kind, values in kinds.items()]
    says.append(control("ID", f"{CORRID} data_type: TYPE_STRING"))
    model_checks.check(parse_pbtxt(f'name: "m" sequence_batching {{ {" ".join(says)} oldest {{ }} }}', "m"))


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
        (state("dims: 2") + state("dims: 2", given="other"), "State input name 'in' specified more than once."),
        (state("dims: 2") + state("dims: 2", taken="other"), "State output name 'out' specified more than once."),
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
def test_states_refused(says: str, sentence: str) -> None:
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
def test_good_states(says: str) -> None:
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
