"""Compares counts of bytecodes with stored ones: a test fails where its count is more than 15 % above the stored one.

The room is there so that code can be written for its reader. The counts are in ``baseline.json``, for each version of Python that
they were taken with; ``python -m pytest -n 0 --store-work tests/work`` stores this tree's counts in their place.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

#: A way may cost so many times what is stored.
ROOM = 1.15
_FILE = Path(__file__).with_name("baseline.json")
_PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
#: Version of Python -> name of a way -> bytecodes a request.
_STORED: dict[str, dict[str, float]] = json.loads(_FILE.read_text())

#: Bytecodes differ from one Python to the next.
counts = pytest.mark.skipif(_PYTHON not in _STORED, reason=f"no bytecode counts are stored for Python {_PYTHON}")


class Baseline:
    """The stored counts, or those that are being stored."""

    def __init__(self, storing: bool) -> None:
        self.storing = storing

    def allows(self, name: str, counted: float) -> bool:
        """Returns whether a count is within the room; False for a name without a stored count."""
        return counted <= _STORED[_PYTHON].get(name, 0) * ROOM

    def check(self, name: str, counted: float) -> None:
        """Fails the test if a count is above what is allowed; stores the count instead if ``storing``."""
        assert counted > 0, f"{name}: nothing was counted"
        if self.storing:
            _STORED[_PYTHON][name] = round(counted)
            ordered = {python: dict(sorted(of.items())) for python, of in _STORED.items()}
            _FILE.write_text(json.dumps(ordered, indent=2) + "\n")
            return
        stored = _STORED[_PYTHON].get(name)
        assert stored is not None, f"{name}: no count is stored"
        assert counted <= stored * ROOM, (
            f"{name}: {counted:.0f} bytecodes, {counted / stored:.2f} of the stored {stored:.0f}"
        )
