"""Generates ModelInferRequests of every kind, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from tensord.daemon.grpc.response_codec import varint
from tensord.shm.datatypes import ELEMENT_SIZES

Infer = service_pb2.ModelInferRequest
Parameter = service_pb2.InferParameter
TYPED = {
    "BOOL": ("bool_contents", [True, False]),
    "INT8": ("int_contents", [-128, 127]),
    "INT16": ("int_contents", [-(1 << 15), 5]),
    "INT32": ("int_contents", [-(1 << 31), 5]),
    "INT64": ("int64_contents", [-(1 << 63), 5]),
    "UINT8": ("uint_contents", [0, 255]),
    "UINT16": ("uint_contents", [0, 65535]),
    "UINT32": ("uint_contents", [0, (1 << 32) - 1]),
    "UINT64": ("uint64_contents", [0, (1 << 64) - 1]),
    "FP32": ("fp32_contents", [0.5, -1e30]),
    "FP64": ("fp64_contents", [0.1, 1e300]),
    "BYTES": ("bytes_contents", [b"", b"\xffab"]),
}

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
INT64 = st.one_of(st.integers(-2, 4), st.integers(-(1 << 63), (1 << 63) - 1))
UINT32 = st.integers(0, (1 << 32) - 1)
KEYS = st.one_of(
    TEXT,
    st.sampled_from(
        [
            *("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "classification", "triton_x"),
            *("tensord_replace", "parameter_set", "triton_enable_empty_final_response", "binary_data_output"),
            *("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"),
        ]
    ),
)
PARAMETERS = st.dictionaries(
    KEYS,
    st.one_of(
        st.just(Parameter()),
        st.booleans().map(lambda value: Parameter(bool_param=value)),
        INT64.map(lambda value: Parameter(int64_param=value)),
        st.floats().map(lambda value: Parameter(double_param=value)),
        st.integers(0, (1 << 64) - 1).map(lambda value: Parameter(uint64_param=value)),
        st.one_of(TEXT, st.just("x" * 129)).map(lambda value: Parameter(string_param=value)),
    ),
    max_size=4,
)
CONTENTS = st.builds(
    service_pb2.InferTensorContents,
    bool_contents=st.lists(st.booleans(), max_size=1),
    int_contents=st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=2),
    int64_contents=st.lists(INT64, max_size=1),
    uint_contents=st.lists(UINT32, max_size=2),
    uint64_contents=st.lists(st.integers(0, (1 << 64) - 1), max_size=1),
    fp32_contents=st.lists(st.floats(width=32), max_size=1),
    fp64_contents=st.lists(st.floats(), max_size=1),
    bytes_contents=st.lists(st.binary(max_size=3), max_size=1),
)
ONE_COLUMN = st.sampled_from(sorted(TYPED.values(), key=lambda typed: typed[0])).map(
    lambda typed: service_pb2.InferTensorContents(**{typed[0]: typed[1]})
)
INPUTS = st.builds(
    Infer.InferInputTensor,
    name=TEXT,
    datatype=st.one_of(st.sampled_from(sorted(ELEMENT_SIZES)), TEXT),
    shape=st.lists(INT64, max_size=3),
    parameters=st.one_of(st.just({}), PARAMETERS),
    contents=st.one_of(st.none(), ONE_COLUMN, CONTENTS),
)
REQUESTS = st.builds(
    Infer,
    model_name=st.sampled_from(["m", "m", "m", "m", "nope", ""]),
    model_version=st.one_of(st.just(""), st.just("1"), st.integers().map(str), TEXT),
    id=TEXT,
    parameters=st.one_of(st.just({}), PARAMETERS),
    inputs=st.lists(INPUTS, max_size=3),
    outputs=st.lists(st.builds(Infer.InferRequestedOutputTensor, name=TEXT, parameters=PARAMETERS), max_size=2),
    raw_input_contents=st.lists(st.binary(max_size=300), max_size=3),
)


def field(tag: int, content: bytes) -> bytes:
    """Encodes a length-delimited field with a given tag."""
    return varint(tag) + varint(len(content)) + content


def fields(request: Infer) -> list[bytes]:
    """Returns the fields of a request one by one, encoded.

    In any order they mean the same, except for those that repeat.
    """
    found: list[bytes] = []
    for column, value in request.ListFields():
        each = value if column.name in ("inputs", "outputs", "raw_input_contents") else (value,)
        found += [Infer(**{column.name: [one] if each is value else one}).SerializeToString() for one in each]
    return found
