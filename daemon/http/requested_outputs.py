"""The entries of ``outputs``, and the slices of registered regions that inputs and outputs name.

Source: Triton docs/protocol/extension_shared_memory.md, extension_classification.md, extension_binary_data.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tensord.daemon.http.decoded_request import DecodedRequest
from tensord.daemon.http.json_values import boolean, is_unsigned, text, unsigned
from tensord.daemon.http.request_head import ExactOutput, OutputHead, given
from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import RegionSlice, RequestedOutput

_INT64_MAX, _UINT64_MAX = (1 << 63) - 1, (1 << 64) - 1


def read_outputs(entries: Iterable[OutputHead | ExactOutput], decoded: DecodedRequest) -> None:
    """Fills in what the entries ask for. Raises InvalidArgument."""
    decoded.outputs = tuple([_requested(entry, decoded) for entry in entries])


def _requested(entry: OutputHead | ExactOutput, decoded: DecodedRequest) -> RequestedOutput:
    parameters = given(entry.parameters)
    if not parameters:
        return RequestedOutput(entry.name)
    classification = parameters.get("classification", 0)
    if not is_unsigned(classification):
        raise InvalidArgument(
            "Unable to set 'classification': attempt to access JSON non-unsigned-integer as unsigned-integer"
        )
    if "binary_data" in parameters:
        decoded.binary[entry.name] = boolean("binary_data", parameters["binary_data"])
    if "shared_memory_region" not in parameters:
        return RequestedOutput(entry.name, None, classification)
    region = read_region(parameters)
    if decoded.binary.get(entry.name):
        raise InvalidArgument("Output can't set both 'shared_memory_region' and 'binary_data'")
    if classification:
        raise InvalidArgument("Output can't set both 'shared_memory_region' and 'classification'")
    return RequestedOutput(entry.name, region)


def read_region(parameters: dict[str, Any]) -> RegionSlice:
    """The slice that the parameters of an input or output name. Raises InvalidArgument: wrong types, or numbers no region has."""
    region = text("shared_memory_region", parameters["shared_memory_region"])
    offset = unsigned("shared_memory_offset", parameters.get("shared_memory_offset", 0))
    byte_size = unsigned("shared_memory_byte_size", parameters.get("shared_memory_byte_size", 0))
    if offset > _INT64_MAX:
        raise InvalidArgument(f"Invalid offset for shared memory region: '{region}'")
    if byte_size > _UINT64_MAX - offset:
        raise InvalidArgument(
            f"Integer overflow detected: byte_size ({byte_size}) + offset ({offset}) exceeds maximum value ({_UINT64_MAX}) "
            f"for region '{region}'"
        )
    if byte_size > _INT64_MAX:
        raise InvalidArgument(f"Invalid offset + byte size for shared memory region: '{region}'")
    return RegionSlice(region, offset, byte_size)
