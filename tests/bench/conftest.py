"""What a module's tests have in common: one daemon with the models that are measured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.daemon_process import ROOT, DaemonProcess


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, leaves_nothing: None) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), [ROOT / "bench" / "models"]) as daemon:
        daemon.wait_ready()
        yield daemon
