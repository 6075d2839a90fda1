"""openapi.yaml against the code and against a real daemon: every route, every status and every content type is described."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import hypothesis
import pytest
import requests
import schemathesis
import yaml
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

from tensord.daemon.front.access import Access
from tensord.daemon.http.routes import Routes
from tests import repositories
from tests.daemon_process import DaemonOf, DaemonProcess
from tests.generated import examples

DOCUMENT = Path(__file__).parents[2] / "daemon" / "http" / "openapi.yaml"
#: Where programs of this environment are, before others.
BESIDE = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
#: What somebody does with a client that was generated.
ASKS = """
import sys
from made_client import Client
from made_client.api.inference import infer
from made_client.api.models import model_metadata
from made_client.api.repository import index
from made_client.api.server import live, server_metadata
from made_client.models import Datatype, Error, IndexRequest, InferenceRequest, InputTensor

with Client(base_url=sys.argv[1]) as client:
    print(server_metadata.sync(client=client).name, live.sync(client=client).live)
    (described,) = model_metadata.sync("echo_fp32", client=client).inputs
    print("echo_fp32", described.datatype.value, described.shape)
    tensor = InputTensor(name="x", datatype=Datatype.FP32, shape=[2], data=[1.5, 2.5])
    print(infer.sync("echo_fp32", client=client, body=InferenceRequest(inputs=[tensor])).outputs[0].data)
    refused = infer.sync("nobody", client=client, body=InferenceRequest(inputs=[tensor]))
    assert isinstance(refused, Error), refused
    print(refused.error)
    print(sorted(model.name for model in index.sync(client=client, body=IndexRequest())))
"""
#: Generated requests for each endpoint; the same ones every time.
EXAMPLES = 20

SCHEMA = schemathesis.openapi.from_path(DOCUMENT)
#: "METHOD PATH" -> operation.
OPERATIONS = {found.ok().label: found.ok() for found in SCHEMA.get_all_operations()}
CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    """Runs a daemon in explicit mode, so that load and unload do something."""
    repository = tmp_path_factory.mktemp("repository")
    repositories.echo_models(repository, ["FP32"])
    options = {"repository": {"control_mode": "explicit", "load": ["*"]}}
    return daemon_of(repository, options)


@pytest.fixture(scope="module")
def session(leaves_nothing: None) -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


def test_the_paths_and_methods_are_those_of_the_code() -> None:
    # The table of routes is made without asking any endpoint.
    application = Routes(cast("Any", None), Access({}, "http")).application()
    served = {
        (route.path, method)
        for route in application.routes
        if route.include_in_schema
        for method in route.methods - {"HEAD"}
    }
    document = yaml.safe_load(DOCUMENT.read_text())
    described = {
        (path, method.upper())
        for path, operations in document["paths"].items()
        for method in operations
        if method != "parameters"
    }
    assert described == served


def test_the_daemon_serves_it(daemon: DaemonProcess, session: requests.Session) -> None:
    """The document names the served version; a client that has it gets 304, and HEAD gives its length."""
    url = f"http://{daemon.url}/v2/openapi.yaml"
    answer = session.get(url)
    assert (answer.status_code, answer.headers["Content-Type"]) == (200, "application/yaml")
    assert answer.content == DOCUMENT.read_bytes()
    assert yaml.safe_load(answer.content)["info"]["version"] == importlib.metadata.version("tensord")
    tag = answer.headers["ETag"]
    for known in (tag, f'"other", W/{tag}', "*"):
        again = session.get(url, headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["ETag"]) == (304, b"", tag)
    assert session.get(url, headers={"If-None-Match": '"other"'}).status_code == 200
    head = session.head(url)
    assert (head.status_code, head.content, head.headers["ETag"]) == (200, b"", tag)
    assert int(head.headers["Content-Length"]) == len(answer.content)


@pytest.mark.skipif(shutil.which("openapi-python-client", path=BESIDE) is None, reason="there is no generator")
def test_a_generated_client_asks_the_daemon(daemon: DaemonProcess, tmp_path: Path) -> None:
    """From what the daemon serves, without a warning; the client's own types go in and out."""
    (tmp_path / "generator.yaml").write_text("post_hooks: []\n")
    made = subprocess.run(
        [
            *("openapi-python-client", "generate", "--url", f"http://{daemon.url}/v2/openapi.yaml", "--meta", "none"),
            *("--config", "generator.yaml", "--output-path", "made_client", "--fail-on-warning"),
        ],
        cwd=tmp_path,
        env=os.environ | {"PATH": BESIDE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    (tmp_path / "asks.py").write_text(ASKS)
    done = subprocess.run(
        [sys.executable, "asks.py", f"http://{daemon.url}"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr, done.stdout.splitlines()) == (
        0,
        "",
        [
            "tensord True",
            "echo_fp32 FP32 [-1]",
            "[1.5, 2.5]",
            "Request for unknown model: 'nobody' is not found",
            "['echo_bytes', 'echo_fp32']",
        ],
    )


@SCHEMA.hook
def map_path_parameters(context: Any, path_parameters: dict[str, Any]) -> dict[str, Any]:
    """Replaces half of the generated names by existing ones, else nearly every answer would be 404."""
    if path_parameters and len(path_parameters.get("model", "")) % 2:
        path_parameters["model"] = "echo_fp32"
        if "version" in path_parameters:
            path_parameters["version"] = "1"
    return path_parameters


@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("name", OPERATIONS)
def test_generated_requests_are_answered_as_described(
    name: str, mode: GenerationMode, daemon: DaemonProcess, session: requests.Session
) -> None:
    operation = OPERATIONS[name]
    if mode.is_negative and not (operation.body or "{version}" in name):
        pytest.skip("there is nothing to get wrong: any name will do")

    @hypothesis.settings(
        max_examples=examples(EXAMPLES),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case) -> None:
        response = case.call(base_url=f"http://{daemon.url}", session=session)
        case.validate_response(response, checks=CHECKS)
        assert "internal error" not in response.text

    ask()
