"""The inputs and requested outputs of a ModelInferRequest: typed contents, places in regions, what belongs together. Sans-I/O.

Source: grpc_service.proto; texts as recorded against a real Triton.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tensord.daemon.grpc import packed_numbers
from tensord.daemon.submit.placement import InputContent
from tensord.shm.arrays import DTYPES, byte_content
from tensord.shm.datatypes import ELEMENT_SIZES, element_count
from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import RegionSlice, RequestedOutput

#: Datatype of a contents field, and the datatypes that may come in it.
_CONTENTS = {
    "bool_contents": ("BOOL", ("BOOL",)),
    "int_contents": ("INT32", ("INT8", "INT16", "INT32")),
    "int64_contents": ("INT64", ("INT64",)),
    "uint_contents": ("UINT32", ("UINT8", "UINT16", "UINT32")),
    "uint64_contents": ("UINT64", ("UINT64",)),
    "fp32_contents": ("FP32", ("FP32",)),
    "fp64_contents": ("FP64", ("FP64",)),
    "bytes_contents": ("BYTES", ("BYTES",)),
}


def content(entry: Any, shape: tuple[int, ...], has_raw: bool, model: str) -> InputContent | None:
    """The content of an input that is no raw tensor; None: it is one."""
    name, datatype = entry.name, entry.datatype
    element_count(shape, f"input '{name}' shape")
    if "shared_memory_region" in entry.parameters:
        if entry.HasField("contents"):
            raise InvalidArgument(
                f"unexpected 'content' provided when using shared memory for input tensor '{name}' for model '{model}'"
            )
        return _region(name, entry.parameters)
    if datatype not in ELEMENT_SIZES:
        raise InvalidArgument(f"invalid datatype for input {name}")
    if not entry.HasField("contents"):
        return None
    if has_raw:
        raise InvalidArgument(
            f"contents field must not be specified when using raw_input_contents for '{name}' for model '{model}'"
        )
    filled = [column.name for column, _ in entry.contents.ListFields()]
    if not filled:
        return None
    what = f"unexpected explicit tensor data for input tensor '{name}' for model '{model}'"
    if len(filled) > 1:
        raise InvalidArgument(f"{what}, binary data was already supplied.")
    kind, takes = _CONTENTS[filled[0]]
    if datatype not in takes:
        raise InvalidArgument(f"{what} of type '{kind}', expected datatype '{datatype}'")
    return _typed_bytes(name, datatype, kind, entry.contents)


def _typed_bytes(name: str, datatype: str, kind: str, contents: Any) -> bytes:
    """Typed contents as wire bytes. Raises InvalidArgument: a value does not fit its datatype.

    Args:
      kind: the datatype of the one field that is filled.
    """
    if datatype == "BYTES":
        values = contents.bytes_contents
        elements = np.empty(len(values), np.object_)
        elements[:] = list(values)
        return byte_content(elements)
    numbers, dtype = packed_numbers.of_contents(contents, DTYPES[kind]), DTYPES[datatype]
    if numbers.dtype != dtype:
        limits = np.iinfo(dtype)
        if len(numbers) and not (limits.min <= numbers.min() and numbers.max() <= limits.max):
            raise InvalidArgument(f"a value of input '{name}' is out of the range of {datatype}")
        numbers = numbers.astype(dtype)
    return numbers.tobytes()


def _region(name: str, parameters: Any) -> RegionSlice:
    numbers = []
    region = parameters["shared_memory_region"]
    if region.WhichOneof("parameter_choice") != "string_param":
        raise InvalidArgument(
            f"invalid value type for 'shared_memory_region' parameter for tensor '{name}', expected string_param."
        )
    for key in ("shared_memory_offset", "shared_memory_byte_size"):
        if key not in parameters:
            numbers.append(0)
            continue
        value = parameters[key]
        if value.WhichOneof("parameter_choice") != "int64_param":
            raise InvalidArgument(
                f"invalid value type for '{key}' parameter for tensor '{name}', expected int64_param."
            )
        numbers.append(value.int64_param)
    if "shared_memory_byte_size" not in parameters:
        raise InvalidArgument(
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter "
            f"for tensor '{name}'"
        )
    if numbers[0] < 0:
        raise InvalidArgument(f"Invalid offset for shared memory region: '{region.string_param}'")
    if numbers[1] < 0:
        raise InvalidArgument(f"Invalid offset + byte size for shared memory region: '{region.string_param}'")
    return RegionSlice(region.string_param, *numbers)


def requested(entry: Any) -> RequestedOutput:
    parameters = entry.parameters
    classification = 0
    if "classification" in parameters:
        value = parameters["classification"]
        if value.WhichOneof("parameter_choice") != "int64_param":
            raise InvalidArgument("invalid value type for 'classification' parameter, expected int64_param")
        classification = value.int64_param
        if classification <= 0:
            raise InvalidArgument("invalid value for 'classification' parameter, expected >= 0")
    if "shared_memory_region" not in parameters:
        return RequestedOutput(entry.name, None, classification)
    if classification:
        raise InvalidArgument("output can't set both 'shared_memory_region' and 'classification'")
    return RequestedOutput(entry.name, _region(entry.name, parameters))
