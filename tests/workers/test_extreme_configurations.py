"""Every number of a configuration at its extremes, in a real worker: it loads or is refused, and other models do not notice.

A load that hangs, or that kills the worker, fails the test by its silence. Of memory the most that was ever used is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from tensord.config import model_checks, model_fields
from tensord.config.model_config import parse_pbtxt
from tensord.protocol import model_config_pb2
from tensord.shm.control_records import Load, Loaded
from tensord.shm.errors import ServingError
from tensord.shm.operations import ServeLoaded
from tests.config.test_model_fields import HONOURED
from tests.repositories import answering, scale_model, write_model
from tests.workers.worker_process import WorkerProcess

PYTHON = answering("return response(y=request.inputs()[0].as_numpy())")
JAX = """
    def create(path, config, device):
        def apply(params, inputs, *state):
            made = {"y": inputs["x"]}
            return (made, *state) if state else made

        return apply, None
"""
#: A configuration that uses everything that has a number.
WHOLE = """
    name: "m"
    max_batch_size: 4
    version_policy { latest { num_versions: 1 } }
    input { name: "x" data_type: TYPE_FP32 dims: [ 2, 1 ] reshape { shape: [ 2 ] } }
    output { name: "y" data_type: TYPE_FP32 dims: [ 2, 1 ] reshape { shape: [ 2 ] } }
    dynamic_batching {
      preferred_batch_size: [ 2 ]
      max_queue_delay_microseconds: 1
      priority_levels: 2
      default_priority_level: 1
      default_queue_policy { default_timeout_microseconds: 1000000 max_queue_size: 9 }
      priority_queue_policy { key: 2 value { default_timeout_microseconds: 1000000 max_queue_size: 9 } }
    }
    instance_group { count: 1 kind: KIND_CPU rate_limiter { resources { name: "r" count: 1 } priority: 1 } }
    model_warmup {
      name: "w" batch_size: 1 count: 1
      inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 2, 1 ] zero_data: true } }
    }
"""
#: The same with sequences, of each strategy.
SEQUENCES = [
    WHOLE.partition("dynamic_batching {")[0]
    + f"""
    sequence_batching {{
      max_sequence_idle_microseconds: 1000
      control_input {{ name: "s" control {{ kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }} }}
      {strategy}
    }}
    instance_group {WHOLE.partition("instance_group")[2]}"""
    for strategy in (
        "direct { max_queue_delay_microseconds: 1 }",
        "oldest { max_candidate_sequences: 2 preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 1 }",
        """oldest { max_candidate_sequences: 2 }
        state { input_name: "h" output_name: "h" data_type: TYPE_FP32 dims: [ 2 ] }
        state {
          input_name: "g" output_name: "g" data_type: TYPE_FP32 dims: [ 2 ]
          initial_state { name: "i" data_type: TYPE_FP32 dims: [ 2 ] zero_data: true }
        }""",
    )
]
#: By the type of a field.
EXTREMES = {
    "int32": (-(1 << 31), -1, 0, 7, 1 << 20, (1 << 31) - 1),
    "int64": (-(1 << 63), -1, 0, 7, 1 << 31, 1 << 40, (1 << 63) - 1),
    "uint32": (0, 7, 1 << 20, (1 << 32) - 1),
    "uint64": (0, 7, 50_000_000, 1 << 40, 1 << 63, (1 << 64) - 1),
}
#: What a load may use and give back, besides what programs and their compilation take.
ROOM = 1 << 30


def numbers(message: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields path, message and field of every number in a message that is honoured or ignored."""
    for field in message.DESCRIPTOR.fields:
        path, value = prefix + field.name, getattr(message, field.name)
        if path in model_fields.REFUSED:
            continue
        if field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_INT64, field.CPPTYPE_UINT32, field.CPPTYPE_UINT64):
            yield path, message, field
        elif field.message_type is None:
            continue
        elif field.message_type.GetOptions().map_entry:
            parts = value.values() if field.message_type.fields_by_name["value"].message_type is not None else ()
            for part in parts:
                yield from numbers(part, f"{path}.value.")
        elif field.is_repeated:
            for part in value:
                yield from numbers(part, f"{path}.")
        elif message.HasField(field.name):
            yield from numbers(value, f"{path}.")


def kind(field: Any) -> str:
    return {
        field.CPPTYPE_INT32: "int32",
        field.CPPTYPE_INT64: "int64",
        field.CPPTYPE_UINT32: "uint32",
        field.CPPTYPE_UINT64: "uint64",
    }[field.cpp_type]


def cases(backend: str) -> Iterator[tuple[str, Any]]:
    """Yields a name and a configuration for each number at each extreme, and for those that must agree."""
    everything = [(WHOLE, path, field) for path, _, field in numbers(parse_pbtxt(WHOLE, "m"))]
    for text in SEQUENCES:
        found = numbers(parse_pbtxt(text, "m"))
        everything += [(text, path, field) for path, _, field in found if path.startswith("sequence_batching")]
    for text, path, field in everything:
        for value in EXTREMES[kind(field)]:
            message = parse_pbtxt(text, "m")
            message.backend = backend
            holder = next(holder for found, holder, _ in numbers(message) if found == path)
            if field.is_repeated:
                getattr(holder, field.name)[:] = [value]
            else:
                setattr(holder, field.name, value)
            yield f"{path}: {value}", message
    for name, more in TOGETHER.items():
        message = parse_pbtxt(WHOLE, "m")
        message.backend = backend
        text_format.Merge(more, message)
        yield name, message


MOST, LARGEST = (1 << 31) - 1, (1 << 63) - 1
TOGETHER = {
    "all levels and a policy for the last": (
        f"dynamic_batching {{ priority_levels: {(1 << 64) - 1} default_priority_level: 4294967297 "
        f"priority_queue_policy {{ key: {(1 << 64) - 1} value {{ max_queue_size: 1 }} }} }}"
    ),
    "the largest batch, preferred": f"max_batch_size: {MOST} dynamic_batching {{ preferred_batch_size: [ {MOST} ] }}",
    "a warm-up of the largest batch": f"max_batch_size: {MOST} model_warmup {{ name: 'v' batch_size: {MOST} "
    "inputs { key: 'x' value { data_type: TYPE_FP32 dims: [ 2, 1 ] zero_data: true } } }",
    "many instances": "instance_group { count: 254 kind: KIND_CPU }",
    "one more than there may be": "instance_group { count: 256 kind: KIND_CPU }",
    "a tensor beyond any memory": f"input {{ name: 'z' data_type: TYPE_FP32 dims: [ {LARGEST}, {LARGEST} ] optional: true }}",
    "an output beyond any memory": f"output {{ name: 'z' data_type: TYPE_FP64 dims: [ {MOST}, {MOST}, {MOST}, {MOST} ] }}",
    "more dims than an array has": f"input {{ name: 'z' data_type: TYPE_FP32 dims: [ {', '.join('1' * 33)} ] optional: true }}",
    "as many dims as an array has": f"output {{ name: 'z' data_type: TYPE_FP32 dims: [ {', '.join('1' * 32)} ] }}",
    "many warm-ups": "max_batch_size: 1000000 " + "model_warmup { name: 'v' batch_size: 1000000 count: 10000 "
    "inputs { key: 'x' value { data_type: TYPE_FP32 dims: [ 2, 1 ] zero_data: true } } }" * 1000,
    "many parameters": "".join(f"parameters {{ key: '{number}' value {{ }} }}" for number in range(10_000)),
}


@pytest.mark.parametrize(("backend", "source"), [("python", PYTHON), ("jax", JAX)])
def test_a_load_costs_other_models_nothing(tmp_path: Path, backend: str, source: str) -> None:
    scale_model(tmp_path)
    folder = write_model(tmp_path, "m", source)
    x = np.ones((1, 4), np.float32)
    loaded, refused = [], []
    with WorkerProcess() as worker:
        worker.serve(tmp_path, "scale")
        worker.infer("scale", {"x": x})
        for number, (what, message) in enumerate(cases(backend), 1):
            # A version each: their loads are in nobody's way.
            worker.send(Load("m", number, str(folder.parent), str(folder), message.SerializeToString()))
            assert worker.infer("scale", {"x": x})["y"].tolist() == [[4.0] * 4], what
            answer, _ = worker.wait(lambda record: isinstance(record, Loaded))
            assert (answer.name, answer.version) == ("m", number)
            assert "Error" not in answer.reason, (what, answer.reason)
            assert most_memory(worker) < ROOM, what
            if answer.reason:
                refused.append(what)
                continue
            loaded.append(what)
            worker.call(ServeLoaded("m", number))
            if backend == "python":
                # However long it may wait for company: it need not wait any more when its model goes.
                asked = worker.submit("m", {"x": np.ones((1, 2, 1), np.float32)}, version=number)
            worker.unload("m", number)
            if backend == "python":
                worker.answer(asked)
    assert "Traceback" not in worker.log
    assert {"input.dims: 0", "max_batch_size: -1", "one more than there may be"} <= set(refused)
    assert {"instance_group.count: 7", "all levels and a policy for the last", "many parameters"} <= set(loaded)


def most_memory(worker: WorkerProcess) -> int:
    """Returns the largest resident memory that the worker ever had, in bytes."""
    (found,) = re.findall(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{worker.process.pid}/status").read_text(), re.MULTILINE)
    return int(found) * 1024


def test_every_number_of_the_message_is_among_them() -> None:
    """Those of fields that are refused or without effect are looked at nowhere, or as a list of which the length counts."""
    listed = {path for path in HONOURED if _is_number(path)}
    asked = {path for text in (WHOLE, *SEQUENCES) for path, _, _ in numbers(parse_pbtxt(text, "m"))}
    elsewhere = {
        path for path in listed if path.startswith("ensemble_scheduling.")
    }  # tests/config/test_ensemble_checks.py
    assert listed - asked - elsewhere == {
        "version_policy.specific.versions",
        "dynamic_batching.priority_queue_policy.key",
    }
    assert len(elsewhere) == 2


def _is_number(path: str) -> bool:
    described = model_config_pb2.ModelConfig.DESCRIPTOR
    *parents, last = path.split(".")
    for name in parents:
        described = described.fields_by_name[name].message_type
    return described.fields_by_name[last].cpp_type in (1, 2, 3, 4)


@pytest.mark.parametrize("value", [-(1 << 63), 0, (1 << 63) - 1])
def test_versions_are_checked_where_they_are_chosen(value: int) -> None:
    message = parse_pbtxt(f'name: "m" version_policy {{ specific {{ versions: [ 1, {value} ] }} }}', "m")
    try:
        model_checks.check(message)
    except ServingError as error:
        assert value < 1
        assert str(value) in error.message
