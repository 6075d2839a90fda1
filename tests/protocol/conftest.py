"""Provides one daemon with models of every datatype, tritonclient for both protocols, and the stand-in for the CUDA driver."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from tests import repositories
from tests.collector import Collector
from tests.cuda_stub.library import CudaStub
from tests.daemon_process import PATIENCE, DaemonOf, DaemonProcess


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> CudaStub:
    """Returns the stand-in for a daemon that is started with its ``environment``."""
    return CudaStub(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    repository = tmp_path_factory.mktemp("repository")
    repositories.echo_models(repository)
    repositories.scale_model(repository)
    repositories.faulty_models(repository)
    repositories.sleepy_model(repository)
    return daemon_of(repository, {"repository": {"strict_readiness": False}})


@pytest.fixture(scope="module")
def collector(leaves_nothing: None) -> Iterator[Collector]:
    with contextlib.closing(Collector()) as made:
        yield made


@pytest.fixture(scope="module")
def http(daemon: DaemonProcess) -> Iterator[httpclient.InferenceServerClient]:
    with contextlib.closing(
        httpclient.InferenceServerClient(
            daemon.url, concurrency=32, network_timeout=PATIENCE, connection_timeout=PATIENCE
        )
    ) as client:
        yield client


@pytest.fixture(scope="module")
def grpc(daemon: DaemonProcess) -> Iterator[grpcclient.InferenceServerClient]:
    with contextlib.closing(grpcclient.InferenceServerClient(daemon.grpc_url)) as client:
        yield client


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest) -> Any:
    """Returns tritonclient's client of each protocol in turn."""
    return request.getfixturevalue(request.param)
