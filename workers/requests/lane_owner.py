"""Bounds what the requests of one user's clients, and answers to them, hold of a worker's memory, on all their lanes together.

request ─▶ parts of a record that is not whole ─▶ held until it is, or its time is over
       ├▶ prepared                              ─▶ held until the lane ends                     of all lanes of the user
       └▶ waits, or runs                        ─▶ held until it is answered                    together: bounded

answer ─▶ segment of a lane's response arena ─▶ held until the lane gives its leases back, or ends
      ├▶ blocked: the arena is full           ─▶ held until there is room                           of all lanes of the user
      └▶ record that the socket does not take ─▶ held until the client reads                       together: bounded
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensord.shm.arena import Budget
from tensord.shm.errors import Unavailable

if TYPE_CHECKING:
    from tensord.workers.requests.submitter_link import SubmitterLink


class LaneOwner(Budget):
    """Counts the bytes of one user's requests, and of answers to them, that this worker holds for all lanes; and bounds both.

    The base class counts answers. Owned by the worker's loop.
    """

    def __init__(self, name: str, max_byte_size: int, max_request_byte_size: int = 1 << 30) -> None:
        super().__init__(max_byte_size)
        self.name = name
        self._max_request_byte_size = max_request_byte_size
        #: Bytes of requests, as they are kept.
        self.request_byte_size = 0
        self.submitters: set[SubmitterLink[Any]] = set()
        #: Bytes of answers that are blocked, or that the sockets did not take.
        self.waiting_byte_size = 0

    def leave(self, submitter: SubmitterLink[Any]) -> bool:
        """Removes a lane that has ended. Returns whether it was the user's last one."""
        self.submitters.discard(submitter)
        return not self.submitters

    @property
    def share(self) -> int:
        """Returns how many bytes of answers a lane may hold although the user's other lanes hold all that they may together.

        It is an equal part, for each lane, of what is left of twice as much.
        """
        return (2 * self.max_byte_size - self.used - self.waiting_byte_size) // max(1, len(self.submitters))

    def check(self, submitter: SubmitterLink[Any]) -> None:
        """Checks that a lane of the user may send a further request.

        Raises Unavailable: answers to the user hold all bytes they may, and those to this lane its share.
        """
        held = self.used + self.waiting_byte_size
        if held > self.max_byte_size and submitter.answers_byte_size >= self.share:
            raise Unavailable(
                f"{held} bytes of answers to clients of this user are held, at most {self.max_byte_size} may be "
                "(clients.max_owner_response_byte_size)"
            )

    def check_room(self, submitter: SubmitterLink[Any], byte_size: int) -> None:
        """Checks that ``byte_size`` more bytes of requests may be held for a lane of the user.

        Raises Unavailable: requests of the user hold all bytes they may, and those on this lane its share (as ``share`` says).
        """
        held, most = self.request_byte_size, self._max_request_byte_size
        share = (2 * most - held) // max(1, len(self.submitters))
        if held + byte_size > most and submitter.request_byte_size + byte_size > share:
            raise Unavailable(
                f"{held} bytes of requests of clients of this user are held, and one of {byte_size} came: at most {most} may be "
                "(clients.max_owner_request_byte_size)"
            )

    def reclaim(self) -> bool:
        """Closes one unused segment in a response arena of this user's lanes. Returns whether there was one."""
        for submitter in self.submitters:
            if submitter.lane.arena.trim():
                # The client is told, so that it unmaps it.
                submitter.flush_soon()
                return True
        return False

    def describe_full(self, byte_size: int) -> str:
        """Returns the error message for an answer of ``byte_size`` bytes that found no room in this user's arenas in time."""
        return (
            f"no room for an answer of {byte_size} bytes in the response arenas of this user: {self.used} of "
            f"{self.max_byte_size} are in use (clients.max_owner_response_byte_size)"
        )

    def __repr__(self) -> str:
        return f"<LaneOwner of {len(self.submitters)} lanes, {self.used + self.waiting_byte_size} bytes>"
