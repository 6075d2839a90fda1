"""Tests where the daemon can be reached besides plain TCP: Unix sockets for both protocols, TLS and mutual TLS for both."""

from __future__ import annotations

import json
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import trustme
from cryptography import x509
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests import repositories
from tests.daemon_process import PATIENCE, ROOT, DaemonProcess, tensorctl_status, wait_until


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repositories.scale_model(tmp_path_factory.mktemp("repository"))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Writes the files of a certificate authority, a server and a client; returns their paths."""
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


def http_at(transport: httpx.BaseTransport | None, address: str) -> list[float]:
    """Sends a request over HTTP; returns the output."""
    with httpx.Client(transport=transport, base_url=f"http://{address}", trust_env=False, timeout=PATIENCE) as client:
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [2.0] * 4}
        return list(client.post("/v2/models/scale/infer", json={"inputs": [tensor]}).json()["outputs"][0]["data"])


def grpc_at(target: str) -> list[float]:
    """Sends a request over gRPC; returns the output."""
    with grpcclient.InferenceServerClient(target) as client:
        given = grpcclient.InferInput("x", [1, 4], "FP32")
        given.set_data_from_numpy(np.full((1, 4), 2, np.float32))
        return list(client.infer("scale", [given]).as_numpy("y").ravel())


@pytest.mark.parametrize("processes", [1, 2])
def test_several_addresses_at_once(serving: Any, tmp_path: Path, processes: int) -> None:
    """TCP and a Unix socket of each protocol, whichever front takes the connection; all of them are said."""
    paths = {protocol: tmp_path / f"{protocol}.sock" for protocol in ("http", "grpc")}
    control = tmp_path / "control.sock"
    daemon = serving(
        **{
            protocol: {"address": ["127.0.0.1", f"unix:{path}"], "processes": processes}
            for protocol, path in paths.items()
        },
        supervisor={"control_socket": str(control)},
    )
    for _ in range(2 * processes):
        assert http_at(None, daemon.url) == [7.0] * 4
        assert http_at(httpx.HTTPTransport(uds=str(paths["http"])), "x") == [7.0] * 4
        assert grpc_at(daemon.grpc_url) == grpc_at(f"unix:{paths['grpc']}") == [7.0] * 4
    daemon.wait_log(rf"serving grpc on grpc://127\.0\.0\.1:\d+ and unix:{paths['grpc']}\n")
    status = tensorctl_status(control)
    assert status["http"] == [f"http://{daemon.url}", f"unix:{paths['http']}"]
    assert status["grpc"] == [f"grpc://{daemon.grpc_url}", f"unix:{paths['grpc']}"]
    daemon.stop()
    assert not any(path.exists() for path in paths.values())


#: Binds the sockets, and becomes the daemon with them from descriptor 3 on, as systemd has it.
ACTIVATION = """
import os, socket, sys

folder, names = sys.argv[1:3]
sockets = []
for at, name in enumerate(names.split(":")):
    if at % 2:
        sockets.append(socket.socket(socket.AF_UNIX))
        sockets[-1].bind(f"{folder}/{name}.sock")
        sockets[-1].listen()
    else:
        sockets.append(socket.create_server(("127.0.0.1", 0)))
for at, sock in enumerate(sockets):
    os.dup2(sock.fileno(), 100 + at)
for at in range(len(sockets)):
    os.dup2(100 + at, 3 + at)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(sockets)), "LISTEN_FDNAMES": names}
os.execv(sys.executable, [sys.executable, "-m", "tensord", *sys.argv[3:]])
"""


def test_sockets_of_the_service_manager(repository: Path, tmp_path: Path, leaves_nothing: None) -> None:
    """Two of each protocol, told by their names. Their paths are the service manager's, and stay."""
    daemon = DaemonProcess(tmp_path, [repository], {"http": {"address": "unix:/not/used"}})
    daemon.program = [sys.executable, "-c", ACTIVATION, str(tmp_path), "http:http:grpc:grpc"]
    with daemon:
        daemon.wait_ready()
        assert http_at(None, daemon.url) == [7.0] * 4
        assert http_at(httpx.HTTPTransport(uds=f"{tmp_path}/http.sock"), "x") == [7.0] * 4
        assert grpc_at(daemon.grpc_url) == grpc_at(f"unix:{tmp_path}/grpc.sock") == [7.0] * 4
    assert (tmp_path / "http.sock").exists()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("http:grcp", "descriptor 4 is called 'grcp': FileDescriptorName= in its unit has to be http or grpc"),
        ("http:grpc", "a socket for grpc was passed, but grpc.enabled is false"),
    ],
)
def test_sockets_that_nobody_would_serve(repository: Path, tmp_path: Path, names: str, words: str) -> None:
    command = [sys.executable, "-c", ACTIVATION, str(tmp_path), names, "serve", f"--model-repository={repository}"]
    done = subprocess.run([*command, "--allow-grpc=false", "--device=cpu"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"tensord: socket activation: {words}\n" in done.stderr


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
    daemon = serving(grpc={"use_tls": True, "certificate": authority["server.pem"], "key": authority["server.key"]})
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
        }
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


def test_https(serving: Any, authority: dict[str, str], tmp_path: Path) -> None:
    """Small and large requests, on one connection; Unix sockets stay plain."""
    path = tmp_path / "http.sock"
    files = {"use_tls": True, "certificate": authority["server.pem"], "key": authority["server.key"]}
    daemon = DaemonProcess(
        tmp_path,
        [repositories.echo_models(tmp_path / "models", ["FP32"])],
        {"http": {"address": ["127.0.0.1", f"unix:{path}"], **files}},
    )
    daemon.served_on = r"serving http on https://127\.0\.0\.1:(\d+)"
    with daemon:
        daemon.wait_log("ready: ")
        url = re.findall(r"serving http on (https://\S+)", daemon.log)[-1]
        trusts = ssl.create_default_context(cafile=authority["root.pem"])
        with httpx.Client(verify=trusts, base_url=url, timeout=PATIENCE, trust_env=False) as client:
            assert client.get("/v2/health/ready").status_code == 200
            for count in (4, 4, 1 << 20, 4, 1 << 22):
                assert echoed(client, count)
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x", timeout=PATIENCE
        ) as client:
            assert echoed(client, 1 << 20)
        with pytest.raises(httpx.TransportError), httpx.Client(base_url=url.replace("https", "http")) as client:
            client.get("/v2")


def echoed(client: httpx.Client, count: int) -> bool:
    """Returns whether a model returns so many floats, in binary."""
    values = np.arange(count, dtype=np.float32)
    tensor = {"name": "x", "datatype": "FP32", "shape": [count], "parameters": {"binary_data_size": 4 * count}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    answer = client.post("/v2/models/echo_fp32/infer", content=head + values.tobytes(), headers=headers)
    assert answer.status_code == 200, answer.text
    body = answer.content[int(answer.headers["Inference-Header-Content-Length"]) :]
    return body == values.tobytes()


def test_mutual_https(repository: Path, tmp_path: Path, authority: dict[str, str], leaves_nothing: None) -> None:
    files = {"certificate": authority["server.pem"], "key": authority["server.key"]}
    options = {"http": {"mutual_tls": True, "root_certificate": authority["root.pem"], **files}}
    daemon = DaemonProcess(tmp_path, [repository], options)
    daemon.served_on = r"serving http on https://127\.0\.0\.1:(\d+)"
    with daemon:
        daemon.wait_log("ready: ")
        url = re.findall(r"serving http on (https://\S+)", daemon.log)[-1]
        trusts = ssl.create_default_context(cafile=authority["root.pem"])
        with pytest.raises(httpx.TransportError), httpx.Client(verify=trusts, base_url=url) as client:
            client.get("/v2")
        trusts.load_cert_chain(authority["client.pem"], authority["client.key"])
        with httpx.Client(verify=trusts, base_url=url, timeout=PATIENCE) as client:
            assert client.get("/v2").json()["name"] == "tensord"


def test_certificates_are_read_again(repository: Path, tmp_path: Path, leaves_nothing: None) -> None:
    """By both protocols; one that cannot be used changes nothing, and a reload says so."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "root.pem")
    certificate, key, control = tmp_path / "server.pem", tmp_path / "server.key", tmp_path / "control.sock"

    def issue() -> int:
        issued = authority.issue_cert("localhost", "127.0.0.1")
        issued.private_key_pem.write_to_path(key)
        issued.cert_chain_pems[0].write_to_path(certificate)
        return x509.load_pem_x509_certificate(certificate.read_bytes()).serial_number

    def served(port: int) -> int:
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            trusts.wrap_socket(plain, server_hostname="localhost") as tls,
        ):
            return x509.load_der_x509_certificate(tls.getpeercert(True)).serial_number

    first = issue()
    trusts = ssl.create_default_context(cafile=str(tmp_path / "root.pem"))
    files = {"use_tls": True, "certificate": str(certificate), "key": str(key)}
    options = {"http": files, "grpc": files, "supervisor": {"control_socket": str(control)}}
    daemon = DaemonProcess(tmp_path, [repository], options)
    daemon.served_on = r"serving http on https://127\.0\.0\.1:(\d+)"
    with daemon:
        daemon.wait_log("ready: ")
        ports = [
            int(re.findall(rf"serving \w+ on {scheme}://127\.0\.0\.1:(\d+)", daemon.log)[-1])
            for scheme in ("https", "grpc")
        ]
        assert [served(port) for port in ports] == [first, first]
        second = issue()
        wait_until(lambda: [served(port) for port in ports] == [second, second], "the new certificate", daemon)
        certificate.write_text("no certificate")
        daemon.wait_log("changed certificates are not used, the former ones stay in force", 2)
        assert [served(port) for port in ports] == [second, second]
        command = [sys.executable, "-m", "tensord.daemon.ctl", "--socket", str(control), "reload"]
        refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert refused.returncode == 1
        assert "http.certificate or http.key cannot be used" in refused.stderr
