"""A table of the datatypes that tensors of requests and answers may have, such as FP32. This module does not import numpy."""

from __future__ import annotations

from typing import NamedTuple


class Datatype(NamedTuple):
    """Describes one datatype that tensors of requests and answers may have, such as FP32."""

    #: numpy's name of the dtype. numpy itself has no bfloat16: the package ml_dtypes has it.
    dtype: str
    #: Bytes of an element; None: an element's length varies.
    byte_size: int | None
    #: The kind of an element in JSON: "boolean", "signed-integer", "unsigned-integer", "double", "string"; "": JSON cannot hold
    #: it.
    json: str
    #: The field of gRPC's InferTensorContents that it may come in; "": none. The last one with a field gives the field's numbers.
    contents: str
    #: Its name in files of safetensors, and in pushed parameters; "": it has none.
    file: str


DATATYPES = {
    "BOOL": Datatype("bool", 1, "boolean", "bool_contents", "BOOL"),
    "UINT8": Datatype("uint8", 1, "unsigned-integer", "uint_contents", "U8"),
    "UINT16": Datatype("uint16", 2, "unsigned-integer", "uint_contents", "U16"),
    "UINT32": Datatype("uint32", 4, "unsigned-integer", "uint_contents", "U32"),
    "UINT64": Datatype("uint64", 8, "unsigned-integer", "uint64_contents", "U64"),
    "INT8": Datatype("int8", 1, "signed-integer", "int_contents", "I8"),
    "INT16": Datatype("int16", 2, "signed-integer", "int_contents", "I16"),
    "INT32": Datatype("int32", 4, "signed-integer", "int_contents", "I32"),
    "INT64": Datatype("int64", 8, "signed-integer", "int64_contents", "I64"),
    "FP16": Datatype("float16", 2, "", "", "F16"),
    "FP32": Datatype("float32", 4, "double", "fp32_contents", "F32"),
    "FP64": Datatype("float64", 8, "double", "fp64_contents", "F64"),
    "BYTES": Datatype("object", None, "string", "bytes_contents", ""),
    "BF16": Datatype("bfloat16", 2, "", "", "BF16"),
}
#: Types of arrays that can be pushed as parameters, more than requests have: their names in files, and numpy's.
FILE_TYPES = {
    **{each.file: each.dtype for each in DATATYPES.values() if each.file},
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
}
