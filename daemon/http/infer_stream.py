"""Handles infer_stream: one request in the format of ``infer``, answered with any number of responses in one HTTP response.

    response   | u32 size of the JSON | u64 size of what follows it | JSON | tensor | tensor | ...      little-endian

An error is a response whose JSON has ``error`` and ``code``; if it is final and the first, it is an ordinary HTTP error response.
"""

from __future__ import annotations

import struct
from typing import ClassVar

import msgspec

from tensord.daemon.front.status import http_status
from tensord.daemon.http import request_codec, response_codec
from tensord.daemon.http.body import Body, PlacedBody
from tensord.daemon.http.decoded_request import DecodedRequest
from tensord.daemon.http.generate import GenerateStream
from tensord.shm.control_records import ModelState
from tensord.shm.errors import InvalidArgument, ServingError
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import AnswerRecord, PreparedAnswer

#: It is read at once, on the loop.
_MAX_JSON = 256 << 10
_SIZES = struct.Struct("<IQ")
_encode = msgspec.json.Encoder().encode


class InferStream(GenerateStream):
    """One infer_stream request: writes all responses of its model into one HTTP response, each as two sizes, JSON and tensors."""

    _media_type: ClassVar[bytes] = b"application/octet-stream"

    def _read(self, body: Body, state: ModelState) -> DecodedRequest:
        head, size = self._head, body.received
        json_size = size if head.json_size is None else head.json_size
        if not 0 < json_size <= size:
            raise InvalidArgument(f"inference header size should be in range (1, {size}), got: {json_size}")
        if json_size > _MAX_JSON:
            raise InvalidArgument(
                f"the JSON of a request for infer_stream has {json_size} bytes, at most {_MAX_JSON} are read: "
                "send large tensors as binary data"
            )
        text = bytes(body.head(json_size) if isinstance(body, PlacedBody) else body.whole()[:json_size])
        return request_codec.decode(text, size - json_size, head.model)

    def _answer(self, prepared: PreparedAnswer, own: AnswerRecord, lane: SubmitterLane) -> None:
        decoded, contents = self._decoded, own.contents
        assert decoded is not None
        said, parts = response_codec.encode(prepared, contents, self._head.model, self._client_id, decoded, lane.view)
        self._say(_response(said, parts), 200)

    def _fail(self, error: ServingError, final: bool) -> None:
        if not self._status and final:
            self._refuse(http_status(error), error.message)
        else:
            self._say(_response(_encode({"error": error.message, "code": error.code}), []), 200)


def _response(said: bytes, parts: list[response_codec.Buffer]) -> bytes:
    return b"".join([_SIZES.pack(len(said), sum(map(len, parts))), said, *parts])
