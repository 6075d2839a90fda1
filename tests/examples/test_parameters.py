"""The examples of parameters that are pushed: actors of a learner get better, customers have weights or adapters of their own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon_process import DaemonOf, DaemonProcess
from tests.examples.models import ROOT

pytestmark = pytest.mark.xdist_group("examples")
FOLDER = ROOT / "examples" / "parameters"


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    return daemon_of(FOLDER / "models", folder=tmp_path_factory.mktemp("parameters"))


def run(daemon: DaemonProcess, program: str, *words: str) -> str:
    """Runs an example, which must end with 0; returns its output."""
    command = [sys.executable, str(FOLDER / program), "--url", daemon.url, *words]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def pushed(daemon: DaemonProcess, picture: Path, count: int) -> list[float]:
    """Has the learner push so often; returns the mean of each round."""
    output = run(daemon, "learner.py", "--pushes", str(count), "--plot", str(picture))
    status, answer = daemon.get("/v2/models/cartpole.parameter_gradient/stats")
    assert status == 200
    assert json.loads(answer)["model_stats"][0]["inference_count"] >= count
    found = re.findall(r"pushed (\d+): a round by (\d+) to (\d+) returned (\d+\.\d)", output)
    rounds = [(int(number), int(first), int(last), float(mean)) for number, first, last, mean in found]
    assert [number for number, *_ in rounds] == list(range(1, count + 1))
    assert all(first <= last < number for number, first, last, _ in rounds)
    assert picture.read_bytes().startswith(b"\x89PNG")
    return [mean for *_, mean in rounds]


def test_actors_are_answered_by_what_the_learner_pushes(daemon: DaemonProcess, tmp_path: Path) -> None:
    """By the newest parameters or by few before them."""
    pushed(daemon, tmp_path / "return.png", 10)


@pytest.mark.release("the same with as many pushes as it takes to get better")
def test_actors_get_better_while_the_learner_pushes(daemon: DaemonProcess, tmp_path: Path) -> None:
    """The return rises."""
    means = pushed(daemon, tmp_path / "return.png", 60)
    assert sum(means[-10:]) > 3 * sum(means[:10])


def test_every_customer_is_answered_by_their_own_weights(daemon: DaemonProcess) -> None:
    output = run(daemon, "customers.py", "--customers", "30")
    assert "30 customers were answered, 0 of them wrongly" in output
    assert "sets: main, customer-0" in output


def test_customers_with_adapters_share_calls(daemon: DaemonProcess) -> None:
    output = run(daemon, "adapters.py", "--customers", "32")
    assert "32 customers were answered, 0 of them wrongly" in output
