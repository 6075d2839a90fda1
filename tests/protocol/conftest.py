"""One daemon for the module, serving models of every datatype."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import repositories
from tests.daemon_process import DaemonProcess


@pytest.fixture(scope="module")
def daemon(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    repository = tmp_path_factory.mktemp("repository")
    repositories.echo_models(repository)
    repositories.scale_model(repository)
    repositories.faulty_models(repository)
    repositories.sleepy_model(repository)
    with DaemonProcess(
        tmp_path_factory.mktemp("daemon"), [repository], {"repository": {"strict_readiness": False}}
    ) as running:
        running.wait_ready()
        yield running
