"""Sequences as clients meet them: over HTTP, gRPC and streams, in Triton Python models, host models and jitted ones."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.daemon_process import PATIENCE, ROOT, DaemonOf, DaemonProcess, wait_until
from tests.protocol import sequence_models
from tests.repositories import write_model
from tests.scrapes import scrape

NO_START = "must specify the START flag on the first request of the sequence"


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    repository = tmp_path_factory.mktemp("repository")
    sequence_models.all_models(repository)
    options = {"repository": {"control_mode": "explicit", "load": ["*"]}}
    return daemon_of(repository, options)


def tensor(module: Any, x: int, rows: bool, size: int = 1) -> Any:
    given = module.InferInput("x", [1, size] if rows else [size], "INT32")
    given.set_data_from_numpy(np.full([1, size] if rows else [size], x, np.int32))
    return given


class Sender:
    """Sends steps of sequences to one model over one protocol; answers are (sum, parameters)."""

    def __init__(self, client: Any, model: str) -> None:
        self._client = client
        self._module = httpclient if isinstance(client, httpclient.InferenceServerClient) else grpcclient
        self.model = model
        self._rows = client.get_model_config(model)
        self._rows = (
            self._rows["max_batch_size"] if isinstance(self._rows, dict) else self._rows.config.max_batch_size
        ) > 0

    def __call__(self, who: int | str, x: int, flags: str = "", **more: Any) -> tuple[int, dict[str, Any]]:
        """Sends a step; returns the sum and the answer's parameters. ``flags``: S for START, E for END."""
        size = more.pop("size", 1)
        result = self._client.infer(
            self.model,
            [tensor(self._module, x, self._rows, size)],
            sequence_id=who,
            sequence_start="S" in flags,
            sequence_end="E" in flags,
            **more,
        )
        response = result.get_response()
        if isinstance(response, dict):
            parameters = response.get("parameters", {})
        else:
            parameters = {
                name: getattr(value, value.WhichOneof("parameter_choice"))
                for name, value in response.parameters.items()
            }
        return int(result.as_numpy("y").reshape(-1)[0]), parameters

    def refused(self, who: int | str, x: int, flags: str = "", **more: Any) -> InferenceServerException:
        with pytest.raises(InferenceServerException) as caught:
            self(who, x, flags, **more)
        return caught.value


# ---------------------------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize("model", ["single", "direct", "oldest", "pair", "host"])
def test_each_request_finds_what_the_one_before_left(client: Any, model: str) -> None:
    send = Sender(client, model)
    assert [send(5, 1, "S")[0], send(5, 10)[0], send(5, 100, "E")[0]] == [1, 11, 111]
    assert send(5, 7, "SE")[0] == 7
    error = send.refused(5, 1)
    assert f"inference request for sequence 5 to model '{model}' {NO_START}" in error.message()
    assert error.status() in ("400", "StatusCode.INVALID_ARGUMENT")


def test_the_protocols_share_sequences(http: Any, grpc: Any) -> None:
    over_http, over_grpc = Sender(http, "oldest"), Sender(grpc, "oldest")
    assert [over_http(7, 1, "S")[0], over_grpc(7, 10)[0], over_http(7, 100, "E")[0]] == [1, 11, 111]


def test_what_a_python_model_is_told(client: Any) -> None:
    send = Sender(client, "single")
    seen = [send(8, 1, flags)[1] for flags in ("S", "", "E", "SE")]
    assert [json.loads(each["told"]) for each in seen] == [[1, 0, True], [0, 0, True], [0, 1, True], [1, 1, True]]
    assert [(each["corrid"], each["flags"]) for each in seen] == [("8", 1), ("8", 0), ("8", 2), ("8", 3)]


@pytest.mark.parametrize("model", ["jax", "jax_direct"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_a_jitted_model_is_told(client: Any, model: str, size: int) -> None:
    """The controls reach it for shapes that have a program, that are padded, and that are compiled on arrival."""
    send = Sender(client, model)
    assert [send(9, 1, flags, size=size)[0] for flags in ("S", "", "E", "SE")] == [1011, 11, 111, 1111]


@pytest.mark.parametrize(
    ("model", "who", "corrid"),
    [
        ("single", 2**64 - 1, str(2**64 - 1)),
        ("single", "abc", "27974191445704707"),
        ("single", "a text that is longer than eight bytes", str(int.from_bytes(b"\x26\0\0\0a te", "little"))),
        ("direct", 2**64 - 1, "-1"),
        ("oldest", 2**32 + 5, "5"),
        ("texts", "c-1", "b'c-1'"),
        ("texts", "grün", str("grün".encode())),
        ("texts", "x" * 128, str(b"x" * 128)),
    ],
)
def test_the_correlation_id_as_the_model_is_told(http: Any, model: str, who: int | str, corrid: str) -> None:
    assert Sender(http, model)(who, 1, "SE")[1]["corrid"] == corrid


@pytest.mark.parametrize(
    ("model", "who", "words"),
    [
        ("oldest", "text", "control 'CORRID' data-type is 'BYTES', but model 'oldest' expects 'INT32'"),
        ("texts", 5, "control 'CORRID' data-type is 'UINT64', but model 'texts' expects 'BYTES'"),
    ],
)
def test_an_id_that_the_model_cannot_be_told(client: Any, model: str, who: int | str, words: str) -> None:
    error = Sender(client, model).refused(who, 1, "S", request_id="me")
    assert f"[request id: me] sequence batching {words}" in error.message()


def test_ids_that_are_none(client: Any) -> None:
    send = Sender(client, "single")
    for who in (0, ""):
        assert "must specify a non-zero or non-empty correlation ID" in send.refused(who, 1, "S").message()
    error = send.refused("x" * 10_000, 1, "S")
    assert "string correlation ID cannot be longer than 128 characters" in error.message()
    assert error.status() in ("501", "StatusCode.UNIMPLEMENTED")


def test_a_client_cannot_send_controls(http: Any) -> None:
    control = httpclient.InferInput("START", [1], "INT32")
    control.set_data_from_numpy(np.ones(1, np.int32))
    with pytest.raises(InferenceServerException, match="expected 1 inputs but got 2 inputs for model 'single'"):
        http.infer("single", [tensor(httpclient, 1, False), control], sequence_id=5, sequence_start=True)
    assert [each["name"] for each in http.get_model_metadata("single")["inputs"]] == ["x"]


def test_a_step_that_fails_is_answered_so_and_the_sequence_lives_on(client: Any) -> None:
    """All that ran together get the error: nothing is run a second time in a model that keeps state."""
    send = Sender(client, "oldest")
    send(12, 1, "S")
    assert "minus two thousand" in send.refused(12, -2000).message()
    assert send(12, 10, "E")[0] == 11


# --------------------------------------------------------------------------------------------------------- slots, times


def together(*calls: Any) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(PATIENCE) for future in [pool.submit(call) for call in calls]]


def test_rows_of_direct_are_slots(http: Any) -> None:
    """The second sequence has row 1, so a model sees two requests where only that one has something to do."""
    send = Sender(http, "direct")
    assert send(21, 1, "S")[1]["together"] == 1
    sum_, seen = send(22, 5, "S")
    assert (sum_, seen["together"]) == (5, 2)
    assert send(21, 1, "E")[0] == 2
    assert send(22, 1, "E") == (6, seen | {"told": "[0, 1.0, true]", "flags": 2})


def test_who_finds_no_slot_waits_until_one_is_free(grpc: Any) -> None:
    send, ended = Sender(grpc, "single"), []
    send(31, 1, "S")
    other = threading.Thread(target=lambda: ended.append(send(32, 5, "SE")[0]))
    other.start()
    assert send(31, 10)[0] == 11
    assert not ended
    assert send(31, 100, "E")[0] == 111
    other.join(PATIENCE)
    assert ended == [5]


def test_instances_run_beside_each_other_and_keep_their_sequences(grpc: Any) -> None:
    send = Sender(grpc, "pair")
    homes = [send(41, 1, "S")[1]["instance"], send(42, 1, "S")[1]["instance"]]
    assert len(set(homes)) == 2
    for x in (10, 100):
        answers = together(lambda x=x: send(41, x), lambda x=x: send(42, 2 * x))
        assert [seen["instance"] for _, seen in answers] == homes
    assert [send(41, 0, "E")[0], send(42, 0, "E")[0]] == [111, 221]


def test_requests_that_go_round_again(grpc: Any) -> None:
    """Iterative sequences: with an id of one's own and without, several at a time; START is told in the first round only."""
    send = Sender(grpc, "rounds")
    assert send(7, 3, "S")[0] == 31
    assert together(*[lambda x=x: send(0, x)[0] for x in (1, 5, 20, 2)]) == [11, 51, 201, 21]
    assert NO_START in send.refused(7, 3).message()
    assert (
        "Expected a None object in the execute function return list for reschduled request"
        in send.refused(0, 1000).message()
    )
    error = Sender(grpc, "no_rounds").refused(7, 3, "S")
    assert "while the model is not configured to handle such a flag." in error.message()


# -------------------------------------------------------------------------------------------------------------- streams


class Stream:
    """A gRPC stream, used as in Triton's example of sequences."""

    def __init__(self, url: str) -> None:
        self.client = grpcclient.InferenceServerClient(url)
        self.answers: queue.Queue[Any] = queue.Queue()
        self.client.start_stream(callback=lambda result, error: self.answers.put(error or result))

    def send(self, model: str, who: int | str, x: int, flags: str = "", rows: bool = True, **parameters: str) -> None:
        self.client.async_stream_infer(
            model,
            [tensor(grpcclient, x, rows)],
            request_id=f"{who}_{x}",
            sequence_id=who,
            sequence_start="S" in flags,
            sequence_end="E" in flags,
            parameters=parameters,
        )

    def take(self, count: int) -> list[Any]:
        return [self.answers.get(timeout=PATIENCE) for _ in range(count)]

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_stream()
        self.client.close()


def test_tritons_example_of_sequences_on_streams(daemon: DaemonProcess) -> None:
    """simple_grpc_sequence_stream_infer_client: two sequences on a stream, pipelined, one with a number, one with a text."""
    values = [11, 7, 5, 3, 2, 0, 1]
    with Stream(daemon.grpc_url) as stream:
        for who, sign in ((1007, 1), ("1008-text", -10)):
            for number, x in enumerate(values):
                flags = "S" * (number == 0) + "E" * (number == len(values) - 1)
                stream.send("quiet" if who == 1007 else "texts", who, sign * x, flags, rows=who != 1007)
        sums: dict[str, list[int]] = {"1007": [], "1008-text": []}
        for result in stream.take(2 * len(values)):
            sums[result.get_response().id.rpartition("_")[0]].append(int(result.as_numpy("y").reshape(-1)[0]))
    running = np.cumsum(values).tolist()
    assert sums == {"1007": running, "1008-text": [-10 * x for x in running]}


def test_a_client_that_leaves_takes_its_waiting_steps_along(daemon: DaemonProcess, http: Any, tmp_path: Path) -> None:
    """One step runs and two wait when the stream is cut: these never run, the sequence is over, and all of them count."""
    send, gate = Sender(http, "single"), tmp_path / "gate"

    def waiting() -> float:
        return scrape(daemon.metrics_url).model("nv_inference_pending_request_count", "single")

    def cancelled() -> float:
        return scrape(daemon.metrics_url).model("nv_inference_request_failure", "single", reason="CANCELED")

    def failed() -> int:
        return int(http.get_inference_statistics("single")["model_stats"][0]["inference_stats"]["fail"]["count"])

    before = cancelled(), failed()
    try:
        with Stream(daemon.grpc_url) as stream:
            stream.send("single", 53, 5, "S", rows=False)
            stream.take(1)
            stream.send("single", 53, 1, rows=False, until=str(gate))
            for x in (10, 100):
                stream.send("single", 53, x, rows=False)
            wait_until(lambda: waiting() == 2, "both steps to wait", daemon)
            stream.client.stop_stream(cancel_requests=True)
        wait_until(lambda: waiting() == 0, "the waiting steps to go", daemon)
        wait_until(lambda: cancelled() == before[0] + 2, "what waited to be counted", daemon)
    finally:
        gate.touch()
    wait_until(lambda: cancelled() == before[0] + 3, "what ran to be counted", daemon)
    assert failed() == before[1] + 3
    # The slot is free for others, and the id is not known any more.
    assert send(54, 7, "SE")[0] == 7
    assert NO_START in send.refused(53, 1).message()


def test_the_model_and_the_client_of_the_manual(
    daemon: DaemonProcess, http: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    manual = (ROOT / "docs" / "sequences.md").read_text(encoding="utf-8")
    config = re.findall(r"^```\n(.*?)^```", manual, re.MULTILINE | re.DOTALL)[0]
    model, client = re.findall(r"^```python\n(.*?)^```", manual, re.MULTILINE | re.DOTALL)
    write_model(Path(daemon.sections["repository"]["paths"][0]), "running_sum", model, config)
    http.load_model("running_sum")
    exec(client.replace("localhost:8000", daemon.url), {})
    assert capsys.readouterr().out.split() == ["[[1]]", "[[11]]", "[[111]]"]


# ------------------------------------------------------------------------------------------------- bounds, unload, reload


@pytest.fixture
def bounded(tmp_path_factory: pytest.TempPathFactory, leaves_nothing: None) -> Iterator[DaemonProcess]:
    repository = tmp_path_factory.mktemp("bounded")
    sequence_models.python_model(repository, "single", sequence_models.corrid("UINT64"))
    sequence_models.python_model(repository, "wide", "oldest { max_candidate_sequences: 100 }")
    options = {
        "requests": {"max_queue_size": 3, "max_sequences": 20},
        "repository": {"control_mode": "explicit", "load": ["*"]},
    }
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), [repository], options) as running:
        yield running


def test_more_than_may_wait_and_more_than_may_live(bounded: DaemonProcess) -> None:
    with contextlib.closing(grpcclient.InferenceServerClient(bounded.grpc_url)) as client:
        send, wide = Sender(client, "single"), Sender(client, "wide")
        send(1, 1, "S")
        results: queue.Queue[str] = queue.Queue()

        def start(who: int) -> None:
            try:
                results.put(str(send(who, who, "SE")[0]))
            except InferenceServerException as error:
                results.put(f"{error.status()}: {error.message()}")

        threads = [threading.Thread(target=start, args=(who,)) for who in range(2, 7)]
        for thread in threads:
            thread.start()
        refused = [results.get(timeout=PATIENCE) for _ in range(2)]
        assert refused == ["StatusCode.UNAVAILABLE: [request id: <id_unknown>] Exceeds maximum queue size"] * 2
        # Who has a slot goes on, or is refused as well, and loses nothing by that.
        assert "Exceeds maximum queue size" in send.refused(1, 10).message()
        # A storm of sequences that are begun and never ended.
        for who in range(10, 26):
            wide(who, 1, "S")
        error = wide.refused(26, 1, "S")
        assert error.status() == "StatusCode.UNAVAILABLE"
        assert "20 sequences are live on this worker, requests.max_sequences allows 20" in error.message()
        assert wide(10, 5)[0] == 6
        client.unload_model("single")
        left = [results.get(timeout=PATIENCE) for _ in range(3)]
        assert all(text.isdigit() for text in left)
        for thread in threads:
            thread.join(PATIENCE)
        assert wide(26, 1, "S")[0] == 1


def test_unload_answers_what_it_has_and_forgets_the_rest(bounded: DaemonProcess) -> None:
    with (
        contextlib.closing(grpcclient.InferenceServerClient(bounded.grpc_url)) as client,
        Stream(bounded.grpc_url) as stream,
    ):
        send = Sender(client, "wide")
        stream.send("wide", 1, 1, "S", rows=False)
        stream.take(1)
        for x in (-1000, 1, 1):
            stream.send("wide", 1, x, rows=False)
        # What comes after it on the stream has come after them: they are the worker's by then.
        stream.send("wide", 2, 1, "S", rows=False)
        left = stream.take(1)
        client.unload_model("wide")
        left += stream.take(3)
        assert sorted(int(result.as_numpy("y")[0]) for result in left) == [-999, -998, -997, 1]
        error = send.refused(1, 1)
        assert error.status() == "StatusCode.NOT_FOUND"
        assert "unknown model: 'wide'" in error.message()
        client.load_model("wide")
        assert NO_START in send.refused(1, 1).message()


def test_a_sequence_ends_where_it_began_when_its_model_is_loaded_again(bounded: DaemonProcess) -> None:
    with contextlib.closing(grpcclient.InferenceServerClient(bounded.grpc_url)) as client:
        send = Sender(client, "wide")
        send(1, 1, "S")
        send(2, 1, "S")
        client.load_model("wide")
        assert send(1, 10)[0] == 11
        assert send(3, 5, "S")[0] == 5
        # A START goes to the new load, and what was is over.
        assert send(2, 7, "S")[0] == 7
        assert send(2, 1)[0] == 8
        assert send(1, 100, "E")[0] == 111
        assert NO_START in send.refused(1, 1).message()
        client.unload_model("wide")
        client.load_model("wide")
        assert NO_START in send.refused(2, 1).message()
