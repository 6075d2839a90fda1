"""Calls between models of a real daemon: what they bring, how they fail, what ends with whom, and that none waits for itself."""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.daemon_process import PATIENCE, DaemonOf, DaemonProcess, wait_until
from tests.protocol import calling_models
from tests.protocol.calling_models import run
from tests.scrapes import scrape


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    repository = calling_models.write(tmp_path_factory.mktemp("repository"))
    options = {"repository": {"control_mode": "explicit", "load": ["*"]}, "rate_limit": {"mode": "execution_count"}}
    return daemon_of(repository, options)


@pytest.fixture
def http(daemon: DaemonProcess) -> Iterator[httpclient.InferenceServerClient]:
    with httpclient.InferenceServerClient(daemon.url, concurrency=8, network_timeout=PATIENCE) as client:
        yield client


def stats(http: httpclient.InferenceServerClient, model: str) -> dict[str, Any]:
    (found,) = http.get_inference_statistics(model)["model_stats"]
    return dict(found)


ONES = "np.ones((1, 4), np.float32)"


def test_a_call_brings_what_the_model_answers_and_counts_as_its_request(http: httpclient.InferenceServerClient) -> None:
    before = stats(http, "scale")["inference_stats"]["success"]["count"]
    said = run(http, "script", f"said = of(call('scale', {{'x': {ONES}}}, ['y']).exec())")
    assert said == {"y": [[4, 4, 4, 4]]}
    assert stats(http, "scale")["inference_stats"]["success"]["count"] == before + 1


def test_a_request_goes_along_with_all_it_says(http: httpclient.InferenceServerClient) -> None:
    said = run(
        http,
        "script",
        """
        response = call("tell", {"x": np.ones(4, np.float32)}, ["said", "y", "y"], request_id="mine", timeout=9_000_000,
                        parameters={"colour": "red", "n": 3, "b": True}, model_version=1,
                        preferred_memory=pb.PreferredMemory(pb.TRITONSERVER_MEMORY_CPU, 0), trace=request.trace()).exec()
        said = json.loads(of(response)["said"][0]), response.parameters(), len(response.output_tensors())
        """,
    )
    assert said[0] == {
        "id": "mine",
        "sequence": 0,
        "flags": 0,
        "timeout": 9_000_000,
        "parameters": {"colour": "red", "n": 3, "b": True},
        "wanted": ["said", "y"],
    }
    assert said[1:] == ['{"size": 4, "kind": "told"}', 2]


def test_what_is_wrong_is_an_error_of_the_response(http: httpclient.InferenceServerClient) -> None:
    said = run(
        http,
        "script",
        f"""
        ones = {ONES}
        said = {{
            "unknown": of(call("nobody", {{"x": ones}}, ["y"]).exec()),
            "version": of(call("scale", {{"x": ones}}, ["y"], model_version=7).exec()),
            "missing": of(call("scale", {{}}, ["y"]).exec()),
            "shape": of(call("scale", {{"x": np.ones((1, 5), np.float32)}}, ["y"]).exec()),
            "datatype": of(call("scale", {{"x": np.ones((1, 4))}}, ["y"]).exec()),
            "output": of(call("scale", {{"x": ones}}, ["z"]).exec()),
            "decoupled": of(call("repeat", {{"values": np.ones(2, np.float32)}}, ["value"]).exec()),
            "raises": of(call("tell", {{"x": -np.ones(4, np.float32)}}).exec()),
            "refuses": of(call("tell", {{"x": -2 * np.ones(4, np.float32)}}).exec()),
            "code": call("tell", {{"x": -2 * np.ones(4, np.float32)}}).exec().error().code() == pb.TritonError.NOT_FOUND,
        }}
        """,
    )
    begins = "error Model {} - Error when running inference: {}"
    ready = "Failed for execute the inference request. Model '{}' is not ready."
    assert said["unknown"] == begins.format("nobody", ready.format("nobody"))
    assert said["version"] == begins.format("scale", ready.format("scale"))
    assert "expected 1 inputs but got 0 inputs for model 'scale'" in said["missing"]
    assert "[1,5]" in said["shape"]
    assert "FP64" in said["datatype"]
    assert said["output"] == begins.format("scale", "unexpected inference output 'z' for model 'scale'")
    assert said["decoupled"].startswith(begins.format("repeat", "Model repeat is using the decoupled. The current BLS"))
    assert said["raises"] == (
        "error Failed to process the request(s) for model 'tell_0', message: ValueError: no such number"
    )
    assert said["refuses"] == "error not that one"
    assert said["code"] is True


def test_a_request_that_cannot_be_one_is_refused_when_it_is_made(http: httpclient.InferenceServerClient) -> None:
    said = run(
        http,
        "script",
        """
        def tried(**more):
            try:
                pb.InferenceRequest(**{"model_name": "scale", "inputs": [], "requested_output_names": [], **more}).exec()
            except pb.TritonModelException as error:
                return str(error)
        said = [
            tried(inputs=[None], request_id="r"), tried(requested_output_names=[""]), tried(correlation_id=1.5),
            tried(parameters={"f": 1.5}), tried(correlation_id="x" * 129), tried(correlation_id=-1), tried(timeout=-1),
            tried(parameters="x"), tried(parameters="[1]"), tried(parameters='{"a": [1]}'),
            tried(parameters='{"f": 1.5}', correlation_id="\\ud800"),
        ]
        """,
    )
    assert said == [
        "Input tensor for request with id 'r' and model name 'scale' should not be empty.",
        "Requested output name for request with id '' and model name 'scale' should not be empty.",
        "Correlation ID must be integer or string",
        "Expect parameters values to have type bool/int/str, found type <class 'float'>",
        "string correlation ID has 129 bytes, at most 128 are taken",
        "correlation ID -1 is no unsigned number of 64 bits",
        "timeout is -1, it cannot be negative",
        "parameters are no JSON: Expecting value: line 1 column 1 (char 0)",
        "parameters are [1], a mapping of names to values is expected",
        "parameter 'a' is [1], a bool, a number or a text is expected",
        None,
    ]


def test_what_is_given_along_may_be_written_to_and_what_comes_back_too(http: httpclient.InferenceServerClient) -> None:
    said = run(
        http,
        "async",
        """
        async def main():
            x = np.ones((1, 4), np.float32)
            waiting = call("scale", {"x": x}, ["y"]).async_exec()
            x[:] = 9
            response = await waiting
            (tensor,) = response.output_tensors()
            further = call("scale", {"x": tensor.as_numpy()}, ["y"]).async_exec()
            tensor.as_numpy()[:] = 0
            return [of(await further), tensor.as_numpy().tolist()]
        """,
    )
    assert said == [{"y": [[13, 13, 13, 13]]}, [[0, 0, 0, 0]]]


def test_answers_are_inputs_again_and_ensembles_are_called_like_models(http: httpclient.InferenceServerClient) -> None:
    said = run(
        http,
        "script",
        f"""
        first = call("scale", {{"x": {ONES}}}, ["y"]).exec()
        (tensor,) = first.output_tensors()
        renamed = pb.Tensor.from_dlpack("x", tensor.to_dlpack())
        second = pb.InferenceRequest(model_name="scale", inputs=[renamed], requested_output_names=["y"]).exec()
        said = [of(second), of(call("twice", {{"x": {ONES}}}, ["y"]).exec())]
        """,
    )
    assert said == [{"y": [[13, 13, 13, 13]]}] * 2


def test_many_calls_at_once_share_batches(http: httpclient.InferenceServerClient) -> None:
    """A coroutine makes all of them before it waits."""
    said = run(
        http,
        "async",
        """
        async def main():
            waiting = [call("scale", {"x": np.full((1, 4), i, np.float32)}, ["y"]).async_exec() for i in range(100)]
            return [of(response)["y"][0][0] for response in await asyncio.gather(*waiting)]
        """,
    )
    assert said == [3 * i + 1 for i in range(100)]


def test_too_many_calls_at_once_are_refused(http: httpclient.InferenceServerClient) -> None:
    said = run(
        http,
        "async",
        """
        async def main():
            waiting = [call("scale", {"x": np.ones((1, 4), np.float32)}, ["y"]).async_exec() for i in range(1100)]
            texts = {str(of(response)) for response in await asyncio.gather(*waiting)}
            return sorted(texts)
        """,
    )
    assert said[-1] == str({"y": [[4.0, 4.0, 4.0, 4.0]]})
    assert all("calls under way, at most 1024 are taken (requests.max_calls)" in text for text in said[:-1])


def test_all_responses_of_a_decoupled_model_come_through_an_iterator(http: httpclient.InferenceServerClient) -> None:
    """The last response is empty where the model only says that it is done, as in Triton; the iterator can be used again."""
    code = """
        responses = call("repeat", {"values": np.array([1, 2, 3], np.float32)}, ["value"]).exec(decoupled=True)
        first = [of(response) for response in responses]
        said = [first, [of(response) for response in responses] == first]
    """
    values = [{"value": [1]}, {"value": [2]}, {"value": [3]}, {}]
    assert run(http, "script", code) == [values, True]
    code = """
        async def main():
            asked = call("repeat", {"values": np.array([1, -2, 3], np.float32)}, ["value"])
            both = await asyncio.gather(asked.async_exec(decoupled=True), asked.async_exec(decoupled=True))
            none = await call("repeat", {"values": np.zeros(0, np.float32)}, ["value"]).async_exec(decoupled=True)
            single = await call("scale", {"x": np.ones((1, 4), np.float32)}, ["y"]).async_exec(decoupled=True)
            return [[of(response) for response in each] for each in (*both, none, single)]
    """
    one = [{"value": [1]}, "error below zero", {"value": [3]}, {}]
    assert run(http, "async", code) == [one, one, [{}], [{"y": [[4, 4, 4, 4]]}]]


def test_a_stepped_model_is_called_like_a_decoupled_one(http: httpclient.InferenceServerClient) -> None:
    code = """
        asked = call("counts", {"start": np.array([1, 2], np.int32)}, ["y"], parameters={"count": 3})
        said = [of(each)["y"][0] for each in asked.exec(decoupled=True) if each.output_tensors()]
    """
    assert run(http, "script", code) == [3, 4, 5]


def test_responses_that_nobody_takes_hold_up_nobody(http: httpclient.InferenceServerClient) -> None:
    """More than may wait for whoever takes them, of an iterator that is let go, one that is cancelled, and one that is read."""
    code = """
        values = np.arange(6000, dtype=np.float32)
        asked = call("repeat", {"values": values}, ["value"])
        next(iter(asked.exec(decoupled=True)))
        cancelled = asked.exec(decoupled=True)
        cancelled.cancel()
        *_, last = cancelled
        said = [of(last), sum(of(each).get("value", [0])[0] for each in asked.exec(decoupled=True))]
    """
    last, total = run(http, "script", code)
    assert last == {}, "the empty one that is final: what the model sends is brought"
    assert total == sum(range(6000))


def test_a_model_that_is_called_keeps_sequences(http: httpclient.InferenceServerClient) -> None:
    code = """
        def step(x, flags=0, who="mine"):
            asked = call("sums", {"x": np.full((1, 1), x, np.float32)}, ["y"], correlation_id=who, flags=flags)
            return of(asked.exec())
        START, END = pb.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, pb.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
        said = [step(1, START), step(2), step(5, START, 7), step(3, END), step(1), step(1, END, 7), step(4, START | END)]
    """
    said = run(http, "script", code)
    assert said[:4] == [{"y": [[1]]}, {"y": [[3]]}, {"y": [[5]]}, {"y": [[6]]}]
    assert "must specify the START flag" in said[4]
    assert said[5:] == [{"y": [[6]]}, {"y": [[4]]}]


def test_a_call_is_made_from_a_thread_of_the_model_too(http: httpclient.InferenceServerClient) -> None:
    code = """
        said = []
        def work():
            said.append(of(call("scale", {"x": np.ones((1, 4), np.float32)}, ["y"]).exec()))
        threads = [threading.Thread(target=work) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    """
    assert run(http, "script", code) == [{"y": [[4, 4, 4, 4]]}] * 4


# ------------------------------------------------------------------------------------------------------- circles

SELF = "said = script(self.name, 'said = 1')"


def test_a_model_that_waits_for_its_only_instance_is_told(http: httpclient.InferenceServerClient) -> None:
    said = run(http, "script", SELF)
    assert "Model script - Error when running inference: model 'script' waits for itself (script -> script)" in said
    assert run(http, "pair", SELF) == 1, "another instance is free"


def test_one_that_waits_behind_another_with_a_deadline_is_told(
    daemon: DaemonProcess, http: httpclient.InferenceServerClient, tmp_path: Path
) -> None:
    """1. A request holds the only instance. 2. One that may be refused in time waits. 3. The first asks its own model."""
    for _ in range(5):
        run(http, "script", "said = 1")
    begun, go_on = tmp_path / "begun", tmp_path / "go_on"
    held = f"""
        open({str(begun)!r}, "w").close()
        while not os.path.exists({str(go_on)!r}):
            time.sleep(0.001)
        said = script(self.name, "said = 1")
    """

    def hold() -> Any:
        with httpclient.InferenceServerClient(daemon.url, network_timeout=PATIENCE) as client:
            return run(client, "script", "import os\n" + dedent(held))

    with concurrent.futures.ThreadPoolExecutor(2) as pool, grpcclient.InferenceServerClient(daemon.grpc_url) as grpc:
        first = pool.submit(hold)
        wait_until(begun.exists, "the first to run")
        code = grpcclient.InferInput("code", [1], "BYTES")
        code.set_data_from_numpy(np.array([b"said = 2"], np.object_))
        second = pool.submit(grpc.infer, "script", [code], client_timeout=PATIENCE)
        wait_until(
            lambda: scrape(daemon.metrics_url).model("nv_inference_pending_request_count", "script") == 1,
            "the second to wait",
        )
        go_on.touch()
        assert "waits for itself (script -> script)" in first.result()
        assert second.result().as_numpy("said")[0] == b"2"


@pytest.mark.parametrize(
    ("model", "code", "says"),
    [
        # The rest of a sequence waits for the request that calls, on whichever instance.
        ("series", "correlation_id=5", "series -> series"),
        # Its answer would leave behind the one that waits for it.
        ("ordered", "", "ordered -> ordered"),
        # An instance is free, and what it needs is not.
        ("needs", "model_name='needs_too'", "needs -> needs_too"),
    ],
)
def test_what_waits_for_other_things_than_an_instance_is_told(
    http: httpclient.InferenceServerClient, model: str, code: str, says: str
) -> None:
    code = f"""
        more = dict({code})
        model = more.pop("model_name", self.name)
        said = of(call(model, {{"code": np.array(["said = 1"], np.object_)}}, **more).exec())
    """
    own = {"sequence_id": 5, "sequence_start": True} if model == "series" else {}
    assert f"waits for itself ({says})" in run(http, model, code, **own)


def test_a_circle_of_models_ends_at_its_last_call(http: httpclient.InferenceServerClient) -> None:
    code = """
        said = script("other", "said = script('script', 'said = 1')")
    """
    assert "model 'script' waits for itself (script -> other -> script)" in run(http, "script", code)


def test_a_coroutine_that_waits_for_its_own_model_is_told(http: httpclient.InferenceServerClient) -> None:
    code = """
        async def main():
            inner = np.array(["async def main(): return 1"], np.object_)
            first = call("async", {"code": inner}).async_exec()
            second = call("scale", {"x": np.ones((1, 4), np.float32)}, ["y"]).async_exec()
            return [of(response) for response in await asyncio.gather(first, second)]
    """
    said = run(http, "async", code)
    assert "waits for itself (async -> async)" in said[0]
    assert said[1] == {"y": [[4, 4, 4, 4]]}


def test_requests_that_take_all_instances_from_each_other_are_told(http: httpclient.InferenceServerClient) -> None:
    """Both instances wait until both are taken, then each asks for a further one."""
    code = """
        barrier = pb.__dict__.setdefault("_barrier", threading.Barrier(2))
        barrier.wait(120)
        said = script("pair", "said = 1")
    """
    given = httpclient.InferInput("code", [1], "BYTES")
    given.set_data_from_numpy(np.array([calling_models.dedent(code).encode()], np.object_))
    waiting = [http.async_infer("pair", [given]) for _ in range(2)]
    answers = sorted(str(each.get_result(timeout=PATIENCE).as_numpy("said")[0]) for each in waiting)
    assert sum("waits for itself" in answer for answer in answers) == 1, (
        "one of them goes on when the other one has failed"
    )


def test_calls_are_nested_only_so_deep(http: httpclient.InferenceServerClient) -> None:
    """Each level takes an instance of a model that answers from a coroutine, so none of them is ever missing."""
    code = """
        DEPTH = 20
        async def main():
            depth = json.loads(request.parameters()).get("depth", 0)
            if depth == DEPTH:
                return depth
            text = pb.get_input_tensor_by_name(request, "code").as_numpy()
            asked = call("async_decoupled", {"code": text}, parameters={"depth": depth + 1})
            responses = await asked.async_exec(decoupled=True)
            said = of(next(iter(responses)))
            return said if isinstance(said, str) else json.loads(said["said"][0])
    """
    assert run(http, "async", code.replace("DEPTH = 20", "DEPTH = 10")) == 10
    said = run(http, "async", code)
    assert "calls are nested 17 deep (async -> async_decoupled -> " in said
    assert said.endswith("at most 16 are taken")


def test_a_thread_that_execute_waits_for_is_told_after_a_while(http: httpclient.InferenceServerClient) -> None:
    code = """
        def work():
            said.append(script("script", "said = 1"))
        said = []
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    """
    (said,) = run(http, "script", code)
    assert "model 'script' waits for itself (script -> script)" in said


# ------------------------------------------------------------------------------------------------- ends on the way


def run_apart(daemon: DaemonProcess, model: str, code: str) -> Any:
    """Runs code in a model with a client of its own, for use in another thread."""
    with httpclient.InferenceServerClient(daemon.url, network_timeout=PATIENCE) as client:
        return run(client, model, code)


def held(path: Path, model: str = "gate") -> str:
    """Calls a model that answers when the file is there."""
    return f"said = of(call({model!r}, {{'path': np.array([{str(path)!r}], np.object_)}}, ['code']).exec())"


def test_a_client_that_gives_up_ends_what_was_called_for_it(
    daemon: DaemonProcess, http: httpclient.InferenceServerClient, tmp_path: Path
) -> None:
    path = tmp_path / "go"
    inner = f"""said = script("other", {held(path)!r})"""
    with grpcclient.InferenceServerClient(daemon.grpc_url) as client:
        given = grpcclient.InferInput("code", [1], "BYTES")
        given.set_data_from_numpy(np.array([inner.encode()], np.object_))
        ended = threading.Event()
        asked = client.async_infer("many", [given], lambda result, error: ended.set())
        wait_until(path.with_suffix(".began").exists, "the call to have begun")
        asked.cancel()
        assert ended.wait(PATIENCE)
    wait_until(path.with_suffix(".cancelled").exists, "what was called to be cancelled")
    assert run(http, "other", "said = 1") == 1


def test_a_model_that_is_loaded_anew_or_unloaded_answers_what_it_was_called_for(
    daemon: DaemonProcess, http: httpclient.InferenceServerClient, tmp_path: Path
) -> None:
    (repository,) = daemon.sections["repository"]["paths"]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(run_apart, daemon, "many", held(tmp_path / "first"))
        wait_until((tmp_path / "first.began").exists, "the first call to have begun")
        os.utime(f"{repository}/gate/1/model.py", (1, 1))
        http.load_model("gate")
        second = pool.submit(run_apart, daemon, "many", held(tmp_path / "second"))
        wait_until((tmp_path / "second.began").exists, "the second call to have begun")
        http.unload_model("gate")
        wait_until(lambda: not http.is_model_ready("gate"), "the model to be gone")
        assert "Model 'gate' is not ready." in run(http, "many", held(tmp_path / "third"))
        (tmp_path / "first").touch()
        (tmp_path / "second").touch()
        assert first.result(PATIENCE) == second.result(PATIENCE) == {"code": [1]}
    http.load_model("gate")


def test_a_call_that_ends_its_process_is_one_error(http: httpclient.InferenceServerClient) -> None:
    """The caller is run again, and then told that its request ends processes."""
    with pytest.raises(InferenceServerException, match="worker"):
        run(http, "script", """said = script("other", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")""")
    assert run(http, "script", SELF.replace("self.name", "'other'")) == 1


def test_nothing_of_it_is_left(http: httpclient.InferenceServerClient, daemon: DaemonProcess) -> None:
    """After all of the above every queue is empty."""
    pending = scrape(daemon.metrics_url).of("nv_inference_pending_request_count", "model")
    assert pending["scale"] == 0
    assert not any(pending.values())
