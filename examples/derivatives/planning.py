"""Parks a car by plans that gradients improve, 50 times a second: the dynamics, and their gradients, are a served model's.

python examples/derivatives/planning.py [--url ADDRESS] [--seconds S]        (pip install tensord-client jax)

In each period the controller improves its plan for the next 64 periods by a few steps, and carries out the first action. On
the server's host, requests go over a lane.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import tensord_client

PERIOD, HORIZON, IMPROVEMENTS, RATE = 0.02, 64, 3, 0.3
TARGET, MOST = np.array([2.0, 1.0, 0.0, 0.0], np.float32), np.array([4.0, 3.0], np.float32)


def drive(state, action):
    """Moves the real car, which has a little more drag than the model's."""
    _, _, heading, speed = state
    change = [speed * np.cos(heading), speed * np.sin(heading), speed * action[1], action[0] - 0.15 * speed]
    return (state + PERIOD * np.array(change)).astype(np.float32)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", help="the server's address; without it the usual places are tried")
    parser.add_argument("--seconds", type=float, default=6)
    arguments = parser.parse_args()
    with tensord_client.connect(arguments.url) as client:
        foretell = tensord_client.jax(client.model("car", timeout=120))

        def cost(plan, state):
            states = foretell({"state": state, "actions": MOST * jnp.tanh(plan)})["states"]
            away = (states - TARGET) * jnp.array([1.0, 1.0, 0.3, 0.3])
            return jnp.mean(away**2) + jnp.mean(away[-1] ** 2)

        @jax.jit
        def improve(plan, state):
            def step(plan, _):
                slope = jax.grad(cost)(plan, state)
                return plan - RATE * slope / (jnp.linalg.norm(slope) + 1e-3), None

            plan, _ = jax.lax.scan(step, plan, None, IMPROVEMENTS)
            return jnp.concatenate([plan[1:], plan[-1:]]), MOST * jnp.tanh(plan[0])

        state, plan = np.zeros(4, np.float32), jnp.zeros((HORIZON, 2))
        improve(plan, state)  # compiled before the car moves
        took, late, due = [], 0, time.monotonic()
        for _ in range(int(arguments.seconds / PERIOD)):
            began = time.monotonic()
            plan, action = improve(plan, state)
            state = drive(state, np.asarray(action))
            took.append(time.monotonic() - began)
            due += PERIOD
            late += time.monotonic() > due
            time.sleep(max(0.0, due - time.monotonic()))
    print(f"{len(took)} plans, {1000 * np.median(took):.1f} ms each (median); {late} periods were late")
    print(f"parked {np.hypot(*(state - TARGET)[:2]):.3f} m from the target")


if __name__ == "__main__":
    main()
