"""What a request says of its sequence."""

from __future__ import annotations

from typing import NamedTuple


class Step(NamedTuple):
    """One of a sequence."""

    sequence_id: int
    start: bool
    end: bool

    @property
    def parameters(self) -> dict[str, int | bool]:
        """As Triton's clients name them."""
        return {"sequence_id": self.sequence_id, "sequence_start": self.start, "sequence_end": self.end}
