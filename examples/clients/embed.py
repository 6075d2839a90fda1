"""Compares texts by meaning: text -> tokenizer -> minilm -> cosine similarity of every pair.

python examples/clients/embed.py [--url HOST:PORT] [TEXT ...]    (pip install 'tritonclient[http]'; a server with minilm)
"""

import argparse
import sys

import numpy as np
import tritonclient.http as triton

#: The first two are alike, and so are the last two.
TEXTS = (
    "The cat sits on the mat.",
    "A kitten is resting on the rug.",
    "Shares fell after the quarterly report.",
    "The stock market reacted to poor earnings.",
)


def infer(client: triton.InferenceServerClient, model: str, **arrays: np.ndarray) -> triton.InferResult:
    """Sends one request with the named arrays as its inputs; returns its result."""
    inputs = []
    for name, array in arrays.items():
        tensor = triton.InferInput(name, array.shape, "BYTES" if array.dtype == object else "INT64")
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return client.infer(model, inputs)


def main() -> int:
    """Prints the table of similarities. Returns 0 if the built-in texts came out alike in the expected pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="localhost:8000")
    parser.add_argument("texts", nargs="*", help="at most 32; some of our own if none are given")
    arguments = parser.parse_args()
    texts = arguments.texts or TEXTS

    with triton.InferenceServerClient(arguments.url) as client:
        tokens = infer(client, "tokenizer", text=np.array([[text.encode()] for text in texts], object))
        names = ("input_ids", "attention_mask")
        embeddings = infer(client, "minilm", **{name: tokens.as_numpy(name) for name in names}).as_numpy("embedding")
    similarity = embeddings @ embeddings.T

    for row, text in zip(similarity, texts, strict=True):
        print(*(f"{value:6.3f}" for value in row), f"  {text}")
    if not np.allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-4):
        print("NOT right: an embedding does not have length 1")
        return 1
    if not arguments.texts:
        np.fill_diagonal(similarity, -1)
        if similarity.argmax(axis=1).tolist() != [1, 0, 3, 2]:
            print("NOT right: other texts came out alike")
            return 1
        print("all right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
