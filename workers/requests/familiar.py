"""Requests that repeat themselves: what inputs of certain names, datatypes and shapes came to when they were validated.

Clients ask with the same shapes again and again. Where they do, only the places of the tensors are new.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np

#: (name, datatype, shape) of each input, in the order of the request.
Inputs = tuple[tuple[str, str, tuple[int, ...]], ...]
#: Kinds of requests remembered for one model version.
_LIMIT = 256


class Known(NamedTuple):
    """What such a request comes to."""

    #: What requests must have in common to run together.
    key: Hashable
    rows: int
    #: dtype and byte size of each input, in the order of the request.
    tensors: list[tuple[np.dtype[Any], int]]


class Familiar:
    """One per model version; belongs to the worker's loop."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[Inputs, Known] = {}

    def find(self, inputs: Inputs) -> Known | None:
        """What they came to before, if they did."""
        return self._known.get(inputs)

    def learn(self, inputs: Inputs, known: Known) -> None:
        """Remembers inputs that were found right."""
        if len(self._known) >= _LIMIT:
            self._known.clear()
        self._known[inputs] = known

    def __repr__(self) -> str:
        return f"<Familiar {len(self._known)} kinds>"
