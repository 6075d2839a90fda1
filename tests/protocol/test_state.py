"""Models that keep state on the device, as clients meet them: who shares it, who loses it, and what does not load."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.daemon_process import ROOT, DaemonOf, DaemonProcess
from tests.protocol.sequence_models import checked_sums
from tests.repositories import write_model
from tests.scrapes import scrape

SEQUENCES = "sequence_batching { max_sequence_idle_microseconds: 60000000 oldest { max_candidate_sequences: 128 } }"
#: State by Triton's names: what goes in, what comes out, where it begins; and the controls as inputs.
TRITON = """
    import jax.numpy as jnp

    def create(path, config, device):
        def apply(params, inputs, state):
            told = 100 * inputs["START"] + 10 * inputs["END"]
            return {"told": told}, {"after": state["before"] + inputs["x"]}

        return apply, None
"""
TRITON_CONFIG = """
    max_batch_size: 4
    input { name: "x" data_type: TYPE_INT32 dims: 2 }
    output [ { name: "told" data_type: TYPE_INT32 dims: 1 }, { name: "after" data_type: TYPE_INT32 dims: 2 } ]
    sequence_batching {
      direct { }
      control_input [
        { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } },
        { name: "END" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } }
      ]
      state {
        input_name: "before" output_name: "after" data_type: TYPE_INT32 dims: 2 use_same_buffer_for_input_output: true
        initial_state { name: "begin" data_type: TYPE_INT32 dims: 2 data_file: "begin" }
      }
    }
"""
TENSORS = 'inputs = {"x": "FP32[1]"}\noutputs = {"y": "FP32[1]"}\nmax_batch_size = 2\n'
APPLY = (
    "def create(path, config, device):\n    return (lambda params, inputs, state: ({'y': inputs['x']}, state)), None"
)


def model_of(*lines: str) -> str:
    return TENSORS + "\n".join(lines)


#: What does not load: its model, its configuration, and why.
REFUSED = {
    "no_sequences": (
        model_of('state = {"h": "FP32[1]"}', APPLY),
        "",
        "model 'no_sequences': state 'h' is declared in model.py, but config.pbtxt has no sequence_batching",
    ),
    "texts": (
        model_of('state = {"h": "BYTES[1]"}', APPLY),
        SEQUENCES,
        "state 'h' is BYTES, which a jitted function cannot keep",
    ),
    "no_dict": (
        model_of('state = ["h"]', APPLY),
        SEQUENCES,
        "state of model.py must be a dict of names to declarations",
    ),
    "two_arguments": (
        model_of('state = {"h": "FP32[1]"}', APPLY.replace(", state:", ":")),
        SEQUENCES,
        "the function of create() takes (params, inputs), it is called with (params, inputs, state)",
    ),
    "three_arguments": (
        model_of(APPLY),
        SEQUENCES,
        "takes (params, inputs, state), it is called with (params, inputs)",
    ),
    "no_pair": (
        model_of('state = {"h": "FP32[1]"}', APPLY.replace("({'y': inputs['x']}, state)", "{'y': inputs['x']}")),
        SEQUENCES,
        "apply returned dict, a pair (outputs, state) is expected",
    ),
    "first": (
        model_of('state = {"h": "FP32[2]"}', APPLY + ", {'h': __import__('numpy').zeros(3, 'float32')}"),
        SEQUENCES,
        "state 'h' begins as FP32[3] from create(), declared is FP32[2]",
    ),
    "unknown_first": (
        model_of('state = {"h": "FP32[2]"}', APPLY + ", {'g': 1}"),
        SEQUENCES,
        "create() returned state 'g', which is not declared",
    ),
    "host_state": (
        model_of("host = True", 'state = {"h": "FP32[2]"}', APPLY),
        SEQUENCES,
        "state is for functions that are compiled; a host model keeps its own",
    ),
    "huge": (
        model_of('state = {"h": "FP32[1000000000]"}', APPLY),
        SEQUENCES,
        "the state of 128 sequences has 516000000000 bytes, executables.max_state_byte_size allows 1048576",
    ),
    "other_dims": (
        model_of('state = {"h": "FP32[3]"}', APPLY),
        SEQUENCES[:-1] + ' state { input_name: "h" output_name: "h" data_type: TYPE_FP32 dims: 2 } }',
        "state 'h': dims [3] in model.py, [2] in config.pbtxt",
    ),
    "short_file": (
        model_of(APPLY),
        SEQUENCES[:-1]
        + ' state { input_name: "h" output_name: "h" data_type: TYPE_FP32 dims: 2 '
        + 'initial_state { name: "b" data_type: TYPE_FP32 dims: 2 data_file: "begin" } } }',
        "initial_state setting expects 8 bytes, but the data provided from begin has 3 bytes.",
    ),
}


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "sums", checked_sums("1", "np.array([10], np.float32)"), SEQUENCES)
    write_model(repository, "triton", TRITON, TRITON_CONFIG)
    begin(repository / "triton", np.array([5, 7], np.int32).tobytes())
    for name, (source, config, _) in REFUSED.items():
        write_model(repository, name, source, config)
    begin(repository / "short_file", b"abc")
    shutil.copytree(ROOT / "examples" / "models" / "running_mean", repository / "running_mean")
    options = {
        "repository": {"control_mode": "explicit", "load": ["*"], "strict_readiness": False, "exit_on_error": False},
        "executables": {"max_state_byte_size": 1 << 20},
    }
    return daemon_of(repository, options)


def begin(folder: Path, content: bytes) -> None:
    (folder / "initial_state").mkdir()
    (folder / "initial_state" / "begin").write_bytes(content)


def ask(client: Any, model: str, who: int | str, x: Any, flags: str = "", name: str = "x") -> Any:
    """Sends a step of a sequence; returns the result. ``flags``: S for START, E for END."""
    module: Any = httpclient if isinstance(client, httpclient.InferenceServerClient) else grpcclient
    array = np.atleast_2d(x)
    given = module.InferInput(name, list(array.shape), {"f": "FP32", "i": "INT32"}[array.dtype.kind])
    given.set_data_from_numpy(array)
    return client.infer(model, [given], sequence_id=who, sequence_start="S" in flags, sequence_end="E" in flags)


def total(client: Any, who: int | str, x: float, flags: str = "") -> float:
    return float(ask(client, "sums", who, np.float32(x), flags).as_numpy("y")[0, 0])


def test_each_sequence_has_its_own(client: Any) -> None:
    assert [total(client, 1, 1, "S"), total(client, 2, 5, "S"), total(client, 1, 1), total(client, 2, 5)] == [
        11,
        15,
        12,
        20,
    ]
    assert total(client, 1, 1, "S") == 11
    assert [total(client, 1, 1, "E"), total(client, 2, 5, "E")] == [12, 25]


def test_many_at_once(grpc: Any) -> None:
    """More sequences than slots: the rest waits for those that end."""

    def sequence(who: int) -> list[float]:
        return [total(grpc, 1000 + who, who, {0: "S", 9: "E"}.get(step, "")) for step in range(10)]

    with ThreadPoolExecutor(32) as pool:
        for who, sums in enumerate(pool.map(sequence, range(200))):
            assert sums == [10 + who * (step + 1) for step in range(10)]


def test_state_as_triton_configures_it(client: Any) -> None:
    answers = [ask(client, "triton", "a", np.array([1, 2], np.int32), flags) for flags in ("S", "", "E")]
    assert [answer.as_numpy("after").tolist() for answer in answers] == [[[6, 9]], [[7, 11]], [[8, 13]]]
    assert [answer.as_numpy("told").tolist() for answer in answers] == [[[100]], [[0]], [[10]]]


def test_the_example(client: Any) -> None:
    readings = np.array([[1, 2, 3], [3, 2, 1], [5, 5, 5]], np.float32)
    for number, reading in enumerate(readings):
        answer = ask(client, "running_mean", "sensor", reading, "S" if number == 0 else "", "reading")
        np.testing.assert_allclose(answer.as_numpy("mean")[0], readings[: number + 1].mean(axis=0), rtol=1e-6)


def test_a_failed_run_loses_every_sequence_once_and_clearly(client: Any, daemon: DaemonProcess) -> None:
    workers = [process.pid for process in daemon.workers]
    before = scrape(daemon.metrics_url).model("tensord_model_sequences_lost_total", "sums")
    for who in ("begun", "failing", "anew"):
        assert total(client, who, 1, "S") == 11
    for who, x in (("failing", -1), ("begun", 1)):
        with pytest.raises(InferenceServerException) as lost:
            total(client, who, x)
        expected = (
            f"sequence {who} of model 'sums' was lost after an execution error; start it again with the START flag"
        )
        assert expected in lost.value.message()
        assert lost.value.status() in ("503", "StatusCode.UNAVAILABLE", None)
        with pytest.raises(InferenceServerException, match="must specify the START flag on the first request"):
            total(client, who, 1)
    assert scrape(daemon.metrics_url).model("tensord_model_sequences_lost_total", "sums") >= before + 3
    assert [total(client, who, 1, "S") for who in ("failing", "begun", "anew")] == [11, 11, 11]
    assert [process.pid for process in daemon.workers] == workers


def test_what_does_not_load_says_why(daemon: DaemonProcess, http: Any) -> None:
    found = {model["name"]: model.get("reason", "") for model in http.get_model_repository_index()}
    reasons = {name: text in found[name] for name, (_, _, text) in REFUSED.items()}
    assert all(reasons.values()), json.dumps(
        {name: found[name] for name, fits in reasons.items() if not fits}, indent=1
    )


def test_nan_stays_with_its_sequence(client: Any) -> None:
    total(client, 51, 1, "S")
    total(client, 52, 1, "S")
    assert np.isnan(total(client, 51, np.nan))
    assert total(client, 52, 1) == 12
    assert np.isnan(total(client, 51, 1, "E"))
