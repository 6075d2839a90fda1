"""Declares a stepped model: a small decoder that continues prompts greedily, for many requests at once.

Weights from a fixed seed, so both servers of a comparison hold the same: the arithmetic counts, not the text.
"""

import jax
import jax.numpy as jnp
import numpy as np

inputs = {"prompt": "INT32[length]", "count": "INT32[1]"}
outputs = {"token": "INT32[1]"}
buckets = {"length": (8, 32, 128)}
slots = 16
max_steps = 128
inserts_per_step = 16
step_slots = (1, 4, 16)

VOCABULARY, WIDTH, HEADS, LAYERS, LONGEST = 256, 128, 4, 2, 128


def parameters():
    keys = iter(jax.random.split(jax.random.PRNGKey(2), 3 + 6 * LAYERS))

    def normal(*shape):
        return np.asarray(jax.random.normal(next(keys), shape) * 0.08)

    embedding, positions, last = normal(VOCABULARY, WIDTH), normal(LONGEST, WIDTH), normal(WIDTH, VOCABULARY)
    square, wide = (WIDTH, WIDTH), (WIDTH, 4 * WIDTH)
    shapes = {"q": square, "k": square, "v": square, "w": square, "a": wide, "b": wide[::-1]}
    layers = [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(LAYERS)]
    return {"embedding": embedding, "positions": positions, "last": last, "layers": layers}


def norm(x):
    return (x - x.mean(axis=-1, keepdims=True)) / jnp.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)


def network(params, tokens, at, attend):
    """Returns the next token after each position.

    ``attend``: called with the layer and its q, k and v, [n, heads, size]; it knows which positions see which.
    """
    x = params["embedding"][tokens] + params["positions"][at]
    for i, layer in enumerate(params["layers"]):
        y = norm(x)
        q, k, v = ((y @ layer[name]).reshape(len(y), HEADS, -1) for name in "qkv")
        x = x + attend(i, q, k, v).reshape(x.shape) @ layer["w"]
        x = x + jax.nn.gelu(norm(x) @ layer["a"]) @ layer["b"]
    return jnp.argmax(norm(x) @ params["last"], axis=-1).astype(jnp.int32)


def seen(scores, sees):
    return jax.nn.softmax(jnp.where(sees, scores / np.sqrt(WIDTH // HEADS), -1e9), axis=-1)


def create(path, config, device):
    def init(params, slots):
        size = (slots, HEADS, LONGEST, WIDTH // HEADS)
        caches = {name: [jnp.zeros(size) for _ in range(LAYERS)] for name in ("keys", "values")}
        return caches | {name: jnp.zeros(slots, jnp.int32) for name in ("token", "at", "left")}

    def insert(params, carry, slot, inputs):
        length, count = inputs["length"], inputs["count"][0]
        at = jnp.arange(len(inputs["prompt"]))
        keys, values = list(carry["keys"]), list(carry["values"])

        def attend(i, q, k, v):
            keys[i] = jax.lax.dynamic_update_slice(keys[i], k.swapaxes(0, 1)[None], (slot, 0, 0, 0))
            values[i] = jax.lax.dynamic_update_slice(values[i], v.swapaxes(0, 1)[None], (slot, 0, 0, 0))
            weights = seen(jnp.einsum("qhd,khd->hqk", q, k), at[None, :] <= at[:, None])
            return jnp.einsum("hqk,khd->qhd", weights, v)

        token = network(params, inputs["prompt"], at, attend)[length - 1]
        new = {"token": token, "at": length, "left": count - 1}
        carry = {"keys": keys, "values": values} | {
            name: carry[name].at[slot].set(value) for name, value in new.items()
        }
        return carry, {"token": token[None]}, count > 0, count <= 1

    def step(params, carry, active):
        count = len(active)
        token, at = carry["token"][:count], carry["at"][:count]
        rows = jnp.arange(count)
        keys, values = list(carry["keys"]), list(carry["values"])

        def attend(i, q, k, v):
            keys[i] = keys[i].at[rows, :, at].set(k)
            values[i] = values[i].at[rows, :, at].set(v)
            scores = jnp.einsum("shd,shtd->sht", q, keys[i][:count])
            return jnp.einsum(
                "sht,shtd->shd", seen(scores, jnp.arange(LONGEST) <= at[:, None, None]), values[i][:count]
            )

        token = jnp.where(active, network(params, token, at, attend), token)
        left = carry["left"][:count] - active
        new = {"token": token, "at": at + active, "left": left}
        carry = {"keys": keys, "values": values} | {
            name: carry[name].at[:count].set(value) for name, value in new.items()
        }
        return carry, {"token": token[:, None]}, active, (left <= 0) | (at + 1 >= LONGEST)

    return (init, insert, step), parameters()
