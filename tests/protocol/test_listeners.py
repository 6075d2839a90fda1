"""Where the daemon can be reached besides plain TCP: Unix sockets for both protocols, TLS and mutual TLS for gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import tritonclient.grpc as grpcclient
import trustme
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests import repositories
from tests.daemon_process import DaemonProcess


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repositories.scale_model(tmp_path_factory.mktemp("repository"))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files of a certificate authority, a server and a client."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "root.pem")
    for name in ("server", "client"):
        issued = authority.issue_cert("localhost", "127.0.0.1")
        issued.private_key_pem.write_to_path(folder / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
    return {path.name: str(path) for path in folder.iterdir()}


@pytest.fixture
def serving(repository: Path, tmp_path: Path, leaves_nothing: None) -> Iterator[Any]:
    running: list[DaemonProcess] = []

    def start(**options: Any) -> DaemonProcess:
        daemon = DaemonProcess(tmp_path, [repository], options)
        running.append(daemon)
        daemon.start()
        daemon.wait_ready()
        return daemon

    yield start
    for daemon in running:
        daemon.stop()


def test_grpc_on_a_unix_socket(serving: Any, tmp_path: Path) -> None:
    path = tmp_path / "grpc.sock"
    daemon = serving(grpc={"address": f"unix:{path}", "socket_mode": "0600"})
    daemon.wait_log("serving grpc on unix:")
    assert path.stat().st_mode & 0o777 == 0o600
    with grpc.insecure_channel(f"unix:{path}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ModelReady(service_pb2.ModelReadyRequest(name="scale")).ready
    daemon.stop()
    assert not path.exists()


def test_http_on_a_unix_socket(repository: Path, tmp_path: Path, leaves_nothing: None) -> None:
    path = tmp_path / "http.sock"
    # DaemonProcess waits for a TCP address in the log, which this daemon has only for gRPC.
    daemon = DaemonProcess(tmp_path, [repository], {"http": {"address": f"unix:{path}"}})
    daemon.served_on = r"serving http on unix:"
    with daemon, httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x") as client:
        daemon.wait_log("ready: ")
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [2.0] * 4}
        answer = client.post("/v2/models/scale/infer", json={"inputs": [tensor]})
        assert answer.json()["outputs"][0]["data"] == [7.0] * 4
        assert client.get("/v2").json()["name"] == "tensord"
    assert not path.exists()


def test_a_service_of_its_name(repository: Path, tmp_path: Path, leaves_nothing: None) -> None:
    """In a namespace with services tensord and tensord-http, whose variables Kubernetes sets in every container."""
    environment = {
        "TENSORD_SERVICE_HOST": "10.0.0.1",
        "TENSORD_SERVICE_PORT": "8000",
        "TENSORD_PORT": "tcp://10.0.0.1:8000",
        "TENSORD_PORT_8000_TCP_ADDR": "10.0.0.1",
        "TENSORD_HTTP_PORT": "tcp://10.0.0.2:8000",
        "TENSORD_SERVER_NAME": "mine",
    }
    with DaemonProcess(tmp_path, [repository], environment=environment) as daemon:
        assert b'"name":"mine"' in daemon.get("/v2")[1]
        daemon.wait_log(
            r"environment: not read as configuration, because the container platform set it for a service: "
            r"TENSORD_HTTP_PORT, TENSORD_PORT, TENSORD_PORT_8000_TCP_ADDR, \.\.\.\n"
        )
        assert daemon.log.count("container platform") == 1


def test_tls(serving: Any, authority: dict[str, str]) -> None:
    daemon = serving(
        grpc={"use_tls": True, "certificate": authority["server.pem"], "key": authority["server.key"]},
    )
    options = {"ssl": True, "root_certificates": authority["root.pem"]}
    with grpcclient.InferenceServerClient(daemon.grpc_url, **options) as client:
        assert client.is_server_ready()
    with (
        grpcclient.InferenceServerClient(daemon.grpc_url) as client,
        pytest.raises(InferenceServerException, match="UNAVAILABLE"),
    ):
        client.is_server_ready()


def test_mutual_tls(serving: Any, authority: dict[str, str]) -> None:
    daemon = serving(
        grpc={
            "mutual_tls": True,
            "certificate": authority["server.pem"],
            "key": authority["server.key"],
            "root_certificate": authority["root.pem"],
        },
    )
    options = {"ssl": True, "root_certificates": authority["root.pem"]}
    mine = {"private_key": authority["client.key"], "certificate_chain": authority["client.pem"]}
    with grpcclient.InferenceServerClient(daemon.grpc_url, **options, **mine) as client:
        assert client.is_server_ready()
    with (
        grpcclient.InferenceServerClient(daemon.grpc_url, **options) as client,
        pytest.raises(InferenceServerException, match="UNAVAILABLE"),
    ):
        client.is_server_ready()
