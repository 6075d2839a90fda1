"""Provides one daemon for a module's tests, with models of bench/models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests import run_folder
from tests.daemon_process import ROOT, DaemonProcess


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, leaves_nothing: None) -> Iterator[DaemonProcess]:
    models = {"control_mode": "explicit", "load": ["addsub", "identity", "mlp", "post", "rnn"]}
    folder = tmp_path_factory.mktemp("daemon")
    with contextlib.ExitStack() as stack:
        # Modules begin at the same time: what the first has compiled the others find.
        with run_folder.only_one("bench"):
            options = {"repository": models}
            daemon = stack.enter_context(DaemonProcess(folder, [ROOT / "bench" / "models"], options))
            daemon.wait_ready()
        yield daemon
