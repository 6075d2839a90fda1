"""The stored counts as a fixture."""

from __future__ import annotations

import pytest

from tests.work.baseline import Baseline


@pytest.fixture(scope="session")
def baseline(request: pytest.FixtureRequest) -> Baseline:
    """What ways cost when it was stored; with ``--store-work`` it takes what they cost now."""
    return Baseline(request.config.getoption("--store-work"))
