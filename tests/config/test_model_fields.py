"""No field of the published ModelConfig is passed over in silence, and the manual says what the code does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tensord.config import model_fields
from tensord.config.model_config import complete, is_map, parse_json, parse_pbtxt, to_json
from tensord.protocol import model_config_pb2
from tensord.shm.errors import Unsupported

MANUAL = Path(__file__).parents[2] / "docs" / "models.md"
#: The message that fields are in, "." the configuration itself, and their names or paths in it.
_HONOURED = """
    . name platform backend max_batch_size default_model_filename
    version_policy. latest.num_versions all specific.versions
    input. name data_type format dims reshape.shape optional allow_ragged_batch
    batch_input. kind target_name data_type source_input
    batch_output. kind target_name source_input
    output. name data_type dims reshape.shape label_filename
    dynamic_batching. preferred_batch_size max_queue_delay_microseconds priority_levels default_priority_level
    dynamic_batching. preserve_ordering
    dynamic_batching.default_queue_policy. timeout_action default_timeout_microseconds allow_timeout_override
    dynamic_batching.default_queue_policy. max_queue_size
    dynamic_batching.priority_queue_policy. key value.timeout_action value.default_timeout_microseconds
    dynamic_batching.priority_queue_policy. value.allow_timeout_override value.max_queue_size
    response_cache. enable
    model_transaction_policy. decoupled
    ensemble_scheduling.step. model_name model_version input_map.key input_map.value output_map.key output_map.value
    ensemble_scheduling. max_inflight_requests
    sequence_batching. max_sequence_idle_microseconds iterative_sequence
    sequence_batching.control_input. name control.kind control.int32_false_true control.fp32_false_true
    sequence_batching.control_input. control.bool_false_true control.data_type
    sequence_batching.direct. max_queue_delay_microseconds minimum_slot_utilization
    sequence_batching.oldest. max_candidate_sequences preferred_batch_size max_queue_delay_microseconds
    sequence_batching.oldest. preserve_ordering
    sequence_batching.state. input_name output_name data_type dims initial_state.name initial_state.data_type
    sequence_batching.state. initial_state.dims initial_state.zero_data initial_state.data_file
    instance_group. name kind count gpus passive
    instance_group.rate_limiter. priority resources.count resources.global resources.name
    parameters. key value.string_value
    model_warmup. name batch_size count
    model_warmup.inputs. key value.data_type value.dims value.zero_data value.random_data value.input_data_file
"""
#: Paths of honoured fields without sub-fields.
HONOURED = frozenset(
    (message + name).lstrip(".") for message, *names in map(str.split, _HONOURED.strip().splitlines()) for name in names
)
TABLES = (HONOURED, model_fields.REFUSED, model_fields.WITHOUT_EFFECT)


def published(described: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every path of a message with its field, down to fields that are listed or are no messages."""
    for field in described.fields:
        path = prefix + field.name
        listed = path in model_fields.REFUSED or path in model_fields.WITHOUT_EFFECT
        if listed or field.message_type is None or not field.message_type.fields:
            yield path, field
        else:
            yield from published(field.message_type, f"{path}.")


FIELDS = dict(published(model_config_pb2.ModelConfig.DESCRIPTOR))


def test_every_published_field_stands_in_one_table_and_every_entry_is_a_field() -> None:
    assert {path: sum(path in table for table in TABLES) for path in FIELDS} == dict.fromkeys(FIELDS, 1)
    assert {path for table in TABLES for path in table} == FIELDS.keys()


def asking(path: str) -> Any:
    """Returns a configuration that sets this one field."""
    *parents, last = path.split(".")
    message = model_config_pb2.ModelConfig(name="m")
    inner = message
    for name in parents:
        field = inner.DESCRIPTOR.fields_by_name[name]
        inner = getattr(inner, name).add() if field.is_repeated else getattr(inner, name)
        if not field.is_repeated:
            inner.SetInParent()
    field = inner.DESCRIPTOR.fields_by_name[last]
    if is_map(field):
        getattr(inner, last)["k"] = "v"
    elif field.message_type is not None:
        part = getattr(inner, last).add() if field.is_repeated else getattr(inner, last)
        part.SetInParent()
    elif path in model_fields._NEUTRAL:
        pass  # a Boolean that is true where nothing is said: the message around it says false
    else:
        value: Any = {field.TYPE_STRING: "x", field.TYPE_BOOL: True}.get(field.type, 1)
        if field.is_repeated:
            getattr(inner, last).append(value)
        else:
            setattr(inner, last, value)
    return message


@pytest.mark.parametrize("path", sorted(model_fields.REFUSED))
def test_what_is_refused(path: str) -> None:
    with pytest.raises(Unsupported) as caught:
        model_fields.refuse(asking(path))
    assert caught.value.message == f"model 'm': {path}: {model_fields.REFUSED[path]}"


@pytest.mark.parametrize("path", sorted(model_fields.WITHOUT_EFFECT))
def test_what_is_without_effect(path: str) -> None:
    message = asking(path)
    model_fields.refuse(message)
    sentence = f"{path} is without effect: {model_fields.WITHOUT_EFFECT[path]}"
    assert model_fields.without_effect(message) == [sentence]


def test_each_is_told_once_however_often_it_is_said() -> None:
    message = parse_pbtxt(
        'instance_group { profile: "a" } instance_group { profile: "b" host_policy: "p" } '
        'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "env.tar.gz" } } parameters { key: "mine" value { } }',
        "m",
    )
    assert [sentence.split(" is without effect")[0] for sentence in model_fields.without_effect(message)] == [
        "instance_group.profile",
        "instance_group.host_policy",
        "parameter EXECUTION_ENV_PATH",
    ]


def test_what_the_server_prints_asks_for_nothing() -> None:
    """A configuration that was read from the server and is sent back with a load is neither refused nor warned of."""
    message = parse_pbtxt('name: "m" backend: "python" max_batch_size: 4 dynamic_batching { }', "m")
    message.model_transaction_policy.SetInParent()
    complete(message)
    sent = parse_json(to_json(message).decode(), "m")
    model_fields.refuse(sent)
    assert model_fields.without_effect(sent) == []


def test_the_manual_has_these_tables() -> None:
    text = (
        MANUAL.read_text(encoding="utf-8").partition("\n## What a configuration may ask for\n")[2].partition("\n## ")[0]
    )
    rows = re.findall(r"^\| (parameter )?`([^`]+)` \| (.+) \|$", text, re.MULTILINE)
    assert {name: why for parameter, name, why in rows if parameter} == model_fields.PARAMETERS_WITHOUT_EFFECT
    fields = {name: why for parameter, name, why in rows if not parameter}
    assert fields == model_fields.REFUSED | model_fields.WITHOUT_EFFECT
    # Each below its own heading.
    refused, without_effect = text.split("without effect**")
    assert all(f"| `{path}` |" in refused for path in model_fields.REFUSED)
    assert all(f"| `{path}` |" in without_effect for path in model_fields.WITHOUT_EFFECT)
