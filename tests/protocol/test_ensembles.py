"""Ensembles of a real daemon: their answers over both protocols, what they count, what they cost in copies, and how they fail."""

from __future__ import annotations

import json
import queue
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from tests.daemon_process import PATIENCE, DaemonOf, DaemonProcess, wait_until
from tests.repositories import answering, applying, ensemble, fields, of_x, scale_model, write_model
from tests.scrapes import scrape

PLUS = """
    inputs = {"a": "FP32[4]", "b": "FP32[4]"}
    outputs = {"sum": "FP32[4]", "difference": "FP32[4]"}
    max_batch_size = 8

    def create(path, config, device):
        return (lambda params, inputs: {"sum": inputs["a"] + inputs["b"], "difference": inputs["a"] - inputs["b"]}), {}
"""
#: Words as numbers: a host model before a jitted one.
LENGTHS = applying(
    """
    words = inputs["words"]
    lengths = np.array([len(word) for word in words.ravel()], np.float32).reshape(words.shape)
    upper = np.array([word.decode().upper() for word in words.ravel()], np.object_).reshape(words.shape)
    return {"x": lengths, "upper": upper}
    """,
    "words BYTES[4]",
    "x FP32[4], upper BYTES[4]",
    more="max_batch_size = 8\nhost = True",
)
#: Answers, fails, or leaves an output out, as its first number says; tells what it was asked with.
JUDGE = answering("""
    x, hint = given(request), pb_utils.get_input_tensor_by_name(request, "hint")
    first = x.ravel()[0]
    if first == -1:
        return pb_utils.InferenceResponse(error=pb_utils.TritonError("judged", pb_utils.TritonError.NOT_FOUND))
    said = {
        "id": request.request_id(), "sequence": request.correlation_id(), "flags": request.flags(),
        "timeout": request.timeout(), "parameters": json.loads(request.parameters() or "{}"),
        "wanted": sorted(request.requested_output_names()), "hint": hint is not None,
    }
    made = {"said": np.array([[json.dumps(said)]], np.object_)}
    return response(**made | ({"y": x} if first != -2 else {}))
""")
JUDGE_CONFIG = fields("x FP32 4, hint FP32 4 ?", "y FP32 4, said STRING 1", "max_batch_size: 8")
#: Says of which sequence its answer is, as the request told it.
TAGGER = answering("""
    return response(json.loads(json.loads(request.parameters()).get("tag", "{}")), y=given(request))
""")
TAGGER_CONFIG = fields("x FP32 4", "y FP32 4", "max_batch_size: 8")
#: Sums up what came of a sequence.
SUMS = applying(
    """
    total = state["sum"] + inputs["x"]
    return {"y": total}, {"sum": total}
    """,
    "x FP32[4]",
    "y FP32[4]",
    more='max_batch_size = 8\nstate = {"sum": "FP32[4]"}',
    arguments="params, inputs, state",
)
#: Holds its requests until it may go on.
GATE = answering("""
    told = json.loads(request.parameters() or "{}")
    pathlib.Path(told["began"]).touch()
    while not pathlib.Path(told["until"]).exists():
        time.sleep(0.005)
    return response(y=request.inputs()[0].as_numpy())
""")
GATE_CONFIG = fields("x FP32 -1 4", "y FP32 -1 4")
#: Says how many rows each of its batches has, and holds them until it may go on.
MEETS = applying(
    """
    with open(path / "rows", "a") as file:
        file.write(f"{len(inputs['x'])} ")
    while not (path / "until").exists():
        time.sleep(0.005)
    return {"y": inputs["x"] + 1}
    """,
    "x FP32[4]",
    "y FP32[4]",
    more="import time\nmax_batch_size = 8\nhost = True",
)
#: One at a time; one more may wait.
NARROW = 'backend: "jax" max_batch_size: 1 dynamic_batching { default_queue_policy { max_queue_size: 1 } }'
UNBATCHED = of_x("x + 0.5")
COUNTS = applying(
    """
    for i in range(int(inputs["n"][0])):
        if i == 13:
            raise ValueError("unlucky")
        yield {"i": np.array([i], np.int32)}
    """,
    "n INT32[1]",
    "i INT32[1]",
    more="host = True",
)
TENS = """
    inputs = {"x": "INT32[1]", "k": "INT32[1]"}
    outputs = {"y": "INT32[1]"}

    def create(path, config, device):
        return (lambda params, inputs: {"y": inputs["x"] * 10 + inputs["k"]}), {}
"""
JUDGED = ("judge", {"x": "x", "hint": "hint"}, {"y": "y", "said": "said"})


def models(repository: Path) -> Path:
    """Writes the models and ensembles: 3x + 1, then sums; and some that fail on the way."""
    scale_model(repository)
    write_model(repository, "plus", PLUS)
    write_model(repository, "lengths", LENGTHS)
    write_model(repository, "judge", JUDGE, JUDGE_CONFIG)
    write_model(repository, "gate", GATE, GATE_CONFIG)
    write_model(repository, "unbatched", UNBATCHED)
    scaled = ("scale", {"x": "x"}, {"y": "scaled"})
    ensemble(
        repository,
        "chain",
        ["x FP32 4"],
        ["total FP32 4", "scaled FP32 4", "rest FP32 4"],
        [scaled, ("plus", {"a": "scaled", "b": "x"}, {"sum": "total", "difference": "rest"})],
        8,
    )
    inner = ("chain", {"x": "x"}, {"total": "inner"})
    ensemble(repository, "nested", ["x FP32 4"], ["y FP32 4"], [inner, ("scale", {"x": "inner"}, {"y": "y"})], 8)
    deep = "nested"
    for depth in range(3):
        ensemble(repository, f"deep{depth}", ["x FP32 4"], ["y FP32 4"], [(deep, {"x": "x"}, {"y": "y"})], 8)
        deep = f"deep{depth}"
    counted = ("lengths", {"words": "words"}, {"x": "n", "upper": "upper"})
    scaled = ("scale", {"x": "n"}, {"y": "y"})
    ensemble(repository, "words", ["words STRING 4"], ["y FP32 4", "upper STRING 4"], [counted, scaled], 8)
    ensemble(repository, "judged", ["x FP32 4", "hint FP32 4 ?"], ["y FP32 4", "said STRING 1"], [JUDGED], 8)
    # What a judge leaves out, the next one does without.
    first = ("judge", {"x": "x"}, {"y": "middle"})
    second = ("judge", {"x": "x", "hint": "middle"}, {"y": "z", "said": "last"})
    ensemble(repository, "twice", ["x FP32 4"], ["z FP32 4", "last STRING 1"], [first, second], 8)
    second = ("scale", {"x": "middle"}, {"y": "z"})
    ensemble(repository, "needs", ["x FP32 4"], ["z FP32 4"], [first, second], 8)
    first, second = ("gate", {"x": "x"}, {"y": "held"}), ("scale", {"x": "held"}, {"y": "y"})
    ensemble(repository, "gated", ["x FP32 -1 4"], ["y FP32 -1 4"], [first, second])
    first, second = ("scale", {"x": "x"}, {"y": "batched"}), ("unbatched", {"x": "batched"}, {"y": "y"})
    ensemble(repository, "shapes", ["x FP32 1 4"], ["y FP32 4"], [first, second])
    write_model(repository, "whole", UNBATCHED.replace("FP32[4]", "FP32[n, 4]"))
    second, third = ("whole", {"x": "batched"}, {"y": "whole"}), ("scale", {"x": "whole"}, {"y": "y"})
    ensemble(repository, "mixed", ["x FP32 4"], ["y FP32 4"], [first, second, third], 8)
    ensemble(
        repository, "ends_alone", ["x FP32 4"], ["y FP32 4"], [first, ("unbatched", {"x": "batched"}, {"y": "y"})], 8
    )
    write_model(repository, "meets", MEETS)
    first, second = ("scale", {"x": "x"}, {"y": "scaled"}), ("meets", {"x": "scaled"}, {"y": "y"})
    ensemble(repository, "met", ["x FP32 4"], ["y FP32 4"], [first, second], 8)
    write_model(repository, "narrow", MEETS.replace("max_batch_size = 8", ""), NARROW)
    ensemble(repository, "narrowed", ["x FP32 4"], ["y FP32 4"], [("narrow", {"x": "x"}, {"y": "y"})], 1)
    write_model(repository, "tagger", TAGGER, TAGGER_CONFIG)
    tagged = ("tagger", {"x": "x"}, {"y": "tagged"})
    judged = [("judge", {"x": of}, {"y": f"y_{of}", "said": f"said_{of}"}) for of in ("x", "tagged", "y_tagged")]
    said = [f"said_{of} STRING 1" for of in ("x", "tagged", "y_tagged")]
    ensemble(repository, "retold", ["x FP32 4"], [*said, "y_x FP32 4", "y_y_tagged FP32 4"], [tagged, *judged], 8)
    write_model(repository, "sums", SUMS, "sequence_batching { max_sequence_idle_microseconds: 600000000 }")
    ensemble(repository, "tagged_sums", ["x FP32 4"], ["y FP32 4"], [tagged, ("sums", {"x": "tagged"}, {"y": "y"})], 1)
    write_model(repository, "counts", COUNTS)
    write_model(repository, "tens", TENS)
    counted, made = ("counts", {"n": "n"}, {"i": "i"}), ("tens", {"x": "n", "k": "n"}, {"y": "k"})
    last = ("tens", {"x": "i", "k": "k"}, {"y": "y"})
    for name, most in (("streamed", 0), ("streamed_one_by_one", 1)):
        ensemble(repository, name, ["n INT32 1"], ["y INT32 1"], [counted, made, last])
        config = repository / name / "config.pbtxt"
        config.write_text(config.read_text().replace("step {", f"max_inflight_requests: {most} step {{", 1))
    ensemble(repository, "outer_stream", ["n INT32 1"], ["y INT32 1"], [("streamed", {"n": "n"}, {"y": "y"})])
    return repository


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    repository = models(tmp_path_factory.mktemp("repository"))
    return daemon_of(repository)


def tensor(client: Any, name: str, array: Any, datatype: str = "FP32") -> Any:
    made = (grpcclient if isinstance(client, grpcclient.InferenceServerClient) else httpclient).InferInput(
        name, array.shape, datatype
    )
    made.set_data_from_numpy(array)
    return made


def asked(client: Any, *names: str) -> list[Any]:
    kind = grpcclient if isinstance(client, grpcclient.InferenceServerClient) else httpclient
    return [kind.InferRequestedOutput(name) for name in names]


def rows(count: int = 1, first: float = 1.0) -> Any:
    return np.arange(first, first + 4 * count, dtype=np.float32).reshape(count, 4)


def stats(http: httpclient.InferenceServerClient, model: str) -> dict[str, Any]:
    (found,) = http.get_inference_statistics(model)["model_stats"]
    return dict(found)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_a_chain_gives_what_its_models_give_one_after_the_other(client: Any, count: int) -> None:
    x = rows(count)
    got = client.infer("chain", [tensor(client, "x", x)])
    np.testing.assert_array_equal(got.as_numpy("scaled"), 3 * x + 1)
    np.testing.assert_array_equal(got.as_numpy("total"), 4 * x + 1)
    np.testing.assert_array_equal(got.as_numpy("rest"), 2 * x + 1)


def test_what_nobody_asked_for_is_not_computed(client: Any, http: httpclient.InferenceServerClient) -> None:
    before = stats(http, "plus")["inference_stats"]["success"]["count"]
    got = client.infer("chain", [tensor(client, "x", rows())], outputs=asked(client, "scaled"))
    np.testing.assert_array_equal(got.as_numpy("scaled"), 3 * rows() + 1)
    assert got.as_numpy("total") is None
    assert stats(http, "plus")["inference_stats"]["success"]["count"] == before


def test_ensembles_in_ensembles(client: Any) -> None:
    x = rows(3)
    for name in ("nested", "deep0", "deep2"):
        got = client.infer(name, [tensor(client, "x", x)])
        np.testing.assert_array_equal(got.as_numpy("y"), 3 * (4 * x + 1) + 1)


def test_strings_on_the_way(client: Any) -> None:
    words = np.array([["a", "bb", "", "dddd"]], np.object_)
    got = client.infer("words", [tensor(client, "words", words, "BYTES")])
    np.testing.assert_array_equal(got.as_numpy("y"), [[4, 7, 1, 13]])
    assert got.as_numpy("upper").tolist() == [[b"A", b"BB", b"", b"DDDD"]]


def test_members_are_told_what_the_request_says(client: Any) -> None:
    got = client.infer(
        "judged", [tensor(client, "x", rows())], request_id="mine", timeout=7_000_000, parameters={"colour": "red"}
    )
    said = json.loads(got.as_numpy("said").ravel()[0])
    assert said["id"] == "mine"
    assert said["timeout"] == 7_000_000
    assert said["parameters"] == {"colour": "red"}
    assert said["hint"] is False
    got = client.infer("judged", [tensor(client, "x", rows()), tensor(client, "hint", rows())])
    assert json.loads(got.as_numpy("said").ravel()[0])["hint"] is True


def test_what_a_step_leaves_out_an_optional_input_does_without(client: Any) -> None:
    got = client.infer("twice", [tensor(client, "x", rows())])
    assert json.loads(got.as_numpy("last").ravel()[0])["hint"] is True
    got = client.infer("twice", [tensor(client, "x", rows(first=-2))])
    assert json.loads(got.as_numpy("last").ravel()[0])["hint"] is False
    assert got.as_numpy("z") is None


def test_what_a_step_leaves_out_is_missing_where_it_is_needed(client: Any) -> None:
    with pytest.raises(InferenceServerException, match=r"in ensemble 'needs', .*expected 1 inputs but got 0 inputs"):
        client.infer("needs", [tensor(client, "x", rows(first=-2))])


def test_a_step_that_fails_is_told_with_its_code(client: Any) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.infer("judged", [tensor(client, "x", rows(first=-1))], request_id="r")
    assert caught.value.message() == "in ensemble 'judged', judged"
    assert caught.value.status() in ("404", "StatusCode.NOT_FOUND")
    assert client.infer("judged", [tensor(client, "x", rows())]).as_numpy("y") is not None


def test_a_batch_of_one_goes_to_a_model_that_does_not_batch(client: Any) -> None:
    got = client.infer("shapes", [tensor(client, "x", rows())])
    np.testing.assert_array_equal(got.as_numpy("y"), (3 * rows() + 1.5)[0])


@pytest.mark.parametrize("count", [1, 3])
def test_a_batch_passes_through_a_model_that_does_not_batch(client: Any, count: int) -> None:
    """The batch passes as a whole where that model's first dimension varies."""
    got = client.infer("mixed", [tensor(client, "x", rows(count))])
    np.testing.assert_array_equal(got.as_numpy("y"), 3 * (3 * rows(count) + 1.5) + 1)


def test_an_ensemble_that_batches_answers_with_its_batch_dimension(client: Any) -> None:
    """The one row of a last model that does not batch is a batch of one; more rows are that model's error."""
    got = client.infer("ends_alone", [tensor(client, "x", rows())])
    np.testing.assert_array_equal(got.as_numpy("y"), 3 * rows() + 1.5)
    with pytest.raises(InferenceServerException, match=r"in ensemble 'ends_alone', .* Expected \[4\], got \[3,4\]"):
        client.infer("ends_alone", [tensor(client, "x", rows(3))])


def test_regions_on_both_ends(client: Any) -> None:
    x = rows(2)
    region = shm.create_shared_memory_region("ens", "/tensord-test-ensemble", 64)
    try:
        shm.set_shared_memory_region(region, [x])
        client.register_system_shared_memory("ens", "/tensord-test-ensemble", 64)
        given = tensor(client, "x", x)
        given.set_shared_memory("ens", 32)
        (wanted,) = asked(client, "total")
        wanted.set_shared_memory("ens", 32, 32)
        client.infer("chain", [given], outputs=[wanted])
        np.testing.assert_array_equal(shm.get_contents_as_numpy(region, np.float32, [16])[8:], (4 * x + 1).ravel())
    finally:
        client.unregister_system_shared_memory("ens")
        shm.destroy_shared_memory_region(region)


@pytest.mark.cpu_workers("what has to be copied")
def test_what_is_counted_and_that_nothing_is_copied(http: httpclient.InferenceServerClient) -> None:
    """The tensor between two jitted models is used where the first one has left it."""
    names = ("chain", "scale", "plus")
    http.infer("chain", [tensor(http, "x", rows())])  # anything that happens once
    before = {name: stats(http, name) for name in names}
    http.infer("chain", [tensor(http, "x", rows())], outputs=asked(http, "total"))
    after = {name: stats(http, name) for name in names}
    for name in names:
        was, now = before[name]["inference_stats"], after[name]["inference_stats"]
        moved = {key: now[key]["count"] - was[key]["count"] for key in now}
        assert moved == {
            "success": 1, "fail": 0, "queue": 1, "compute_input": 1, "compute_infer": 1, "compute_output": 1,
            "cache_hit": 0, "cache_miss": 0,
        }  # fmt: skip
        assert after[name]["execution_count"] - before[name]["execution_count"] == 1
        assert after[name]["inference_count"] - before[name]["inference_count"] == 1
    copied = {name: after[name]["copied_byte_size"] - before[name]["copied_byte_size"] for name in names}
    # The client's bytes into the first program, as of every small request; and its output into the answer.
    assert copied == {"chain": 32, "scale": 0, "plus": 0}


def test_requests_of_everybody_share_a_members_batches(
    daemon: DaemonProcess, grpc: grpcclient.InferenceServerClient
) -> None:
    """1. A member is busy with one request. 2. Two of ensembles and one of its own wait for it. 3. They are one batch."""
    folder = Path(daemon.sections["repository"]["paths"][0], "meets") / "1"
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask(model: str, first: float) -> None:
        grpc.async_infer(model, [tensor(grpc, "x", rows(1, first))], lambda result, error: answers.put((result, error)))

    def waiting() -> float:
        return scrape(daemon.metrics_url).model("nv_inference_pending_request_count", "meets")

    ask("meets", 0)
    wait_until(lambda: (folder / "rows").exists(), "the member to begin", daemon)
    for number, model in enumerate(("met", "meets", "met"), 1):
        ask(model, number)
    wait_until(lambda: waiting() == 3, "three to wait for the member", daemon)
    (folder / "until").touch()
    got = [answers.get(timeout=PATIENCE) for _ in range(4)]
    assert [error for _, error in got if error] == []
    found = sorted(float(result.as_numpy("y")[0, 0]) for result, _ in got)
    # Those of the ensemble were scaled before: 3x + 1, and then one more.
    assert found == [1, 3, 5, 11]
    assert (folder / "rows").read_text().split() == ["1", "3"]


def test_a_members_full_queue_is_what_the_client_is_told(daemon: DaemonProcess, client: Any) -> None:
    """1. The member is busy. 2. Another request waits for it, which is all that may. 3. The next is told so, with that code."""
    folder = Path(daemon.sections["repository"]["paths"][0], "narrow") / "1"
    (folder / "until").unlink(missing_ok=True)

    def figure(name: str) -> float:
        return scrape(daemon.metrics_url).model(name, "narrow")

    with grpcclient.InferenceServerClient(daemon.grpc_url) as others:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def ask() -> None:
            others.async_infer("narrowed", [tensor(others, "x", rows())], lambda result, error: answers.put(error))

        before = (folder / "rows").read_text() if (folder / "rows").exists() else ""
        ask()
        wait_until(
            lambda: (folder / "rows").exists() and (folder / "rows").read_text() != before, "it to begin", daemon
        )
        ask()
        wait_until(lambda: figure("nv_inference_pending_request_count") == 1, "one to wait", daemon)
        with pytest.raises(InferenceServerException) as caught:
            client.infer("narrowed", [tensor(client, "x", rows())], request_id="third")
        assert caught.value.status() in ("503", "StatusCode.UNAVAILABLE")
        assert caught.value.message() == "in ensemble 'narrowed', [request id: third] Exceeds maximum queue size"
        (folder / "until").touch()
        assert [answers.get(timeout=PATIENCE) for _ in range(2)] == [None, None]


def test_metadata_config_index_and_ready(client: Any, http: httpclient.InferenceServerClient) -> None:
    metadata = http.get_model_metadata("chain")
    assert metadata["platform"] == "ensemble"
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    config = http.get_model_config("chain")
    assert [step["model_name"] for step in config["ensemble_scheduling"]["step"]] == ["scale", "plus"]
    assert config["backend"] == ""
    assert config["instance_group"] == []
    assert client.is_model_ready("chain")


def test_cancelled_between_steps(
    daemon: DaemonProcess,
    grpc: grpcclient.InferenceServerClient,
    http: httpclient.InferenceServerClient,
    tmp_path: Path,
) -> None:
    """1. The first step runs. 2. The client gives up. 3. The first step ends: the second one never begins."""
    began, until = tmp_path / "began", tmp_path / "until"
    before = stats(http, "scale")["inference_stats"]["success"]["count"]
    answers: list[Any] = []
    done = threading.Event()

    def answered(result: Any, error: Any) -> None:
        answers.append(error)
        done.set()

    call = grpc.async_infer(
        "gated", [tensor(grpc, "x", rows())], answered, parameters={"began": str(began), "until": str(until)}
    )
    wait_until(began.exists, "the first step to run", daemon)
    call.cancel()
    assert done.wait(60)
    # Its connection, and the lane, keep the order: whoever has answered this has read that the other one was cancelled.
    grpc.infer("plus", [tensor(grpc, name, rows()) for name in ("a", "b")])
    until.touch()
    assert "CANCELLED" in str(answers[0]) or "cancelled" in str(answers[0])
    wait_until(lambda: stats(http, "gated")["inference_stats"]["fail"]["count"] == 1, "the request to end", daemon)
    assert stats(http, "scale")["inference_stats"]["success"]["count"] == before


def test_a_model_says_of_which_sequence_later_steps_are(client: Any) -> None:
    """1. The client is of sequence 5. 2. A model says "other", START. 3. Steps behind it are of that one, others are not."""
    tag = json.dumps({"sequence_id": "other", "sequence_start": True})
    got = client.infer(
        "retold", [tensor(client, "x", rows())], sequence_id=5, sequence_end=True, parameters={"tag": tag}
    )
    said = [json.loads(got.as_numpy(f"said_{of}").item()) for of in ("x", "tagged", "y_tagged")]
    assert [(one["sequence"], one["flags"]) for one in said] == [(5, 2), ("other", 1), ("other", 1)]
    # What it does not say of the flags is not set, and the sequence stays.
    got = client.infer(
        "retold",
        [tensor(client, "x", rows())],
        sequence_id=5,
        sequence_end=True,
        parameters={"tag": '{"sequence_start": true}'},
    )
    said = [json.loads(got.as_numpy(f"said_{of}").item()) for of in ("x", "tagged", "y_tagged")]
    assert [(one["sequence"], one["flags"]) for one in said] == [(5, 2), (5, 1), (5, 1)]


def test_sequences_that_a_model_names(http: httpclient.InferenceServerClient) -> None:
    sums = {7: 0.0, 8: 0.0}
    for number in range(6):
        who = 7 + number % 2
        tag = {"sequence_id": who, "sequence_start": number < 2, "sequence_end": number > 3}
        got = http.infer("tagged_sums", [tensor(http, "x", rows())], parameters={"tag": json.dumps(tag)})
        sums[who] += 1
        np.testing.assert_array_equal(got.as_numpy("y"), sums[who] * rows())


@pytest.mark.parametrize(
    ("tag", "why"),
    [
        (
            {"sequence_id": True},
            "expected parameter 'sequence_id' to be TRITONSERVER_PARAMETER_INT or TRITONSERVER_PARAMETER_STRING",
        ),
        ({"sequence_end": 1}, "expect parameter 'sequence_end' to be TRITONSERVER_PARAMETER_BOOL"),
        ({"sequence_id": -1}, "correlation ID -1 is no unsigned number of 64 bits"),
    ],
)
def test_a_sequence_that_is_none(http: httpclient.InferenceServerClient, tag: dict[str, Any], why: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        http.infer("retold", [tensor(http, "x", rows())], parameters={"tag": json.dumps(tag)})
    assert (caught.value.status(), caught.value.message()) == ("400", f"in ensemble 'retold', {why}")


def events(daemon: DaemonProcess, model: str, n: int) -> list[Any]:
    status, body = daemon.request("POST", f"/v2/models/{model}/generate_stream", json.dumps({"n": n}).encode())
    assert status == 200, body
    found = [json.loads(line.removeprefix("data: ")) for line in body.decode().split("\n\n") if line]
    return [event["y"] if "y" in event else event["error"] for event in found]


@pytest.mark.parametrize("model", ["streamed", "streamed_one_by_one", "outer_stream"])
@pytest.mark.parametrize("n", [0, 1, 12])
def test_each_answer_of_a_member_that_streams_goes_through_the_steps(daemon: DaemonProcess, model: str, n: int) -> None:
    assert events(daemon, model, n) == [10 * i + 11 * n for i in range(n)]


def test_a_stream_that_fails_in_the_middle_ends_with_one_error(daemon: DaemonProcess) -> None:
    found = events(daemon, "streamed_one_by_one", 20)
    assert found[:-1] == [10 * i + 220 for i in range(len(found) - 1)]
    assert found[-1] == "in ensemble 'streamed_one_by_one', model 'counts' version 1 failed with ValueError"
    config = json.loads(daemon.get("/v2/models/streamed/config")[1])
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert daemon.request("POST", "/v2/models/streamed/infer", b"{}")[0] >= 400


def test_requests_that_come_together_get_what_each_would_get_alone(
    daemon: DaemonProcess, http: httpclient.InferenceServerClient
) -> None:
    """Answers and counts are the same whether the requests run as one batch or each step runs by itself."""
    before = {name: stats(http, name)["inference_stats"]["success"]["count"] for name in ("chain", "scale", "plus")}
    inputs = [rows(1 + i % 3, 10.0 * i) for i in range(48)]
    calls = [http.async_infer("chain", [tensor(http, "x", x)], outputs=asked(http, "total")) for x in inputs]
    for x, call in zip(inputs, calls, strict=True):
        np.testing.assert_array_equal(call.get_result().as_numpy("total"), 4 * x + 1)
    for name, count in before.items():
        assert stats(http, name)["inference_stats"]["success"]["count"] == count + len(inputs)
