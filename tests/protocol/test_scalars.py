"""Single numbers without a batch dimension: each request is answered with its own, whichever way it takes in and out."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shared_memory
from tritonclient.grpc import service_pb2

from tests.daemon_process import PATIENCE, DaemonProcess
from tests.repositories import answering, applying, of_x, write_model

#: So many requests of a kind that every way is taken: the first, the repeated, the loop's C part.
_MANY = 12
_FUNCTION = """
def create(path, config, device):
    return (lambda params, i: {"y": i["x"] * 2 + 1}), {}
"""
_TRITON = answering(
    """
    x = given(request)
    asked = pb_utils.InferenceRequest(
        model_name="scalar", requested_output_names=["y"], inputs=[pb_utils.Tensor("x", x.reshape(()))]
    )
    y = pb_utils.get_output_tensor_by_name(asked.exec(), "y").as_numpy()
    assert y.shape == ()
    return response(y=y)
    """,
    more="""
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [1]})
        config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [1]})
        config.set_max_batch_size(0)
        return config
    """,
)
_STEPS = """
    platform: "ensemble"
    input { name: "v" data_type: TYPE_FP32 dims: 3 }
    output { name: "w" data_type: TYPE_FP32 dims: 50000 }
    ensemble_scheduling {
      step { model_name: "sum" model_version: -1 input_map { key: "x" value: "v" } output_map { key: "y" value: "s" } }
      step { model_name: "scalar" model_version: -1 input_map { key: "x" value: "s" } output_map { key: "y" value: "t" } }
      step { model_name: "wide" model_version: -1 input_map { key: "x" value: "t" } output_map { key: "y" value: "w" } }
    }
"""


@pytest.fixture(scope="module")
def daemon(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder, scalar = tmp_path_factory.mktemp("repository"), 'inputs = {"x": "FP32[]"}\noutputs = {"y": "FP32[]"}\n'
    write_model(folder, "scalar", scalar + _FUNCTION)
    write_model(folder, "configured", scalar + _FUNCTION, 'input { name: "x" data_type: TYPE_FP32 }')
    write_model(folder, "host", scalar + "host = True\n" + _FUNCTION)
    write_model(
        folder,
        "generator",
        scalar
        + """
def create(path, config, device):
    def apply(params, i):
        yield {"y": i["x"] * 2 + 1}
    return apply, {}
""",
    )
    write_model(
        folder,
        "mixed",
        applying(
            'return {"y": i["v"] * i["x"], "s": i["v"].sum() + i["x"], "m": i["n"] + 1, "c": ~i["b"]}',
            "x FP32[], v FP32[3], n INT64[], b BOOL[]",
            "y FP32[3], s FP32[], m INT64[], c BOOL[]",
            arguments="params, i",
        ),
    )
    write_model(
        folder,
        "text",
        of_x('np.array(x[()] + b"!", object)', "BYTES[]", more="import numpy as np\nhost = True"),
    )
    total = 'inputs = {"x": "FP32[3]"}\noutputs = {"y": "FP32[]"}\n'
    write_model(
        folder, "sum", total + 'def create(path, config, device):\n    return (lambda p, i: {"y": i["x"].sum()}), {}\n'
    )
    write_model(
        folder,
        "wide",
        of_x("jnp.arange(50000, dtype=jnp.float32) * x", "FP32[]", "FP32[50000]", more="import jax.numpy as jnp"),
    )
    write_model(folder, "triton", _TRITON)
    (folder / "steps" / "1").mkdir(parents=True)
    (folder / "steps" / "config.pbtxt").write_text(_STEPS)
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), [folder]) as running:
        yield running
        assert "Traceback" not in running.log


def asked(daemon: DaemonProcess, model: str, *tensors: tuple[str, str, list[int], Any]) -> dict[str, Any]:
    """Asks in JSON; returns shape and data of each output."""
    given = [{"name": n, "datatype": t, "shape": shape, "data": data} for n, t, shape, data in tensors]
    status, answer = daemon.infer(model, given)
    assert status == 200, answer
    return {output["name"]: (output["shape"], output["data"]) for output in answer["outputs"]}


@pytest.mark.parametrize("model", ["scalar", "configured", "host", "generator"])
def test_in_json(daemon: DaemonProcess, model: str) -> None:
    if model == "generator":
        for number in range(_MANY):
            body = json.dumps({"x": number}).encode()
            _, answer = daemon.request("POST", f"/v2/models/{model}/generate_stream", body)
            assert json.loads(answer.removeprefix(b"data: "))["y"] == 2 * number + 1
        return
    for number in range(_MANY):
        assert asked(daemon, model, ("x", "FP32", [], [number])) == {"y": ([], [2 * number + 1])}
        assert daemon.request("POST", f"/v2/models/{model}/generate", json.dumps({"x": number}).encode())[0] == 200


def test_other_datatypes_and_others_beside_it(daemon: DaemonProcess) -> None:
    for number in range(_MANY):
        tensors = ("x", "FP32", [], [number]), ("v", "FP32", [3], [1, 2, number]), ("n", "INT64", [], [number])
        assert asked(daemon, "mixed", *tensors, ("b", "BOOL", [], [number % 2 == 0])) == {
            "y": ([3], [number, 2 * number, number * number]),
            "s": ([], [3 + 2 * number]),
            "m": ([], [number + 1]),
            "c": ([], [number % 2 == 1]),
        }
        assert asked(daemon, "text", ("x", "BYTES", [], [f"a{number}"])) == {"y": ([], [f"a{number}!"])}


@pytest.mark.parametrize("library", [httpclient, grpcclient])
@pytest.mark.parametrize("model", ["scalar", "host", "wide"])
def test_in_binary_from_several_at_once(daemon: DaemonProcess, library: Any, model: str) -> None:
    wrong: list[Any] = []

    def ask(first: int) -> None:
        timeouts = {"network_timeout": PATIENCE, "connection_timeout": PATIENCE} if library is httpclient else {}
        url = daemon.url if library is httpclient else daemon.grpc_url
        with contextlib.closing(library.InferenceServerClient(url, **timeouts)) as client:
            for number in range(first, first + 4 * _MANY):
                tensor = library.InferInput("x", [], "FP32")
                tensor.set_data_from_numpy(np.array(number, np.float32))
                y = client.infer(model, [tensor]).as_numpy("y")
                expected = (
                    np.arange(50000, dtype=np.float32) * number if model == "wide" else np.float32(2 * number + 1)
                )
                if y.shape != expected.shape or not np.array_equal(y, expected):
                    wrong.append((number, y))

    threads = [threading.Thread(target=ask, args=(100 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_typed_contents_and_a_raw_body(daemon: DaemonProcess) -> None:
    with contextlib.closing(grpcclient.InferenceServerClient(daemon.grpc_url)) as client:
        assert list(client.get_model_metadata("scalar").inputs[0].shape) == []
        for number in range(_MANY):
            contents = service_pb2.InferTensorContents(fp32_contents=[number])
            tensor = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", contents=contents)
            answer = client._client_stub.ModelInfer(service_pb2.ModelInferRequest(model_name="scalar", inputs=[tensor]))
            assert list(answer.outputs[0].shape) == []
            assert answer.raw_output_contents == [np.float32(2 * number + 1).tobytes()]
            fields, body = {"Inference-Header-Content-Length": "0"}, np.float32(number).tobytes()
            status, answered = daemon.request("POST", "/v2/models/scalar/infer", body, fields)
            assert (status, answered[-4:]) == (200, np.float32(2 * number + 1).tobytes())


def test_in_a_region(daemon: DaemonProcess) -> None:
    key = f"/tensord-test-scalars-{daemon.pid}"
    region = shared_memory.create_shared_memory_region("scalars", key, 64)
    try:
        with contextlib.closing(httpclient.InferenceServerClient(daemon.url)) as client:
            client.register_system_shared_memory("scalars", key, 64)
            for number in range(_MANY):
                shared_memory.set_shared_memory_region(region, [np.array([number], np.float32)])
                tensor, output = httpclient.InferInput("x", [], "FP32"), httpclient.InferRequestedOutput("y")
                tensor.set_shared_memory("scalars", 4)
                output.set_shared_memory("scalars", 4, 32)
                assert client.infer("scalar", [tensor], outputs=[output]).get_output("y")["shape"] == []
                (found,) = shared_memory.get_contents_as_numpy(region, np.float32, [1], 32)
                assert found == 2 * number + 1
            client.unregister_system_shared_memory("scalars")
    finally:
        shared_memory.destroy_shared_memory_region(region)


def test_between_models(daemon: DaemonProcess) -> None:
    """Scalars pass in a call of a Triton Python model, and between the steps of an ensemble."""
    for number in range(_MANY):
        assert asked(daemon, "triton", ("x", "FP32", [1], [number])) == {"y": ([], [2 * number + 1])}
        shape, data = asked(daemon, "steps", ("v", "FP32", [3], [number, 1, 2]))["w"]
        assert (shape, data[:3]) == ([50000], [0, 2 * (number + 3) + 1, 2 * (2 * (number + 3) + 1)])


def test_what_is_no_single_number(daemon: DaemonProcess) -> None:
    for shape, data, words in (
        ([1], [5], "unexpected shape for input 'x' for model 'scalar'. Expected [], got [1]"),
        ([], [5, 6], "Expected 4, got 8"),
        ([], [], "Expected 4, got 0"),
    ):
        status, answer = daemon.infer("scalar", [{"name": "x", "datatype": "FP32", "shape": shape, "data": data}])
        assert status == 400
        assert words in answer["error"]
