"""State with dims that vary, as clients meet it: as large as the first request, growing, from a file, bounded."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.daemon_process import DaemonOf, DaemonProcess
from tests.protocol.sequence_models import checked_sums
from tests.repositories import applying, write_model

LIMIT = 1 << 20
SEQUENCES = "sequence_batching { max_sequence_idle_microseconds: 600000000 oldest { max_candidate_sequences: 128 } }"
#: It has the size of its first request.
SIZED = checked_sums("n", "10")
#: All that came so far, behind what config.pbtxt says; clients may ask for it.
GROWS = """
    import jax.numpy as jnp

    def create(path, config, device):
        def apply(params, inputs, state):
            seen = jnp.concatenate([state["seen"], inputs["x"]], axis=1)
            return {"y": jnp.max(seen, axis=1, keepdims=True)}, {"all": seen}

        return apply, None
"""
GROWS_CONFIG = """
    max_batch_size: 4
    input { name: "x" data_type: TYPE_FP32 dims: 1 }
    output [ { name: "y" data_type: TYPE_FP32 dims: 1 }, { name: "all" data_type: TYPE_FP32 dims: -1 } ]
    sequence_batching {
      max_sequence_idle_microseconds: 600000000
      oldest { max_candidate_sequences: 16 }
      control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
      state {
        input_name: "seen" output_name: "all" data_type: TYPE_FP32 dims: -1
        initial_state { name: "begin" data_type: TYPE_FP32 dims: 2 data_file: "begin" }
      }
    }
    model_warmup { name: "once" batch_size: 1 inputs { key: "x" value { data_type: TYPE_FP32 dims: 1 zero_data: true } } }
"""
#: Without a batch dimension: twice as large at each step.
DOUBLES = applying(
    """
    h = jnp.concatenate([state["h"], state["h"]])
    return {"y": jnp.full(1, h.shape[0], jnp.int32)}, {"h": h}
    """,
    "x FP32[1]",
    "y INT32[1]",
    more='state = {"h": "FP32[-1]"}',
    arguments="params, inputs, state",
)
RAGGED = """
    inputs = {"x": "FP32[n]"}
    outputs = {"y": "FP32[1]"}
    ragged = ["x"]
    max_batch_size = 2
    state = {"h": "FP32[m]"}

    def create(path, config, device):
        return (lambda params, inputs, state: ({}, state)), None
"""


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "sized", SIZED, SEQUENCES)
    write_model(
        repository, "direct", SIZED, "sequence_batching { max_sequence_idle_microseconds: 600000000 direct { } }"
    )
    write_model(repository, "pair", SIZED, f"{SEQUENCES} instance_group {{ count: 2 }}")
    write_model(repository, "padded", SIZED.replace("max_batch", 'buckets = {"n": (4, 8)}\n    max_batch'), SEQUENCES)
    write_model(repository, "grows", GROWS, GROWS_CONFIG)
    (repository / "grows" / "initial_state").mkdir()
    (repository / "grows" / "initial_state" / "begin").write_bytes(np.array([5, 7], np.float32).tobytes())
    write_model(repository, "doubles", DOUBLES, SEQUENCES)
    write_model(repository, "laid", RAGGED, SEQUENCES)
    options: dict[str, dict[str, Any]] = {
        "repository": {"control_mode": "explicit", "load": ["*"], "strict_readiness": False, "exit_on_error": False},
        "executables": {"max_state_byte_size": LIMIT},
    }
    return daemon_of(repository, options)


def ask(client: Any, model: str, who: int | str, x: Any, flags: str = "", rows: bool = True) -> Any:
    """Sends a step of a sequence; returns the result. ``flags``: S for START, E for END."""
    module: Any = httpclient if isinstance(client, httpclient.InferenceServerClient) else grpcclient
    array = np.array([x] if rows else x, np.float32)
    given = module.InferInput("x", list(array.shape), "FP32")
    given.set_data_from_numpy(array)
    return client.infer(model, [given], sequence_id=who, sequence_start="S" in flags, sequence_end="E" in flags)


def sums(client: Any, model: str, who: int | str, x: list[float], flags: str = "") -> list[float]:
    found: list[float] = ask(client, model, who, x, flags).as_numpy("y")[0].tolist()
    return found


@pytest.mark.parametrize("model", ["sized", "direct", "pair", "padded"])
def test_each_sequence_has_the_size_of_its_first_request(client: Any, model: str) -> None:
    assert sums(client, model, 1, [1, 2, 3], "S") == [11, 12, 13]
    assert sums(client, model, 2, [1] * 5, "S") == [11] * 5
    assert sums(client, model, 1, [1, 1, 1]) == [12, 13, 14]
    with pytest.raises(InferenceServerException) as refused:
        sums(client, model, 1, [1, 1])
    assert (
        f"axis 'n' has size 2 in a request to model '{model}', 3 in state 'sum' of sequence 1"
        in refused.value.message()
    )
    assert refused.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
    # It changed nothing.
    assert sums(client, model, 1, [1, 1, 1], "E") == [13, 14, 15]
    assert sums(client, model, 2, [1, 2], "S") == [11, 12]
    assert sums(client, model, 2, [1, 2], "E") == [12, 14]
    with pytest.raises(InferenceServerException, match="must specify the START flag"):
        sums(client, model, 2, [1, 2])


def test_many_of_all_sizes_at_once(grpc: Any) -> None:
    def sequence(who: int) -> None:
        chance = random.Random(who)
        size = chance.randint(1, 12)
        total = [10.0] * size
        for step in range(steps := chance.randint(1, 8)):
            x = [float(chance.randint(0, 9)) for _ in range(size)]
            total = [a + b for a, b in zip(total, x, strict=True)]
            flags = "S" * (step == 0) + "E" * (step == steps - 1)
            assert sums(grpc, chance.choice(["sized"]), f"many-{who}", x, flags) == total

    with ThreadPoolExecutor(16) as pool:
        for _ in pool.map(sequence, range(100)):
            pass


@pytest.mark.parametrize("model", ["sized", "pair"])
def test_a_run_that_fails_changes_no_state(client: Any, model: str) -> None:
    assert sums(client, model, 3, [1, 1], "S") == [11, 11]
    with pytest.raises(InferenceServerException, match=f"model '{model}' version 1 failed with"):
        sums(client, model, 3, [-1, 1])
    assert sums(client, model, 3, [1, 1], "E") == [12, 12]


def test_state_that_grows_from_a_file(client: Any) -> None:
    answers = [ask(client, "grows", "a", [x], flags) for x, flags in ((1, "S"), (9, ""), (2, "E"))]
    assert [answer.as_numpy("all").tolist() for answer in answers] == [[[5, 7, 1]], [[5, 7, 1, 9]], [[5, 7, 1, 9, 2]]]
    assert [answer.as_numpy("y").tolist() for answer in answers] == [[[7]], [[9]], [[9]]]


def test_clients_get_no_state_that_is_no_output(http: Any) -> None:
    response = ask(http, "sized", 4, [1, 1], "SE").get_response()
    assert [output["name"] for output in response["outputs"]] == ["y"]
    assert [tensor["name"] for tensor in http.get_model_metadata("sized")["inputs"]] == ["x"]


def test_all_of_it_is_bounded(http: Any) -> None:
    def double(who: int, flags: str = "") -> int:
        return int(ask(http, "doubles", who, [0], flags, rows=False).as_numpy("y")[0])

    # From one element on: 2**17 have half of what there may be.
    assert [double(1, "S" * (step == 0)) for step in range(17)] == [2 << step for step in range(17)]
    assert [double(2, "S" * (step == 0)) for step in range(17)] == [2 << step for step in range(17)]
    for _ in range(2):
        with pytest.raises(InferenceServerException) as full:
            double(1)
        assert (
            f"the state of sequence 1 of model 'doubles' would have {LIMIT} bytes beside {LIMIT // 2} of other sequences, "
            f"executables.max_state_byte_size allows {LIMIT}"
        ) in full.value.message()
    # Whoever ends makes room, and who was refused goes on where it was.
    double(2, "E")
    assert double(1) == 1 << 18
    assert double(1, "SE") == 2


def test_what_does_not_load_says_why(http: Any) -> None:
    (entry,) = [model for model in http.get_model_repository_index() if model["name"] == "laid"]
    assert "model 'laid': state 'h' varies in size, which is not possible beside ragged inputs" in entry["reason"]
