"""One surface: the same cases on every way to a model, with the same answers and the same exceptions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensord_client

from tests import run_folder
from tests.client.ways import WAYS, Awaited, Loaded, Raises, X, models
from tests.daemon_process import PATIENCE, DaemonProcess, wait_until


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def daemon(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with tempfile.TemporaryDirectory(prefix="tensord-test-") as short:
        options = {"clients": {"socket": f"{short}/clients.sock"}, "workers": {"cpu": 2}}
        with DaemonProcess(tmp_path_factory.mktemp("daemon"), [repository], options) as daemon:
            newest = "/v2/models/scale/versions/2/ready"
            wait_until(lambda: daemon.get(newest)[0] == 200, "the newest version to be ready", daemon)
            yield daemon


@contextlib.contextmanager
def opened(way: str, request: pytest.FixtureRequest, repository: Path) -> Iterator[Any]:
    """Yields a client of its own, over one of ``WAYS``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORD_EXECUTABLES_CACHE_DIRECTORY", run_folder.programs())
        if way in ("testing", "folder"):
            made: Any = Loaded(repository) if way == "testing" else tensord_client.connect(repository)
            yield made
            made.close()
            return
        daemon: DaemonProcess = request.getfixturevalue("daemon")
        socket = Path(daemon.sections["clients"]["socket"])
        address = {"tcp": f"http://127.0.0.1:{daemon.port}", "lane": str(socket)}.get(way.split()[0])
        address = address or f"unix:{socket.with_name('http.sock')}"
        if way.endswith("awaited"):
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever)
            thread.start()
            found = asyncio.run_coroutine_threadsafe(tensord_client.connect_async(address), loop).result(PATIENCE)
            made = Awaited(loop, found)
            yield made
            made.close()
            asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result(PATIENCE)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
            return
        with tensord_client.connect(address) as made:
            yield made


@pytest.fixture(scope="module", params=WAYS)
def client(request: pytest.FixtureRequest, repository: Path) -> Iterator[Any]:
    with opened(request.param, request, repository) as made:
        yield made


def test_answers(client: Any) -> None:
    model = client.model("scale")
    got = model({"x": X})
    np.testing.assert_array_equal(got["y"], 5 * X + 1)
    assert got["y"].dtype == np.float32
    assert (got.version, dict(got.parameters), model.name, model.version) == (2, {}, "scale", 2)
    (x,), (y,) = model.inputs, model.outputs
    assert (x.name, x.datatype, x.dtype, x.shape) == ("x", "FP32", np.float32, (-1, 4))
    assert client.model("echo_bytes").inputs["x"].dtype == object
    assert model.outputs["y"] is y
    with pytest.raises(KeyError):
        model.outputs["z"]
    assert model.config["max_batch_size"] == 8
    with got:
        pass
    got.release()


def test_what_it_took(client: Any) -> None:
    """The first is unknown everywhere, the third is known; large ones lie in other memory."""
    small, large = client.model("scale"), client.model("echo_int64")
    for model, given, rounds in ((small, X, 4), (large, np.arange(1 << 16), 3)):
        for _ in range(rounds):
            got = model({"x": given})
            assert got.timing is not None
            assert got.timing.compute_ns > 0
            assert got.timing.queue_ns >= 0
            assert got.copied_bytes == got.timing.copied_bytes >= 0


def test_a_version(client: Any) -> None:
    model = client.model("scale", 1)
    got = model({"x": X}, outputs=["y"], request_id="me", priority=0, parameters={"a": 1, "b": "c", "d": True})
    np.testing.assert_array_equal(got["y"], 3 * X + 1)
    assert (model.version, got.version) == (1, 1)


@pytest.mark.parametrize("given", [X.astype(">f4"), np.asfortranarray(X), X[:, ::-1][:, ::-1], X.tolist()])
def test_any_array(client: Any, given: Any) -> None:
    np.testing.assert_array_equal(client.model("scale")({"x": given})["y"], 5 * X + 1)


class Hand(NamedTuple):
    """A part of a tree."""

    force: Any
    torque: Any


class Foreign:
    """An array of another library, on the host or, as it claims, on a device."""

    def __init__(self, device: int = 1) -> None:
        self._device = device

    def __dlpack__(self, **_: Any) -> Any:
        return X.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0


def test_arrays_of_other_libraries(client: Any) -> None:
    import jax.numpy

    model = client.model("scale")
    for given in (Foreign(), jax.numpy.asarray(X)):
        np.testing.assert_array_equal(model({"x": given})["y"], 5 * X + 1)
    with Raises("InvalidArgument", "input 'x' lies on a device (DLPack type 2): bring it to the host first"):
        model({"x": Foreign(2)})


def test_bfloat16_of_pytorch(client: Any) -> None:
    torch = pytest.importorskip("torch")
    given = torch.arange(3, dtype=torch.bfloat16)
    assert client.model("echo_bf16")({"x": given})["y"].tolist() == [0, 1, 2]


def test_strings_of_numpy(client: Any, tmp_path: Path) -> None:
    """Arrays of strings are accepted, of a fixed length and of any length, which numpy has from 2.0 on."""
    (tmp_path / "until").touch()
    texts = np.array([str(tmp_path / "until")])
    for given in (
        texts,
        texts.astype("S"),
        *([texts.astype(np.dtypes.StringDType())] if hasattr(np, "dtypes") else []),
    ):
        assert client.model("waits")({"path": given})["y"].tolist() == [1]


@pytest.mark.parametrize("datatype", ["bf16", "fp16", "bool", "int64"])
def test_datatypes(client: Any, datatype: str) -> None:
    model = client.model(f"echo_{datatype}")
    got = model({"x": [0, 1, 1]})["y"]
    assert got.tolist() == [0, 1, 1]
    assert model({"x": got})["y"].dtype == got.dtype
    assert model({"x": got[:0]})["y"].shape == (0,)


def test_strings(client: Any) -> None:
    model = client.model("echo_bytes")
    for given in (["a", "ö", ""], np.array(["a", "ö", ""]), np.array([b"a", "ö".encode(), b""], object)):
        assert model({"x": given})["y"].tolist() == [b"a", "ö".encode(), b""]
    assert model({"x": np.array([b"\xff" * 100_000], object)})["y"].tolist() == [b"\xff" * 100_000]


def test_nested_mappings(client: Any) -> None:
    model = client.model("nested")
    got = model({"text": {"ids": [1, 2]}, "plain": {"name": np.array([3, 4], np.int32)}})
    assert got["y"].tolist() == [31, 42]
    with Raises("InvalidArgument", "input 'plain/name' is given twice"):
        model({"text.ids": [1, 2], "plain": {"name": [3, 4]}, "plain/name": [3, 4]})


def test_trees(client: Any) -> None:
    """Tuples and lists are trees where the model has inputs below their name, and values elsewhere."""
    model = client.model("tree")
    goal = (np.ones(2, np.float32), [2.0, 3.0])
    assert [tensor.name for tensor in model.inputs] == ["goal.0", "goal.1", "hand.force", "hand.torque", "rest"]
    for given in (goal, list(goal), {0: goal[0], 1: goal[1]}, {"0": goal[0], "1": goal[1]}):
        for hand in (Hand([5.0], [7.0]), {"force": [5.0], "torque": [7.0]}):
            got = model({"goal": given, "hand": hand, "rest": (1, 2)})
            assert got["y"].tolist() == [1 + 2 + 5 + 7 + 1, 1 + 3 + 5 + 7 + 2]
    with Raises("InvalidArgument", "expected 5 inputs but got 4 inputs for model 'tree'..."):
        model({"goal": goal[:1], "hand": Hand([5.0], [7.0]), "rest": (1, 2)})


def test_a_step_after_the_end(client: Any) -> None:
    model = client.model("running_mean")
    (x,) = model.inputs
    step = model.sequence()
    given = {x.name: np.zeros((1, *x.shape[1:]), np.float32)}
    step(given)
    step(given, end=True)
    with Raises(
        "InvalidArgument", f"sequence {step.sequence_id} ended with an earlier step: sequence() begins another"
    ):
        step(given)


@pytest.mark.parametrize(
    ("inputs", "outputs", "text"),
    [
        ({}, (), "expected 1 inputs but got 0 inputs for model 'scale'..."),
        ({"z": [[1.0] * 4]}, (), "unexpected inference input 'z' for model 'scale'"),
        ({"x": np.zeros((1, 4))}, (), "inference input 'x' data-type is 'FP64', but model 'scale' expects 'FP32'"),
        ({"x": [[1.0] * 3]}, (), "unexpected shape for input 'x' for model 'scale'. Expected [-1,4], got [1,3]."),
        ({"x": [[1.0] * 4] * 9}, (), "inference request batch-size must be <= 8 for 'scale'"),
        ({"x": [[1.0] * 4]}, ("z",), "unexpected inference output 'z' for model 'scale'"),
        ({"x": [["a"] * 4]}, (), "input 'x' cannot be an array of FP32: could not convert string to float: 'a'"),
        ({"x": np.zeros((1, 4), np.complex64)}, (), "input 'x': arrays of complex64 have no datatype in the protocol"),
    ],
)
def test_refusals(client: Any, inputs: dict[str, Any], outputs: tuple[str, ...], text: str) -> None:
    model = client.model("scale")
    with Raises("InvalidArgument", text):
        model(inputs, outputs=outputs)
    with Raises("InvalidArgument", text):
        model.submit(inputs, outputs=outputs).result(PATIENCE)


def test_arguments_that_no_request_has(client: Any) -> None:
    with pytest.raises(TypeError):
        client.model("scale")({"x": X}, color="red")


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ({"priority": "high"}, "priority is 'high'..."),
        ({"priority": -1}, "priority is -1..."),
        ({"timeout_us": 1.5}, "timeout_us is 1.5..."),
        ({"request_id": 3}, "request_id is 3..."),
        ({"replace_key": b"k"}, "replace_key is b'k'..."),
        ({"sequence_start": "yes"}, "sequence_start is 'yes'..."),
        ({"sequence_id": -1}, "..."),
        ({"sequence_id": 1.5}, "sequence_id is 1.5..."),
        ({"sequence_id": "x" * 129}, "string correlation ID cannot be longer than 128 characters"),
        ({"parameters": [1]}, "parameters ..."),
        ({"parameters": {"a": None}}, "parameter..."),
        ({"parameters": {"a": [1]}}, "parameter..."),
        ({"parameters": {3: 1}}, "..."),
        ({"parameters": {"a": 1 << 64}}, "..."),
    ],
)
def test_values_that_no_request_has(client: Any, own: dict[str, Any], text: str) -> None:
    """Each is refused before it is sent, so that other requests of the client notice nothing."""
    model = client.model("scale")
    for ask in (model, model.submit, lambda inputs, **own: model.prepare(inputs, **own)()):
        with Raises("Unsupported" if "longer" in text else "InvalidArgument", text):
            ask({"x": X}, **own)


def test_a_scheduling_parameter_is_one_wherever_it_stands(client: Any) -> None:
    model, one = client.model("priorities"), {"x": np.ones((1, 1), np.float32)}
    for own in ({"priority": 3}, {"parameters": {"priority": 3}}, {"parameters": {"priority": 7}, "priority": 3}):
        assert model(one, **own)["y"].tolist() == [[3]]
    for parameters in ({"priority": -1}, {"timeout": "soon"}, {"sequence_start": 1}):
        with Raises("InvalidArgument", "parameter '..."):
            model(one, parameters=parameters)


def test_numpys_numbers_and_none_are_values(client: Any) -> None:
    own = {
        "priority": np.int64(1),
        "timeout_us": None,
        "parameters": {"a": np.float32(0.5), "b": np.int64(1), "c": np.True_},
    }
    assert client.model("scale")({"x": X}, **own, request_id=None)["y"].tolist() == (5 * X + 1).tolist()


@pytest.mark.parametrize(
    ("inputs", "outputs", "text"),
    [
        (X, (), "inputs are ndarray, a mapping of names to arrays is expected"),
        ({"x": None}, (), "input 'x' cannot be an array of FP32: None is no value"),
        ({"x": [[1.0, None, 3.0, 4.0]]}, (), "input 'x' cannot be an array of FP32: None is no value"),
        ({"x": X}, "y", "outputs are the text 'y', a sequence of names is expected"),
    ],
)
def test_what_is_no_request(client: Any, inputs: Any, outputs: Any, text: str) -> None:
    with Raises("InvalidArgument", text):
        client.model("scale")(inputs, outputs=outputs)


@pytest.mark.parametrize(
    ("datatype", "value", "became"),
    [
        ("int64", 1.7, "1.7 would become 1"),
        ("int64", "1", "'1' would become 1"),
        ("int64", float("nan"), "..."),
        ("int64", 1e30, "..."),
        ("int64", 1 << 63, "..."),
        ("bool", "False", "'False' would become True"),
        ("bool", 2, "2 would become True"),
        ("bool", None, "None is no value"),
        ("bool", 0.5, "0.5 would become True"),
        ("fp16", "1.5", "'1.5' would become 1.5"),
        ("fp16", 1e5, "100000.0 would become inf"),
        ("bf16", 1e39, "1e+39 would become inf"),
    ],
)
def test_values_that_would_become_others(client: Any, datatype: str, value: Any, became: str) -> None:
    """A list is cast to the input's datatype only if its values stay what they are, wherever in it they stand."""
    model = client.model(f"echo_{datatype}")
    for given in ([value], [0, value]):
        with Raises("InvalidArgument", f"input 'x' cannot be an array of {datatype.upper()}: {became}"):
            model({"x": given})


def test_values_that_stay_what_they_are(client: Any) -> None:
    for datatype, given, expected in (
        ("int64", [2.0, True, (1 << 53) + 1, -(1 << 63)], [2, 1, (1 << 53) + 1, -(1 << 63)]),
        ("bool", [1.0, 0, False], [True, False, False]),
        ("fp16", [0.1, 3, True, Fraction(1, 4), float("-inf")], [float(np.float16(0.1)), 3, 1, 0.25, float("-inf")]),
        ("bf16", [3.140625, -1, 0.1], [3.140625, -1, 0.10009765625]),
    ):
        assert client.model(f"echo_{datatype}")({"x": given})["y"].tolist() == expected
    assert np.isnan(client.model("echo_fp16")({"x": [float("nan")]})["y"]).all()


@pytest.mark.parametrize("element", [None, "\ud800", 1.7, True])
def test_strings_that_have_no_bytes(client: Any, element: Any) -> None:
    arrays = [np.array([element], object)] if element is None or isinstance(element, str) else []
    for given in ([element], ["a", element], *arrays):
        with Raises("InvalidArgument", "an element of a BYTES tensor is..."):
            client.model("echo_bytes")({"x": given})


def test_it_is_its_processs_own(client: Any) -> None:
    if not isinstance(client, tensord_client.Client):
        pytest.skip("it is no client")
    for each in (client, client.model("scale")):
        with pytest.raises(TypeError, match=r"connect\(\)"):
            pickle.dumps(each)


_FORKS = """
import os, sys
import numpy as np, tensord_client

client = tensord_client.connect(sys.argv[1])
model = client.model("scale")
child = os.fork()
if child:
    os.waitpid(child, 0)
try:
    print(model({"x": np.zeros((1, 4), np.float32)})["y"].tolist(), flush=True)
except tensord_client.Unavailable as error:
    print(error, flush=True)
if child:
    client.close()
os._exit(0)
"""


def test_a_forked_child_has_not_the_models_that_its_parent_serves(repository: Path) -> None:
    environment = {**os.environ, "TENSORD_EXECUTABLES_CACHE_DIRECTORY": run_folder.programs()}
    command = [sys.executable, "-W", "ignore", "-c", _FORKS, str(repository)]
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=True)
    assert sorted(ran.stdout.splitlines()) == [
        "[[1.0, 1.0, 1.0, 1.0]]",
        "a process that was forked off has not the models of its parent: connect in it, or spawn it",
    ]


def test_timeouts(client: Any) -> None:
    assert client.model("scale", timeout=float("inf"))({"x": X})["y"].tolist() == (5 * X + 1).tolist()


def test_a_model_that_fails(client: Any) -> None:
    with Raises("Internal", "model 'raises' version 1 failed with ValueError"):
        client.model("raises")({"x": [1.0, 2.0]})


def test_submit(client: Any) -> None:
    model = client.model("scale")
    given = [np.full((1, 4), i, np.float32) for i in range(100)]
    futures = [model.submit({"x": each}) for each in given]
    for each in given:
        each[:] = -1
    for i, future in enumerate(futures):
        assert future.result(PATIENCE)["y"].tolist() == [[5.0 * i + 1] * 4]


def test_inputs_may_be_written_to_once_a_request_is_submitted(client: Any, request: pytest.FixtureRequest) -> None:
    """Requests that wait for a connection have their own copy, and so have large ones that no socket takes at once."""
    model, size = client.model("echo_int64", timeout=PATIENCE), 4096
    # Over a lane no more results may be held.
    count = 64 if "lane" in request.node.callspec.params["client"] else 100
    x = np.empty(size, np.int64)
    submitted = []
    for number in range(count):
        x[:] = number
        submitted.append(model.submit({"x": x}))
    x[:] = -1
    for number, future in enumerate(submitted):
        np.testing.assert_array_equal(future.result(PATIENCE)["y"], np.full(size, number))


def test_large_tensors(client: Any) -> None:
    model = client.model("echo_int64")
    given = np.arange(1 << 20)
    futures = [model.submit({"x": given + i}) for i in range(4)]
    for i, future in enumerate(futures):
        np.testing.assert_array_equal(future.result(PATIENCE)["y"], given + i)


def test_many_threads(client: Any) -> None:
    model = client.model("scale")
    with ThreadPoolExecutor(16) as threads:
        got = threads.map(lambda i: model({"x": [[i] * 4]})["y"][0, 0], range(400))
        assert list(got) == [5.0 * i + 1 for i in range(400)]


def test_a_timeout(client: Any, tmp_path: Path) -> None:
    until = tmp_path / "until"
    model = client.model("waits", timeout=0.25)
    with Raises("DeadlineExceeded", "Deadline Exceeded"):
        model({"path": [str(until)]})
    with Raises("DeadlineExceeded", "Deadline Exceeded"):
        model.submit({"path": [str(until)]}).result(PATIENCE)
    until.touch()
    assert client.model("waits", timeout=PATIENCE)({"path": [str(until)]})["y"].tolist() == [1]


def test_cancelling_what_waits(client: Any, tmp_path: Path) -> None:
    """The others go on. What has begun runs on where it is; nobody waits for it."""
    model = client.model("waits")
    first = model.submit({"path": [str(tmp_path / "first")]})
    wait_until((tmp_path / "first.begun").exists, "the first to begin")
    second = model.submit({"path": [str(tmp_path / "second")]})
    if second.cancel():
        with pytest.raises(CancelledError):
            second.result()
    (tmp_path / "first").touch()
    (tmp_path / "second").touch()
    assert first.result(PATIENCE)["y"].tolist() == [1]


class Interrupted(Exception):
    """Raised by a signal's handler in the middle of a call."""


@pytest.mark.parametrize("is_prepared", [False, True])
def test_what_waits_is_cancelled_where_a_signal_ends_its_call(client: Any, tmp_path: Path, is_prepared: bool) -> None:
    """A handler that raises, as that of Ctrl-C does, cancels the request: it does not run afterwards and leaves nothing."""
    if isinstance(client, Awaited):
        pytest.skip("a loop's tasks are cancelled by the loop")

    def interrupt(_: int, __: object) -> None:
        raise Interrupted

    model = client.model("waits")
    first = model.submit({"path": [str(tmp_path / "first")]})
    wait_until((tmp_path / "first.begun").exists, "the first to begin")
    inputs = {"path": [str(tmp_path / "second")]}
    former = signal.signal(signal.SIGALRM, interrupt)
    try:
        call = model.prepare(inputs) if is_prepared else lambda: model(inputs)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Interrupted):
            call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    # Whoever answers this has seen before that nobody waits for the second.
    assert client.model("scale", timeout=PATIENCE)({"x": X})["y"].tolist() == (5 * X + 1).tolist()
    for name in ("first", "second", "third"):
        (tmp_path / name).touch()
    assert first.result(PATIENCE)["y"].tolist() == [1]
    assert client.model("waits", timeout=PATIENCE)({"path": [str(tmp_path / "third")]})["y"].tolist() == [1]
    assert not (tmp_path / "second.begun").exists()


def test_the_newest_of_a_key_wins(client: Any, tmp_path: Path) -> None:
    model = client.model("waits")
    first = model.submit({"path": [str(tmp_path / "first")]}, replace_key="camera")
    wait_until((tmp_path / "first.begun").exists, "the first to begin")
    second = model.submit({"path": [str(tmp_path / "second")]}, replace_key="camera", request_id="second")
    other = model.submit({"path": [str(tmp_path / "other")]}, replace_key="another")
    # Requests of one client may go over several connections, and so come in any order.
    third = model.submit({"path": [str(tmp_path / "third")]}, replace_key="camera", request_id="third")
    wait_until(lambda: second.done() or third.done(), "one of two to be replaced")
    for name in ("first", "second", "third", "other"):
        (tmp_path / name).touch()
    assert first.result(PATIENCE)["y"].tolist() == other.result(PATIENCE)["y"].tolist() == [1]
    (replaced,) = [error for future in (second, third) if (error := future.exception(PATIENCE)) is not None]
    assert type(replaced).__name__ == "Replaced", replaced
    with Raises("InvalidArgument", "parameter 'tensord_replace' has 1000 bytes, at most 128 are allowed"):
        model({"path": [str(tmp_path / "first")]}, replace_key="k" * 1000)


def test_a_stream(client: Any) -> None:
    model = client.model("three")
    got = list(model.stream({"n": [3]}))
    assert [each["i"].tolist() for each in got] == [[[i] * (i + 1)] * 2 for i in range(3)]
    assert [each["h"].tolist() for each in got] == [[0], [1], [2]]
    assert [each["s"].tolist() for each in got] == [[b"\xff%d" % i] for i in range(3)]
    assert [each.version for each in got] == [1] * 3
    assert [list(each) for each in model.stream({"n": [1]}, outputs=["h"])] == [["h"]]
    assert list(model.stream({"n": [0]})) == []
    with Raises("InvalidArgument", "model 'three' answers a request with several responses: use stream()"):
        model({"n": [3]})


def test_a_stream_that_fails(client: Any) -> None:
    responses = client.model("three").stream({"n": [9]})
    assert [next(responses)["h"].tolist() for _ in range(4)] == [[0], [1], [2], [3]]
    with Raises("Internal", "model 'three' version 1 failed with ValueError"):
        next(responses)
    with Raises("InvalidArgument", "unexpected inference input 'm' for model 'three'"):
        list(client.model("three").stream({"m": [1]}))


def test_a_stream_that_is_left(client: Any) -> None:
    model = client.model("counts")
    counted = model.stream({"start": [1, 2, 3]}, parameters={"count": 5})
    assert [int(each["y"][0]) for each in counted] == [6, 7, 8, 9, 10]
    left = model.stream({"start": [1] * 10}, parameters={"ends": False})
    assert [int(next(left)["y"][0]) for _ in range(5)] == [10, 11, 12, 13, 14]
    left.close()


def test_a_stream_of_one(client: Any) -> None:
    (got,) = client.model("scale").stream({"x": X})
    np.testing.assert_array_equal(got["y"], 5 * X + 1)


def test_sequences(client: Any) -> None:
    model = client.model("running_mean")
    (x,), (y,) = model.inputs, model.outputs

    def step(sequence: Any, value: float, end: bool = False) -> float:
        rows = np.full((1, *x.shape[1:]), value, np.float32)
        return float(sequence({x.name: rows}, end=end)[y.name].ravel()[0])

    with model.sequence() as first, model.sequence("two") as second:
        assert [step(first, 1), step(second, 10), step(first, 3), step(second, 20, end=True)] == [1, 10, 2, 15]
        step(first, 1, end=True)
    with Raises(
        "InvalidArgument",
        f"inference request for sequence {first.sequence_id} to model 'running_mean' must specify the START flag on the "
        "first request of the sequence",
    ):
        model({x.name: np.zeros((1, *x.shape[1:]), np.float32)}, sequence_id=first.sequence_id)


def test_models_that_are_not_served(client: Any) -> None:
    if isinstance(client, Loaded):
        return  # it loads a folder: there is no server to say what it serves
    with Raises("NotFound", "Request for unknown model: 'none' is not found"):
        client.model("none")
    with Raises("NotFound", "Request for unknown model: 'scale' version 3 is not found"):
        client.model("scale", 3)


def test_a_prepared_call_sends_what_an_array_holds_that_had_to_be_copied(client: Any) -> None:
    class Other(NamedTuple):
        """An array of another library, in memory of numpy's."""

        values: Any

        def __dlpack__(self, **how: Any) -> Any:
            return self.values.__dlpack__(**how)

        def __dlpack_device__(self) -> Any:
            return self.values.__dlpack_device__()

    model = client.model("scale", timeout=PATIENCE)
    for x, other in ((X.T.copy().T, False), (X.astype(">f4"), False), (X.T.copy().T, True), (X.copy(), True)):
        call = model.prepare({"x": Other(x) if other else x})
        for i in range(4):
            x[:] = X + i
            np.testing.assert_array_equal(call()["y"], 5 * (X + i) + 1)
    words = np.array([[b"a", b"b"], [b"c", b"d"]], object)
    call = client.model("echo_bytes").prepare({"x": words[:, 0]})
    for word in (b"e", b"fgh"):
        words[1, 0] = word
        assert call()["y"].tolist() == [b"a", word]


def test_prepared_calls_and_places(client: Any) -> None:
    model = client.model("scale", timeout=PATIENCE)
    x, y = client.empty(model.inputs["x"], shape=(3, 4)), client.empty((3, 4), np.float32)
    for call in (
        model.prepare({"x": x}, out={"y": y}),
        # The id has a byte in it that deadlines begin with.
        model.prepare({"x": x}, out={"y": y}, request_id="\u03df", parameters={"a": 1}),
    ):
        taken = []
        for i in range(5):
            x[:] = X + i
            got = call()
            assert got["y"] is y
            np.testing.assert_array_equal(y, 5 * (X + i) + 1)
            taken.append(got.timing)
        # Each call's own, to the nanosecond; also where the answer is the object of the call before.
        assert len(set(taken)) > 1
    assert client.empty(model.inputs["x"]).shape == (1, 4)
    with Raises("InvalidArgument", "output 'y' ..."):
        model.prepare({"x": x}, out={"y": client.empty((2, 4), np.float32)})()
    for place in (np.empty((2, 4), np.float32), np.empty((3, 4), np.float64), client.empty((3, 5), np.float32)):
        with Raises("InvalidArgument", "output 'y' ..."):
            model.prepare({"x": x}, out={"y": place})()
    for place in (np.broadcast_to(np.float32(0), (3, 4)), [[0.0] * 4] * 3):
        with Raises("InvalidArgument", "the place of output 'y' is no array that can be written to"):
            model.prepare({"x": x}, out={"y": place})
    with Raises("InvalidArgument", "output 'y' is float32[3, 4], and its place is float32[5, 4]"):
        model.prepare({"x": x}, out={"y": client.empty((5, 4), np.float32)})()
    if isinstance(client, Loaded):
        return  # its arrays are numpy's own
    with Raises("InvalidArgument", "an array that is shared has a datatype of fixed size"):
        client.empty(client.model("echo_bytes").inputs["x"])


@pytest.mark.parametrize("count", [3, 5000])
def test_any_array_that_can_be_written_to_is_a_place(client: Any, count: int) -> None:
    """An output is written or copied to the caller's array in ``out``, which keeps no memory of the server in use.

    ``out`` may be any mapping, and may be changed once the call is prepared.
    """
    model = client.model("echo_int64", timeout=PATIENCE)
    x = np.arange(count)
    for y in (np.zeros(count, np.int64), np.zeros(2 * count, np.int64)[::2], client.empty(count, np.int64)):
        out = {"y": y}
        call = model.prepare({"x": x}, out=MappingProxyType(out))
        out.clear()
        for i in range(80):
            x[:] = np.arange(count) + i
            assert call()["y"] is y
            np.testing.assert_array_equal(y, x)
    texts = np.zeros(2, object)
    client.model("echo_bytes").prepare({"x": ["a", "b"]}, out={"y": texts})()
    assert texts.tolist() == [b"a", b"b"]


def test_the_newest_answer(client: Any, tmp_path: Path) -> None:
    """Two are under way, the second of which waits in the model; of what comes meanwhile the newest is asked."""
    with client.model("waits").latest() as live:
        for name in ("first", "second", "third", "fourth"):
            live.put({"path": [str(tmp_path / name)]})
        assert (live.replaced, live.behind) == (1, 3)
        with Raises("DeadlineExceeded", "Deadline Exceeded"):
            live.get(timeout=0.05)
        for name in ("first", "second", "fourth"):
            (tmp_path / name).touch()
        while live.behind:
            assert live.get(timeout=PATIENCE)["y"].tolist() == [1]
        assert not (tmp_path / "third.begun").exists()
        live.put({"path": ["none", "too many"]})
        with Raises("InvalidArgument", "unexpected shape for input 'path' for model 'waits'..."):
            live.get(timeout=PATIENCE)
    with Raises("Cancelled", "it was closed"):
        live.put({"path": [str(tmp_path / "first")]})


@pytest.mark.parametrize("way", WAYS[1:])
def test_a_closed_client(way: str, request: pytest.FixtureRequest, repository: Path, tmp_path: Path) -> None:
    """``close`` cancels requests under way, except in this process, where models end them; later requests are refused."""

    def waited(model: Any, inputs: Any) -> Any:
        return model.submit(inputs).result(PATIENCE)

    for kind in ("call", "submit", "prepare"):
        path = tmp_path / kind
        inputs = {"path": [str(path)]}
        with opened(way, request, repository) as client, ThreadPoolExecutor() as threads:
            model, scale = client.model("waits"), client.model("scale")
            prepared, call = model.prepare(inputs), scale.prepare({"x": X})
            if way != "folder":
                begin = {"call": (model, inputs), "submit": (waited, model, inputs), "prepare": (prepared,)}
                under_way = threads.submit(*begin[kind])
                wait_until(path.with_suffix(".begun").exists, "the request to begin")
                client.close()
                with Raises("Cancelled", "the client was closed"):
                    under_way.result(PATIENCE)
            path.touch()
            client.close()
            for ask, *given in (
                (scale, {"x": X}),
                (scale.submit, {"x": X}),
                (call,),
                (client.model, "scale"),
                (client.empty, 3, "f4"),
            ):
                with Raises("Unavailable", "the client was closed"):
                    ask(*given)


def test_a_closed_model(client: Any) -> None:
    model = client.model("scale")
    model.close()
    model.close()
    with Raises("Unavailable", "the model was closed"):
        model({"x": X})


def test_the_port_of_grpc(daemon: DaemonProcess) -> None:
    address = daemon.grpc_url
    text = rf"http://{address}: the answer is no HTTP/1\.1, it is HTTP/2: gRPC has a port of its own$"
    with pytest.raises(tensord_client.Unavailable, match=text):
        tensord_client.connect(address)


_NGINX = """
daemon off; worker_processes 1; pid {folder}/pid; error_log stderr;
events {{ worker_connections 64; }}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    server {{ listen unix:{folder}/front; location / {{ proxy_pass http://127.0.0.1:{port}; {directives} }} }}
}}
"""


@pytest.mark.skipif(
    shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin") is None, reason="nginx is not installed"
)
@pytest.mark.parametrize("directives", ["", "proxy_buffering off;", "proxy_http_version 1.1;"])
def test_behind_nginx(daemon: DaemonProcess, directives: str) -> None:
    """As it comes it asks in HTTP/1.0: answers and responses have lengths, or end with the connection, or are in chunks."""
    with tempfile.TemporaryDirectory(prefix="tensord-test-") as folder:
        conf = Path(folder) / "conf"
        conf.write_text(_NGINX.format(folder=folder, port=daemon.port, directives=directives))
        nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
        with subprocess.Popen([str(nginx), "-p", folder, "-e", "stderr", "-c", str(conf)]) as proxy:
            try:
                with tensord_client.connect(f"unix:{folder}/front", wait=PATIENCE) as client:
                    assert client.model("scale", timeout=PATIENCE)({"x": X})["y"].tolist() == (5 * X + 1).tolist()
                    three = client.model("three", timeout=PATIENCE)
                    answers = list(three.stream({"n": [3]}))
                    assert [answer["i"].tolist() for answer in answers] == [[[i] * (i + 1)] * 2 for i in range(3)]
                    with Raises("InvalidArgument", "unexpected inference input 'm' for model 'three'"):
                        list(three.stream({"m": [3]}))
            finally:
                proxy.terminate()
