"""Models that send a request round again: each request is a sequence of its own, until its model lets it go.

Pure. Triton calls them iterative sequences; what batches them is what batches other sequences.
"""

from __future__ import annotations

import itertools

from tensord.workers.scheduling.sequence import Controls


class IterativeIds:
    """Gives out correlation ids, in one model version, to requests that come without one."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def first_round(self, controls: Controls) -> Controls:
        """Returns the controls of a new request: a START where it has no id of its own, and never an END."""
        if not controls.correlation_id:
            return Controls(next(self._numbers), True, False)
        return controls._replace(end=False)

    @staticmethod
    def next_round(controls: Controls) -> Controls:
        """Returns the controls of a request that its model has sent round again."""
        return controls._replace(start=False)

    def __repr__(self) -> str:
        return f"<IterativeIds {self._numbers!r}>"
