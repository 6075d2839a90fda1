"""Events of a model's sequences: one is admitted, begins, or is gone."""

from __future__ import annotations

from typing import Protocol


class SequenceEvents(Protocol):
    """Receives the events of one model version's sequences.

    ``generation`` tells sequences of one correlation id apart; a later one has a higher number.

    A sequence has ``waiting``, then ``begun`` unless it never ran, then ``gone``. The ``gone`` of a sequence may come after the
    ``waiting`` of the next one of its id.
    """

    def waiting(self, correlation_id: int | str, generation: int) -> None:
        """Announces a sequence that is to be admitted. Raises Unavailable: there are too many; then it is not."""

    def begun(self, correlation_id: int | str, generation: int) -> None:
        """Announces a sequence's first run: the model may have state of it from now on."""

    def gone(self, correlation_id: int | str, generation: int) -> None:
        """Announces the end of a sequence: no request of it waits or runs, and its slot is free."""
