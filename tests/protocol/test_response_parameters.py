"""Parameters of responses of Python models and generators reach the client, with their types, on every way there is."""

from __future__ import annotations

import json
import queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from tests.daemon_process import DaemonOf, DaemonProcess
from tests.repositories import answering, applying, fields, write_model

#: ``what`` is Python: the parameters of the answer. ``size``: elements of the output.
MODEL = answering(
    """
    TritonPythonModel.calls += 1
    told = json.loads(request.parameters())
    if "error" in told:
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(told["error"] * told["times"]))
    level = __import__("enum").IntEnum("Level", {"HIGH": 7})
    parameters = eval(told["what"], {"calls": self.calls, "np": np, "Level": level})
    return response(parameters, y=np.full(told.get("size", 1), self.calls, np.int32))
    """,
    more="calls = 0",
)
#: A generator whose one response has the parameters that the input says, as Python.
GENERATOR = applying(
    """
    yield {"y": np.ones(1, np.int32)}, eval(inputs["what"][0], {"np": np})
    """,
    "what BYTES[1]",
    "y INT32[1]",
    more="host = True",
)
#: A Python model that asks the generator, and tells the parameters it got as text.
ASKS = answering(
    """
    what = pb_utils.Tensor("what", np.array([json.loads(request.parameters())["what"]], np.object_))
    asked = pb_utils.InferenceRequest(model_name="yields", inputs=[what], requested_output_names=["y"])
    first = next(asked.exec(decoupled=True))
    return response({"got": first.parameters()}, y=np.ones(1, np.int32))
    """
)
CONFIG = fields("x INT32 1", "y INT32 -1")
GOOD = (
    "{'text': 'grüß', 'number': -2**63, 'most': 2**63 - 1, 'yes': True, 'no': False, 'empty': '', "
    "'level': Level.HIGH, 'np': np.str_('s')}"
)
EXPECTED: dict[str, Any] = {
    "text": "grüß",
    "number": -(2**63),
    "most": 2**63 - 1,
    "yes": True,
    "no": False,
    "empty": "",
    "level": 7,
    "np": "s",
}
X = {"name": "x", "datatype": "INT32", "shape": [1], "data": [1]}


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    folder = tmp_path_factory.mktemp("parameters")
    write_model(folder / "models", "says", MODEL, CONFIG)
    write_model(folder / "models", "yields", GENERATOR)
    write_model(folder / "models", "asks", ASKS, CONFIG)
    return daemon_of(folder / "models", folder=folder)


def plain(parameters: Any) -> dict[str, Any]:
    """Returns the values of a protobuf map of parameters, each from the field that is set."""
    return {key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in parameters.items()}


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Returns whether parameters are equal, types included: for a JSON client True is not 1."""
    return found == wanted and all(type(found[key]) is type(value) for key, value in wanted.items())


@pytest.mark.parametrize("binary", [False, True])
def test_http(daemon: DaemonProcess, binary: bool) -> None:
    x = httpclient.InferInput("x", [1], "INT32")
    x.set_data_from_numpy(np.array([1], np.int32), binary_data=binary)
    outputs = [httpclient.InferRequestedOutput("y", binary_data=binary)]
    with httpclient.InferenceServerClient(daemon.url) as client:
        answer = client.infer("says", [x], outputs=outputs, parameters={"what": GOOD}).get_response()
        assert same(answer["parameters"], EXPECTED)
        assert "parameters" not in client.infer("says", [x], parameters={"what": "None"}).get_response()
        assert "parameters" not in client.infer("says", [x], parameters={"what": "{}"}).get_response()


def test_grpc(daemon: DaemonProcess) -> None:
    x = grpcclient.InferInput("x", [1], "INT32")
    x.set_data_from_numpy(np.array([1], np.int32))
    with grpcclient.InferenceServerClient(daemon.grpc_url) as client:
        found = client.infer("says", [x], parameters={"what": GOOD}).get_response().parameters
        assert same(plain(found), EXPECTED)
        assert {key: value.WhichOneof("parameter_choice") for key, value in found.items()} == {
            "text": "string_param",
            "number": "int64_param",
            "most": "int64_param",
            "yes": "bool_param",
            "no": "bool_param",
            "empty": "string_param",
            "level": "int64_param",
            "np": "string_param",
        }
        answers: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: answers.put(error or result))
        client.async_stream_infer("says", [x], parameters={"what": GOOD})
        found = plain(answers.get(timeout=240).get_response().parameters)
        client.stop_stream()
        assert same({key: value for key, value in found.items() if key != "triton_final_response"}, EXPECTED)


def test_generate(daemon: DaemonProcess) -> None:
    body = json.dumps({"x": 1, "what": "{'reason': 'stop', 'tokens': 3}"}).encode()
    status, answer = daemon.request("POST", "/v2/models/says/generate", body)
    found = json.loads(answer)
    assert (status, found["reason"], found["tokens"]) == (200, "stop", 3)


@pytest.mark.parametrize("size", [1, 3, 100_000])
def test_each_answer_has_its_own(daemon: DaemonProcess, size: int) -> None:
    """Each answer has its own parameters also where request and answer repeat, small and large."""
    x = grpcclient.InferInput("x", [1], "INT32")
    x.set_data_from_numpy(np.array([1], np.int32))
    said = {"what": "{'calls': calls} if calls % 3 else {}", "size": size}
    with grpcclient.InferenceServerClient(daemon.grpc_url) as client:
        for _ in range(12):
            answer = client.infer("says", [x], parameters=said)
            calls = int(answer.as_numpy("y")[0])
            assert plain(answer.get_response().parameters) == ({"calls": calls} if calls % 3 else {})
            status, found = daemon.infer("says", [X], parameters=said)
            calls = found["outputs"][0]["data"][0]
            assert (status, found.get("parameters", {})) == (200, {"calls": calls} if calls % 3 else {})


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("{1: 'a'}", "Expect parameters keys to have type str, found type <class 'int'>"),
        ("{'a': 0.5}", "Expect parameters values to have type bool/int/str, found type <class 'float'>"),
        ("{'a': None}", "Expect parameters values to have type bool/int/str, found type <class 'NoneType'>"),
        ("{'a': [1]}", "Expect parameters values to have type bool/int/str, found type <class 'list'>"),
        ("{'a': np.int32(1)}", "Expect parameters values to have type bool/int/str, found type <class 'numpy.int32'>"),
        ("[1]", "Expect parameters to have type dict, found type <class 'list'>"),
        ("{'a': 2**63}", "parameter 'a' is an integer of 64 bits, those that fit into 64 with a sign are sent"),
        ("{'a': 10**5000}", "parameter 'a' is an integer of 16610 bits"),
        ("{'a': '\\ud800'}", "a parameter's text cannot be sent as UTF-8: surrogates not allowed"),
        ("{'\\ud800': 1}", "a parameter's text cannot be sent as UTF-8"),
        ("{'a': 'x' * (1 << 20)}", "the parameters are 1048585 bytes, at most 1048576 are sent"),
    ],
)
def test_what_no_client_could_be_sent(daemon: DaemonProcess, what: str, words: str) -> None:
    status, answer = daemon.infer("says", [X], parameters={"what": what})
    assert status == 500
    assert answer["error"].startswith(
        "Failed to process the request(s) for model 'says_0', message: TritonModelException: "
    )
    assert words in answer["error"]
    assert daemon.infer("says", [X], parameters={"what": "{'a': 1}"})[1]["parameters"] == {"a": 1}


def generated(daemon: DaemonProcess, what: str) -> dict[str, Any]:
    """Returns the first event of the generator's answer."""
    answer = daemon.request("POST", "/v2/models/yields/generate_stream", json.dumps({"what": what}).encode())[1]
    found: dict[str, Any] = json.loads(answer.partition(b"data: ")[2].partition(b"\n")[0])
    return found


def test_of_a_generator(daemon: DaemonProcess) -> None:
    what = "{'score': np.float32(0.5), 'rate': np.float64(0.25), 'n': np.int64(3), 'yes': np.True_, 'text': 'grüß'}"
    expected = {"score": 0.5, "rate": 0.25, "n": 3, "yes": True, "text": "grüß"}
    found = generated(daemon, what)
    assert same({key: found.get(key) for key in expected}, expected)
    assert same(json.loads(daemon.infer("asks", [X], parameters={"what": what})[1]["parameters"]["got"]), expected)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("{'a': None}", "are a dict of bool, int, float or str by name, found <class 'NoneType'>"),
        ("{'a': [1]}", "are a dict of bool, int, float or str by name, found <class 'list'>"),
        ("{1: 2}", "are a dict of bool, int, float or str by name, found <class 'int'>"),
        ("{'a': np.longdouble(1)}", "are a dict of bool, int, float or str by name, found <class 'numpy.longdouble'>"),
        (
            "{'a': np.uint64(2**63)}",
            "parameter 'a' is an integer of 64 bits, those that fit into 64 with a sign are sent",
        ),
        ("{'a': '\\ud800'}", "a parameter's text cannot be sent as UTF-8: surrogates not allowed"),
        ("{'a': 'x' * (300 << 20)}", "the parameters are 314572809 bytes, at most 1048576 are sent"),
    ],
)
def test_what_no_client_could_be_sent_by_a_generator(daemon: DaemonProcess, what: str, words: str) -> None:
    """The request gets an error, and the worker goes on."""
    error = generated(daemon, what)["error"]
    assert error.startswith("model 'yields': ")
    assert words in error
    assert generated(daemon, "{'a': 1}")["a"] == 1


def test_as_much_as_is_allowed(daemon: DaemonProcess) -> None:
    found = daemon.infer("says", [X], parameters={"what": "{'a': 'x' * ((1 << 20) - 16)}"})[1]
    assert len(found["parameters"]["a"]) == (1 << 20) - 16


def test_a_long_error_is_cut_and_says_so(daemon: DaemonProcess) -> None:
    """Clients have room for a sentence, not for a megabyte."""
    for times, expected in ((8192, "e" * 8192), (100_000, f"{'e' * 8192}... (91808 more characters)")):
        status, answer = daemon.infer("says", [X], parameters={"error": "e", "times": times})
        assert (status, answer) == (500, {"error": expected})
    parameters = {"what": "{}['e' * 100_000]"}
    status, answer = daemon.infer("says", [X], parameters=parameters)
    assert status == 500
    assert "KeyError: 'eee" in answer["error"]
    assert answer["error"].endswith(" more characters)")
    assert len(answer["error"]) < 1200
