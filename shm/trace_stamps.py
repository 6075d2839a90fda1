"""Defines the names of the timestamps that traces have.

Source: Triton docs/user_guide/trace.md.
"""

from __future__ import annotations

from typing import Final

#: Taken in a front.
HTTP_RECV_START: Final = "HTTP_RECV_START"
HTTP_RECV_END: Final = "HTTP_RECV_END"
HTTP_SEND_START: Final = "HTTP_SEND_START"
HTTP_SEND_END: Final = "HTTP_SEND_END"
GRPC_WAITREAD_START: Final = "GRPC_WAITREAD_START"
GRPC_WAITREAD_END: Final = "GRPC_WAITREAD_END"
GRPC_SEND_START: Final = "GRPC_SEND_START"
GRPC_SEND_END: Final = "GRPC_SEND_END"
#: Taken in a front, or in a worker for requests that were made there.
REQUEST_START: Final = "REQUEST_START"
REQUEST_END: Final = "REQUEST_END"
#: Taken in a worker.
QUEUE_START: Final = "QUEUE_START"
COMPUTE_START: Final = "COMPUTE_START"
COMPUTE_INPUT_END: Final = "COMPUTE_INPUT_END"
COMPUTE_OUTPUT_START: Final = "COMPUTE_OUTPUT_START"
COMPUTE_END: Final = "COMPUTE_END"
#: Taken in a worker with the first response of a model that has several; Triton has no such moment.
RESPONSE_START: Final = "RESPONSE_START"
