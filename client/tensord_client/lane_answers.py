"""Makes the caller's answers of a worker's messages: arrays are views of the worker's memory, the caller's own, or copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tensord_client.answer_memory import AnswerLease
from tensord_client.common.arrays import decode_strings, dtype_of, typestr
from tensord_client.common.results import Answer, Array, check_place, written
from tensord_client.native import wire

if TYPE_CHECKING:
    from tensord_client._lane import AnswerRecord, OutputTensor


def made_answer(record: AnswerRecord, lease: AnswerLease | None, places: Any) -> Answer:
    """Converts a worker's message to an ``Answer``: its arrays are views of the worker's memory, the caller's own, or copies.

    Args:
      lease: the lease of the worker's memory, which the answer then holds; None: there is none.
      places: output name -> the array that the output is in, or is copied to here where workers do not reach it.

    Raises: ValueError, LookupError, TypeError: the record is malformed.  InvalidArgument: an output differs from its place.
    """
    answer = Answer()
    prepared = record.prepared
    answer.version = prepared.version
    if prepared.parameters:
        answer.parameters = prepared.parameters
    answer.times = record.timing
    if prepared.plan and wire.arrays(answer, prepared.plan, record.contents, places, np.ndarray):
        return answer
    contents = iter(record.contents)
    views: list[Array] = []
    for output in prepared.outputs:
        if output.placed:
            answer[output.name] = place = places[output.name]
            check_place(output.name, output.shape, dtype_of(output.datatype), place)
            continue
        content = next(contents)
        if type(content) is bytes:
            answer[output.name] = _array(content, output)
        elif lease is None:
            raise ValueError(f"output '{output.name}' lies in no lease")
        elif output.datatype == "BYTES":
            answer[output.name] = decode_strings(lease.content(content), output.shape)
        else:
            dtype = dtype_of(output.datatype)
            name, viewed = typestr(dtype)
            array = lease.view(content, output.shape, name, dtype)
            answer[output.name] = array.view(dtype) if viewed else array
            if output.name not in places:
                views.append(array)
    written(answer, places)
    if views and lease is not None:
        lease.hold(sum([array.nbytes for array in views]))
        answer.lease = lease
    return answer


def _array(content: bytes, output: OutputTensor) -> Array:
    if output.datatype == "BYTES":
        return decode_strings(content, output.shape)
    return np.frombuffer(bytearray(content), dtype_of(output.datatype)).reshape(output.shape)
