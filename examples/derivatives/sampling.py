"""Samples the posterior of a line with Hamiltonian Monte Carlo, over a likelihood that is served: the measurements stay there.

python examples/derivatives/sampling.py [--url ADDRESS] [--samples N]        (pip install tensord-client blackjax)

Sixteen chains run in one program of JAX: their likelihoods and gradients are the rows of one request.
"""

import argparse

import blackjax
import jax
import jax.numpy as jnp
import tensord_client

CHAINS, STEP, STEPS, PRIOR = 16, 0.05, 4, 10.0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", help="the server's address; without it the usual places are tried")
    parser.add_argument("--samples", type=int, default=100)
    arguments = parser.parse_args()
    with tensord_client.connect(arguments.url) as client:
        served = tensord_client.jax(client.model("likelihood", timeout=120))

        def log_density(line):
            """Returns the logarithm of the posterior's density: what is served, and a wide normal prior."""
            likelihood = served({"line": line[None]})["log_likelihood"][0]
            return likelihood - 0.5 * jnp.sum((line / PRIOR) ** 2)

        sampler = blackjax.hmc(log_density, STEP, jnp.ones(2), STEPS)

        def step(states, key):
            states, told = jax.vmap(sampler.step)(jax.random.split(key, CHAINS), states)
            return states, (states.position, told.acceptance_rate)

        @jax.jit
        def sample(key):
            begin, *keys = jax.random.split(key, arguments.samples + 1)
            states = jax.vmap(sampler.init)(jax.random.normal(begin, (CHAINS, 2)))
            return jax.lax.scan(step, states, jnp.stack(keys))[1]

        lines, accepted = sample(jax.random.key(0))
        # The chains begin anywhere.
        lines = lines[arguments.samples // 4 :].reshape(-1, 2)
    for name, values in zip(("offset", "slope"), lines.T, strict=True):
        print(f"{name} {values.mean():.3f} +- {values.std():.3f}")
    print(f"{len(lines)} samples, {accepted.mean():.0%} of the moves were accepted")


if __name__ == "__main__":
    main()
