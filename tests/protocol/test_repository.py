"""Models that come and go while the daemon runs, with the stock client: from folders, and from files it sends along."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient
from google.protobuf import text_format
from tritonclient.utils import InferenceServerException

from tensord.config import model_config
from tensord.protocol import model_config_pb2
from tests import repositories
from tests.daemon_process import PATIENCE, DaemonProcess, wait_until

TIMES = repositories.answering("""
    return response(y=given(request) * np.float32(FACTOR))
""")
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
    """Runs a daemon whose private folders are in a temporary folder of their own, which must be empty in the end."""
    repository = tmp_path_factory.mktemp("repository")
    repositories.scale_model(repository)
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch_module.setenv("TMPDIR", str(temporary))
    options = {"repository": {"control_mode": "explicit"}}
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), [repository], options) as running:
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
    ("config", "path", "words"),
    [
        ("", "1/model.py", "failed to load 'bad': files are given without a 'config'"),
        (json.dumps(CONFIG), "../../x.py", "failed to load 'bad': '../../x.py' is no path of a file in a model"),
        (
            json.dumps(CONFIG),
            "/tmp/tensord-test-x.py",
            "load failed for model 'bad': at least one version must be available",
        ),
        ("{", "1/model.py", "failed to load 'bad': configuration of model 'bad': Input data was truncated"),
    ],
)
def test_files_that_are_refused(client: httpclient.InferenceServerClient, config: str, path: str, words: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.load_model("bad", config=config or None, files={f"file:{path}": source(1)})
    assert caught.value.message().startswith(words)
    assert caught.value.status() == "400"
    assert not Path("/tmp/tensord-test-x.py").exists()


def test_a_slash_before_a_file_and_one_entry_for_a_list(client: httpclient.InferenceServerClient) -> None:
    """Both are accepted, as in Triton."""
    config = {**CONFIG, "instance_group": {"count": 2, "kind": "KIND_CPU"}}
    client.load_model("slash", config=json.dumps(config), files={"file:/1/model.py": source(4)})
    assert client.get_model_config("slash")["instance_group"][0]["count"] == 2
    assert ask(client, "slash") == [4, 8]
    client.unload_model("slash")


def test_a_configuration_given_with_a_load_goes_with_its_model(client: httpclient.InferenceServerClient) -> None:
    client.load_model("scale", config=json.dumps({"max_batch_size": 3}))
    with pytest.raises(InferenceServerException, match="failed to load 'scale': model 'scale': max_batch_size is -1"):
        client.load_model("scale", config=json.dumps({"max_batch_size": -1}))
    client.load_model("scale")
    assert client.get_model_config("scale")["max_batch_size"] == 3
    client.unload_model("scale")
    client.load_model("scale")
    assert client.get_model_config("scale")["max_batch_size"] == 8
    client.unload_model("scale")


@pytest.mark.parametrize(
    ("asks", "words"),
    [
        ({"sequence_batching": {"state": [{}]}}, "sequence_batching.state: a Triton Python model keeps its own state"),
        ({"model_repository_agents": {"agents": [{"name": "checksum"}]}}, "agents: no repository agents are run"),
    ],
)
def test_a_model_that_asks_for_what_is_not_offered_is_never_ready(
    client: httpclient.InferenceServerClient, daemon: DaemonProcess, asks: dict[str, Any], words: str
) -> None:
    """The request may come from the model's folder or from the client."""
    folder = Path(daemon.sections["repository"]["paths"][0]) / "asks"
    repositories.write_model(Path(daemon.sections["repository"]["paths"][0]), "asks", TIMES, config_text(asks))
    with pytest.raises(InferenceServerException, match=f"failed to load 'asks': model 'asks': .*{words}") as caught:
        client.load_model("asks")
    assert caught.value.status() == "501"
    with pytest.raises(InferenceServerException, match=f"failed to load 'given': model 'given': .*{words}"):
        client.load_model("given", config=json.dumps(CONFIG | asks), files={"file:1/model.py": source(1)})
    assert not client.is_model_ready("asks")
    assert not client.is_model_ready("given")
    shutil.rmtree(folder)


def config_text(fields: dict[str, Any]) -> str:
    """Formats CONFIG with further fields as config.pbtxt."""
    return text_format.MessageToString(model_config.parse_json(json.dumps(CONFIG | fields), "m"))


def test_what_has_no_effect_is_warned_of_once(client: httpclient.InferenceServerClient, daemon: DaemonProcess) -> None:
    config = CONFIG | {"optimization": {"cuda": {"graphs": True}, "eager_batching": True}}
    client.load_model("warns", config=json.dumps(config), files={"file:1/model.py": source(4)})
    for sentence in (
        "optimization.cuda is without effect: XLA decides",
        "optimization.eager_batching is without effect: a batch",
    ):
        daemon.wait_log(f"model 'warns': {sentence}")
        assert daemon.log.count(f"model 'warns': {sentence}") == 1
    client.unload_model("warns")


VALUES = (
    "null",
    "true",
    "1",
    "-1",
    "1e999",
    str(1 << 64),
    '"x"',
    '"\\ud800"',
    "[]",
    "[null]",
    "[[1]]",
    "{}",
    '{"x": 1}',
    "[{}]",
)
FIELDS = sorted(field.name for field in model_config_pb2.ModelConfig.DESCRIPTOR.fields)
BODIES = [
    *("[]", "null", "1", "{", '{"parameters": '),
    *(f'{{"parameters": {value}}}' for value in VALUES),
    *(f'{{"parameters": {{"{key}": {value}}}}}' for key in ("config", "file:1/model.py", "x") for value in VALUES),
    *(f'{{"parameters": {{"{key}": "YQ=="}}}}' for key in ("\\ud800", "file:\\ud800", "file:1/\\ud800")),
    *(
        f'{{"parameters": {{"config": "{{}}", "file:{path}": "{content}"}}}}'
        for path in ("", "/", "1", "1/", "..", "1/../2/model.py", "1/a b", "1/\\u0000", "é/x", "x" * 300)
        for content in ("", "YQ==", "YQ", "é")
    ),
    *(json.dumps({"parameters": {"config": f'{{"{field}": {value}}}'}}) for field in FIELDS for value in VALUES),
]


def test_no_load_request_is_the_servers_fault(client: httpclient.InferenceServerClient, daemon: DaemonProcess) -> None:
    """A load with any value anywhere is done or refused with a sentence, and the next plain load works as ever."""
    statuses = set()
    for body in BODIES:
        status, answer = daemon.request("POST", "/v2/repository/models/scale/load", body.encode())
        assert status in (200, 400, 501), (body, answer)
        assert status == 200 or json.loads(answer)["error"], body
        statuses.add(status)
    assert statuses == {200, 400, 501}
    client.unload_model("scale")
    client.load_model("scale")
    assert client.get_model_config("scale")["max_batch_size"] == 8
    client.unload_model("scale")


def test_a_load_that_fails_takes_nothing_from_readiness(client: httpclient.InferenceServerClient) -> None:
    broken = b"raise RuntimeError('refusing to load')"
    with pytest.raises(InferenceServerException) as caught:
        client.load_model("heals", config=json.dumps(CONFIG), files={"file:1/model.py": broken})
    assert caught.value.message() == (
        "load failed for model 'heals': version 1 is at UNAVAILABLE state: RuntimeError: refusing to load "
        "(model.py, line 1);\n"
    )
    assert client.is_server_ready()
    assert not client.is_model_ready("heals")
    client.load_model("heals", config=json.dumps(CONFIG), files={"file:1/model.py": source(1)})
    assert client.is_server_ready()


def test_a_repository_that_is_not_there_is_no_reason_to_exit(leaves_nothing: None, tmp_path: Path) -> None:
    """
    1. One of two repositories is not there, and the daemon is told not to exit on errors. 2. It comes, and a reload looks again.
    Result: live, not ready, and the other repository's model is served; then both are, and it is ready.
    """
    there, missing = tmp_path / "there", tmp_path / "missing"
    there.mkdir()
    repositories.scale_model(there)
    with DaemonProcess(tmp_path, [there, missing], arguments=["--exit-on-error=false"], ready=False) as daemon:
        daemon.wait_log(r"supervisor\W+not ready: .*; 1 of 2 models are not served: repository 'missing'")
        assert f"model repository '{missing}' cannot be read: No such file or directory" in daemon.log
        assert daemon.get("/v2/health/live")[0] == 200
        assert daemon.get("/v2/health/ready")[0] == 400
        assert daemon.get("/v2/models/scale/ready")[0] == 200
        status, index = daemon.request("POST", "/v2/repository/index", b"")
        assert (status, [entry["name"] for entry in json.loads(index)]) == (200, ["scale"])
        missing.mkdir()
        repositories.scale_model(missing, "late")
        daemon.signal(signal.SIGHUP)
        wait_until(lambda: daemon.get("/v2/models/late/ready")[0] == 200, "the model that came", daemon)
        daemon.wait_ready()
