"""The table of the protocol's datatypes. No numpy here: processes that touch no tensor read it."""

from __future__ import annotations

#: Datatype -> numpy's name of its dtype, and the bytes of an element; None where an element's length varies. numpy itself has no
#: bfloat16: the package ml_dtypes has it.
DATATYPES: dict[str, tuple[str, int | None]] = {
    "BOOL": ("bool", 1),
    "UINT8": ("uint8", 1),
    "UINT16": ("uint16", 2),
    "UINT32": ("uint32", 4),
    "UINT64": ("uint64", 8),
    "INT8": ("int8", 1),
    "INT16": ("int16", 2),
    "INT32": ("int32", 4),
    "INT64": ("int64", 8),
    "FP16": ("float16", 2),
    "FP32": ("float32", 4),
    "FP64": ("float64", 8),
    "BYTES": ("object", None),
    "BF16": ("bfloat16", 2),
}
