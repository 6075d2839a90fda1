"""The example of a robot: openpi-client with a numpy below 2, the gateway in the same environment, and the policy's actions."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest
import websockets.sync.client as websocket

from tests import openpi_gateway
from tests.daemon_process import PATIENCE, DaemonProcess
from tests.examples.models import ROOT, load
from tests.openpi_gateway import GatewayProcess

pytestmark = pytest.mark.xdist_group("examples")
FOLDER = ROOT / "examples" / "robots"
CAMERAS = ("top", "left_wrist", "right_wrist")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("robots")
    with DaemonProcess(folder, [FOLDER / "models"], {"clients": {"socket": str(folder / "clients.sock")}}) as daemon:
        yield daemon


def test_a_robot_in_an_environment_of_its_own(daemon: DaemonProcess) -> None:
    """It asks once for each chunk of sixteen actions, and carries out the actions that the model's function gives."""
    python = openpi_gateway.environment()
    with GatewayProcess(daemon.folder, "--model", "policy", python=python) as gateway:
        command = [
            python,
            "-W",
            "error::RuntimeWarning",
            FOLDER / "robot.py",
            "--port",
            str(gateway.port),
            "--steps",
            "40",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("40 steps with 3 requests, joints [")


def test_actions_are_those_of_the_function(daemon: DaemonProcess) -> None:
    _, words = load("examples/robots/models/words")
    _, vision = load("examples/robots/models/vision")
    generator = np.random.default_rng(0)
    with GatewayProcess(daemon.folder, "--model", "policy") as gateway, websocket.connect(gateway.url) as connection:
        told = msgpack.unpackb(connection.recv(PATIENCE))
        assert told["action_horizon"] == 16
        assert told["tensord"]["inputs"]["observation/top"] == {"datatype": "UINT8", "shape": [224, 224, 3]}
        for prompt in ("put it down", "fold the towel, now and not later than at nine o'clock", ""):
            images = {name: generator.integers(0, 256, (224, 224, 3), np.uint8) for name in CAMERAS}
            state = generator.standard_normal(8).astype(np.float32)
            observation = {name: packed(value) for name, value in {**images, "state": state}.items()}
            connection.send(msgpack.packb({"observation": observation, "prompt": prompt}))
            answer = connection.recv(PATIENCE)
            assert isinstance(answer, bytes), answer
            actions = msgpack.unpackb(answer)["actions"]
            rows = {name: value[None] for name, value in {**images, "state": state}.items()}
            expected = vision({**rows, **words({"prompt": np.array([[prompt.encode()]], object)})})["actions"][0]
            assert (actions[b"dtype"], actions[b"shape"]) == ("<f4", [16, 8])
            np.testing.assert_allclose(np.frombuffer(actions[b"data"], "<f4").reshape(16, 8), expected, atol=1e-5)


def packed(value: np.ndarray) -> dict[bytes, object]:
    return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}


def test_the_page_names_what_is_there() -> None:
    page = (ROOT / "docs" / "robots.md").read_text()
    for name in ("examples/robots/robot.py", "systemd/tensord-openpi.service"):
        assert name in page
        assert Path(ROOT, name).exists()
