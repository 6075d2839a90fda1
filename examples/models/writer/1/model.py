"""Continues texts, a character at a time, with a small transformer: a stepped model.

The worker keeps what was written so far of 64 texts on the device (``carry``). Texts join and leave between steps, and each step
adds a character to all of them at once. ``examples/train_writer.py`` trained it on the documentation that comes with Python.
"""

import jax
import jax.numpy as jnp
import numpy as np

# A text comes as the codes of its characters, and goes on as such.
inputs = {"prompt": "UINT8[length]"}
outputs = {"character": "UINT8[1]"}
buckets = {"length": (16, 64, 256)}
# What a client may say besides, as parameters of its request.
request = {"count": ("INT32", 400), "temperature": ("FP32", 0.5), "seed": ("INT32", 0)}
# Texts that are written at a time, and characters of the longest one.
slots = 64
max_steps = 4096
# A client that wants no stream gets all characters in one answer.
gather = "concat"

#: Every character sees so many before it.
WINDOW = 128
HEADS = 4
#: What there is besides the end of a text, which is number 0.
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
_CODES = np.array([0, *CHARACTERS.encode()], np.uint8)
_NUMBERS = np.full(256, CHARACTERS.index("?") + 1, np.int32)
_NUMBERS[_CODES[1:]] = np.arange(1, len(_CODES))


def numbers(codes):
    """Returns the number of each character; characters that the model does not know are taken for question marks."""
    return jnp.asarray(_NUMBERS)[codes.astype(jnp.int32)]


def network(params, before, tokens, at, attend):
    """Returns the logits of the character that follows each of the given characters.

    Args:
      before, tokens, at: numbers of the characters before them, of the characters, and their positions, INT32[...].
      attend: called with a layer's number and its q, k and v, FP32[..., heads, size]; it knows which characters see which.
    """
    x = params["embedding"][tokens] + params["pairs"][before, tokens]
    for i, layer in enumerate(params["layers"]):
        q, k, v = (each.reshape(*tokens.shape, HEADS, -1) for each in jnp.split(_norm(x) @ layer["qkv"], 3, axis=-1))
        x += attend(i, _turned(_norm(q), at), _turned(_norm(k), at), v).reshape(x.shape) @ layer["out"]
        x += jnp.square(jax.nn.relu(_norm(x) @ layer["up"])) @ layer["down"]
    return _norm(x) @ params["next"]


def windowed(at):
    """Returns attention for a whole text: each character sees itself and those before it, as far as the window reaches."""
    distance = at[:, None] - at[None, :]
    seen = (distance >= 0) & (distance < WINDOW)

    def attend(i, q, k, v):
        scores = jnp.einsum("...qhd,...khd->...hqk", q, k) / np.sqrt(q.shape[-1])
        return jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(jnp.where(seen, scores, -1e9)), v)

    return attend


def _norm(x):
    return x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-6)


def _turned(x, at):
    """Applies rotary embedding, so that attention depends on how far apart two characters are. ``at``: their positions."""
    half = x.shape[-1] // 2
    angle = at[..., None, None] * 1e4 ** (-np.arange(half, dtype=np.float32) / half)
    cos, sin, a, b = jnp.cos(angle), jnp.sin(angle), x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _drawn(logits, temperature, seed, at):
    """Chooses the next character of one text. The choice depends only on the logits, the text's seed and the position."""
    key = jax.random.fold_in(jax.random.key(seed), at)
    likely = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-3))
    return jnp.where(temperature > 0, likely, jnp.argmax(logits)).astype(jnp.int32)


def create(path, config, device):
    with np.load(path / "params.npz") as file:
        flat = {name: file[name].astype(np.float32) for name in file.files}
    layers = range(len([name for name in flat if name.startswith("qkv")]))
    params = {
        "embedding": flat["embedding"],
        "pairs": flat["pairs"],
        "layers": [{name: flat[f"{name}_{i}"] for name in ("qkv", "out", "up", "down")} for i in layers],
        "next": flat["next"],
    }

    def init(params, slots):
        size = (slots, HEADS, WINDOW, params["embedding"].shape[1] // HEADS)
        return {
            # A ring for each text: what stands at place n is where n modulo WINDOW is.
            "keys": [jnp.zeros(size) for _ in params["layers"]],
            "values": [jnp.zeros(size) for _ in params["layers"]],
            # The last character, which no layer has seen yet, the one before it, its place, and how many are to follow it.
            "before": jnp.zeros(slots, jnp.int32),
            "token": jnp.zeros(slots, jnp.int32),
            "at": jnp.zeros(slots, jnp.int32),
            "left": jnp.zeros(slots, jnp.int32),
            "temperature": jnp.zeros(slots),
            "seed": jnp.zeros(slots, jnp.int32),
        }

    def insert(params, carry, slot, inputs, request):
        # The prompt is padded to a bucket; its axis says how long it is. An empty one begins like any text does: after an end.
        length = jnp.maximum(inputs["length"], 1)
        tokens = jnp.where(inputs["length"] > 0, numbers(inputs["prompt"]), 0)
        at = jnp.arange(len(tokens))
        ring = jnp.arange(WINDOW)
        newest = ring + (length - 1 - ring) // WINDOW * WINDOW
        keys, values, attend = list(carry["keys"]), list(carry["values"]), windowed(at)

        def keep(i, q, k, v):
            keys[i] = keys[i].at[slot].set(k[newest].swapaxes(0, 1))
            values[i] = values[i].at[slot].set(v[newest].swapaxes(0, 1))
            return attend(i, q, k, v)

        count, temperature, seed = (request[name][0] for name in ("count", "temperature", "seed"))
        before = jnp.concatenate([jnp.zeros(1, jnp.int32), tokens[:-1]])
        logits = network(params, before, tokens, at, keep)[length - 1]
        token = _drawn(logits, temperature, seed, length)
        new = {"before": tokens[length - 1], "token": token, "at": length, "left": count - 1}
        new |= {"temperature": temperature, "seed": seed}
        carry = {name: carry[name].at[slot].set(value) for name, value in new.items()}
        emit = (count > 0) & (token > 0)
        finished = (count <= 1) | (token == 0)
        return {**carry, "keys": keys, "values": values}, _output(token), emit, finished

    def step(params, carry, active):
        before, token, at = carry["before"], carry["token"], carry["at"]
        keys, values = list(carry["keys"]), list(carry["values"])
        rows, place = jnp.arange(len(at)), at % WINDOW
        seen = jnp.arange(WINDOW) <= at[:, None]

        def attend(i, q, k, v):
            keys[i] = keys[i].at[rows, :, place].set(k)
            values[i] = values[i].at[rows, :, place].set(v)
            scores = jnp.einsum("shd,shwd->shw", q, keys[i]) / np.sqrt(q.shape[-1])
            return jnp.einsum("shw,shwd->shd", jax.nn.softmax(jnp.where(seen[:, None], scores, -1e9)), values[i])

        logits = network(params, before, token, at, attend)
        following = jax.vmap(_drawn)(logits, carry["temperature"], carry["seed"], at + 1)
        before, token = jnp.where(active, token, before), jnp.where(active, following, token)
        # Texts that are not active stay as they are: what was written to their rings above is what stands there next.
        carry = {
            **carry,
            "keys": keys,
            "values": values,
            "before": before,
            "token": token,
            "at": at + active,
            "left": carry["left"] - active,
        }
        return carry, _output(token[:, None]), active & (token > 0), (carry["left"] <= 0) | (token == 0)

    return (init, insert, step), params


def _output(token):
    return {"character": jnp.asarray(_CODES)[token].reshape(*token.shape[:-1], 1)}
