"""What a module's tests have in common: one daemon with models of every datatype; a driver that stands in for a GPU's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import repositories
from tests.cuda_stub.library import CudaStub
from tests.daemon_process import DaemonProcess


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> CudaStub:
    """For a daemon started with its ``environment``."""
    return CudaStub(tmp_path_factory.mktemp("cuda"))


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
