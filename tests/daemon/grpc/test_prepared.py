"""Tests that the number of remembered messages is bounded."""

from __future__ import annotations

from tensord.daemon.grpc.prepared import PreparedMessage
from tensord.daemon.grpc.request_codec import DecodedHead
from tensord.shm.messages import PreparedAnswer


def test_layouts_of_a_message_are_bounded() -> None:
    """The bound holds for different workers and for different shapes."""
    message = PreparedMessage(DecodedHead("m", 0))
    kinds = [PreparedAnswer(number) for number in range(3 * PreparedMessage.MAX_ANSWERS)]
    for kind in kinds:
        for streamed in (False, True):
            known = message.answer_layout(kind, streamed)
            assert message.answer_layout(kind, streamed) is known
            assert known is not message.answer_layout(kind, not streamed)
        assert len(message.unary) <= PreparedMessage.MAX_ANSWERS >= len(message.streamed)
