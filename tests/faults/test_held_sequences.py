"""Sequences of clients that do not take their large answers: their next steps wait in the front, and none overtakes another."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tensord.daemon.grpc import frames
from tests import repositories
from tests.daemon.grpc.frame_client import STREAM, FrameClient, prefixed
from tests.daemon_process import PATIENCE, DaemonProcess, wait_until
from tests.scrapes import scrape

MIB = 1 << 20
STEPS = 40
#: An answer, as often as the state of the sequence: many of them are more than a connection may hold.
LENGTH = MIB // 4
MODEL = f"""
    import jax.numpy as jnp

    inputs = {{"x": "INT32[n]"}}
    outputs = {{"y": "INT32[{LENGTH}]"}}
    buckets = {{"n": (1, 1024)}}
    max_batch_size = 2
    state = {{"h": "INT32[1]"}}


    def create(path, config, device):
        def apply(params, inputs, state):
            h = 31 * state["h"] + inputs["x"][:, :1]
            return {{"y": jnp.broadcast_to(h, (h.shape[0], {LENGTH}))}}, {{"h": h}}

        return apply, None
"""

#: Steps of any size; one with parameter ``until`` waits for that file.
GATED = repositories.answering(
    """
    x, start = given(request), given(request, "START")
    until = json.loads(request.parameters() or "{}").get("until")
    while until is not None and not pathlib.Path(until).exists():
        time.sleep(0.01)
    self.state = int(x[0]) + (0 if start[0] else 31 * self.state)
    return response(y=np.array([self.state], np.int32))
    """,
    more="state = 0",
)
GATED_CONFIG = repositories.fields(
    "x INT32 -1",
    "y INT32 1",
    """sequence_batching {
      max_sequence_idle_microseconds: 600000000
      control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
    }""",
)


@pytest.fixture(scope="module")
def daemon(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("repository")
    sequences = "sequence_batching { max_sequence_idle_microseconds: 600000000 oldest { max_candidate_sequences: 4 } }"
    repositories.write_model(folder, "steps", MODEL, sequences)
    repositories.write_model(folder, "gated", GATED, GATED_CONFIG)
    options: dict[str, dict[str, Any]] = {
        "arenas": {"byte_size": MIB, "max_byte_size": 16 * MIB, "wait": PATIENCE, "connection_share": 0.05},
        "http": {"max_body_byte_size": 8 * MIB},
        "grpc": {"max_message_byte_size": 8 * MIB},
    }
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), [folder], options) as running:
        yield running
        assert "Traceback" not in running.log


def flags(number: int) -> dict[str, bool]:
    return {"sequence_start": number == 0, "sequence_end": number == STEPS - 1}


def expected() -> list[int]:
    """Returns the state after each step, in INT32 arithmetic."""
    states, h = [], 0
    for number in range(STEPS):
        h = (31 * h + number + 1 + (1 << 31)) % (1 << 32) - (1 << 31)
        states.append(h)
    return states


def message(number: int, who: int) -> Any:
    """Builds step ``number`` of a sequence; every third step is larger than the others."""
    size = 700 if number % 3 == 1 else 1
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="INT32", shape=[1, size])
    x = np.zeros(size, np.int32)
    x[0] = number + 1
    made = service_pb2.ModelInferRequest(model_name="steps", inputs=[tensor], raw_input_contents=[x.tobytes()])
    made.parameters["sequence_id"].int64_param = who
    for name, value in flags(number).items():
        made.parameters[name].bool_param = value
    return made


def state_of(response: Any) -> int:
    values = np.frombuffer(response.raw_output_contents[0], np.int32)
    assert (values == values[0]).all()
    return int(values[0])


@pytest.mark.parametrize("streamed", [True, False])
def test_steps_over_grpc_keep_their_order(daemon: DaemonProcess, streamed: bool) -> None:
    """1. all steps are sent while nothing is taken; 2. the answers are taken: each is that of its own step."""
    who = 1 + streamed
    with FrameClient(int(daemon.grpc_url.split(":")[1]), ((frames.INITIAL_WINDOW_SIZE, 0),)) as client:
        if streamed:
            stream = client.open(STREAM)
            calls = [stream]
            for number in range(STEPS):
                client.data(stream, prefixed(message(number, who)), end=number == STEPS - 1)
        else:
            calls = [client.call(message(number, who)) for number in range(STEPS)]
        client.synchronise()
        client.send(frames.settings(((frames.INITIAL_WINDOW_SIZE, 64 * MIB),)))
        answers = []
        for call in calls:
            answer = client.answer(call)
            assert (answer.status, answer.text) == (0, "")
            answers.append(answer)
    if streamed:
        streamed_answers = answers[0].streamed()
        assert {one.error_message for one in streamed_answers} == {""}
        responses = [one.infer_response for one in streamed_answers]
    else:
        responses = [service_pb2.ModelInferResponse.FromString(answer.messages[0]) for answer in answers]
    assert [state_of(response) for response in responses] == expected()


def test_a_step_that_is_cancelled_while_it_waits_ends_its_sequence(daemon: DaemonProcess) -> None:
    """
    1. The first answer is not taken, so all further steps wait in the front. One of them is cancelled.
    2. The answers are taken. Result: none is computed from a state that lacks a step.
    3. The same id can be started again.
    """
    left_out = 20
    with FrameClient(int(daemon.grpc_url.split(":")[1]), ((frames.INITIAL_WINDOW_SIZE, 0),)) as client:
        before = computed(daemon)
        calls = [client.call(message(0, 9))]
        wait_until(lambda: computed(daemon) > before, "the first step to be computed", daemon)
        client.synchronise()
        calls += [client.call(message(number, 9)) for number in range(1, STEPS)]
        client.synchronise()
        client.send(frames.frame(frames.RST_STREAM, 0, calls[left_out], frames.CANCEL.to_bytes(4, "big")))
        client.synchronise()
        client.send(frames.settings(((frames.INITIAL_WINDOW_SIZE, 64 * MIB),)))
        answers = {number: client.answer(call) for number, call in enumerate(calls) if number != left_out}
        states = {
            number: state_of(service_pb2.ModelInferResponse.FromString(answer.messages[0]))
            for number, answer in answers.items()
            if answer.status == 0
        }
        # Where it had gone to the worker already, it may have run; else those behind it have not.
        assert states
        assert states == {number: expected()[number] for number in states}
        refused = client.answer(client.call(message(1, 9)))
        assert "must specify the START flag" in refused.text
        again = client.answer(client.call(message(0, 9)))
        assert state_of(service_pb2.ModelInferResponse.FromString(again.messages[0])) == expected()[0]


def computed(daemon: DaemonProcess) -> float:
    return scrape(daemon.metrics_url).model("nv_inference_count", "steps")


def test_steps_over_http_keep_their_order(daemon: DaemonProcess) -> None:
    sent = b""
    for number in range(STEPS):
        size = 700 if number % 3 == 1 else 1
        content = {
            "inputs": [{"name": "x", "shape": [1, size], "datatype": "INT32", "data": [number + 1] + [0] * (size - 1)}],
            "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
            "parameters": {"sequence_id": 3, **flags(number)},
        }
        body = json.dumps(content).encode()
        sent += b"POST /v2/models/steps/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with socket.create_connection(("127.0.0.1", daemon.port), PATIENCE) as sock, ThreadPoolExecutor(1) as pool:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        # The front may stop reading before it has all of them.
        sending = pool.submit(sock.sendall, sent)
        wait_until(lambda: daemon.get("/v2/health/live")[0] == 200, "the front to go on", daemon)
        with sock.makefile("rb") as file:
            states = [next_state(file) for _ in range(STEPS)]
        sending.result(PATIENCE)
    assert states == expected()


def next_state(file: Any) -> int:
    """Reads the next answer on a connection and returns the state in it."""
    assert file.readline().startswith(b"HTTP/1.1 200")
    headers = http.client.parse_headers(file)
    content = file.read(int(headers["Content-Length"]))
    values = np.frombuffer(content[int(headers["Inference-Header-Content-Length"]) :], np.int32)
    assert (values == values[0]).all()
    return int(values[0])


def gated(number: int, who: int, byte_size: int = 4, until: str = "") -> Any:
    """Builds a step that adds ``number``; 1 begins and 3 ends its sequence."""
    x = np.full(byte_size // 4, number, np.int32)
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="INT32", shape=[len(x)])
    made = service_pb2.ModelInferRequest(model_name="gated", inputs=[tensor], raw_input_contents=[x.tobytes()])
    made.parameters["sequence_id"].int64_param = who
    made.parameters["sequence_start"].bool_param = number == 1
    made.parameters["sequence_end"].bool_param = number >= 3
    if until:
        made.parameters["until"].string_param = until
    return made


def waiting_for_room(daemon: DaemonProcess, client: FrameClient, who: int, byte_size: int, gate: Path) -> list[int]:
    """Sends three steps: a large one that runs until ``gate`` exists, one that finds no room meanwhile, a small one."""
    calls = [client.call(gated(1, who, 800 << 10, str(gate)))]
    running = scrape_running(daemon)
    wait_until(lambda: running() == 1, "the first step to run", daemon)
    calls.append(client.call(gated(2, who, byte_size)))
    calls.append(client.call(gated(3, who)))
    client.synchronise()
    return calls


def scrape_running(daemon: DaemonProcess) -> Any:
    def running() -> float:
        samples = scrape(daemon.metrics_url)
        return samples.model("tensord_model_sequences", "gated", state="slot") - samples.model(
            "nv_inference_pending_request_count", "gated"
        )

    return running


def value_of(answer: Any) -> int:
    assert (answer.status, answer.text) == (0, "")
    return state_of(service_pb2.ModelInferResponse.FromString(answer.messages[0]))


@pytest.mark.parametrize("byte_size", [40 << 10, 1 * MIB])
def test_a_small_step_does_not_pass_a_large_one_that_waits_for_room(
    daemon: DaemonProcess, tmp_path: Path, byte_size: int
) -> None:
    gate = tmp_path / "gate"
    try:
        with FrameClient(int(daemon.grpc_url.split(":")[1])) as client:
            calls = waiting_for_room(daemon, client, 20, byte_size, gate)
            gate.touch()
            assert [value_of(client.answer(call)) for call in calls] == [1, 31 + 2, 31 * 33 + 3]
    finally:
        gate.touch()


def test_who_waits_for_a_step_that_is_cancelled_does_not_run(daemon: DaemonProcess, tmp_path: Path) -> None:
    """The step before it is taken back while that has no room. Later ones go on from what the first one left."""
    gate = tmp_path / "gate"
    try:
        with FrameClient(int(daemon.grpc_url.split(":")[1])) as client:
            first, cancelled, behind = waiting_for_room(daemon, client, 30, MIB, gate)
            client.send(frames.frame(frames.RST_STREAM, 0, cancelled, frames.CANCEL.to_bytes(4, "big")))
            answer = client.answer(behind)
            assert (answer.status, answer.text) == (1, "a request of sequence 30 before this one did not run")
            gate.touch()
            assert value_of(client.answer(first)) == 1
            assert value_of(client.answer(client.call(gated(4, 30)))) == 31 + 4
    finally:
        gate.touch()


def test_a_step_that_is_arriving_behind_one_that_is_cancelled_does_not_run(daemon: DaemonProcess) -> None:
    """All three were arriving. The first one is whole later, and what comes then goes on from what it left."""
    with FrameClient(int(daemon.grpc_url.split(":")[1])) as client:
        steps = [prefixed(gated(number, 40, MIB)) for number in (1, 2, 3)]
        first, cancelled, behind = calls = [client.open() for _ in steps]
        for call, step in zip(calls, steps, strict=True):
            client.data(call, step[:500])
        client.send(frames.frame(frames.RST_STREAM, 0, cancelled, frames.CANCEL.to_bytes(4, "big")))
        answer = client.answer(behind)
        assert (answer.status, answer.text) == (1, "a request of sequence 40 before this one did not run")
        client.data(first, steps[0][500:], end=True)
        assert value_of(client.answer(first)) == 1
        assert value_of(client.answer(client.call(gated(4, 40)))) == 31 + 4
