"""What is refused in a configuration, and with which words."""

from __future__ import annotations

from typing import Any

import pytest

from tensord.config import model_checks, model_config
from tensord.shm.errors import InvalidArgument, Unsupported


def parsed(text: str) -> Any:
    return model_config.parse_pbtxt(text, "m")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_batch_size: -1", "max_batch_size is -1"),
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
        (
            "dynamic_batching { priority_levels: 2 }",
            "default priority level must be in range [1, 2] for m: 0 is given",
        ),
        (
            "dynamic_batching { priority_levels: 1 default_priority_level: 1 priority_queue_policy { key: 2 value { } } }",
            "priority queue policy must have priority level in range [1, 1] for m: 2 is given",
        ),
        (
            "instance_group { rate_limiter { resources [ { name: 'R' count: 1 }, { name: 'R' count: 1 global: true } ] } }",
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
    """Where each name was looked for among all of them, this took minutes."""
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
