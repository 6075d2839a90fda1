"""Sends any number of responses to a request: part of ``triton_python_backend_utils`` (see ``interface``).

Source: triton-inference-server/python_backend, README "Decoupled mode" and src/response_sender.cc; errors have the texts of that.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from tensord.workers.python_backend.errors import TritonModelException
from tensord.workers.python_backend.response import InferenceResponse

if TYPE_CHECKING:
    from tensord.workers.models.python_model import ResponseWriter

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class InferenceResponseSender:
    """Sends the responses to one request. It may be used from any thread, and after ``execute`` has returned."""

    def __init__(self, writer: ResponseWriter) -> None:
        self._writer = writer
        self._lock = threading.Lock()
        self._sent = 0
        self._closed = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Sends a response. With COMPLETE_FINAL in ``flags`` it is the last, the sender is closed, and ``response`` may be None.

        Raises TritonModelException: the sender is closed, there is nothing to send, or a model that is not decoupled sends more
        than one response.
        """
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is None:
            if not flags:
                raise TritonModelException(
                    "Inference Response object must be provided when the response flags is set to zero."
                )
        elif not isinstance(response, InferenceResponse):
            raise TypeError(f"send() takes an InferenceResponse, not {type(response).__name__}")
        final = bool(flags)
        with self._lock:
            self._check(response, final)
            self._sent += 1
            self._closed = final
            if response is not None or self._writer.decoupled:
                self._writer.send(response, final)

    def _check(self, response: InferenceResponse | None, final: bool) -> None:
        if not self._writer.decoupled:
            if response is not None and self._sent:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send more than one response."
                )
            if response is None and final and not self._sent:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
                )
        if self._closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")

    def is_cancelled(self) -> bool:
        return self._writer.is_cancelled()

    def __del__(self) -> None:
        # A model that has not sent its final response is done once it cannot send it any more.
        with contextlib.suppress(AttributeError):
            self._writer.give_up()
