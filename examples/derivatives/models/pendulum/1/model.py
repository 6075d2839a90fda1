"""Simulates a pendulum with friction, from its angle and speed at the beginning to its angles at 32 moments."""

import jax
import jax.numpy as jnp
import numpy as np

inputs = {"start": "FP32[2]", "friction": "FP32[1]"}
outputs = {"angles": "FP32[32]"}
max_batch_size = 16
derivatives = True

MOMENTS, STEPS, SECONDS = 32, 8, 0.0125


def create(path, config, device):
    def force(state, friction, gravity):
        return jnp.stack([state[1], -gravity * jnp.sin(state[0]) - friction * state[1]])

    def step(state, friction, gravity):
        """Takes a step of the classical method of Runge and Kutta."""
        a = force(state, friction, gravity)
        b = force(state + SECONDS / 2 * a, friction, gravity)
        c = force(state + SECONDS / 2 * b, friction, gravity)
        d = force(state + SECONDS * c, friction, gravity)
        return state + SECONDS / 6 * (a + 2 * b + 2 * c + d)

    def simulate(params, start, friction):
        def moment(state, _):
            state = jax.lax.fori_loop(0, STEPS, lambda _, s: step(s, friction[0], params["gravity"]), state)
            return state, state[0]

        return jax.lax.scan(moment, start, None, MOMENTS)[1]

    def apply(params, inputs):
        angles = jax.vmap(lambda start, friction: simulate(params, start, friction))(
            inputs["start"], inputs["friction"]
        )
        return {"angles": angles}

    return apply, {"gravity": np.float32(9.81)}
