"""Recognises handwritten digits over gRPC, with the images in the message (raw contents).

python examples/clients/grpc_body.py [--url HOST:PORT]           (pip install 'tritonclient[grpc]')
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton


def main() -> int:
    """Sends all samples in one batch. Returns 0 if every digit is right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="localhost:8001")
    url = parser.parse_args().url
    samples = json.loads((Path(__file__).parent / "digits.json").read_text())
    images = np.array(samples["images"], np.float32)

    image = triton.InferInput("image", images.shape, "FP32")
    image.set_data_from_numpy(images)
    with triton.InferenceServerClient(url) as client:
        result = client.infer("digits", [image], outputs=[triton.InferRequestedOutput("logits")])
    predicted = result.as_numpy("logits").argmax(axis=1).tolist()

    print("predicted", *predicted)
    print("label    ", *samples["labels"])
    right = predicted == samples["labels"]
    print("all right" if right else "NOT all right")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
