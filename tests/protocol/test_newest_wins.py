"""A waiting request is replaced by the next one of its key, over both protocols, while ten times too many are sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.daemon_process import PATIENCE, DaemonProcess, wait_until
from tests.repositories import write_model
from tests.scrapes import scrape

Start = Callable[..., DaemonProcess]
#: Requests for each execution, and executions.
RATE, EXECUTIONS = 10, 5

#: Writes what it was given when a run begins, and ends that when it is told.
CAMERA = """
    import itertools, os, pathlib, time
    inputs = {{"x": "INT32[1]"}}
    outputs = {{"y": "INT32[1]"}}
    host = True
    runs = itertools.count(1)

    def create(path, config, device):
        def apply(params, inputs):
            folder, run = pathlib.Path({folder!r}), next(runs)
            (folder / "written").write_text(str(int(inputs["x"][0])))
            os.replace(folder / "written", folder / f"run-{{run}}")
            while not (folder / f"go-{{run}}").exists():
                time.sleep(0.005)
            {answer}
        return apply, None
"""
CONFIG = 'backend: "jax" '
STREAMS = "model_transaction_policy { decoupled: true } "
ALL = 'parameters { key: "replace_waiting" value { string_value: "true" } } '


def ask_over_http(daemon: DaemonProcess, number: int, key: str) -> int | str:
    """Sends a request; returns the number in its answer, or the text of a 409."""
    parameters = {"tensord_replace": key} if key else {}
    given = [{"name": "x", "datatype": "INT32", "shape": [1], "data": [number]}]
    status, answer = daemon.infer("camera", given, id=f"frame {number}", parameters=parameters)
    assert status in (200, 409)
    return str(answer["error"]) if status == 409 else int(answer["outputs"][0]["data"][0])


def ask_over_grpc(daemon: DaemonProcess, number: int, key: str) -> int | str:
    given = grpcclient.InferInput("x", [1], "INT32")
    given.set_data_from_numpy(np.array([number], np.int32))
    parameters = {"tensord_replace": key} if key else None
    with grpcclient.InferenceServerClient(daemon.grpc_url) as client:
        try:
            answer = client.infer(
                "camera", [given], request_id=f"frame {number}", parameters=parameters, client_timeout=PATIENCE
            )
        except InferenceServerException as error:
            assert error.status() == "StatusCode.ABORTED"
            return str(error.message())
        return int(answer.as_numpy("y")[0])


def ask_a_stream(daemon: DaemonProcess, number: int, key: str) -> int | str:
    body = {"x": number, "id": f"frame {number}", "parameters": {"tensord_replace": key} if key else {}}
    status, answer = daemon.request("POST", "/v2/models/camera/generate_stream", json.dumps(body).encode())
    events = [json.loads(line.removeprefix(b"data: ")) for line in answer.splitlines() if line.startswith(b"data: ")]
    if status == 409 or "error" in events[0]:
        return str((events or [json.loads(answer)])[0]["error"])
    return int(events[0]["y"])


def pending(daemon: DaemonProcess) -> float:
    """Returns how many requests wait in the model's queue."""
    return scrape(daemon.metrics_url).model("nv_inference_pending_request_count", "camera")


@pytest.mark.parametrize("key", ["left", ""], ids=["key", "replace_waiting"])
@pytest.mark.parametrize(
    ("ask", "answer", "config"),
    [
        pytest.param(ask_over_http, 'return {"y": inputs["x"]}', "", id="http"),
        pytest.param(ask_over_grpc, 'return {"y": inputs["x"]}', "", id="grpc"),
        pytest.param(ask_a_stream, 'yield {"y": inputs["x"]}', STREAMS, id="decoupled"),
    ],
)
def test_what_runs_was_sent_last(
    start_daemon: Start,
    tmp_path: Path,
    ask: Callable[[DaemonProcess, int, str], int | str],
    answer: str,
    config: str,
    key: str,
) -> None:
    """Ten come while one runs: nine are answered that they were replaced, the tenth runs next. One of them waits at any time."""
    source = CAMERA.format(folder=str(tmp_path), answer=answer)
    write_model(tmp_path / "models", "camera", source, CONFIG + config + ("" if key else ALL))
    daemon = start_daemon(tmp_path / "models")
    daemon.wait_ready()
    of_key = " of key 'left'" if key else ""

    with ThreadPoolExecutor(RATE + 2) as threads:

        def send(number: int) -> Future[int | str]:
            return threads.submit(ask, daemon, number, key)

        def ran(run: int) -> int:
            path = tmp_path / f"run-{run}"
            wait_until(path.exists, f"run {run} to begin", daemon)
            return int(path.read_text())

        newest, sent = send(0), 0
        for run in range(1, EXECUTIONS + 1):
            # That each has come is known by the answer of the one before it.
            assert ran(run) == sent, "the newest of those that were sent before"
            running, waiting = newest, list[Future[int | str]]()
            for _ in range(RATE):
                sent += 1
                waiting.append(send(sent))
                if len(waiting) == 1:
                    # Two that are sent at once come in any order.
                    wait_until(lambda: pending(daemon) == 1, "the first to wait", daemon)
                else:
                    told = (
                        f"the request was replaced while it waited, by the next one{of_key}, request id 'frame {sent}'"
                    )
                    assert waiting[-2].result(PATIENCE) == told
            assert pending(daemon) == 1
            newest, former = waiting[-1], sent - RATE
            (tmp_path / f"go-{run}").touch()
            assert running.result(PATIENCE) == former
        (tmp_path / f"go-{EXECUTIONS + 1}").touch()
        assert newest.result(PATIENCE) == sent
    samples, replaced = scrape(daemon.metrics_url), EXECUTIONS * (RATE - 1)
    assert samples.model("nv_inference_request_failure", "camera", reason="REPLACED") == replaced
    assert samples.model("nv_inference_request_success", "camera") == EXECUTIONS + 1
    assert samples.model("nv_inference_pending_request_count", "camera") == 0
    (statistics,) = json.loads(daemon.get("/v2/models/camera/stats")[1])["model_stats"]
    assert statistics["inference_stats"]["fail"]["count"] == replaced


def test_a_key_that_is_refused(daemon: DaemonProcess, http: Any) -> None:
    given = [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]
    for parameters, error in (
        ({"tensord_replace": "k" * 129}, "parameter 'tensord_replace' has 129 bytes, at most 128 are allowed"),
        ({"tensord_replace": "k", "sequence_id": 5, "sequence_start": True}, "whose requests cannot be replaced"),
        ({"tensord_replace": 5}, "'tensord_replace': attempt to access JSON non-string as string"),
    ):
        status, answer = daemon.infer("scale", given, parameters=parameters)
        assert status == 400
        assert error in answer["error"]
    assert daemon.infer("scale", given, parameters={"tensord_replace": "k" * 128})[0] == 200
    body = json.dumps({"inputs": given, "parameters": {"tensord_replace": "\ud800"}}).encode()
    assert daemon.request("POST", "/v2/models/scale/infer", body)[0] == 400
