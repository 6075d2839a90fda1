"""Runs a camera loop: frames come 60 times a second, and the loop acts upon the newest answer that there is.

python examples/clients/camera.py [--url ADDRESS] [--frames N]           (pip install tensord-client)

The camera is a stand-in that shows handwritten digits one after the other. What the model does not keep up with is left out
(``latest``): the loop never waits for an old frame.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import tensord_client

RATE = 60.0


def main() -> int:
    """Runs the loop. Returns 0 if the last answer is right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server; without it the daemon of this host is looked for")
    parser.add_argument("--frames", type=int, default=120)
    arguments = parser.parse_args()
    samples = json.loads((Path(__file__).parent / "digits.json").read_text())
    images = np.array(samples["images"], np.float32)

    answers, seen = 0, -1
    with tensord_client.connect(arguments.url) as client, client.model("digits", timeout=30).latest() as digits:
        frame = np.empty((1, images.shape[1]), np.float32)
        began = time.monotonic()
        for number in range(arguments.frames):
            frame[0] = images[number % len(images)]
            digits.put({"image": frame})
            try:
                seen = int(digits.get(timeout=0)["logits"].argmax())
                answers += 1
            except tensord_client.DeadlineExceeded:
                pass  # none has come since the last frame
            time.sleep(max(0.0, began + (number + 1) / RATE - time.monotonic()))
        while digits.behind:
            seen = int(digits.get(timeout=30)["logits"].argmax())
            answers += 1

    last = samples["labels"][(arguments.frames - 1) % len(images)]
    print(f"{arguments.frames} frames, {answers} answers, {digits.replaced} frames left out")
    print(f"the last is a {seen}, a {last} was shown")
    return 0 if seen == last else 1


if __name__ == "__main__":
    sys.exit(main())
