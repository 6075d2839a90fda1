"""A robot that asks a policy over ``openpi-client``, as robots do: an action chunk is asked for, and its actions are carried out.

    pip install openpi-client 'gymnasium>=1' 'numpy<2'        in an environment of the robot's own
    python robot.py --host 127.0.0.1 --port 8900 --steps 64

Its world is a made-up one: eight joints that follow the actions, and three cameras that see noise.
"""

import argparse

import gymnasium
import numpy as np
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy


class Arm(gymnasium.Env):
    """Eight joints and three cameras."""

    camera = gymnasium.spaces.Box(0, 255, (224, 224, 3), np.uint8)
    observation_space = gymnasium.spaces.Dict(
        {
            "top": camera,
            "left_wrist": camera,
            "right_wrist": camera,
            "state": gymnasium.spaces.Box(-10, 10, (8,), np.float64),
        }
    )
    action_space = gymnasium.spaces.Box(-1, 1, (8,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._joints = np.array((options or {}).get("pose", np.zeros(8)), np.float64)
        return self._observation(), {}

    def step(self, action):
        self._joints = np.clip(self._joints + 0.1 * action, -10, 10)
        return self._observation(), -float(np.abs(self._joints).sum()), False, False, {}

    def _observation(self):
        images = {
            name: self.np_random.integers(0, 256, (224, 224, 3), np.uint8)
            for name in ("top", "left_wrist", "right_wrist")
        }
        return {**images, "state": self._joints.copy()}


class Counting(WebsocketClientPolicy):
    """Counts how often it asks."""

    asked = 0

    def infer(self, obs):
        self.asked += 1
        return super().infer(obs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8900)
    parser.add_argument("--steps", type=int, default=64)
    arguments = parser.parse_args()

    policy = Counting(arguments.host, arguments.port)
    metadata = policy.get_server_metadata()
    broker = ActionChunkBroker(policy, metadata["action_horizon"])
    world = Arm()
    observation, _ = world.reset(seed=1, options={"pose": metadata["reset_pose"]})
    for _ in range(arguments.steps):
        asked = {"observation": observation, "prompt": "put the red block on the plate"}
        action = broker.infer(asked)["actions"]
        assert world.action_space.contains(action), action
        observation, *_ = world.step(action)
    print(f"{arguments.steps} steps with {policy.asked} requests, joints {np.round(observation['state'], 4).tolist()}")
