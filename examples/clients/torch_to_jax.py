"""Sends images from PyTorch and takes the answers into JAX: the client takes the arrays of either, and needs neither.

python examples/clients/torch_to_jax.py [--url ADDRESS]           (pip install tensord-client torch jax)

A tensor of PyTorch on the host goes in as it is; the outputs are numpy arrays, which JAX takes over.
"""

import argparse
import json
import sys
from pathlib import Path

import jax.numpy as jnp
import tensord_client
import torch


def main() -> int:
    """Sends all samples and computes on with the answers in JAX. Returns 0 if every digit is right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server; without it the daemon of this host is looked for")
    samples = json.loads((Path(__file__).parent / "digits.json").read_text())
    images = torch.tensor(samples["images"], dtype=torch.float32)

    with tensord_client.connect(parser.parse_args().url) as client:
        logits = jnp.asarray(client.model("digits", timeout=30)({"image": images})["logits"])
        predicted = logits.argmax(axis=1).tolist()

    print("predicted", *predicted)
    print("label    ", *samples["labels"])
    return 0 if predicted == samples["labels"] else 1


if __name__ == "__main__":
    sys.exit(main())
