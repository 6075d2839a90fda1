"""A configuration that a client gave holds for the files that it was given for."""

from __future__ import annotations

from pathlib import Path

from tensord.daemon.models.overrides import Overrides
from tensord.daemon.models.repository import FoundModel


def test_until_the_files_change_or_the_model_is_gone() -> None:
    overrides = Overrides()
    m = FoundModel("m", Path("m"), fingerprint="1")
    assert overrides.of(m) == ""
    overrides.keep(m, '{"max_batch_size": 2}')
    assert overrides.of(m) == '{"max_batch_size": 2}'
    assert overrides.of(FoundModel("m", Path("m"), fingerprint="2")) == ""
    assert overrides.of(FoundModel("n", Path("n"), fingerprint="1")) == ""
    # A plain load without one ends it.
    overrides.keep(m, "")
    assert overrides.of(m) == ""
    overrides.keep(m, "{}")
    overrides.drop("m")
    overrides.drop("m")
    assert overrides.of(m) == ""
