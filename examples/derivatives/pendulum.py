"""Fits the friction of a pendulum through a simulator that is served: the gradient of the error comes from the server.

python examples/derivatives/pendulum.py [--url ADDRESS] [--steps N]        (pip install tensord-client jax)

The pendulums were "measured" with a friction of 0.35, and some noise; the program begins with 0.05 and knows nothing of how the
served model "pendulum" computes.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import tensord_client

TRUE, FIRST, RATE = 0.35, 0.05, 0.2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", help="the server's address; without it the usual places are tried")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    with tensord_client.connect(arguments.url) as client:
        simulate = tensord_client.jax(client.model("pendulum", timeout=120))
        random = np.random.default_rng(0)
        start = random.uniform(-1, 1, (8, 2)).astype(np.float32)

        def angles(friction):
            """Returns the angles of all pendulums, with the same friction."""
            return simulate({"start": start, "friction": jnp.full((8, 1), friction)})["angles"]

        measured = np.asarray(angles(TRUE)) + 0.01 * random.normal(size=(8, 32)).astype(np.float32)

        @jax.jit
        def step(friction, speed):
            """Takes a step against the gradient, with momentum."""
            error, gradient = jax.value_and_grad(lambda friction: jnp.mean((angles(friction) - measured) ** 2))(
                friction
            )
            speed = 0.8 * speed - RATE * gradient
            return error, friction + speed, speed

        friction, speed = jnp.float32(FIRST), jnp.float32(0)
        for number in range(arguments.steps):
            error, friction, speed = step(friction, speed)
            if number % 10 == 0:
                print(f"step {number}: a mean squared error of {error:.6f}, a friction of {friction:.3f}")
        print(f"a friction of {friction:.3f} was found, and {TRUE} was true")


if __name__ == "__main__":
    main()
