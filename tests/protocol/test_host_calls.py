"""Host models and generators of a real daemon that ask other models."""

from __future__ import annotations

import concurrent.futures
import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.daemon_process import PATIENCE, DaemonOf, DaemonProcess, wait_until
from tests.protocol.calling_models import TELL
from tests.repositories import applying, fields, scale_model, write_model

#: Asks the model that it is told to, as it is told to.
ASKS = """
    import json
    import numpy as np
    from tensord import models

    inputs = {"how": "BYTES[1]", "x": "FP32[4]"}
    outputs = {"said": "BYTES[1]"}
    host = True

    def create(path, config, device):
        early = []
        try:
            models.call("scale", {"x": np.ones((1, 4), np.float32)})
        except models.ServingError as error:
            early.append(error.message)

        def ask(how, x):
            if how == "call":
                return models.call("scale", {"x": x[None]})["y"].tolist()
            if how == "begin":
                begun = [models.begin("scale", {"x": np.full((1, 4), i, np.float32)}, ["y"]) for i in range(20)]
                return [float(each.result()["y"][0, 0]) for each in begun]
            if how == "tell":
                said = models.call("tell", {"x": x}, request_id="r", parameters={"a": 1}, timeout_us=7)["said"][0]
                return json.loads(said.decode())
            if how == "stream":
                return [each["i"].tolist() for each in models.stream("counts", {"n": np.array([3], np.int32)})]
            if how == "part":
                for each in models.stream("counts", {"n": np.array([1_000_000], np.int32)}):
                    return each["i"].tolist()
            if how == "self":
                return models.call("asks", {"how": np.array(["call"], np.object_), "x": x})["said"].tolist()
            if how == "early":
                return early
            return models.call(how, {"x": x})

        def apply(params, inputs):
            return {"said": np.array([json.dumps(ask(inputs["how"][0].decode(), inputs["x"]))], np.object_)}

        return apply, None
"""
COUNTS = applying(
    """
    for i in range(int(inputs["n"][0])):
        if i < 3:
            x = np.full((1, 4), i, np.float32)
            i = int(models.call("scale", {"x": x})["y"][0, 0])
        yield {"i": np.array([i], np.int32)}
    """,
    "n INT32[1]",
    "i INT32[1]",
    more="from tensord import models",
)

#: Asks others in a callback, as a number tells it to; its answer is 1 where that is refused, with an error that says why.
COMPILED = """
    import concurrent.futures
    import jax
    import jax.experimental
    import numpy as np
    from tensord import models

    inputs = {"how": "INT32[1]"}
    outputs = {"refused": "FP32[1]"}
    refused = [0.0]

    def call():
        return models.call("scale", {"x": np.ones((1, 4), np.float32)})

    def call_in_a_thread():
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(call).result()

    ways = [
        lambda: None, call, call_in_a_thread, lambda: [*models.stream("counts", {"n": np.array([1], np.int32)})],
        lambda: models.is_ready("nobody"), lambda: models.load_model("scale"), lambda: models.unload_model("scale"),
    ]

    def asking(how):
        try:
            ways[how[0]]()
            refused[0] = 0.0
        except models.ServingError as error:
            refused[0] = float("is compiled" in error.message)
        return np.array(refused, np.float32)

    def debugged(how):
        jax.debug.callback(asking, how, ordered=True)
        return jax.pure_callback(lambda _: np.array(refused, np.float32), made, how)

    made = jax.ShapeDtypeStruct((1,), "float32")

    def create(path, config, device):
        return (lambda params, inputs: {"refused": CALLBACK}), {}
"""
#: How Python is called by what is compiled.
CALLBACKS = {
    "pure": "jax.pure_callback(asking, made, inputs['how'])",
    "io": "jax.experimental.io_callback(asking, made, inputs['how'])",
    "debug": "debugged(inputs['how'])",
}


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "asks", ASKS)
    write_model(repository, "counts", COUNTS)
    write_model(repository, "tell", TELL, fields("x FP32 4", "y FP32 4, said STRING 1"))
    scale_model(repository)
    for name, callback in CALLBACKS.items():
        write_model(repository, name, COMPILED.replace("CALLBACK", callback))
    write_model(repository, "on_two", COMPILED.replace("CALLBACK", CALLBACKS["pure"]), "instance_group { count: 2 }")
    return daemon_of(repository)


def asked(http: httpclient.InferenceServerClient, how: str, first: float = 1) -> Any:
    given = [httpclient.InferInput("how", [1], "BYTES"), httpclient.InferInput("x", [4], "FP32")]
    given[0].set_data_from_numpy(np.array([how.encode()], np.object_))
    given[1].set_data_from_numpy(np.full(4, first, np.float32))
    return http.infer("asks", given).as_numpy("said")[0].decode()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("call", "[[4.0, 4.0, 4.0, 4.0]]"),
        ("begin", str([3.0 * i + 1 for i in range(20)])),
        ("stream", "[[1], [4], [7]]"),
        ("part", "[1]"),
        ("early", "[\"model 'scale' can be called only by the code of a model that is served\"]"),
    ],
)
def test_a_host_model_asks_others(http: httpclient.InferenceServerClient, how: str, said: str) -> None:
    assert asked(http, how) == said


def test_what_it_says_of_its_request_goes_along(http: httpclient.InferenceServerClient) -> None:
    said = asked(http, "tell")
    assert '"id": "r"' in said
    assert '"parameters": {"a": 1}' in said
    assert '"timeout": 7' in said


@pytest.mark.parametrize(
    ("how", "first", "text", "status"),
    [
        ("nobody", 1, "Model 'nobody' is not ready.", "404"),
        ("counts", 1, "model 'counts' answers with any number of responses: tensord.models.stream() gives them", "400"),
        ("tell", -2, "not that one", "404"),
        ("self", 1, "model 'asks' waits for itself (asks -> asks)", "500"),
    ],
)
def test_what_the_other_one_answers_is_the_answer_of_who_does_not_catch_it(
    http: httpclient.InferenceServerClient, how: str, first: float, text: str, status: str
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        asked(http, how, first)
    assert text in caught.value.message()
    assert caught.value.status() == status


def test_a_generator_asks_between_its_responses(daemon: DaemonProcess) -> None:
    """A generator that rests because its client takes nothing may ask, too."""
    with grpcclient.InferenceServerClient(daemon.grpc_url) as client:
        came: list[int] = []
        client.start_stream(lambda result, error: came.append(-1 if error else int(result.as_numpy("i")[0])))
        given = grpcclient.InferInput("n", [1], "INT32")
        given.set_data_from_numpy(np.array([5], np.int32))
        client.async_stream_infer("counts", [given])
        client.stop_stream()
    assert came == [1, 4, 7, 3, 4]


@pytest.mark.parametrize("model", [*CALLBACKS, "on_two"])
def test_callbacks_of_what_is_compiled_ask_nobody(http: httpclient.InferenceServerClient, model: str) -> None:
    """Nor do threads that they wait for: the worker's loop runs them, and would wait for itself."""
    answers = []
    for how in range(7):
        given = httpclient.InferInput("how", [1], "INT32")
        given.set_data_from_numpy(np.array([how], np.int32))
        answers.append(float(http.infer(model, [given]).as_numpy("refused")[0]))
    assert answers == [0.0, *[1.0] * 6]


#: Asks another model, after it has noted that it does.
CALLER = """
    from pathlib import Path
    from tensord import models
    inputs, outputs, host = {"x": "FP32[1]"}, {"y": "FP32[1]"}, True
    def create(path, config, device):
        def apply(params, inputs):
            (Path(path).parent / "asks").touch()
            return models.call("fatal", inputs)
        return apply, None
"""
#: Is loaded when there is a file "open".
LATE = """
    import time
    from pathlib import Path
    inputs, outputs, host = {"x": "FP32[1]"}, {"y": "FP32[1]"}, True
    def create(path, config, device):
        while not (Path(path).parent / "open").exists():
            time.sleep(0.001)
        return (lambda params, inputs: {"y": inputs["x"]}), None
"""
#: Kills the worker that loads it first.
FATAL = """
    import os, signal
    from pathlib import Path
    inputs, outputs, host = {"x": "FP32[1]"}, {"y": "FP32[1]"}, True
    def create(path, config, device):
        loaded = Path(path).parent / "loaded"
        if not loaded.exists():
            loaded.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return (lambda params, inputs: {"y": inputs["x"] + 1}), None
"""


def test_a_call_waits_for_a_model_that_a_new_worker_loads_last(daemon_of: DaemonOf, tmp_path: Path) -> None:
    """
    1. A worker dies of a model's load. 2. The next one serves ``caller``, and is to load that model after ``late``.
    3. ``caller`` calls it. 4. ``late`` is loaded. Result: the call is answered.
    """
    for name, text in (("caller", CALLER), ("late", LATE), ("fatal", FATAL)):
        write_model(tmp_path, name, text)
    (tmp_path / "late" / "open").touch()
    options = {"repository": {"control_mode": "explicit", "load": ["caller", "late"]}, "workers": {"cpu": 1}}
    daemon = daemon_of(tmp_path, options)
    x = httpclient.InferInput("x", [1], "FP32").set_data_from_numpy(np.ones(1, np.float32))
    client = httpclient.InferenceServerClient(
        daemon.url, concurrency=2, network_timeout=PATIENCE, connection_timeout=PATIENCE
    )
    with contextlib.closing(client) as http, concurrent.futures.ThreadPoolExecutor() as pool:
        (tmp_path / "late" / "open").unlink()
        loaded = pool.submit(httpclient.InferenceServerClient(daemon.url, network_timeout=PATIENCE).load_model, "fatal")
        wait_until(lambda: len(daemon.log.split("is up on")) > 2, "another worker", daemon)
        wait_until(lambda: http.is_model_ready("caller"), "the caller to be back", daemon)
        asked = http.async_infer("caller", [x])
        wait_until((tmp_path / "caller" / "asks").exists, "the call", daemon)
        (tmp_path / "late" / "open").touch()
        assert asked.get_result().as_numpy("y").tolist() == [2]
        loaded.result()
