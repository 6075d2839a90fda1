"""The digits network reaches what its README states, and its script trains what is in the repository."""

from __future__ import annotations

import json

import numpy as np

from examples import train_digits
from tests.examples.models import ROOT, load

#: As stated in examples/models/digits/README.md: of 360 held-out images.
STATED = 358


def test_held_out_accuracy() -> None:
    _, call = load("examples/models/digits")
    images, labels = train_digits.splits()["held_out"]
    logits = call({"image": images})["logits"]
    assert logits.shape == (360, 10)
    assert logits.dtype == np.float32
    assert int((logits.argmax(axis=1) == labels).sum()) >= STATED
    assert f"**{STATED} (99.4 %)**" in (ROOT / "examples/models/digits/README.md").read_text()


def test_the_splits_share_no_image() -> None:
    """Every image is in exactly one split; the few that scikit-learn has twice would otherwise count as known."""
    splits = train_digits.splits()
    assert [len(images) for images, _ in splits.values()] == [360, 180, 1257]
    held_out = {image.tobytes() for image in splits["held_out"][0]}
    assert not held_out & {image.tobytes() for image in splits["train"][0]}


def test_samples_are_held_out_images_with_their_labels() -> None:
    samples = json.loads(train_digits.SAMPLES.read_text())
    assert samples == train_digits.samples()
    assert samples["labels"] == list(range(10))


def test_training_starts_well(monkeypatch) -> None:
    """Three epochs of the two hundred: the script still learns, in a second."""
    monkeypatch.setattr(train_digits, "EPOCHS", 3)
    model = train_digits.network()
    right, total = train_digits.correct(model, train_digits.train(model), "validation")
    assert right / total > 0.8


def test_parameters_are_small_and_no_code() -> None:
    file = train_digits.VERSION / "params.npz"
    assert file.stat().st_size < 1 << 18
    with np.load(file, allow_pickle=False) as arrays:
        assert all(arrays[name].dtype == np.float32 for name in arrays.files)
