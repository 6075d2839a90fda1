"""ModelConfig: read, completed, checked and printed as Triton does it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config import model_config
from shm.errors import InvalidArgument, ServingError, Unsupported

DYNAMIC = """
name: "dyn"
backend: "python"
max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 2 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_STRING dims: [ -1 ] label_filename: "labels.txt" } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
dynamic_batching { max_queue_delay_microseconds: 200000 }
"""

#: As a Triton 2.51 answered for the same text (field order included).
DYNAMIC_JSON = (
    '{"name":"dyn","platform":"","backend":"python","runtime":"","version_policy":{"latest":{"num_versions":1}},'
    '"max_batch_size":8,"input":[{"name":"INPUT0","data_type":"TYPE_INT32","format":"FORMAT_NONE","dims":[2],'
    '"is_shape_tensor":false,"allow_ragged_batch":false,"optional":false,"is_non_linear_format_io":false}],'
    '"output":[{"name":"OUTPUT0","data_type":"TYPE_STRING","dims":[-1],"label_filename":"labels.txt",'
    '"is_shape_tensor":false,"is_non_linear_format_io":false}],"batch_input":[],"batch_output":[],'
    '"optimization":{"priority":"PRIORITY_DEFAULT","input_pinned_memory":{"enable":true},'
    '"output_pinned_memory":{"enable":true},"gather_kernel_buffer_threshold":0,"eager_batching":false},'
    '"dynamic_batching":{"preferred_batch_size":[8],"max_queue_delay_microseconds":200000,"preserve_ordering":false,'
    '"priority_levels":0,"default_priority_level":0,"priority_queue_policy":{}},'
    '"instance_group":[{"name":"dyn_0","kind":"KIND_CPU","count":1,"gpus":[],"secondary_devices":[],"profile":[],'
    '"passive":false,"host_policy":""}],"default_model_filename":"model.py","cc_model_filenames":{},"metric_tags":{},'
    '"parameters":{},"model_warmup":[]}'
)


def parsed(text: str) -> Any:
    return model_config.parse_pbtxt(text, "m")


def test_json_form_is_tritons() -> None:
    message = parsed(DYNAMIC)
    model_config.check(message)
    model_config.complete(message)
    model_config.check(message, whole=True)
    assert model_config.to_json(message).decode() == DYNAMIC_JSON


def test_metadata_shows_the_clients_shapes() -> None:
    message = parsed(
        'name: "m" backend: "python" max_batch_size: 4 '
        'input { name: "a" data_type: TYPE_INT32 dims: [ 2 ] reshape: { shape: [ 1, 2 ] } } '
        'output { name: "b" data_type: TYPE_BF16 dims: [ -1 ] }'
    )
    assert json.loads(model_config.metadata(message)) == {
        "name": "m",
        "platform": "python",
        "inputs": [{"name": "a", "datatype": "INT32", "shape": [-1, 2]}],
        "outputs": [{"name": "b", "datatype": "BF16", "shape": [-1, -1]}],
    }


def test_errors_name_model_line_and_column_and_no_path() -> None:
    with pytest.raises(InvalidArgument) as error:
        model_config.parse_pbtxt('name: "x"\nno_such_field: 3\n', "bad")
    assert error.value.message == (
        "config.pbtxt of model 'bad': line 2, column 1: "
        'Message type "inference.ModelConfig" has no field named "no_such_field".'
    )


@pytest.mark.parametrize("text", ["{", "[]", '{"no_such": 1}', '{"max_batch_size": "x"}', "[" * 5000])
def test_json_overrides_are_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(InvalidArgument, match="configuration of model 'm'"):
        model_config.parse_json(text, "m")


def test_json_override_round_trip() -> None:
    message = parsed(DYNAMIC)
    model_config.complete(message)
    assert model_config.parse_json(model_config.to_json(message).decode(), "m") == message
    assert model_config.from_bytes(message.SerializeToString()) == message


def test_bytes_that_are_no_message() -> None:
    with pytest.raises(InvalidArgument):
        model_config.from_bytes(b"\xff\xff\xff")


def test_gpu_instances_get_their_device() -> None:
    message = model_config.empty("m")
    model_config.complete(message, gpu=3)
    (group,) = json.loads(model_config.to_json(message))["instance_group"]
    assert (group["name"], group["kind"], group["gpus"]) == ("m", "KIND_GPU", [3])


def test_sequences_get_tritons_defaults() -> None:
    message = parsed('name: "m" sequence_batching { }')
    model_config.complete(message)
    assert message.sequence_batching.max_sequence_idle_microseconds == 1_000_000
    assert message.sequence_batching.WhichOneof("strategy_choice") == "direct"


def test_completing_twice_changes_nothing() -> None:
    message = parsed(DYNAMIC)
    model_config.complete(message)
    before = message.SerializeToString(deterministic=True)
    model_config.complete(message)
    assert message.SerializeToString(deterministic=True) == before


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
        ("max_batch_size: 4 dynamic_batching { preferred_batch_size: [ 8 ] }", "preferred_batch_size 8"),
        ("dynamic_batching { priority_levels: 2 }", "default_priority_level 0 is not among 2 levels"),
        (
            "dynamic_batching { priority_levels: 1 default_priority_level: 1 priority_queue_policy { key: 2 value { } } }",
            "level 2, but there are 1",
        ),
        ("instance_group { count: -1 }", "count is -1"),
        ("instance_group { count: 200 } instance_group { count: 57 }", "asks for 257 instances, at most 256"),
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
        model_config.check(parsed(f'name: "m" {text}'))
    assert "model 'm'" in error.value.message


def test_ensembles_are_not_offered() -> None:
    with pytest.raises(Unsupported, match="ensembles"):
        model_config.check(parsed('name: "m" platform: "ensemble"'))


@pytest.mark.parametrize(
    "text",
    ["", 'backend: "jax" input { name: "a" dims: [ 1 ] }', 'backend: "jax" input { name: "a" data_type: TYPE_FP32 }'],
)
def test_a_whole_configuration_says_more(text: str) -> None:
    message = parsed(f'name: "m" {text}')
    model_config.check(message)
    with pytest.raises(InvalidArgument):
        model_config.check(message, whole=True)


def test_batch_buckets() -> None:
    text = 'name: "m" max_batch_size: 32 parameters { key: "batch_buckets" value { string_value: "1, 8,32" } }'
    assert model_config.batch_buckets(parsed(text)) == (1, 8, 32)
    assert model_config.batch_buckets(parsed('name: "m"')) == ()


@given(st.binary(max_size=200))
def test_any_bytes_give_a_message_or_a_serving_error(content: bytes) -> None:
    """A number beyond an enum, a name with slashes, a policy of nonsense: checked, printed or refused, never an accident."""
    try:
        message = model_config.from_bytes(content)
        model_config.check(message)
        model_config.complete(message)
        json.loads(model_config.to_json(message))
    except ServingError:
        pass


@given(st.text(max_size=200))
def test_any_text_gives_a_message_or_a_serving_error(text: str) -> None:
    for parse in (model_config.parse_pbtxt, model_config.parse_json):
        try:
            model_config.check(parse(text, "m"))
        except ServingError:
            pass


def test_the_message_costs_neither_grpc_nor_numpy() -> None:
    program = (
        "import sys; from config import model_config; model_config.empty('m');"
        "assert not {'grpc', 'numpy', 'tritonclient'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
