"""Models that send a request round again: each request is a sequence of its own, until its model lets it go.

Pure. Triton calls them iterative sequences; what batches them is what batches other sequences.
"""

from __future__ import annotations

import itertools

from tensord.workers.scheduling.sequence import Controls


class IterativeIds:
    """Correlation ids for requests that come without one. One per model version."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def first_round(self, controls: Controls) -> Controls:
        """What a new request says of its sequence: a START, where it has no id of its own. No END is told to such a model."""
        if not controls.correlation_id:
            return Controls(next(self._numbers), True, False)
        return controls._replace(end=False)

    @staticmethod
    def next_round(controls: Controls) -> Controls:
        """What it says when it comes round again."""
        return controls._replace(start=False)

    def __repr__(self) -> str:
        return f"<IterativeIds {self._numbers!r}>"
