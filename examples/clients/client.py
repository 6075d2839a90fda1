"""Recognises handwritten digits with tensord's own client, in which a model is a function of arrays.

python examples/clients/client.py [--url ADDRESS]           (pip install tensord-client)
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import tensord_client


def main() -> int:
    """Sends all samples in one batch, then each by itself. Returns 0 if every digit is right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server; without it the daemon of this host is looked for")
    samples = json.loads((Path(__file__).parent / "digits.json").read_text())
    images = np.array(samples["images"], np.float32)

    with tensord_client.connect(parser.parse_args().url) as client:
        digits = client.model("digits", timeout=30)
        predicted = digits({"image": images})["logits"].argmax(axis=1).tolist()
        futures = [digits.submit({"image": images[i : i + 1]}) for i in range(len(images))]
        alone = [int(future.result()["logits"].argmax()) for future in futures]

    print("predicted", *predicted)
    print("label    ", *samples["labels"])
    right = predicted == alone == samples["labels"]
    print("all right" if right else "NOT all right")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
