"""Trains examples/models/digits on scikit-learn's digits and writes its parameters and a few sample images for the clients.

    python examples/train_digits.py            (needs the [test] extra, for scikit-learn; ten seconds on two CPU cores)

Every seed is fixed. The 1797 images are shuffled once and split: 1257 to train on, 180 that chose the settings
below, 360 held out, which chose nothing. Another processor may round differently in the last bits.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

EXAMPLES = Path(__file__).parent
VERSION = EXAMPLES / "models" / "digits" / "1"
SAMPLES = EXAMPLES / "clients" / "digits.json"

EPOCHS = 200
BATCH = 64
LEARNING_RATE = 2e-3
#: Adam's decay rates and the term that keeps its division finite.
DECAY_1, DECAY_2, EPSILON = 0.9, 0.999, 1e-8


def network() -> ModuleType:
    """Loads the model's own module, so that what is trained is what is served."""
    spec = importlib.util.spec_from_file_location("digits_model", VERSION / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def splits() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns images FP32[n, 64] and labels INT64[n] of "train", "validation" and "held_out"."""
    import sklearn.datasets  # a second, which those who only want the network need not spend

    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order].astype(np.float32), labels[order].astype(np.int64)
    bounds = {"held_out": (0, 360), "validation": (360, 540), "train": (540, len(images))}
    return {name: (images[start:end], labels[start:end]) for name, (start, end) in bounds.items()}


def initial(random: np.random.Generator) -> dict[str, jax.Array]:
    """Returns untrained parameters: kernels and weights scaled to their fan-in (He), biases zero."""
    shapes = {"kernel_0": (3, 3, 1, 16), "kernel_1": (3, 3, 16, 32), "weight_2": (512, 64), "weight_3": (64, 10)}
    params = {}
    for name, shape in shapes.items():
        fan_in = int(np.prod(shape[:-1]))
        params[name] = jnp.asarray(random.normal(size=shape) * (2 / fan_in) ** 0.5, jnp.float32)
        params[f"bias_{name[-1]}"] = jnp.zeros(shape[-1], jnp.float32)
    return params


def shifted(images: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Moves each image by at most one pixel in each direction, so that the network does not learn positions by heart."""
    padded = np.pad(images.reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)))
    corners = random.integers(0, 3, (len(images), 2))
    return np.stack([image[y : y + 8, x : x + 8].ravel() for image, (y, x) in zip(padded, corners, strict=True)])


def train(model: ModuleType, seed: int = 0) -> dict[str, np.ndarray]:
    """Trains the network and returns its parameters: Adam on the cross entropy, the rate falling to zero along a cosine."""
    images, labels = splits()["train"]
    random = np.random.default_rng(seed)
    params = initial(random)
    first = second = jax.tree.map(jnp.zeros_like, params)
    batches = len(images) // BATCH

    def loss(params, images, labels):
        log_probabilities = jax.nn.log_softmax(model.apply(params, {"image": images})["logits"])
        return -jnp.take_along_axis(log_probabilities, labels[:, None], axis=1).mean()

    @jax.jit
    def step(params, first, second, count, images, labels):
        gradient = jax.grad(loss)(params, images, labels)
        first = jax.tree.map(lambda m, g: DECAY_1 * m + (1 - DECAY_1) * g, first, gradient)
        second = jax.tree.map(lambda v, g: DECAY_2 * v + (1 - DECAY_2) * g * g, second, gradient)
        rate = LEARNING_RATE * 0.5 * (1 + jnp.cos(jnp.pi * count / (EPOCHS * batches)))

        def moved(p, m, v):
            return p - rate * (m / (1 - DECAY_1**count)) / (jnp.sqrt(v / (1 - DECAY_2**count)) + EPSILON)

        return jax.tree.map(moved, params, first, second), first, second

    count = 0
    for _ in range(EPOCHS):
        order = random.permutation(len(images))
        for rows in order[: batches * BATCH].reshape(batches, BATCH):
            count += 1
            params, first, second = step(
                params, first, second, float(count), shifted(images[rows], random), labels[rows]
            )
    return {name: np.asarray(value) for name, value in params.items()}


def correct(model: ModuleType, params: dict[str, np.ndarray], split: str) -> tuple[int, int]:
    """Returns how many images of a split are recognised, and how many there are."""
    images, labels = splits()[split]
    logits = jax.jit(model.apply)(params, {"image": images})["logits"]
    return int((np.argmax(logits, axis=1) == labels).sum()), len(labels)


def samples() -> dict[str, list[object]]:
    """Returns the first held-out image of each digit and its label, for the clients."""
    images, labels = splits()["held_out"]
    first = [int(np.flatnonzero(labels == digit)[0]) for digit in range(10)]
    return {"images": images[first].astype(int).tolist(), "labels": labels[first].tolist()}


def main() -> None:
    """Trains the network, prints how many images it recognises, and writes the parameters and samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=VERSION / "params.npz")
    parser.add_argument("--samples", type=Path, default=SAMPLES)
    arguments = parser.parse_args()
    model = network()
    params = train(model)
    for split in ("train", "validation", "held_out"):
        right, total = correct(model, params, split)
        print(f"{split}: {right} of {total} right, {right / total:.2%}")
    np.savez(arguments.output, **params)
    arguments.samples.write_text(json.dumps(samples()) + "\n")


if __name__ == "__main__":
    main()
