"""Recognises handwritten digits through system shared memory: requests and answers carry names and offsets, no tensors.

python examples/clients/http_shared_memory.py [--url HOST:PORT]  (pip install 'tritonclient[http]'; same host as the daemon)
"""

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import shared_memory


def main() -> int:
    """Sends all samples in one batch. Returns 0 if every digit is right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="localhost:8000")
    url = parser.parse_args().url
    samples = json.loads((Path(__file__).parent / "digits.json").read_text())
    images = np.array(samples["images"], np.float32)
    logits_shape = (len(images), 10)
    logits_byte_size = 4 * len(images) * 10

    # One region holds both tensors. Offsets that are multiples of 64 let a CPU worker use the input where it lies.
    name = f"digits_{os.getpid()}"
    offset = -(-images.nbytes // 64) * 64
    byte_size = offset + logits_byte_size
    # Without create_only it would take whatever object has that name, somebody else's included.
    region = shared_memory.create_shared_memory_region(name, f"/{name}", byte_size, create_only=True)
    try:
        shared_memory.set_shared_memory_region(region, [images])
        with triton.InferenceServerClient(url) as client:
            client.register_system_shared_memory(name, f"/{name}", byte_size)
            try:
                image = triton.InferInput("image", images.shape, "FP32")
                image.set_shared_memory(name, images.nbytes, offset=0)
                output = triton.InferRequestedOutput("logits")
                output.set_shared_memory(name, logits_byte_size, offset=offset)
                client.infer("digits", [image], outputs=[output])
                # A view of the region: it must not outlive it.
                logits = shared_memory.get_contents_as_numpy(region, np.float32, logits_shape, offset)
                predicted = logits.argmax(axis=1).tolist()
                del logits
            finally:
                client.unregister_system_shared_memory(name)
    finally:
        shared_memory.destroy_shared_memory_region(region)

    print("predicted", *predicted)
    print("label    ", *samples["labels"])
    right = predicted == samples["labels"]
    print("all right" if right else "NOT all right")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
