"""Models that come and go while the daemon runs, with the stock client: from folders, and from files it sends along."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests import repositories
from tests.daemon_process import PATIENCE, DaemonProcess, wait_until

TIMES = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        x = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", each * np.float32(FACTOR))]) for each in x]
"""
CONFIG = {
    "backend": "python",
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [2]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [2]}],
}


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def daemon(
    leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch_module: pytest.MonkeyPatch
) -> Iterator[DaemonProcess]:
    """Its private folders are in a temporary folder of their own, which is empty in the end."""
    repository = tmp_path_factory.mktemp("repository")
    repositories.scale_model(repository)
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch_module.setenv("TMPDIR", str(temporary))
    options = {"repository": {"control_mode": "explicit"}}
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), [repository], options) as running:
        running.wait_ready()
        yield running
    assert list(temporary.iterdir()) == []


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[httpclient.InferenceServerClient]:
    with httpclient.InferenceServerClient(daemon.url, network_timeout=PATIENCE) as made:
        yield made


def source(factor: int) -> bytes:
    return TIMES.replace("FACTOR", str(factor)).encode()


def ask(client: httpclient.InferenceServerClient, model: str, version: str = "") -> list[float]:
    tensor = httpclient.InferInput("x", [2], "FP32")
    tensor.set_data_from_numpy(np.array([1, 2], np.float32))
    values: list[float] = client.infer(model, [tensor], model_version=version).as_numpy("y").tolist()
    return values


def states(client: httpclient.InferenceServerClient, model: str) -> dict[str, str]:
    index = client.get_model_repository_index()
    return {entry["version"]: entry["state"] for entry in index if entry["name"] == model and "version" in entry}


def test_a_model_from_a_folder(client: httpclient.InferenceServerClient) -> None:
    assert {"name": "scale"} in client.get_model_repository_index()
    assert not client.is_model_ready("scale")
    client.load_model("scale")
    assert states(client, "scale") == {"1": "READY"}
    client.load_model("scale", config=json.dumps({"max_batch_size": 3}))
    assert client.get_model_config("scale")["max_batch_size"] == 3
    client.unload_model("scale", unload_dependents=True)
    wait_until(lambda: states(client, "scale") == {"1": "UNAVAILABLE"}, "unloaded model")
    assert client.is_server_ready()


def test_a_model_from_files(client: httpclient.InferenceServerClient, daemon: DaemonProcess) -> None:
    policy = {**CONFIG, "version_policy": {"all": {}}}
    client.load_model(
        "given", config=json.dumps(policy), files={"file:1/model.py": source(2), "file:7/model.py": source(7)}
    )
    assert [ask(client, "given", version) for version in ("1", "7", "")] == [[2, 4], [7, 14], [7, 14]]
    # Another gift takes its place, and what it does not bring is gone.
    client.load_model("given", config=json.dumps(CONFIG), files={"file:1/model.py": source(3)})
    assert ask(client, "given") == [3, 6]
    assert states(client, "given") == {"1": "READY", "7": "UNAVAILABLE"}
    client.unload_model("given")
    wait_until(lambda: not client.is_model_ready("given"), "unloaded model")
    with pytest.raises(InferenceServerException, match="failed to load 'given', failed to poll from model repository"):
        client.load_model("given")


def test_a_given_model_outlives_its_worker(client: httpclient.InferenceServerClient, daemon: DaemonProcess) -> None:
    client.load_model("kept", config=json.dumps(CONFIG), files={"file:1/model.py": source(5)})
    (worker,) = daemon.workers
    worker.kill()
    assert ask(client, "kept") == [5, 10]


@pytest.mark.parametrize(
    ("config", "path"), [("", "1/model.py"), (json.dumps(CONFIG), "../../x.py"), (json.dumps(CONFIG), "/tmp/x.py")]
)
def test_files_that_are_refused(client: httpclient.InferenceServerClient, config: str, path: str) -> None:
    with pytest.raises(InferenceServerException, match="failed to load 'bad', failed to poll from model repository"):
        client.load_model("bad", config=config or None, files={f"file:{path}": source(1)})
    assert not Path("/tmp/x.py").exists()


def test_a_load_that_fails_holds_up_readiness_until_one_succeeds(client: httpclient.InferenceServerClient) -> None:
    broken = b"raise RuntimeError('refusing to load')"
    with pytest.raises(InferenceServerException) as caught:
        client.load_model("heals", config=json.dumps(CONFIG), files={"file:1/model.py": broken})
    assert caught.value.message() == (
        "load failed for model 'heals': version 1 is at UNAVAILABLE state: Internal: RuntimeError: refusing to load;\n"
    )
    assert not client.is_server_ready()
    client.unload_model("heals")
    assert not client.is_server_ready()
    client.load_model("heals", config=json.dumps(CONFIG), files={"file:1/model.py": source(1)})
    assert client.is_server_ready()
