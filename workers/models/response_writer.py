"""Passes responses from a Triton Python model's response sender to the worker's ``ResponseSender``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from tensord.workers.python_backend.response import InferenceResponse
from tensord.workers.requests.request import Request
from tensord.workers.requests.response_sender import ResponseSender, SenderClosed
from tensord.workers.requests.result import Result


class ResponseWriter:
    """Passes the responses that a Triton Python model sends to one request on to the worker's ``ResponseSender``.

    ``answer`` converts a response to a result.
    """

    def __init__(
        self,
        request: Request,
        sender: ResponseSender,
        decoupled: bool,
        answer: Callable[[Request, InferenceResponse], Result],
    ) -> None:
        self.decoupled = decoupled
        self._request = request
        self._sender = sender
        self._answer = answer
        sender.hold()

    def send(self, response: InferenceResponse | None, final: bool) -> None:
        """Sends a response after all earlier ones; None: only the mark that no response follows. ``final``: it is the last.

        Waits while too many responses are not acknowledged by the client. Does nothing if the request has ended.
        """
        # One that was ended for the model sends to nobody.
        with contextlib.suppress(SenderClosed):
            self._sender.send(None if response is None else self._answer(self._request, response), final)

    def is_cancelled(self) -> bool:
        return self._sender.is_cancelled or self._request.is_cancelled

    def give_up(self) -> None:
        """Notes that the model has dropped its sender and can send nothing more through it.

        If no other sender of the request is left, the request ends with an error.
        """
        self._sender.let_go()
