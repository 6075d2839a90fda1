"""The rules by which a submitter's requests end, whatever happens to their workers and their callers. Does no I/O.

A front, and a client that has lanes, tell a request what has happened to it, and do what it says:

    sent ─▶ the worker does not have its model ─▶ ``may_be_elsewhere``: sent again, once it is known where to
        ├─▶ the worker ended before its last answer ─▶ ``after_end``: sent again, or an error
        ╰─▶ an answer ─▶ its caller's, unless that has gone

    what happens            in both                                a front                         a client
    ─────────────────────── ────────────────────────────────────── ─────────────────────────────── ──────────────────────────────
    a request is sent       to the usable worker with the fewest   near its regions
                            of the submitter's requests
    a worker ends           nothing more is sent to it             its requests wait until the     its requests are told at once
                                                                   supervisor has fenced it
    what it had begun       is sent again, once                    its status page says what;      whatever was sent
                                                                   all of a model that streams
    what may not run twice  gets Internal: it had a response, or   its model keeps state           its model is not called pure,
                                                                                                   or it is of a sequence
    a worker refuses        NotFound of the model means that it    as often as the supervisor      once; and Unavailable, if the
                            may be elsewhere                       says that the model has moved   daemon was not asked lately
    a caller goes           the worker is told, and what comes is  a step is sent all the same,    also where it was not sent yet
                            dropped                                as it may end its sequence
    a sequence's worker     what follows gets ``lost_sequence``    as the worker's page says, for  as this client has sent the
    ends                                                           all fronts, until a START       sequence's requests
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from .errors import Internal, NotFound, ServingError, Unavailable

#: NotFound's message begins so where a model or a version of it is not served.
UNKNOWN_MODEL = "Request for unknown model: "
#: Ends of workers that a request is taken to be the cause of.
_STRIKES = 2


class Submission:
    """A submitter's request, from its sending to its end. Base class of the requests of fronts and clients."""

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

        Args:
          code: the error's code, such as "NOT_FOUND".
          message: the error's text.
          is_told: whether the submitter always knows which workers serve the model. If it does not, the request may be sent to
            another worker also after Unavailable and every NotFound.
        """
        return not (self.cancelled or self.answered) and is_refusal(code, message, is_told)

    def after_end(self, how: str, begun: bool, may_repeat: bool) -> ServingError | None:
        """Decides whether to send the request again, after its worker ended without sending the last answer.

        Returns None to send the request again, else the error that answers it. Call it only if the caller still waits.

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
    """Returns whether a worker's error says that the worker does not have the model, so that another worker may run the request.

    NotFound says so if its message is about an unknown model. ``is_told``: True if the submitter's list of the model's workers is
    up to date. If ``is_told`` is False, every NotFound and every Unavailable counts as such an error.
    """
    if code == NotFound.code and message.startswith(UNKNOWN_MODEL):
        return True
    return not is_told and code in (NotFound.code, Unavailable.code)


class Destination(Protocol):
    """A submitter's end of the lane to one worker."""

    in_flight: Any


D = TypeVar("D", bound=Destination)


def least_busy(workers: Iterable[D]) -> D | None:
    """Returns the first worker with the fewest requests of this submitter in flight, or None if there is no worker."""
    return min(workers, key=load, default=None)


def load(worker: Destination) -> int:
    """Returns a worker's load: how many requests of this submitter are in flight on it."""
    return len(worker.in_flight)


def lost_sequence(model: str, sequence: int | str) -> Unavailable:
    """Makes the error for a request whose sequence was lost because its worker ended."""
    return Unavailable(
        f"sequence {sequence} of model '{model}' was lost when its worker died; start it again with the START flag"
    )
