"""Fields found in whole messages, as protobuf reads them; how those in pieces are found is tested where they arrive."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from tensord.daemon.grpc.request_fields import MAX_RAWS, RefusedRequest, split
from tests.daemon.grpc.requests import REQUESTS, Infer


def whole(message: bytes) -> tuple[bytes, bytes, list[bytes]]:
    head, client_id, raws = split(message)
    return head, client_id, [message[begin:end] for begin, end in raws]


@given(REQUESTS)
def test_a_message_is_split_as_protobuf_reads_it(request_: Any) -> None:
    head, client_id, raws = whole(request_.SerializeToString())
    assert client_id.decode() == request_.id
    assert raws == list(request_.raw_input_contents)
    request_.ClearField("id")
    request_.ClearField("raw_input_contents")
    assert Infer.FromString(head) == request_ or request_ != request_  # a NaN equals nothing


def test_more_raw_tensors_than_any_model_takes() -> None:
    message = b"\x3a\x00" * MAX_RAWS
    assert len(whole(message)[2]) == MAX_RAWS
    with pytest.raises(RefusedRequest, match="more than 1024 raw_input_contents are given"):
        whole(message + b"\x3a\x00")
