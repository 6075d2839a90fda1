"""The example of a robot: openpi-client with a numpy below 2, the gateway in the same environment, and the policy's actions."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest
import websockets.sync.client as websocket

from tests import openpi_gateway
from tests.daemon_process import PATIENCE, DaemonProcess, end_group
from tests.examples.models import ROOT, load
from tests.openpi_gateway import GatewayProcess, packed

pytestmark = pytest.mark.xdist_group("examples")
FOLDER = ROOT / "examples" / "robots"
CAMERAS = ("top", "left_wrist", "right_wrist")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("robots")
    with DaemonProcess(folder, [FOLDER / "models"], {"clients": {"socket": str(folder / "clients.sock")}}) as daemon:
        yield daemon


def test_a_robot_in_an_environment_of_its_own(daemon: DaemonProcess) -> None:
    """The robot asks once for each chunk of sixteen actions, and carries out the actions that the model's function gives."""
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
            actions = openpi_gateway.actions(connection.recv(PATIENCE))["actions"]
            rows = {name: value[None] for name, value in {**images, "state": state}.items()}
            expected = vision({**rows, **words({"prompt": np.array([[prompt.encode()]], object)})})["actions"][0]
            assert actions.dtype == np.float32
            np.testing.assert_allclose(actions, expected, atol=1e-5)


#: Writes a program as openpi's environment would, and what it answers there.
_EXPORT = """
import sys
from pathlib import Path

import jax, jax.numpy as jnp, numpy as np
from jax import export

folder = Path(sys.argv[1])
weights = np.linspace(-1, 1, 32 * 16 * 7, dtype=np.float32).reshape(32, 16 * 7)

def infer(params, inputs):
    seen = inputs["observation"]["image"].astype(jnp.float32).mean((1, 2, 3))[:, None] / 255
    return {"actions": jnp.tanh((inputs["observation"]["state"] + seen) @ params["w"]).reshape(-1, 16, 7)}

(batch,) = export.symbolic_shape("b")
shapes = {"image": ((batch, 64, 64, 3), np.uint8), "state": ((batch, 32), np.float32)}
taken = {"observation": {name: jax.ShapeDtypeStruct(*each) for name, each in shapes.items()}}
program = export.export(jax.jit(infer), platforms=("cpu", "cuda"))({"w": weights}, taken)
(folder / "model.jaxexport").write_bytes(program.serialize())
np.savez(folder / "params.npz", w=weights)
seen = {"image": np.full((1, 64, 64, 3), 7, np.uint8), "state": np.linspace(0, 1, 32, dtype=np.float32)[None]}
answer = np.asarray(jax.jit(infer)({"w": weights}, {"observation": seen})["actions"])
print(jax.__version__, np.__version__, answer.tobytes().hex())
"""


@pytest.mark.release("installs the JAX that openpi pins")
def test_a_program_of_openpi_s_own_environment(tmp_path: Path) -> None:
    python = openpi_gateway.jax_of_openpi()
    version = tmp_path / "models" / "pi" / "1"
    version.mkdir(parents=True)
    command = [python, "-c", _EXPORT, version]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    jax, numpy, expected = done.stdout.split()
    assert (jax, numpy) == ("0.5.3", "1.26.4")
    options = {"clients": {"socket": str(tmp_path / "clients.sock")}}
    with (
        DaemonProcess(tmp_path, [tmp_path / "models"], options),
        GatewayProcess(tmp_path, "--model", "pi") as gateway,
        websocket.connect(gateway.url) as connection,
    ):
        connection.recv(PATIENCE)
        image, state = np.full((64, 64, 3), 7, np.uint8), np.linspace(0, 1, 32)
        connection.send(msgpack.packb({"observation/image": packed(image), "observation": {"state": packed(state)}}))
        assert openpi_gateway.actions(connection.recv(PATIENCE))["actions"].tobytes().hex() == expected


def test_a_policy_object_that_stays_as_it_is(tmp_path: Path) -> None:
    """The page's Python model serves it; only what makes the object is added."""
    page = (ROOT / "docs" / "robots.md").read_text()
    (source,) = re.findall(r"```python\n(import numpy as np\n.+?)```", page, re.DOTALL)
    policy = """
class Policy:
    def infer(self, obs):
        return {"actions": obs["observation/state"] * [[1], [2]] + len(obs["prompt"][0])}

create_policy = Policy
"""
    version = tmp_path / "models" / "kept" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(source + policy)
    (version.parent / "config.pbtxt").write_text(
        'backend: "python" input { name: "observation/state" data_type: TYPE_FP32 dims: 3 } '
        'input { name: "prompt" data_type: TYPE_STRING dims: 1 } output { name: "actions" data_type: TYPE_FP32 dims: [2, 3] }'
    )
    options = {"clients": {"socket": str(tmp_path / "clients.sock")}}
    with (
        DaemonProcess(tmp_path, [tmp_path / "models"], options),
        GatewayProcess(tmp_path, "--model", "kept") as gateway,
        websocket.connect(gateway.url) as connection,
    ):
        connection.recv(PATIENCE)
        connection.send(msgpack.packb({"observation": {"state": packed(np.arange(3.0))}, "prompt": "go"}))
        actions = openpi_gateway.actions(connection.recv(PATIENCE))["actions"]
        assert (actions.dtype, actions.tolist()) == (np.float32, [[2, 3, 4], [2, 4, 6]])


#: A benchmark of vla-eval, as its runner runs it against a model server.
_BENCHMARK = """
import sys

import anyio, numpy as np
from vla_eval.benchmarks.base import StepBenchmark, StepResult
from vla_eval.connection import Connection
from vla_eval.runners.sync_runner import SyncEpisodeRunner

class Arm(StepBenchmark):
    def get_tasks(self):
        return [{"name": "put it down"}]

    def reset(self, task):
        self.steps, self.joints = 0, np.zeros(8)
        return self.joints

    def step(self, action):
        self.steps, self.joints = self.steps + 1, self.joints + 0.1 * action["actions"]
        return StepResult(self.joints, 0.0, self.steps == 20, {})

    def make_obs(self, joints, task):
        images = {name: np.full((224, 224, 3), 7, np.uint8) for name in ("top", "left_wrist", "right_wrist")}
        return {"images": images, "state": joints, "task_description": task["name"]}

    def get_step_result(self, result):
        return {"success": bool(np.abs(self.joints).sum() > 0), "joints": self.joints.tolist()}

async def main():
    arm = Arm()
    async with Connection(sys.argv[1]) as connection:
        print(await SyncEpisodeRunner().run_episode(arm, arm.get_tasks()[0], connection, max_steps=30))

anyio.run(main)
"""


@pytest.mark.release("installs vla-eval")
def test_the_runner_of_vla_eval_asks_a_model_server_of_the_example(daemon: DaemonProcess) -> None:
    python = openpi_gateway.made("vla-eval", "vla-eval==0.8.0")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = "127.0.0.1:{1}".format(*free.getsockname())
    command = [python, FOLDER / "evaluated.py", f"--args.server={daemon.folder}", f"--address={address}"]
    with subprocess.Popen([str(word) for word in command], text=True, start_new_session=True) as serving:
        try:  # its connection waits for the server
            asked = [python, "-c", _BENCHMARK, f"ws://{address}"]
            done = subprocess.run(asked, capture_output=True, text=True, timeout=PATIENCE)
        finally:
            end_group(serving, signal.SIGTERM)
    assert done.returncode == 0, done.stderr
    assert "'success': True" in done.stdout
    assert "'steps': 20" in done.stdout


def test_the_page_names_what_is_there() -> None:
    page = (ROOT / "docs" / "robots.md").read_text()
    for name in ("examples/robots/robot.py", "examples/robots/evaluated.py", "systemd/tensord-openpi.service"):
        assert name in page
        assert Path(ROOT, name).exists()
