"""Decodes raw requests (Inference-Header-Content-Length: 0), whose whole body is the one input of the model. Sans-I/O.

    body   | tensor |      fixed-size datatypes: the shape is the model's, with at most one variable dimension, from the size
           | element |     BYTES: one element, without its length; the model's shape must be [1]

A batching model gets a batch of one; every output comes back binary.
Source: Triton docs/protocol/extension_binary_data.md, "Raw Binary Request"; texts as recorded against a real Triton.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tensord.daemon.http.decoded_request import BinaryPart, DecodedRequest, Source
from tensord.daemon.submit.model_states import configured
from tensord.shm.control_records import ModelState
from tensord.shm.datatypes import ELEMENT_SIZES, element_count
from tensord.shm.errors import InvalidArgument

#: How Triton's messages begin; a raw request has no id.
_LABEL = "[request id: <id_unknown>] "


def decode_raw(state: ModelState, body: bytes | memoryview) -> DecodedRequest:
    """Decodes a raw binary request, whose whole body is the bytes of the model's one input, with no JSON.

    Args:
      state: the model version that is asked for.
    Raises: InvalidArgument: the model has not exactly one input, or not exactly one shape of that input fits the body.
    """
    inputs = msgspec.json.decode(state.metadata)["inputs"]
    if len(inputs) != 1:
        raise InvalidArgument(
            f"{_LABEL}Raw request must only have 1 input (found 1) to be deduced but got {len(inputs)} inputs in "
            f"'{state.name}' model configuration"
        )
    name, datatype, shape = inputs[0]["name"], inputs[0]["datatype"], list(inputs[0]["shape"])
    if configured(state).max_batch_size > 0:
        shape[0] = 1
    if shape.count(-1) > 1:
        raise InvalidArgument(
            f"{_LABEL}The shape of the raw input '{name}' can not be deduced because there are more than one "
            "variable-sized dimension"
        )
    source: Source = BinaryPart(0, len(body))
    if datatype == "BYTES":
        if -1 in shape or element_count(shape) != 1:
            raise InvalidArgument(f"{_LABEL}For BYTE datatype raw input '{name}', the model must have input shape [1]")
        source = len(body).to_bytes(4, "little") + body
    else:
        _fill(state.name, shape, ELEMENT_SIZES[datatype] or 1, len(body))
    return DecodedRequest("", [(name, datatype, tuple(shape), source)], (), {}, True, {})


def _fill(model: str, shape: list[Any], element_size: int, byte_size: int) -> None:
    """Replaces the variable dimension (-1) in ``shape``, if there is one, by the size that fits ``byte_size`` bytes.

    Args:
      model: the model's name, for errors.
      element_size: the bytes of one element.
    Raises: InvalidArgument: no size fits.
    """
    known = element_count([dim for dim in shape if dim != -1]) * element_size
    count = 1
    if -1 in shape:
        count = shape[shape.index(-1)] = byte_size // known if known else 0
    if known * count != byte_size:
        raise InvalidArgument(
            f"{_LABEL}input byte size mismatch for input 'raw_input' for model '{model}'. "
            f"Expected {known * count}, got {byte_size}"
        )
