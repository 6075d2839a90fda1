"""Has the model ``writer`` continue a text, and prints each character as it comes.

python examples/clients/write_grpc.py [--url HOST:PORT] ["json.dumps("]           (pip install 'tritonclient[grpc]')
"""

import argparse
import queue
import sys

import numpy as np
import tritonclient.grpc as triton


def main() -> int:
    """Prints characters until the model ends. Returns 0 if it ended without an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", default="The ")
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--count", type=int, default=400, help="characters at most")
    parser.add_argument("--temperature", type=float, default=0.5, help="0: always the likeliest")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()

    codes = np.frombuffer(asked.text.encode("ascii", "replace"), np.uint8)
    prompt = triton.InferInput("prompt", list(codes.shape), "UINT8")
    prompt.set_data_from_numpy(codes)
    parameters = {"count": asked.count, "temperature": asked.temperature, "seed": asked.seed}
    arrived = queue.Queue()
    print(asked.text, end="", flush=True)
    with triton.InferenceServerClient(asked.url) as client:
        client.start_stream(lambda result, error: arrived.put((result, error)))
        # The last character may be the last response, or it turns out only later that there is no further one.
        client.async_stream_infer("writer", [prompt], parameters=parameters, enable_empty_final_response=True)
        final = False
        while not final:
            result, error = arrived.get()
            if error is not None:
                print(f"\n{error}", file=sys.stderr)
                return 1
            final = result.get_response().parameters["triton_final_response"].bool_param
            if (character := result.as_numpy("character")) is not None:
                print(chr(character[0]), end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
