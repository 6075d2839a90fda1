"""ModelConfig: read, completed, checked and printed as Triton does it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.config import model_checks, model_config
from tensord.protocol import model_config_pb2
from tensord.shm.errors import InvalidArgument, ServingError

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


def names(described: Any) -> set[str]:
    """Returns the names of all fields of a message and of the messages inside it."""
    found = {field.name for field in described.fields}
    return found.union(*(names(field.message_type) for field in described.fields if field.message_type is not None))


NAMES = sorted(names(model_config_pb2.ModelConfig.DESCRIPTOR))


def parsed(text: str) -> Any:
    return model_config.parse_pbtxt(text, "m")


def test_json_form_is_tritons() -> None:
    message = parsed(DYNAMIC)
    model_checks.check(message)
    model_config.complete(message)
    model_checks.check(message, whole=True)
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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "truncated"),
        ("[]", "a list is given, an object is expected"),
        ("null", "null is given, an object is expected"),
        ('{"no_such": 1}', 'no field named "no_such"'),
        ('{"max_batch_size": "x"}', "Failed to parse max_batch_size field"),
        ('{"max_batch_size": 2147483648}', "Failed to parse max_batch_size field"),
        ('{"max_batch_size": []}', "max_batch_size: a list is given, a single value is expected"),
        ('{"input": 5}', "input: a number is given, an object is expected"),
        ('{"input": [[]]}', "input: a list is given, an object is expected"),
        ('{"input": [{"reshape": true}]}', "input: reshape: a boolean is given, an object is expected"),
        ('{"input": [null]}', "input: null is given, an object is expected"),
        ('{"parameters": []}', "parameters: a list is given, an object is expected"),
        ('{"parameters": {"k": "v"}}', "parameters: k: a string is given, an object is expected"),
        ('{"metric_tags": {"k": {}}}', "metric_tags: k: an object is given, a single value is expected"),
        ('{"name": "\\ud800"}', ""),
        # As deep as no Python reads it: 3.12 and newer read some thousand levels.
        ("[" * 200_000, "nested too deeply"),
        ('{"name": "' + "x" * model_config.MAX_BYTE_SIZE + '"}', "1048588 characters given, at most 1048576 are read"),
    ],
)
def test_json_overrides_are_refused_with_a_sentence(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=f"configuration of model 'm': .*{re.escape(words)}"):
        model_config.parse_json(text, "m")


def test_one_entry_may_stand_for_a_list_of_one() -> None:
    """A single entry is read as a list of one, as in Triton."""
    given = '{"instance_group": {"count": 2}, "input": {"name": "x", "dims": 3}, "metricTags": {"a": "b"}}'
    message = model_config.parse_json(given, "m")
    assert [group.count for group in message.instance_group] == [2]
    assert list(message.input[0].dims) == [3]
    assert dict(message.metric_tags) == {"a": "b"}


def test_what_is_no_json_and_protobuf_reads() -> None:
    """Keys without quotes, strings in single ones, a comma behind the last entry; what is in a string stays as it is."""
    loose = """{max_batch_size : 4, 'backend': 'it\\'s "x"', "instance_group": [{count: 2,}, ],
        parameters: {$a1: {string_value: "{b: 1,}, 'c' \\" d:"}, nullify: {"string_value": 'true'},}, }"""
    values = {"$a1": "{b: 1,}, 'c' \" d:", "nullify": "true"}
    strict = {
        "max_batch_size": 4,
        "backend": 'it\'s "x"',
        "instance_group": [{"count": 2}],
        "parameters": {name: {"string_value": value} for name, value in values.items()},
    }
    assert model_config.parse_json(loose, "m") == model_config.parse_json(json.dumps(strict), "m")
    for text in ("{max_batch_size 4}", "{'a': 'b}", "{a: b}", '{"name": "\\', "{'\\", "{'name': '\\q'}"):
        with pytest.raises(InvalidArgument, match=r"JSON is malformed|Input data was truncated"):
            model_config.parse_json(text, "m")


@pytest.mark.parametrize("part", ['"\\"', "'\\'", "a ", "aa", ",  "])
def test_a_long_text_that_is_no_json_is_gone_through_once(part: str) -> None:
    """This would not end if each quote, word or comma were looked for up to the end of the text."""
    with pytest.raises(InvalidArgument):
        model_config.parse_json((part * (1 << 20))[: 1 << 18], "m")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4))
def test_any_json_gives_a_message_or_a_serving_error(given: dict[str, Any]) -> None:
    """Any JSON value may stand where a message has a list, an object, a number or a name."""
    try:
        model_checks.check(model_config.parse_json(json.dumps(given), "m"))
    except ServingError:
        pass


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
    model_config.complete(message, gpus=[3])
    (group,) = json.loads(model_config.to_json(message))["instance_group"]
    assert (group["name"], group["kind"], group["gpus"]) == ("m", "KIND_GPU", [3])


def test_gpus_of_several_workers() -> None:
    """Each has filled in its own, where none is given; a worker of the processor none."""
    given = "instance_group [ { }, { gpus: [ 1 ] }, { kind: KIND_CPU } ]"
    said = []
    for gpus in ([], [2], [0]):
        message = parsed(given)
        model_config.complete(message, gpus)
        said.append(model_config.to_json(message))
    joined = json.loads(model_config.with_gpus_of(said[2], said))
    assert [group["gpus"] for group in joined["instance_group"]] == [[0, 2], [1], []]
    assert joined | {"instance_group": []} == json.loads(said[2]) | {"instance_group": []}
    assert model_config.with_gpus_of(said[1], [said[1], said[1]]) is said[1]


def test_sequences_get_tritons_defaults() -> None:
    message = parsed('name: "m" sequence_batching { }')
    model_config.complete(message)
    assert message.sequence_batching.max_sequence_idle_microseconds == 1_000_000
    # The default strategy is not printed where nobody has asked for it.
    assert message.sequence_batching.WhichOneof("strategy_choice") is None


def test_completing_twice_changes_nothing() -> None:
    message = parsed(DYNAMIC)
    model_config.complete(message)
    before = message.SerializeToString(deterministic=True)
    model_config.complete(message)
    assert message.SerializeToString(deterministic=True) == before


@given(st.binary(max_size=200))
def test_any_bytes_give_a_message_or_a_serving_error(content: bytes) -> None:
    """A number beyond an enum, a name with slashes, a policy of nonsense: checked, printed or refused, never an accident."""
    try:
        message = model_config.from_bytes(content)
        model_checks.check(message)
        model_config.complete(message)
        json.loads(model_config.to_json(message))
    except ServingError:
        pass


@given(st.text(max_size=200))
def test_any_text_gives_a_message_or_a_serving_error(text: str) -> None:
    for parse in (model_config.parse_pbtxt, model_config.parse_json):
        try:
            model_checks.check(parse(text, "m"))
        except ServingError:
            pass


def test_the_message_costs_neither_grpc_nor_numpy() -> None:
    program = (
        "import sys; from tensord.config import model_config; model_config.empty('m');"
        "assert not {'grpc', 'numpy', 'tritonclient'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
