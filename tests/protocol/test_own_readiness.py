"""``TritonPythonModel.is_ready()``: what a model says of itself counts wherever readiness of that model is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient

from tests.daemon_process import DaemonOf, DaemonProcess
from tests.repositories import answering, fields, write_model

#: It says what the file beside it holds.
MODEL = answering(
    """
    other = given(request, "MODEL")[0].decode()
    return response(READY=np.array([pb_utils.is_model_ready(other)]))
    """,
    more="""
    KIND is_ready(self):
        said = open(SAID).read()
        if said == "late":
            time.sleep(3600)
        return eval(said)
    """,
)
CONFIG = fields("MODEL STRING 1", "READY BOOL 1")
KINDS = ("def", "async def")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("said") / "said"
    path.write_text("True")
    return path


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory, said: Path) -> DaemonProcess:
    models = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        write_model(models, kind.split()[0], MODEL.replace("KIND", kind).replace("SAID", repr(str(said))), CONFIG)
    silent = MODEL.replace("KIND is_ready", "def never_asked").replace("SAID", "''")
    write_model(models, "silent,with a comma".replace(" ", "_"), silent, CONFIG)
    return daemon_of(models, {})


def states(daemon: DaemonProcess, ready: bool) -> dict[str, str]:
    body = json.dumps({"ready": ready}).encode()
    return {e["name"]: e["state"] for e in json.loads(daemon.request("POST", "/v2/repository/index", body)[1])}


def asked(daemon: DaemonProcess, model: str, by: str) -> bool:
    body = {"inputs": [{"name": "MODEL", "datatype": "BYTES", "shape": [1], "data": [model]}]}
    status, content = daemon.request("POST", f"/v2/models/{by}/infer", json.dumps(body).encode())
    assert status == 200, content
    return bool(json.loads(content)["outputs"][0]["data"][0])


@pytest.mark.parametrize("model", [kind.split()[0] for kind in KINDS])
@pytest.mark.parametrize("says", ["True", "False", "1", "None", "1 / 0"])
def test_what_it_says_counts(daemon: DaemonProcess, said: Path, model: str, says: str) -> None:
    said.write_text(says)
    ready = says == "True"
    try:
        assert daemon.get(f"/v2/models/{model}/ready")[0] == (200 if ready else 400)
        assert daemon.get(f"/v2/models/{model}/versions/1/ready")[0] == (200 if ready else 400)
        with grpcclient.InferenceServerClient(daemon.grpc_url) as client:
            assert client.is_model_ready(model) is ready
        assert states(daemon, False)[model] == ("READY" if ready else "UNAVAILABLE")
        assert (model in states(daemon, True)) is ready
        assert asked(daemon, model, by="silent,with_a_comma") is ready
        assert daemon.get("/v2/health/ready")[0] == 200
    finally:
        said.write_text("True")


def test_one_that_does_not_answer_is_not_ready(daemon: DaemonProcess, said: Path) -> None:
    said.write_text("late")
    try:
        assert daemon.get("/v2/models/async/ready")[0] == 400
    finally:
        said.write_text("True")
    assert asked(daemon, "def", by="async")
    daemon.wait_log("is_ready of model 'async' has not answered within 5 s")


def test_a_model_without_it_is_ready_while_it_serves(daemon: DaemonProcess) -> None:
    """The model is also ready by a name that could be taken for a list."""
    assert daemon.get("/v2/models/silent,with_a_comma/ready")[0] == 200
    assert daemon.get("/v2/models/silent%2Cwith_a_comma/ready")[0] == 200
