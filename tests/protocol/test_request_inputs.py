"""Tests that what a model asks of its requests reaches it over both protocols, in batches of different requests."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.daemon_process import DaemonOf, DaemonProcess
from tests.repositories import applying, write_model

#: y: x times a parameter, plus 1000 for each level of priority.
JAX = """
    inputs = {"x": "FP32[n]"}
    outputs = {"y": "FP32[n]"}
    max_batch_size = 8
    buckets = {"n": (4,)}
    request = {"scale": ("FP32", 2), "shift": "INT32", "priority": "UINT32"}

    def create(path, config, device):
        def apply(params, inputs, request):
            assert set(inputs) == {"x"}
            y = inputs["x"] * request["scale"] + request["shift"] + 1000 * request["priority"]
            return {"y": y.astype("float32")}

        return apply, None
"""
#: The same without a batch dimension.
SINGLE = """
    inputs = {"x": "FP32[2]"}
    outputs = {"y": "FP32[2]"}
    request = {"scale": ("FP32", 2)}

    def create(path, config, device):
        return (lambda params, inputs, request: {"y": inputs["x"] * request["scale"]}), None
"""
#: State, what the request says and a control of its sequence, all in one function.
STATEFUL = applying(
    """
    total = state["sum"] + inputs["x"] * request["scale"]
    return {"y": total + 1000 * request["sequence_end"]}, {"sum": total}
    """,
    "x FP32[1]",
    "y FP32[1]",
    more='max_batch_size = 4\nstate = {"sum": "FP32[1]"}\nrequest = {"scale": "FP32", "sequence_end": "BOOL"}',
    arguments="params, inputs, state, request",
)
#: A model that refuses request parameters which it does not declare.
STRICT = SINGLE + "    strict_parameters = True\n"
#: Everything that can be told, as text.
HOST = """
    import json
    import numpy as np

    inputs = {"x": "FP32[1]"}
    outputs = {"y": "BYTES[1]"}
    max_batch_size = 4
    host = True
    request = {
        "id": "BYTES", "priority": "INT32", "timeout": "UINT64", "sequence_id": "BYTES", "sequence_start": "BOOL",
        "sequence_end": "BOOL", "mood": ("BYTES", "calm"), "flag": ("BOOL", False), "level": ("INT8", -1),
    }

    def create(path, config, device):
        def apply(params, inputs, request):
            rows = len(inputs["x"])
            told = [{name: array[i, 0] for name, array in request.items()} for i in range(rows)]
            texts = [json.dumps(each, default=lambda v: v.decode() if isinstance(v, bytes) else v.item()) for each in told]
            return {"y": np.array(texts, object)[:, None]}

        return apply, None
"""


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "jitted", JAX)
    write_model(repository, "single", SINGLE)
    write_model(repository, "strict", STRICT)
    write_model(repository, "stateful", STATEFUL, "sequence_batching { oldest { max_candidate_sequences: 4 } }")
    write_model(repository, "host", HOST)
    write_model(repository, "cached", SINGLE, "response_cache { enable: true }")
    options: dict[str, dict[str, Any]] = {
        "repository": {"control_mode": "explicit", "load": ["*"], "strict_readiness": False, "exit_on_error": False}
    }
    return daemon_of(repository, options)


def ask(client: Any, model: str, x: list[Any], **said: Any) -> Any:
    module: Any = httpclient if isinstance(client, httpclient.InferenceServerClient) else grpcclient
    array = np.array(x, np.float32)
    given = module.InferInput("x", list(array.shape), "FP32")
    given.set_data_from_numpy(array)
    return client.infer(model, [given], **said).as_numpy("y")


def test_parameters_of_a_jitted_model(client: Any) -> None:
    # More than once, because what repeats takes shorter ways.
    for shift in (1, 1, 1, 5, 1):
        made = ask(client, "jitted", [[1, 2, 3], [4, 5, 6]], parameters={"scale": 10, "shift": shift})
        assert made.tolist() == [[10 + shift, 20 + shift, 30 + shift], [40 + shift, 50 + shift, 60 + shift]]
    assert ask(client, "jitted", [[1, 2]], parameters={"shift": 0}, priority=3).tolist() == [[3002, 3004]]


def test_requests_that_say_different_things_share_batches(grpc: Any) -> None:
    def one(number: int) -> Any:
        return ask(grpc, "jitted", [[number, 1]], parameters={"scale": number, "shift": 0}).tolist()

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, range(200))) == [[[number * number, number]] for number in range(200)]


def test_without_a_batch_dimension(client: Any) -> None:
    assert ask(client, "single", [1, 2], parameters={"scale": 3.5}).tolist() == [3.5, 7]
    assert ask(client, "single", [1, 2]).tolist() == [2, 4]


def test_state_and_what_the_request_says(client: Any) -> None:
    said = {"sequence_id": 9, "parameters": {"scale": 10}}
    assert ask(client, "stateful", [[1]], sequence_start=True, **said).tolist() == [[10]]
    assert ask(client, "stateful", [[2]], **said).tolist() == [[30]]
    assert ask(client, "stateful", [[3]], sequence_end=True, **said).tolist() == [[1060]]


def test_everything_that_a_host_model_can_be_told(client: Any) -> None:
    (told,) = ask(client, "host", [[0]], request_id="mine", priority=2, timeout=5_000_000, sequence_id="s", sequence_start=True,
                  parameters={"mood": "glad", "flag": True, "level": 7})[0]  # fmt: skip
    assert json.loads(told) == {
        "id": "mine",
        "priority": 2,
        "timeout": 5_000_000,
        "sequence_id": "s",
        "sequence_start": True,
        "sequence_end": False,
        "mood": "glad",
        "flag": True,
        "level": 7,
    }
    (told,) = ask(client, "host", [[0]], sequence_id=12)[0]
    told = json.loads(told)
    assert (told["sequence_id"], told["mood"], told["flag"], told["level"]) == ("12", "calm", False, -1)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({}, "parameter 'shift' is missing, model 'jitted' needs it"),
        ({"shift": "much"}, "model 'jitted': 'shift' of the request is a text, INT32 is expected"),
        ({"shift": 1 << 40}, "'shift' of the request is 1099511627776, INT32 goes from -2147483648 to 2147483647"),
        ({"shift": True}, "'shift' of the request is a truth value, INT32 is expected"),
    ],
)
def test_what_does_not_fit_is_refused(client: Any, parameters: dict[str, Any], words: str) -> None:
    for _ in range(3):
        with pytest.raises(InferenceServerException) as refused:
            ask(client, "jitted", [[1, 2]], request_id="r", parameters=parameters)
        assert refused.value.message().count("[request id: r] ") == 1
        assert words in refused.value.message()
        assert refused.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")


def test_no_answer_for_one_request_is_given_to_another(http: Any) -> None:
    found = {model["name"]: model.get("reason", "") for model in http.get_model_repository_index()}
    assert "its answers depend on 'scale' of a request, which the response cache does not look at" in found["cached"]


def test_parameters_that_a_model_does_not_know(client: Any, daemon: DaemonProcess) -> None:
    assert ask(client, "strict", [1, 2], parameters={"scale": 3.5}).tolist() == [3.5, 7]
    for _ in range(3):
        with pytest.raises(InferenceServerException) as refused:
            ask(client, "strict", [1, 2], request_id="r", parameters={"sclae": 3.5})
        assert (
            "parameter 'sclae' of a request is unknown to model 'strict'; did you mean 'scale'?"
            in refused.value.message()
        )
        assert refused.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
    for _ in range(3):
        assert ask(client, "single", [1, 2], parameters={"sclae": 3.5}).tolist() == [2, 4]
    daemon.wait_log("parameter 'sclae' of a request is unknown to model 'single'; did you mean 'scale'")
