"""Gives ids to iterative sequences (Triton's term): each is one request, which its model may have run again and again.

Pure. Iterative sequences are batched like other sequences.
"""

from __future__ import annotations

import itertools

from tensord.workers.scheduling.sequence import Controls


class IterativeIds:
    """Makes correlation ids for requests without one to an iterative model version, which may ask to run a request again."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def first_round(self, controls: Controls) -> Controls:
        """Returns the sequence controls for a request's first run: a new id and START if the client gave no id, and never END."""
        if not controls.correlation_id:
            return Controls(next(self._numbers), True, False)
        return controls._replace(end=False)

    @staticmethod
    def next_round(controls: Controls) -> Controls:
        """Returns the sequence controls for a further run of a request that its model asked for: the same without START."""
        return controls._replace(start=False)

    def __repr__(self) -> str:
        return f"<IterativeIds {self._numbers!r}>"
