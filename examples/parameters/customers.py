"""Serves a model for each customer: one program, and many parameter sets for it.

python examples/parameters/customers.py [--url ADDRESS] [--customers N]                    (pip install tensord-client)

Each customer has rated some articles. Their weights are fitted to that and pushed as a set of the served model "taste"; then all
of them ask for articles that they have not rated.
"""

import argparse
import sys

import numpy as np
import tensord_client

RATED, ASKED = 40, 5


def fitted(articles, ratings):
    """Fits weights and a bias by least squares, in the names and shapes that the model has."""
    known = np.concatenate([articles, np.ones((len(articles), 1), np.float32)], 1)
    found = np.linalg.lstsq(known, ratings, rcond=None)[0].astype(np.float32)
    return {"weights": found[:-1, None], "bias": found[-1:]}


def main():
    """Pushes the sets and sends the requests. Returns 0 if every customer was answered by their own weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server; without it the daemon of this host is looked for")
    parser.add_argument("--customers", type=int, default=20)
    told = parser.parse_args()
    random = np.random.default_rng(0)
    tastes = random.normal(size=(told.customers, 9)).astype(np.float32)
    wrong = 0
    with tensord_client.connect(told.url) as client:
        parameters = client.model("taste").parameters
        for customer, taste in enumerate(tastes):
            articles = random.normal(size=(RATED, 8)).astype(np.float32)
            parameters.update(fitted(articles, articles @ taste[:8] + taste[8]), set=f"customer-{customer}")
        for customer, taste in enumerate(tastes):
            model = client.model("taste", timeout=60, parameter_set=f"customer-{customer}")
            articles = random.normal(size=(ASKED, 8)).astype(np.float32)
            scores = model({"article": articles})["score"][:, 0]
            wrong += not np.allclose(scores, articles @ taste[:8] + taste[8], atol=1e-3)
        print(f"{told.customers} customers were answered, {wrong} of them wrongly")
        print("sets:", ", ".join(each["set"] for each in parameters.list()[:4]), "...")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
