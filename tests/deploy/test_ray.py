"""deploy/ray on Ray's local cluster: a head and two nodes with a daemon each, on this host (``ray_fleet.py``).

pip install 'tensord[test-ray]' && pytest tests/deploy/test_ray.py
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.daemon_process import PATIENCE, ROOT
from tests.repositories import scale_model

PROGRAM = """
import json, sys
import tensord_ray, yaml
with open(sys.argv[1]) as file:
    (app,) = yaml.safe_load(file)["applications"]
from ray.serve.schema import ServeApplicationSchema
ServeApplicationSchema.model_validate(app)
module, _, name = app["import_path"].partition(":")
assert module == "tensord_ray"
getattr(tensord_ray, name)(app["args"])
print(json.dumps(app["args"]))
"""


@pytest.fixture(scope="module", autouse=True)
def _ray_is_there() -> None:
    # Only children import it: its threads and warnings are not ours.
    there = subprocess.run([sys.executable, "-c", "import ray.serve"], capture_output=True, check=False).returncode == 0
    if not there:
        pytest.skip("ray is not installed: pip install 'tensord[test-ray]'")


def environment() -> dict[str, str]:
    paths = [str(ROOT / "deploy" / "ray"), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TENSORD", "RAY_"))}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Runs ``ray_fleet.py``; returns what it has seen, by name."""
    folder = tmp_path_factory.mktemp("ray")
    models = scale_model(folder / "models")
    with open(folder / "log", "w") as log:
        done = subprocess.run(
            [sys.executable, ROOT / "tests" / "deploy" / "ray_fleet.py", models],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment(),
            timeout=3 * PATIENCE,
            check=False,
        )
    assert done.returncode == 0, (folder / "log").read_text()[-5000:]
    return {line["what"]: line for line in map(json.loads, filter(is_object, done.stdout.splitlines()))}


def is_object(line: str) -> bool:
    return line.startswith('{"what"')


def test_one_daemon_a_node_and_the_own_one_is_preferred(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["placed"] == {"what": "placed", "own": [True, True], "daemons": 2}
    near, far = seen["asked"]["near"], seen["asked"]["far"]
    assert [value for value, _ in near] == [4, 4]
    assert len({re.findall(r"<LaneConnection (\S+)/clients\.sock", client)[0] for _, client in near}) == 2
    assert far[0] == 4
    assert "<HttpConnection to http://" in far[1]


def test_parameters_that_are_pushed_once_reach_all_nodes(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["pushed"]["number"] == 7
    assert [value for value, _ in seen["pushed"]["near"]] == [11, 11]
    assert "number 7 of set 'main' of model 'scale' is not newer than 7" in seen["older"]["error"]
    assert seen["unfit"]["error"].count("model 'scale' has no leaf 'other'") == 2


def test_a_rolling_update_fails_nothing(seen: dict[str, dict[str, Any]]) -> None:
    """Callers over HTTP and on both nodes asked all the time. The new daemons have what was pushed before them."""
    assert seen["rolled"]["errors"] == []
    assert min(seen["rolled"]["answers"]) > 0
    assert seen["rolled"]["values"] == [11]
    assert [value for value, _ in seen["as before"]["near"]] == [11, 11]


def test_a_node_that_is_killed_fails_what_it_held(seen: dict[str, dict[str, Any]]) -> None:
    """Four callers had a request each there at most; those of the other node have not noticed."""
    assert len(seen["killed"]["errors"]) <= 4
    assert all("the request may have run" in error for error in seen["killed"]["errors"])
    count, errors = seen["killed"]["near"]
    assert count > 0
    assert errors == []
    assert seen["killed"]["values"] == [11]


def test_nothing_is_left(seen: dict[str, dict[str, Any]]) -> None:
    assert "done" in seen


def test_the_file_for_serve_deploy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, ROOT / "deploy" / "ray" / "serve.yaml"],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["nodes"] == 2
