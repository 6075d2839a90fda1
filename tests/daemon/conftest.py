"""Provides what all tests of daemon/ need."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.daemon_process import ROOT


@pytest.fixture(scope="module", autouse=True)
def _fakes_are_found() -> Iterator[None]:
    """Lets child processes import the fakes of ``tests``, which are installed nowhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), os.pathsep)
        yield
