"""docs/openapi.yaml against the code and against a real daemon: every route, every status and every content type is described."""

from __future__ import annotations

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

from tensord.daemon.front.access import http_access
from tensord.daemon.http.routes import Routes
from tests import repositories
from tests.daemon_process import DaemonProcess
from tests.generated import examples

DOCUMENT = Path(__file__).parents[2] / "docs" / "openapi.yaml"
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
def daemon(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """In explicit mode, so that load and unload do something."""
    repository = tmp_path_factory.mktemp("repository")
    repositories.echo_models(repository, ["FP32"])
    options = {"repository": {"control_mode": "explicit", "load": ["*"]}}
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), [repository], options) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def session(leaves_nothing: None) -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


def test_the_paths_and_methods_are_those_of_the_code() -> None:
    # The table of routes is made without asking any endpoint.
    application = Routes(cast("Any", None), http_access({})).application()
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


@SCHEMA.hook
def map_path_parameters(context: Any, path_parameters: dict[str, Any]) -> dict[str, Any]:
    """Half of the generated names become ones that exist, else nearly every answer would be 404."""
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
