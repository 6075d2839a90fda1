"""Settings and restricted calls over gRPC: a real daemon, the published client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests import repositories
from tests.daemon_process import DaemonOf, DaemonProcess

KEY = {"triton-grpc-protocol-admin-key": "sesame"}


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    folder = tmp_path_factory.mktemp("grpc_settings")
    repositories.scale_model(folder / "models")
    options = {
        "trace": {"file": str(folder / "trace.json")},
        "grpc": {"restricted_protocol": ["trace,model-repository:admin-key=sesame"]},
    }
    return daemon_of(folder / "models", options, folder=folder)


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(daemon.grpc_url) as client:
        yield client


def test_log_settings(client: triton.InferenceServerClient) -> None:
    changed = client.update_log_settings({"log_verbose_level": 1, "log_info": True}, as_json=True)
    assert changed["settings"]["log_verbose_level"] == {"uint32_param": 1}
    assert client.get_log_settings(as_json=True) == changed
    for settings, text in (
        ({"log_format": "x"}, "invalid argument for log_format, got: x"),
        ({"log_file": "x"}, "log file location can not be updated through network protocol"),
    ):
        with pytest.raises(InferenceServerException, match=text):
            client.update_log_settings(settings)


def test_a_restricted_call_needs_its_key(client: triton.InferenceServerClient) -> None:
    for headers in (None, {"admin-key": "sesame"}, KEY | {"triton-grpc-protocol-admin-key": "x"}):
        with pytest.raises(
            InferenceServerException, match="expecting header 'triton-grpc-protocol-admin-key'"
        ) as caught:
            client.get_trace_settings(headers=headers)
        assert "UNAVAILABLE" in str(caught.value)
    assert client.is_server_live()
    assert client.get_model_repository_index(headers=KEY).models


def test_trace_settings(client: triton.InferenceServerClient) -> None:
    changed = client.update_trace_settings("scale", {"trace_rate": "5"}, headers=KEY, as_json=True)
    assert changed["settings"]["trace_rate"] == {"value": ["5"]}
    assert client.get_trace_settings(headers=KEY, as_json=True)["settings"]["trace_rate"] == {"value": ["1000"]}
    with pytest.raises(InferenceServerException, match="Request for unknown model : nope"):
        client.update_trace_settings("nope", {"trace_rate": "x"}, headers=KEY)
    with pytest.raises(InferenceServerException, match="Unable to parse 'trace_rate', got: x"):
        client.update_trace_settings("scale", {"trace_rate": "x"}, headers=KEY)
