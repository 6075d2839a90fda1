"""What others are told of a model's sequences: when one is admitted, when it begins, and when it is gone."""

from __future__ import annotations

from typing import Protocol


class SequenceEvents(Protocol):
    """One per model version. ``generation`` tells sequences of one correlation id apart; a later one has a higher number.

    Of one sequence: ``waiting``, then ``begun`` unless it never ran, then ``gone``. The ``gone`` of a sequence may come after the
    ``waiting`` of the next one of its id.
    """

    def waiting(self, correlation_id: int | str, generation: int) -> None:
        """One is to be admitted. Raises Unavailable: there are too many; then it is not."""

    def begun(self, correlation_id: int | str, generation: int) -> None:
        """Its first request is about to run: the model may have state of it from now on."""

    def gone(self, correlation_id: int | str, generation: int) -> None:
        """Nothing of it waits or runs, and its slot is free."""
