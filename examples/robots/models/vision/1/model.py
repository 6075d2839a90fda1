"""Answers three camera images, a state and a prompt's words with a chunk of 16 actions: a small vision policy in plain JAX.

Its parameters are random numbers, always the same: it shows what a policy looks like, and has learned nothing.
"""

import jax
import jax.numpy as jnp

CAMERAS = ("top", "left_wrist", "right_wrist")
WIDTH = 64

inputs = {**dict.fromkeys(CAMERAS, "UINT8[224,224,3]"), "state": "FP32[8]", "words": "INT32[8]"}
outputs = {"actions": "FP32[16,8]"}
# Each robot asks for one row; what comes together is one batch.
max_batch_size = 16


def create(path, config, device):
    """Returns the function to run and its parameters. The worker calls it."""
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def random(*shape):
        return jax.random.normal(next(keys), shape, jnp.float32) / shape[-2] ** 0.5

    params = {
        "patches": random(32 * 32 * 3, WIDTH),
        "words": random(512, WIDTH),
        "state": random(8, WIDTH),
        "inner": random(WIDTH, WIDTH),
        "actions": random(WIDTH, 16 * 8),
    }

    def apply(params, inputs):
        """Returns actions, FP32[batch, 16, 8], between -1 and 1."""
        images = jnp.stack([inputs[camera] for camera in CAMERAS], 1).astype(jnp.float32) / 255
        batch = images.shape[0]
        # Of each image 7 x 7 patches of 32 x 32 pixels.
        patches = (
            images.reshape(batch, 3, 7, 32, 7, 32, 3).transpose(0, 1, 2, 4, 3, 5, 6).reshape(batch, -1, 32 * 32 * 3)
        )
        seen = jnp.tanh(patches @ params["patches"]).mean(1)
        told = jnp.where(inputs["words"][..., None] > 0, params["words"][inputs["words"]], 0).sum(1)
        inner = jnp.tanh((seen + told + inputs["state"] @ params["state"]) @ params["inner"])
        return {"actions": jnp.tanh(inner @ params["actions"]).reshape(batch, 16, 8)}

    return apply, params
