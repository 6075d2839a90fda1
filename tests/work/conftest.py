"""Provides the stored counts as a fixture."""

from __future__ import annotations

import pytest

from tests.work.baseline import Baseline


@pytest.fixture(scope="session")
def baseline(request: pytest.FixtureRequest) -> Baseline:
    """Returns the stored counts; with ``--store-work`` it stores new ones."""
    return Baseline(request.config.getoption("--store-work"))
