"""How many connections are taken in one turn of the loop: of a crowd more and more, after one that came alone no other in vain.

alone:   1 | 1, 2? | 1 1 1, 2? | 1 x 7, 2? | ...      a second one is tried for ever more seldom, as long as there is none
a crowd: 2 | 4 | 8 | ... | 64
"""

from __future__ import annotations

#: A crowd of new ones must not starve the old.
_MAX_ROOM = 64
_MAX_ALONE = 15


class Crowd:
    """Decides; pure."""

    __slots__ = ("_alone", "_skips", "room")

    def __init__(self) -> None:
        #: How many may be taken in this turn.
        self.room = 1
        #: After how many that came alone a second one is tried for, and how many of these are still to come.
        self._alone = self._skips = 0

    def took(self, taken: int, room: int) -> None:
        """So many were there, of as many as were tried for."""
        if taken < room:
            self.room = 1
            self._alone = min(2 * self._alone + 1, _MAX_ALONE) if taken <= 1 else 0
            self._skips = self._alone
        elif self._skips:
            self._skips -= 1
        else:
            self.room = min(2 * room, _MAX_ROOM)
            if taken > 1:
                self._alone = 0

    def __repr__(self) -> str:
        return f"<Crowd, {self.room} are taken>"
