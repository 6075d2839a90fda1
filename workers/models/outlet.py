"""What stands between a Triton Python model's response sender and the worker's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from tensord.workers.python_backend.response import InferenceResponse
from tensord.workers.requests.request import Request
from tensord.workers.requests.response_sender import ResponseSender, SenderClosed
from tensord.workers.requests.result import Result


class PythonOutlet:
    """One request's. ``answer``: what a response comes to."""

    def __init__(
        self,
        request: Request,
        sender: ResponseSender[Request],
        decoupled: bool,
        answer: Callable[[Request, InferenceResponse], Result],
    ) -> None:
        self.decoupled = decoupled
        self._request = request
        self._sender = sender
        self._answer = answer
        sender.hold()

    def send(self, response: InferenceResponse | None, final: bool) -> None:
        """In order. Waits where the client has not taken what was sent."""
        # One that was ended for the model sends to nobody.
        with contextlib.suppress(SenderClosed):
            self._sender.send(None if response is None else self._answer(self._request, response), final)

    def is_cancelled(self) -> bool:
        return self._sender.is_cancelled or self._request.is_cancelled

    def give_up(self) -> None:
        """Nothing more will be sent by this one."""
        self._sender.let_go()
