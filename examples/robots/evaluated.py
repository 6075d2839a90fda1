"""A model server of vla-eval whose policy is a model of a daemon: all its benchmarks, and robots, share batches.

pip install vla-eval tensord-client                       in an environment of its own
python evaluated.py --args.server /run/tensord --args.model policy --address 127.0.0.1:8001
"""

import tensord_client
from vla_eval.model_servers.predict import PredictModelServer
from vla_eval.model_servers.serve import run_server
from vla_eval.specs import IMAGE_RGB, LANGUAGE, STATE_JOINT, DimSpec


class Served(PredictModelServer):
    """Asks for a chunk of actions, of which vla-eval carries out one after the other."""

    def __init__(self, server: str = "", model: str = "policy", chunk_size: int = 16):
        super().__init__(chunk_size=chunk_size)
        self.model = tensord_client.connect(server or None).model(model)

    def predict(self, obs, ctx):
        images = {f"observation/{name}": image[None] for name, image in obs["images"].items()}
        state = obs["state"][None].astype("float32")
        answer = self.model({**images, "observation/state": state, "prompt": [[obs["task_description"]]]})
        return {"actions": answer["actions"][0]}

    def get_action_spec(self):
        return {"joints": DimSpec("joints", 8, "joint_velocities", (-1, 1))}

    def get_observation_spec(self):
        return {"images": IMAGE_RGB, "state": STATE_JOINT, "language": LANGUAGE}


if __name__ == "__main__":
    run_server(Served)
