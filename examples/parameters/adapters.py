"""Pushes an adapter for each customer, and computes requests of many customers in one call of the model.

python examples/parameters/adapters.py [--url ADDRESS] [--customers N]                     (pip install tensord-client)

Each customer's adapter is pushed as a set of the served model "adapters", a few KB beside a base that all share. Then all of them
ask at once: requests of different customers wait together and are computed in the same batch (``batch_sets`` of the model).
"""

import argparse
import sys

import numpy as np
import tensord_client

SIZE, RANK = 64, 4


def main():
    """Pushes the adapters and sends the requests. Returns 0 if every customer was answered by their own adapter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server; without it the daemon of this host is looked for")
    parser.add_argument("--customers", type=int, default=32)
    told = parser.parse_args()
    random = np.random.default_rng(0)
    shape = (told.customers, SIZE, RANK)
    downs, ups = (random.normal(size=shape).astype(np.float32) / 8 for _ in range(2))
    x = random.normal(size=(1, SIZE)).astype(np.float32)
    with tensord_client.connect(told.url) as client:
        model = client.model("adapters", timeout=60)
        for customer, (down, up) in enumerate(zip(downs, ups, strict=True)):
            adapter = {"down": down, "up": np.ascontiguousarray(up.T)}
            model.parameters.update({"adapter": adapter}, set=f"customer-{customer}")
        plain = model({"x": x})["y"]  # main's adapter changes nothing
        models = [client.model("adapters", timeout=60, parameter_set=f"customer-{n}") for n in range(told.customers)]
        answers = [one.submit({"x": x}) for one in models]
        wrong = sum(
            not np.allclose(answer.result()["y"], plain + x @ down @ up.T, atol=1e-3)
            for answer, down, up in zip(answers, downs, ups, strict=True)
        )
        print(f"{told.customers} customers were answered, {wrong} of them wrongly")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
