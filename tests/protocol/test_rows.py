"""Rows of a batch as clients meet them: a model that mixes them is refused, and one that may mix them gets each request alone."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensord_client

from tests.daemon_process import PATIENCE, DaemonOf, DaemonProcess
from tests.repositories import applying, of_x, write_model

BATCHES = "max_batch_size: 8\ndynamic_batching { max_queue_delay_microseconds: 20000 }\n"
MAY = 'parameters { key: "rows_may_mix" value { string_value: "true" } }'
#: Adds what it finds in the rows that it gets, and how many they are.
MIXING = "x * 0 + x.sum(0) + 10 * len(x)"
FIRST_SEED = applying(
    """
    return {"y": inputs["x"] + jax.random.normal(jax.random.key(request["seed"][0, 0]), (4,))}
    """,
    "x FP32[4]",
    "y FP32[4]",
    more='request = {"seed": "INT32"}',
    arguments="params, inputs, request",
)
REFUSED = {
    "mixing": (of_x(MIXING), "output 'y' depends on the other rows of its batch"),
    "first_seed": (FIRST_SEED, "(model.py, line 7, in apply)"),
    "remembers": (
        applying(
            'return {"y": state["kept"] * 2}, {"kept": inputs["x"] - inputs["x"].mean(0)}',
            "x FP32[4]",
            "y FP32[4]",
            more='state = {"kept": "FP32[4]"}',
            arguments="params, inputs, state",
        ),
        "output 'kept' depends on the other rows of its batch",
    ),
    "ragged": (
        applying(
            """
            x = inputs["x"]
            return {"y": jax.ops.segment_sum(x / abs(x).max(), inputs["of"], 8)[:, None]}
            """,
            "x FP32[length]",
            "y FP32[1]",
            more='ragged = ["x"]\nbuckets, batch_inputs = {"length": (64,)}, {"of": ("SEGMENT_IDS", "INT32", "x")}',
        ),
        "output 'y' depends on the other rows of its batch",
    ),
    "sets": (
        applying(
            'return {"y": inputs["x"] * params["w"][sets] + inputs["x"][:1]}',
            "x FP32[4]",
            "y FP32[4]",
            more="import jax, numpy as np\nbatch_sets = True",
            params='{"w": np.ones(4, np.float32)}',
            arguments="params, inputs, sets",
        ),
        "output 'y' depends on the other rows of its batch",
    ),
}

REFUSED["first_set"] = (
    REFUSED["sets"][0].replace('[sets] + inputs["x"][:1]', "[sets[0]]"),
    "output 'y' depends on the other rows of its batch",
)


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "may", of_x(MIXING), BATCHES + MAY)
    for name, (source, _) in REFUSED.items():
        more = "sequence_batching { oldest { } }" if name == "remembers" else ""
        write_model(repository, name, source, "max_batch_size: 8\n" + more)
    return daemon_of(repository, {"repository": {"strict_readiness": False}})


def test_requests_that_may_mix_share_no_call_and_meet_no_padding(daemon: DaemonProcess) -> None:
    """Twelve clients ask at the same time, with one row to eight."""
    daemon.wait_ready()

    def ask(seed: int) -> None:
        choose = random.Random(seed)
        with tensord_client.connect(daemon.url, patience=PATIENCE) as client:
            model = client.model("may", timeout=PATIENCE)
            for _ in range(20):
                rows, value = choose.randint(1, 8), float(choose.randint(0, 9))
                y = model({"x": np.full((rows, 4), value, np.float32)})["y"]
                assert y.tolist() == [[rows * value + 10 * rows] * 4] * rows

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(ask, range(12)))


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_mixes_is_refused_with_what_it_did(daemon: DaemonProcess, name: str) -> None:
    daemon.wait_ready()
    status, answer = daemon.request("POST", "/v2/repository/index", b"{}")
    states = {model["name"]: model for model in json.loads(answer)}
    assert (status, states[name]["state"]) == (200, "UNAVAILABLE")
    assert REFUSED[name][1] in states[name]["reason"]
    assert "rows_may_mix = True" in states[name]["reason"]
