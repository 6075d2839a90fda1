"""Writes stepped models that count, and provides a client that has many requests on one gRPC stream."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.repositories import write_model

#: From the sum of what comes, ``count`` numbers in steps of one. 666 fails on the device, the step to 555 takes half a second,
#: and the one to 777 waits for a file ``go`` beside the model. A request with ``every`` answers so often only; one with ``ends``
#: false goes on until it has had all its steps.
COUNTS = """
    import pathlib
    import time

    import jax, jax.numpy as jnp, numpy as np

    here = pathlib.Path(__file__).parent
    inputs = {"start": "INT32[length]"}
    outputs = {"y": "INT32[1]", "half": "FP32[2]"}
    buckets = {"length": (4, 16)}
    request = {"count": ("INT32", 3), "every": ("INT32", 1), "ends": ("BOOL", True), "early": ("BOOL", True)}
    slots = 4
    max_steps = 40
    gather = "concat"

    def check(value, active):
        if (np.asarray(value)[np.asarray(active)] == 666).any():
            raise ValueError("the number of the beast")
        if (np.asarray(value)[np.asarray(active)] == 555).any():
            time.sleep(0.5)
        while (np.asarray(value)[np.asarray(active)] == 777).any() and not (here / "go").exists():
            time.sleep(0.01)
        return value

    def checked(value, active):
        return jax.pure_callback(check, jax.ShapeDtypeStruct(value.shape, jnp.int32), value, active)

    def shown(value, length):
        half = jnp.where(value == 99, jnp.nan, value / 2).astype(jnp.float32)
        return {"y": value[..., None], "half": jnp.stack([half, length.astype(jnp.float32)], -1)}

    def create(path, config, device):
        def init(params, slots):
            return {name: jnp.zeros(slots, jnp.int32) for name in ("value", "left", "length", "every")} | {
                "ends": jnp.zeros(slots, bool)
            }

        def insert(params, carry, slot, inputs, request):
            told = {name: array[0] for name, array in request.items()}
            value, count, early = inputs["start"].sum(), told["count"], told["early"]
            new = {"value": value - ~early, "left": count - early, "length": inputs["length"]}
            new |= {"every": told["every"], "ends": told["ends"]}
            carry = {name: carry[name].at[slot].set(each) for name, each in new.items()}
            over = (new["left"] <= 0) & told["ends"]
            return carry, shown(value, inputs["length"]), early & (count > 0), over

        def step(params, carry, active):
            value = checked(carry["value"] + active, active)
            left = carry["left"] - active
            made = shown(value, carry["length"])
            emit = value % jnp.maximum(carry["every"], 1) == 0
            return carry | {"value": value, "left": left}, made, emit, (left <= 0) & carry["ends"]

        return (init, insert, step), {"scale": np.float32(1), "name": "counts"}
"""
#: Several requests an insertion, whose first response comes with the first step.
ROWS = """
    import jax.numpy as jnp

    inputs = {"start": "INT32[length]", "count": "INT32[1]"}
    outputs = {"y": "INT32[1]"}
    buckets = {"length": (4,)}
    slots, max_steps, insert_rows, step_slots = 8, 100, 4, (2,)

    def create(path, config, device):
        def init(params, slots):
            return jnp.zeros((slots, 2), jnp.int32)

        def insert(params, carry, slot, inputs):
            assert inputs["start"].shape == (4, 4) and slot.shape == inputs["length"].shape == (4,)
            new = jnp.stack([inputs["start"].sum(1) * inputs["length"], inputs["count"][:, 0]], 1)
            return carry.at[slot].set(new), {}

        def step(params, carry, active):
            value, left = carry[: len(active)].T
            new = jnp.stack([value + 1, left - 1], 1)
            kept = jnp.where(active[:, None], new, carry[: len(active)])
            return carry.at[: len(active)].set(kept), {"y": value[:, None]}, left > 0, left <= 1

        return (init, insert, step), None
"""


#: An ensemble of nothing but the first.
ENSEMBLE = """
    platform: "ensemble"
    input [ { name: "start" data_type: TYPE_INT32 dims: [ -1 ] } ]
    output [ { name: "y" data_type: TYPE_INT32 dims: [ 1 ] } ]
    ensemble_scheduling { step [ {
      model_name: "counts" model_version: -1
      input_map { key: "start" value: "start" } output_map { key: "y" value: "y" }
    } ] }
"""


def write_stepped_models(models: Path) -> None:
    """Writes ``counts``, ``rows`` and the ensemble ``whole``."""
    folder = models / "whole" / "1"
    folder.mkdir(parents=True)
    (folder.parent / "config.pbtxt").write_text(ENSEMBLE)
    write_model(models, "counts", COUNTS)
    write_model(models, "rows", ROWS)


class Steps:
    """One gRPC stream of requests to these models."""

    def __init__(self, url: str) -> None:
        self._channel = grpc.insecure_channel(url)
        self._requests: queue.SimpleQueue[service_pb2.ModelInferRequest | None] = queue.SimpleQueue()
        self.call = service_pb2_grpc.GRPCInferenceServiceStub(self._channel).ModelStreamInfer(
            iter(self._requests.get, None)
        )
        #: By a request's id: its responses so far, ended by None, or by the text of an error.
        self.got: dict[str, list[Any]] = defaultdict(list)
        self.ended: set[str] = set()

    def ask(self, name: str, start: Sequence[int] = (1,), model: str = "counts", **parameters: int | bool) -> None:
        """Sends a request. ``count`` is an input of "rows", and a parameter elsewhere."""
        asked = service_pb2.ModelInferRequest(model_name=model, id=name)
        tensors = {"start": np.array(start, np.int32)}
        if model == "rows":
            tensors["count"] = np.array([parameters.pop("count")], np.int32)
        for key, array in tensors.items():
            asked.inputs.add(name=key, datatype="INT32", shape=array.shape)
            asked.raw_input_contents.append(array.tobytes())
        for key, value in parameters.items():
            field = "bool_param" if isinstance(value, bool) else "int64_param"
            setattr(asked.parameters[key], field, value)
        asked.parameters["triton_enable_empty_final_response"].bool_param = True
        self._requests.put(asked)

    def take(self) -> tuple[str, Any]:
        """Returns the next response: its request's id, and its number, None for an end, or an error's text."""
        answer = next(self.call)
        inner = answer.infer_response
        # What is wrong before the model is asked says nothing of that.
        final = inner.parameters["triton_final_response"].bool_param or not inner.model_name
        value: Any = answer.error_message or None
        if inner.outputs:
            value = np.frombuffer(inner.raw_output_contents[0], np.int32).item()
        self.got[inner.id].append(value)
        if final:
            if value is not None and not answer.error_message:
                self.got[inner.id].append(None)
            self.ended.add(inner.id)
        return inner.id, value

    def all_of(self, *names: str) -> list[list[Any]]:
        """Returns all responses to these requests, once all of them have ended."""
        while not self.ended.issuperset(names):
            self.take()
        return [self.got.pop(name) for name in names if self.ended.discard(name) is None]

    def answers(self, start: Sequence[int] = (1,), model: str = "counts", **parameters: int | bool) -> list[Any]:
        """Sends one request and returns all of its responses."""
        self.ask("one", start, model, **parameters)
        return self.all_of("one")[0]

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.put(None)
        self.call.cancel()
        self._channel.close()
