"""Models with several responses, over gRPC streams and generate: every way to answer, and every way to do it wrong."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from tests.daemon_process import PATIENCE, DaemonOf, DaemonProcess, wait_until
from tests.protocol.streaming_models import Stream, write_streaming_models
from tests.repositories import sleepy_model
from tests.scrapes import scrape

NOT_COMPLETED = "the model ended without completing its response"
UNSENT = "TritonModelException: Unable to send response. "
NO_RESPONSE = "TritonModelException: Inference Response object must be provided when the response flags is set to zero."


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streaming") / "models"
    write_streaming_models(folder)
    sleepy_model(folder)
    return folder


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, models: Path) -> DaemonProcess:
    options = {"expert": {"max_ahead": 65536}, "http": {"port": 0, "max_body_byte_size": 1 << 20}}
    arguments = ["--model-control-mode=explicit", "--load-model=*"]
    return daemon_of(models, options, arguments, folder=models.parent)


@pytest.fixture
def stream(daemon: DaemonProcess) -> Iterator[Stream]:
    with Stream(daemon.grpc_url) as opened:
        yield opened


def generate(daemon: DaemonProcess, model: str, how: str = "generate", **fields: Any) -> tuple[int, bytes]:
    return daemon.request("POST", f"/v2/models/{model}/{how}", json.dumps(fields).encode())


def counted(n: int) -> list[list[int]]:
    return [[i] for i in range(n)]


@pytest.mark.parametrize("model", ["talks", "threads", "coroutines", "counts", "host_counts", "rounds"])
@pytest.mark.parametrize("n", [0, 1, 50])
def test_responses_come_in_order_with_one_final_mark(stream: Stream, model: str, n: int) -> None:
    n = max(n, 1) if model == "rounds" else n
    assert stream.answers(model, n) == [*counted(n), None]
    assert stream.answers(model, n) == [*counted(n), None]


@pytest.mark.parametrize(
    ("say", "expected"),
    [
        ("error empty", ["element is bad", [], None]),
        ("told last", [[7], [9]]),
        ("large error", [list(range(1 << 16)), "element is bad", None]),
        ("drop", [NOT_COMPLETED]),
        ("twice", [None]),
        ("nothing", [NO_RESPONSE, None]),
        ("flags", [UNSENT + "Unsupported flag provided.", None]),
    ],
)
def test_what_a_model_sends(stream: Stream, say: str, expected: list[Any]) -> None:
    assert stream.answers("talks", 2, say) == [[0], [1], *expected]
    assert stream.answers("talks", 1) == [[0], None]


def test_a_stream_that_asked_for_it_ends_with_the_first_error(daemon: DaemonProcess) -> None:
    """The responses before it have come; the requests behind it end with the stream, and their model goes on for others."""
    with Stream(daemon.grpc_url, [("triton_grpc_error", "true")]) as stream:
        stream.ask("talks", 2, "error told", "first")
        assert [stream.take()[:2] for _ in range(2)] == [("first", [0]), ("first", [1])]
        stream.ask("slow_counts", 500, request_id="second")
        with pytest.raises(grpc.RpcError) as caught:
            any(stream.take()[0] != "second" for _ in range(1000))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert caught.value.details() == "element is bad"
    with Stream(daemon.grpc_url) as other:
        assert other.answers("talks", 1, "error told") == [[0], "element is bad", [7], None]
        assert other.answers("slow_counts", 2) == [[0], [1], None]


def test_an_exception_costs_its_request_one_error(stream: Stream, daemon: DaemonProcess) -> None:
    for model in ("talks", "coroutines"):
        *good, error = stream.answers(model, 2, "raise")
        assert good == [[0], [1]]
        assert error == f"Failed to process the request(s) for model '{model}_0', message: ValueError: in the middle"
    *good, error = stream.answers("counts", -9)
    assert good == counted(6)[:5]
    assert error == "model 'counts' version 1 failed with ValueError"
    reason = "Python model 'returns_0' is using the decoupled mode and the execute function must return None."
    assert stream.answers("returns", 1) == [
        f"Failed to process the request(s) for model 'returns_0', message: {reason}"
    ]


def test_requests_of_several_models_share_a_stream(stream: Stream) -> None:
    asked = {f"{model}{i}": (model, i % 7) for i in range(20) for model in ("talks", "threads", "counts", "coroutines")}
    for request_id, (model, n) in asked.items():
        stream.ask(model, n, request_id=request_id)
    stream.ask("once", 5, request_id="once")
    found: dict[str, list[Any]] = {}
    open_requests = {*asked, "once"}
    while open_requests:
        request_id, value, final = stream.take()
        found.setdefault(request_id, []).append(value)
        if final:
            open_requests.remove(request_id)
    assert found.pop("once") == [[5]]
    assert found == {request_id: [*counted(n), None] for request_id, (_, n) in asked.items()}


def test_what_is_not_decoupled_is_in_order_beside_what_is(stream: Stream, tmp_path: Path) -> None:
    """1. slow; 2. one response; 3. several. Those of 3 come at once, that of 2 after 1's."""
    until = tmp_path / "until"
    slow = service_pb2.ModelInferRequest(model_name="sleepy", id="slow")
    slow.inputs.add(name="DELAY_MS", datatype="INT32", shape=[1])
    slow.raw_input_contents.append(bytes(4))
    slow.parameters["until"].string_param = str(until)
    stream.send(slow)
    stream.ask("once", 5, request_id="once")
    for model in ("talks", "counts"):
        stream.ask(model, 3, request_id=model)
    beside: dict[str, list[Any]] = {"talks": [], "counts": []}
    for _ in range(8):
        request_id, value, _ = stream.take()
        beside[request_id].append(value)
    assert beside == {key: [*counted(3), None] for key in beside}
    until.touch()
    assert [stream.take()[0] for _ in range(2)] == ["slow", "once"]


def test_marks_are_told_to_those_who_ask(stream: Stream) -> None:
    stream.ask("talks", 2, request_id="a", marks=False)
    assert [stream.take() for _ in range(2)] == [("a", [0], False), ("a", [1], False)]
    stream.ask("talks", 0, request_id="b", marks=False)
    stream.ask("talks", 0, "last", request_id="c", marks=False)
    assert stream.take() == ("c", [9], True)


def test_parameters_of_responses(stream: Stream, daemon: DaemonProcess) -> None:
    stream.ask("talks", 0, "told")
    parameters = next(stream.call).infer_response.parameters
    assert (parameters["why"].string_param, parameters["times"].int64_param) == ("told", 3)
    status, body = generate(daemon, "counts", "generate_stream", n=5)
    assert status == 200
    events = [json.loads(line[6:]) for line in body.decode().splitlines() if line]
    assert [event.get("third") for event in events] == [None, None, None, True, None]


def test_one_answer_by_a_sender_of_a_model_that_gives_one(stream: Stream, daemon: DaemonProcess) -> None:
    for say in ("", "send", "later", "twice"):
        assert stream.answers("once", 3, say) == [[3]]
    said = UNSENT + "Non-decoupled model cannot send more than one response."
    assert stream.answers("once", 3, "said") == [said]
    said = UNSENT + "Non-decoupled model cannot send complete final before sending a response."
    assert stream.answers("once", 3, "final") == [said]
    assert stream.answers("once", 3, "drop") == [NOT_COMPLETED]
    assert stream.answers("async_once", 3) == [[3]]
    n = {"name": "n", "datatype": "INT32", "shape": [1], "data": [4]}
    say = {"name": "say", "datatype": "BYTES", "shape": [1], "data": ["later"]}
    status, answer = daemon.infer("once", [n, say])
    assert (status, answer["outputs"][0]["data"]) == (200, [4])


def test_who_asks_for_another_round_and_has_none_is_told_so(stream: Stream) -> None:
    """A model without iterative sequences: decoupled or not, also as a coroutine, whoever has let go of the sender first."""
    refused = "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to "
    refused += "handle such a flag."
    for model in ("no_rounds", "no_async_rounds"):
        assert stream.answers(model, 2) == [[0], refused]
        assert stream.answers(model, 1) == [[1], None]
    assert stream.answers("once", 3, "again") == [refused]


def test_a_generator_of_64_bits(daemon: DaemonProcess) -> None:
    status, body = generate(daemon, "wide", "generate_stream", n=3)
    events = [json.loads(line[6:])["y"] for line in body.decode().splitlines() if line]
    assert (status, events) == (200, [2**40, 2**40 + 1, 2**40 + 2])


def test_generate_wants_exactly_one(daemon: DaemonProcess) -> None:
    assert generate(daemon, "talks", n=1)[0] == 200
    for n in (0, 2, 50):
        status, body = generate(daemon, "talks", n=n)
        assert status == 400
        assert json.loads(body)["error"].startswith("generate expects model to produce exactly 1 response")


def test_events_for_http_1_0_are_bounded(daemon: DaemonProcess) -> None:
    """All at once is all that it can read; a model without an end does not fill the memory."""
    host, port = daemon.url.split(":")
    body = b'{"n":1073741824}'
    with socket.create_connection((host, int(port)), PATIENCE) as connection:
        head = b"POST /v2/models/counts/generate_stream HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"bytes so far, at most 1048576 are kept for an answer of HTTP/1.0" in answer


def test_a_client_that_leaves_ends_its_model(daemon: DaemonProcess, models: Path) -> None:
    """1 an endless generator and a model that keeps its sender; 2 both clients go; 3 the one is closed, and nothing stays."""
    with Stream(daemon.grpc_url) as stream:
        stream.ask("counts", 1 << 30)
        stream.ask("talks", 1, "keep")
        for _ in range(100):
            stream.take()
    closed = models / "counts" / "1" / "closed"
    wait_until(closed.exists, "the generator to be closed", daemon)
    for model in ("counts", "talks"):
        wait_until(lambda model=model: cancelled(daemon, model) >= 1, f"{model} to be cancelled", daemon)
    with Stream(daemon.grpc_url) as stream:
        assert stream.answers("counts", 2) == [*counted(2), None]


def cancelled(daemon: DaemonProcess, model: str) -> float:
    return scrape(daemon.metrics_url).model("nv_inference_request_failure", model, reason="CANCELED")


def test_a_slow_reader_holds_up_nobody_else(daemon: DaemonProcess) -> None:
    """A generator with one instance rests for the client that does not read, and answers others."""
    with Stream(daemon.grpc_url) as slow, Stream(daemon.grpc_url) as quick:
        slow.ask("counts", 2000)
        slow.take()
        for n in range(5):
            assert quick.answers("counts", n) == [*counted(n), None]
        seen = 1
        while True:
            _, value, final = slow.take()
            if final:
                break
            assert value == [seen] * 4096
            seen += 1
        assert seen == 2000


def test_a_model_that_is_unloaded_ends_its_streams_first(daemon: DaemonProcess) -> None:
    """A load beside the streams changes nothing for them."""
    with Stream(daemon.grpc_url) as slow, Stream(daemon.grpc_url) as other:
        slow.ask("slow_counts", 500)
        slow.take()
        assert daemon.request("POST", "/v2/repository/models/slow_counts/load", b"{}")[0] == 200
        assert other.answers("slow_counts", 3) == [*counted(3), None]
        assert daemon.request("POST", "/v2/repository/models/slow_counts/unload", b"{}")[0] == 200
        rest = [slow.take() for _ in range(500)]
        assert [value for _, value, _ in rest] == [*counted(500)[1:], None]
        assert rest[-1][2]
        other.ask("slow_counts", 1)
        assert "'slow_counts'" in other.take()[1]


def test_statistics_tell_of_each_response(daemon: DaemonProcess) -> None:
    def statistics() -> dict[str, Any]:
        return dict(json.loads(daemon.get("/v2/models/host_counts/stats")[1])["model_stats"][0])

    before = statistics()["inference_stats"]["success"]["count"]
    with Stream(daemon.grpc_url) as stream:
        assert stream.answers("host_counts", 2) == [*counted(2), None]
        assert len(stream.answers("host_counts", -7)) == 6
    samples = scrape(daemon.metrics_url)
    assert samples.model("nv_inference_first_response_histogram_ms_count", "host_counts") >= 2
    assert samples.model("nv_inference_first_response_histogram_ms_bucket", "host_counts", le="+Inf") >= 2
    found = statistics()
    assert found["inference_stats"]["success"]["count"] == before + 2
    assert found["response_stats"]["0"]["success"]["count"] >= 2
    assert found["response_stats"]["5"]["fail"]["count"] == 1
    assert found["execution_count"] == before + 2
