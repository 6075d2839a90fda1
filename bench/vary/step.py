"""Describes the place of a request in its sequence."""

from __future__ import annotations

from typing import NamedTuple


class Step(NamedTuple):
    """One step of a sequence: the sequence's id, and whether the step begins or ends it."""

    sequence_id: int
    start: bool
    end: bool

    @property
    def parameters(self) -> dict[str, int | bool]:
        """Returns the request's parameters, named as Triton's clients name them."""
        return {"sequence_id": self.sequence_id, "sequence_start": self.start, "sequence_end": self.end}
