"""Fixtures: one real daemon a module, and a check that nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon_process import DaemonProcess, nothing_left_behind


@pytest.fixture(autouse=True, scope="module")
def leaves_nothing() -> Iterator[None]:
    """Every module of tests ends with the processes and descriptors it began with."""
    with nothing_left_behind():
        yield


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[Callable[..., DaemonProcess]]:
    """Starts daemons that live until the test ends."""
    started: list[DaemonProcess] = []

    def start(*repositories: Path, **options: dict[str, Any]) -> DaemonProcess:
        folder = tmp_path / f"daemon-{len(started)}"
        folder.mkdir()
        daemon = DaemonProcess(folder, repositories, options)
        started.append(daemon)
        daemon.start()
        return daemon

    yield start
    for daemon in started:
        daemon.stop()
