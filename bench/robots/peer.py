"""Serves the policy with ``openpi-server``: ``python -m bench.robots.peer PACKAGES PORT``. It prints a line when it is ready."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

MODEL = Path(__file__).parent / "models" / "policy" / "1" / "model.py"

if __name__ == "__main__":
    packages, port = sys.argv[1:]
    sys.path.append(packages)
    import jax
    import numpy as np
    from openpi_client.base_policy import BasePolicy
    from openpi_server import WebsocketPolicyServer

    apply, params = runpy.run_path(str(MODEL))["create"](None, None, None)
    function = jax.jit(apply)

    class Policy(BasePolicy):
        """Adds and takes off the batch axis, as openpi's own policy does."""

        def infer(self, obs: dict[str, Any]) -> dict[str, Any]:
            actions = function(params, {name: value[None] for name, value in obs.items()})["actions"]
            return {"actions": np.asarray(actions)[0]}

    Policy().infer({"image": np.zeros((96, 96, 3), np.uint8), "state": np.zeros(32, np.float32)})
    print("ready", flush=True)
    WebsocketPolicyServer(Policy(), "127.0.0.1", int(port), {}).serve_forever()
