"""The live sequences of all models of a worker: that there are not too many. Belongs to the worker's loop."""

from __future__ import annotations

import sys

from shm.errors import Unavailable


class SequenceRegister:
    """One per worker."""

    def __init__(self, most: int = sys.maxsize) -> None:
        self._most = most
        #: Of all models.
        self.live = 0

    def of(self, model: str, version: int) -> RegisteredSequences:
        """What one model version tells of its sequences."""
        return RegisteredSequences(self, model, version)

    def add(self) -> None:
        """Raises Unavailable: there are as many as may be."""
        if self.live >= self._most:
            raise Unavailable(
                f"{self.live} sequences are live on this worker, requests.max_sequences allows {self._most}"
            )
        self.live += 1

    def __repr__(self) -> str:
        return f"<SequenceRegister {self.live} of {self._most}>"


class RegisteredSequences:
    """Those of one model version."""

    def __init__(self, register: SequenceRegister, model: str, version: int) -> None:
        self._register = register
        self.model = model
        self.version = version

    def waiting(self, correlation_id: int | str, generation: int) -> None:
        """One is to be admitted. Raises Unavailable: there are too many."""
        self._register.add()

    def begun(self, correlation_id: int | str, generation: int) -> None:
        """Its first request is about to run."""

    def gone(self, correlation_id: int | str, generation: int) -> None:
        """Nothing of it waits or runs."""
        self._register.live -= 1
