"""Rows of a batch as clients meet them: a model that mixes them is refused, and one that may mix them gets each request alone."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tensord_client

from tests.cuda_stub.library import CudaStub
from tests.daemon_process import PATIENCE, DaemonOf, DaemonProcess
from tests.on_stub import daemon_on
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
    state, reason = states(daemon)[name]
    assert state == "UNAVAILABLE"
    assert REFUSED[name][1] in reason
    assert "rows_may_mix = True" in reason


def test_a_gpu_worker_reads_results_once_they_are_there(tmp_path: Path) -> None:
    """Models that mix rows are refused, and one that does not is served; their results are there 5 ms after each run."""
    for each in ("cuda", "repository", "daemon"):
        (tmp_path / each).mkdir()
    small, large = "FP32[4]", f"FP32[{1 << 18}]"
    models = {"small_mixing": ("x + x.sum(0)", small), "mixing": ("x + x.sum(0)", large), "apart": ("2 * x", large)}
    for name, (y, x) in models.items():
        write_model(tmp_path / "repository", name, of_x(y, x), "max_batch_size: 2")
    options, environment = daemon_on("cuda", CudaStub(tmp_path / "cuda", delay_us=5000))
    options |= {"repository": {"strict_readiness": False}}
    environment |= {"CUDA_VISIBLE_DEVICES": "0"}
    with DaemonProcess(tmp_path / "daemon", [tmp_path / "repository"], options, environment=environment) as daemon:
        daemon.wait_ready()
        found = states(daemon)
    assert {name: state for name, (state, _) in found.items()} == {
        "small_mixing": "UNAVAILABLE",
        "mixing": "UNAVAILABLE",
        "apart": "READY",
    }
    assert all("depends on the other rows" in found[name][1] for name in ("small_mixing", "mixing"))


def states(daemon: DaemonProcess) -> dict[str, tuple[str, str]]:
    """Returns the state of each of a daemon's models, and the reason for it, by the model's name."""
    status, answer = daemon.request("POST", "/v2/repository/index", b"{}")
    assert status == 200
    return {model["name"]: (model["state"], model.get("reason", "")) for model in json.loads(answer)}
