"""Generates requests that differ as clients' do: models, shapes, ids, values, scheduling, parameters, places, heads.

Asked ─▶ http: a whole HTTP request       valid, and with ``wrong``: how often something is not
      ╰▶ grpc: a ModelInferRequest
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from tests import repositories

Infer = service_pb2.ModelInferRequest
#: Name of a model -> datatype of its input ``x``, of which it makes ``y``.
MODELS = {"scale": "FP32", "other": "FP32", "echo_uint8": "UINT8", "echo_bytes": "BYTES"}
#: Of those that make ``factor * x + 1``.
FACTORS = {"scale": 3, "other": 7}
#: Where a region's outputs begin.
OUTPUTS_AT = 2048
_TYPED = {"FP32": "fp32_contents", "UINT8": "uint_contents", "BYTES": "bytes_contents"}


def write_models(repository: Path) -> Path:
    """Writes the models that the requests ask for; returns the repository."""
    repositories.echo_models(repository, ["UINT8"])
    for name, factor in FACTORS.items():
        repositories.scale_model(repository, name, factor)
    return repository


@dataclass(slots=True)
class Asked:
    """One request, independent of the protocol."""

    model: str
    version: str
    name: str
    datatype: str
    shape: list[int]
    values: list[Any]
    id: str
    parameters: dict[str, Any]
    #: "binary", "values" or "region"; where its output goes: these, or "" for whatever the protocol gives.
    source: str
    output: str
    output_name: str
    #: Lines of an HTTP head.
    lines: list[str]
    #: Bytes too many, or too few.
    extra: int = 0
    region: str = "r"
    #: Keys in another order.
    shuffled: bool = False
    #: A byte of the JSON, or of the message, is another one: where, and which.
    damage: tuple[float, int] | None = None

    @property
    def content(self) -> bytes:
        """Returns the input's bytes as they are on the wire, or in the region if it is the source."""
        if self.datatype == "BYTES":
            return b"".join(len(value).to_bytes(4, "little") + value for value in map(str.encode, self.values))
        return np.array(self.values, np.float32 if self.datatype == "FP32" else np.uint8).tobytes()

    @property
    def answer(self) -> bytes:
        """Returns the right output's bytes, as they are on the wire."""
        factor = FACTORS.get(self.model)
        if factor is None:
            return self.content
        return np.array([factor * value + 1 for value in self.values], np.float32).tobytes()

    def http(self) -> bytes:
        """Builds the HTTP request."""
        entry: dict[str, Any] = {"name": self.name, "datatype": self.datatype, "shape": self.shape}
        size, tail = len(self.content) + self.extra, b""
        if self.source == "region":
            entry["parameters"] = {"shared_memory_region": self.region, "shared_memory_byte_size": size}
        elif self.source == "binary":
            entry["parameters"] = {"binary_data_size": size}
            tail = self.content
        else:
            entry["data"] = self.values
        said: dict[str, Any] = {"inputs": [entry], "parameters": self.parameters}
        if self.id:
            said["id"] = self.id
        if self.output:
            output: dict[str, Any] = {"name": self.output_name}
            if self.output == "region":
                place = {"shared_memory_offset": OUTPUTS_AT, "shared_memory_byte_size": 1024}
                output["parameters"] = {"shared_memory_region": self.region, **place}
            else:
                output["parameters"] = {"binary_data": self.output == "binary"}
            said["outputs"] = [output]
        if self.shuffled:
            said = dict(reversed(said.items()))
        text = self._damaged(json.dumps(said).encode())
        lines = ["Host: x", f"Content-Length: {len(text) + len(tail)}", *self.lines]
        if tail:
            lines.append(f"Inference-Header-Content-Length: {len(text)}")
        version = f"/versions/{self.version}" if self.version else ""
        start = f"POST /v2/models/{self.model}{version}/infer HTTP/1.1"
        return "\r\n".join([start, *lines, "", ""]).encode() + text + tail

    def grpc(self) -> bytes:
        """Builds the serialised ModelInferRequest."""
        tensor = Infer.InferInputTensor(name=self.name, datatype=self.datatype, shape=self.shape)
        raws = []
        size = len(self.content) + self.extra
        if self.source == "region":
            tensor.parameters["shared_memory_region"].string_param = self.region
            tensor.parameters["shared_memory_byte_size"].int64_param = size
        elif self.source == "binary":
            raws = [self.content[:size] + bytes(max(0, self.extra))]
        else:
            values = [each.encode() for each in self.values] if self.datatype == "BYTES" else self.values
            getattr(tensor.contents, _TYPED.get(self.datatype, "fp32_contents")).extend(values)
        asked = Infer(model_name=self.model, model_version=self.version, id=self.id, inputs=[tensor])
        asked.raw_input_contents.extend(raws)
        for key, value in self.parameters.items():
            kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
            setattr(asked.parameters[key], kind, value)
        if self.output:
            output = asked.outputs.add(name=self.output_name)
            if self.output == "region":
                output.parameters["shared_memory_region"].string_param = self.region
                output.parameters["shared_memory_offset"].int64_param = OUTPUTS_AT
                output.parameters["shared_memory_byte_size"].int64_param = 1024
        return self._damaged(asked.SerializeToString(deterministic=True))

    def _damaged(self, content: bytes) -> bytes:
        if self.damage is None:
            return content
        at = int(self.damage[0] * len(content))
        return content[:at] + bytes((self.damage[1],)) + content[at + 1 :]


class Dice:
    """Draws random requests. ``wrong``: how often something in a request is not right."""

    def __init__(self, seed: int, wrong: float = 0.0, regions: bool = False) -> None:
        self._random = random.Random(seed)
        self._wrong = wrong
        self._regions = regions

    def choice(self, *options: Any) -> Any:
        return self._random.choice(options)

    def chance(self, share: float) -> bool:
        return self._random.random() < share

    def _value(self, datatype: str) -> Any:
        match datatype:
            case "FP32":
                return float(self._random.randrange(-1000, 1000))
            case "UINT8":
                return self._random.randrange(256)
        return self._random.choice(("", "a", "text", "\u00e4" * 9))

    def _scheduling(self) -> dict[str, Any]:
        """Draws scheduling parameters, nearly always other ones."""
        found: dict[str, Any] = {}
        if self.chance(0.3):
            found["priority"] = self._random.randrange(9)
        if self.chance(0.3):
            found["timeout"] = self._random.randrange(10**9, 10**10)
        if self.chance(0.1):
            found["tensord_replace"] = f"key {self._random.randrange(10**6)}"
        elif self.chance(0.3):
            number = self._random.randrange(1, 10**6)
            found["sequence_id"] = self.choice(number, f"sequence {number}")
            found |= {key: True for key in ("sequence_start", "sequence_end") if self.chance(0.5)}
        if self.chance(0.1):
            # No model here has a set of a customer.
            found["parameter_set"] = (
                self.choice("main", f"customer-{self._random.randrange(10)}") if self._wrong else "main"
            )
        return found

    def asked(self) -> Asked:
        """Draws the next request."""
        model = self.choice("scale", "scale", "scale", "other", "echo_uint8", "echo_bytes")
        datatype = MODELS[model]
        rows = self.choice(1, 1, 2, 3, 8)
        shape = [rows, 4] if datatype == "FP32" else [rows]
        values = [self._value(datatype) for _ in range(int(np.prod(shape)))]
        lines = []
        if self.chance(0.6):
            bits = self._random.getrandbits
            lines.append(f"traceparent: 00-{bits(128):032x}-{bits(64):016x}-01")
        if self.chance(0.3):
            lines.append(self.choice("User-Agent: a", "Accept: */*", "Content-Type: application/json", "x-b3: 1"))
        parameters = self._scheduling()
        if self.chance(0.3):
            parameters |= self.choice({"x": 1}, {"x": True}, {"x": 1.0}, {"y": "z"}, {"n": self._random.random()})
        places = ("binary", "binary", "values", "region") if self._regions else ("binary", "binary", "values")
        asked = Asked(
            model,
            self.choice("", "", "", "1"),
            "x",
            datatype,
            shape,
            values,
            self.choice("", "me", f"{self._random.getrandbits(40):x}", '"\u00e4'),
            parameters,
            self.choice(*places),
            self.choice("", *places) if self.chance(0.6) else "",
            "y",
            lines,
            shuffled=self.chance(0.2),
        )
        if asked.source == "region" and datatype == "BYTES":
            asked.source = "binary"
        if self.chance(self._wrong):
            self._spoil(asked)
        return asked

    def _spoil(self, asked: Asked) -> None:
        """Makes something in a request wrong, or unusual."""
        match self._random.randrange(12):
            case 0:
                asked.model = self.choice("nope", "", "Scale")
            case 1:
                asked.version = self.choice("2", "0", "x", "-1", "9" * 30)
            case 2:
                asked.name = self.choice("z", "", "\u00e4")
            case 3:
                asked.datatype = self.choice("FP32", "UINT8", "INT64", "FP99", "")
                asked.values = [1] * len(asked.values)
            case 4:
                asked.shape = self.choice([], [0], [5, 5], [-1], [1, 1, 4], [2**40], [9, 4])
            case 5:
                asked.extra = self.choice(-1, 1, 4)
            case 6:
                asked.output_name = self.choice("nope", "", "x")
                asked.output = asked.output or "binary"
            case 7:
                asked.region = "nobody's"
            case 8:
                key = self.choice(
                    "priority", "timeout", "sequence_id", "sequence_start", "triton_x", "binary_data_output"
                )
                asked.parameters[key] = self.choice(-1, True, 1.5, "text", "s" * 129, 2**62)
            case 9 | 10:
                asked.damage = self._random.random(), self.choice(0, 32, 34, 44, 58, 125, 255)
            case _:
                asked.lines.append(self.choice("Connection: close", "a : b", "no colon", "Expect: none", "Host: y"))
