"""Decides how a submitter's request goes on if its worker refuses it or ends. Does no I/O.

If a worker answers with an error, ``may_be_elsewhere`` returns whether the request may be sent to another worker. A client
sends a request to another worker at most once for this reason. A front does so each time the model has moved.

If a worker ends before its last answer to a request, ``after_end`` decides whether the request is sent again. A request that
the worker cannot have begun is sent again. A request that the worker may have begun is sent again at most once, and only if
the request may run twice and has had no response. Else the request fails with Internal. Fronts and clients differ:

  - A front calls ``after_end`` when the supervisor has confirmed that the worker is dead. It counts a request as begun if the
    worker was running the request, or if the model has several responses. A request that the worker was running may not run
    twice if its model keeps state.
  - A client calls ``after_end`` as soon as its lane has ended. It counts every request that it sent over the lane as begun. A
    request may run twice only if its model is declared pure and the request does not belong to a sequence.

After the worker of a sequence has ended, fronts and clients fail the sequence's requests with ``lost_sequence`` until one has
the START flag.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import Internal, NotFound, ServingError, Unavailable

#: NotFound's message begins so where a model or a version of it is not served.
UNKNOWN_MODEL = "Request for unknown model: "
#: Ends of workers that a request is taken to be the cause of.
_STRIKES = 2
W = TypeVar("W")


class Submission:
    """A submitter's request, from when it is sent until it ends. Base class of the requests of fronts and of clients."""

    # It has no slots, so that a subclass can be a msgspec.Struct.
    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def cancelled(self) -> bool:
            """Returns whether nobody waits for the request's answer any more."""

        @property
        def answered(self) -> bool:
            """Returns whether the request has had a response that was not its last one."""

    #: The number of workers that ended and may have begun it.
    strikes: int

    def may_be_elsewhere(self, code: str, message: str, is_told: bool = True) -> bool:
        """Returns whether the request may be sent to another worker, after a worker has answered it with an error.

        Returns False if nobody waits for the answer any more, or if the request has had a response before the error. Else
        returns whether the error means that the worker does not have the model, as ``is_refusal`` tells from the arguments.

        Args:
          code: the error's code, such as "NOT_FOUND".
          message: the error's text.
          is_told: True if the submitter's list of the model's workers is up to date.
        """
        return not (self.cancelled or self.answered) and is_refusal(code, message, is_told)

    def after_end(self, how: str, begun: bool, may_repeat: bool) -> ServingError | None:
        """Decides whether to send the request again, after its worker ended without sending the last answer.

        Returns None if the request must be sent again, else the error for the caller. Call it only if the caller still waits.

        Args:
          how: a clause that says what happened, such as "the worker process ended".
          begun: True if the worker may have begun to run the request.
          may_repeat: True if running the request twice does no harm.
        """
        if self.answered or (begun and not may_repeat):
            return Internal(f"{how} while it had the request, which may not be run twice")
        if begun:
            self.strikes += 1  # type: ignore[misc]  # a subclass has it
            if self.strikes >= _STRIKES:
                return Internal(f"the request was given up: {self.strikes} worker processes ended while they had it")
        return None


def is_refusal(code: str, message: str, is_told: bool = True) -> bool:
    """Returns whether a worker's error means that the worker does not have the model. Another worker may then run the request.

    ``is_told``: True if the submitter's list of the model's workers is up to date. Then only a NotFound whose message is about
    an unknown model has this meaning. If ``is_told`` is False, every NotFound and every Unavailable has it.
    """
    if code == NotFound.code and message.startswith(UNKNOWN_MODEL):
        return True
    return not is_told and code in (NotFound.code, Unavailable.code)


def least_busy(workers: Iterable[W]) -> W | None:
    """Returns the first worker with the fewest requests of this submitter in flight, or None if there is no worker."""
    return min(workers, key=load, default=None)


def load(worker: Any) -> int:
    """Returns how many requests of this submitter are in flight on ``worker``, the submitter's end of a lane."""
    return len(worker.in_flight)


def lost_sequence(model: str, sequence: int | str) -> Unavailable:
    """Makes the error for a request whose sequence was lost because its worker ended."""
    return Unavailable(
        f"sequence {sequence} of model '{model}' was lost when its worker died; start it again with the START flag"
    )
