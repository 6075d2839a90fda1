"""Ensembles are loaded with what they are made of, go with it, and come back with it: a real daemon, asked as clients ask."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.daemon_process import PATIENCE, DaemonOf, DaemonProcess, wait_until
from tests.repositories import deadly_model, ensemble, of_x, scale_model, write_model

STEP = {"x": "x"}, {"y": "y"}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("repository")
    for name in ("a", "b", "shared"):
        scale_model(repository, name)
    first, second = ("a", {"x": "x"}, {"y": "mid"}), ("b", {"x": "mid"}, {"y": "y"})
    ensemble(repository, "e", ["x FP32 4"], ["y FP32 4"], [first, second], 8)
    for number, name in enumerate(("slow_a", "slow_b"), 2):
        write_model(repository, name, slowly_traced(number))
    slow = ("slow_a", {"x": "x"}, {"y": "mid"}), ("slow_b", {"x": "mid"}, {"y": "y"})
    ensemble(repository, "slow", ["x FP32 4"], ["y FP32 4"], slow, 8)
    ensemble(repository, "around", ["x FP32 4"], ["y FP32 4"], [("slow", *STEP)], 8)
    ensemble(repository, "outer", ["x FP32 4"], ["y FP32 4"], [("e", *STEP)], 8)
    ensemble(repository, "one", ["x FP32 4"], ["y FP32 4"], [("shared", *STEP)], 8)
    ensemble(repository, "other", ["x FP32 4"], ["y FP32 4"], [("shared", *STEP)], 8)
    ensemble(repository, "pinned", ["x FP32 4"], ["y FP32 4"], [("shared:7", *STEP)], 8)
    ensemble(repository, "missing", ["x FP32 4"], ["y FP32 4"], [("nowhere", *STEP)], 8)
    ensemble(repository, "ring", ["x FP32 4"], ["y FP32 4"], [("rang", *STEP)], 8)
    ensemble(repository, "rang", ["x FP32 4"], ["y FP32 4"], [("ring", *STEP)], 8)
    ensemble(repository, "typed", ["x INT32 4"], ["y FP32 4"], [("a", *STEP)], 8)
    ensemble(repository, "unwell", ["x FP32 4"], ["y FP32 4"], [("broken", *STEP)], 8)
    write_model(repository, "broken", "def create(path, config, device):\n    raise OSError('no')\n", IO)
    deadly_model(repository)
    ensemble(repository, "kills", ["x INT32 1"], ["y INT32 1"], [("deadly", *STEP)])
    return repository


IO = """
    backend: "jax"
    max_batch_size: 8
    input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
    output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }
"""


def slowly_traced(factor: int) -> str:
    """Returns a model.py of ``y = factor * x`` whose tracing takes a moment."""
    return of_x(f"(time.sleep(0.5), {factor} * x)[1]", more="import time\nmax_batch_size = 8")


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, repository: Path) -> DaemonProcess:
    options = {"repository": {"control_mode": "explicit", "load": []}, "workers": {"cpu": 2}}
    return daemon_of(repository, options)


@pytest.fixture(autouse=True)
def nothing_loaded(http: httpclient.InferenceServerClient) -> Iterator[None]:
    yield
    for entry in http.get_model_repository_index():
        if entry.get("state") == "READY":
            http.unload_model(entry["name"])
    wait_until(lambda: not loaded(http), "all models to be gone")


def loaded(http: httpclient.InferenceServerClient) -> set[str]:
    return {entry["name"] for entry in http.get_model_repository_index() if entry.get("state") == "READY"}


def answer(client: Any, model: str = "e") -> Any:
    kind = grpcclient if isinstance(client, grpcclient.InferenceServerClient) else httpclient
    given = kind.InferInput("x", (1, 4), "FP32")
    given.set_data_from_numpy(np.ones((1, 4), np.float32))
    return client.infer(model, [given]).as_numpy("y").ravel().tolist()


def test_members_are_loaded_with_it_and_stay_without_it(client: Any, http: httpclient.InferenceServerClient) -> None:
    client.load_model("outer")
    assert loaded(http) == {"a", "b", "e", "outer"}
    assert answer(client, "outer") == [13.0] * 4
    client.unload_model("outer")
    wait_until(lambda: loaded(http) == {"a", "b", "e"}, "the outer one to be gone")
    assert answer(client, "e") == [13.0] * 4


def test_dependents_go_with_it_unless_others_need_them(client: Any, http: httpclient.InferenceServerClient) -> None:
    client.load_model("outer")
    client.unload_model("outer", unload_dependents=True)
    wait_until(lambda: loaded(http) == set(), "all of them to be gone")
    client.load_model("one")
    client.load_model("other")
    client.unload_model("one", unload_dependents=True)
    wait_until(lambda: loaded(http) == {"other", "shared"}, "only that one to be gone")
    # Somebody asked for it by name.
    client.load_model("shared")
    client.unload_model("other", unload_dependents=True)
    wait_until(lambda: loaded(http) == {"shared"}, "only that one to be gone")


def test_it_goes_with_a_member_and_comes_back_with_it(client: Any, http: httpclient.InferenceServerClient) -> None:
    client.load_model("outer")
    client.unload_model("a")
    wait_until(lambda: loaded(http) == {"b"}, "it to go with its member")
    assert not client.is_model_ready("outer")
    with pytest.raises(InferenceServerException):
        answer(client)
    client.load_model("a")
    wait_until(lambda: loaded(http) == {"a", "b", "e", "outer"}, "it to be back")
    assert answer(client, "outer") == [13.0] * 4


def test_another_member_makes_another_ensemble(
    client: Any, http: httpclient.InferenceServerClient, repository: Path
) -> None:
    client.load_model("e")
    scale_model(repository, "a", 5.0)
    try:
        client.load_model("a")
        assert answer(client) == [19.0] * 4
        # And one that does not fit any more takes it down.
        wrong = IO.replace("TYPE_FP32", "TYPE_INT32")
        write_model(
            repository, "a", "def create(path, config, device):\n    return (lambda p, i: {'y': i['x']}), {}\n", wrong
        )
        client.load_model("a")
        wait_until(lambda: loaded(http) == {"a", "b"}, "it to go")
    finally:
        shutil.rmtree(repository / "a")
        scale_model(repository, "a")
    client.load_model("a")
    wait_until(lambda: loaded(http) == {"a", "b", "e"}, "it to be back")
    assert answer(client) == [13.0] * 4


def test_a_member_is_loaded_when_what_is_made_of_it_answers_with_it(
    client: Any, http: httpclient.InferenceServerClient, repository: Path
) -> None:
    """1. a member is loaded anew; 2. it is unloaded and loaded: the answer comes with the new program."""
    client.load_model("around")
    assert answer(client, "slow") == answer(client, "around") == [6.0] * 4
    try:
        for factor in (5, 7):
            write_model(repository, "slow_a", slowly_traced(factor))
            client.load_model("slow_a")
            assert answer(client, "slow") == answer(client, "around") == [3.0 * factor] * 4
        client.unload_model("slow_b")
        client.load_model("slow_b")
        assert answer(client, "around") == [21.0] * 4
    finally:
        write_model(repository, "slow_a", slowly_traced(2))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("missing", "ensemble missing contains models that are not available or ambiguous: nowhere"),
        ("ring", "circular dependency between ensembles: ring -> ... -> rang -> ring"),
        ("pinned", "ensemble 'pinned' depends on 'shared' whose required version 7 is not loaded."),
        (
            "unwell",
            "ensemble 'unwell' depends on 'broken' which has no loaded version. Model 'broken' loading failed with "
            "error: version 1 ",
        ),
        (
            "typed",
            "in ensemble typed, ensemble tensor x: inconsistent data type: TYPE_INT32 is inferred from model typed "
            "while TYPE_FP32 ",
        ),
    ],
)
def test_what_cannot_be_loaded(client: Any, http: httpclient.InferenceServerClient, name: str, sentence: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.load_model(name)
    assert caught.value.message().startswith(f"load failed for model '{name}': {sentence}")
    assert caught.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
    assert name not in loaded(http)


def test_a_worker_that_dies_takes_nothing_along(
    client: Any, http: httpclient.InferenceServerClient, daemon: DaemonProcess
) -> None:
    client.load_model("e")
    for _ in range(2):
        killed = daemon.workers[0].pid
        os.kill(killed, signal.SIGKILL)
        assert answer(client) == [13.0] * 4
        wait_until(
            lambda gone=killed: gone not in (pids := [w.pid for w in daemon.workers]) and len(pids) == 2, "one more"
        )
    assert "e" in loaded(http)


def test_a_member_that_kills_its_worker_is_one_clear_error(
    client: Any, http: httpclient.InferenceServerClient, daemon: DaemonProcess
) -> None:
    client.load_model("kills")
    kind = grpcclient if isinstance(client, grpcclient.InferenceServerClient) else httpclient

    def infer(value: int) -> Any:
        given = kind.InferInput("x", (1,), "INT32")
        given.set_data_from_numpy(np.array([value], np.int32))
        return client.infer("kills", [given]).as_numpy("y").tolist()

    assert infer(4) == [8]
    with pytest.raises(InferenceServerException, match="worker"):
        infer(-1)
    assert infer(5) == [10]


def test_clients_may_come_while_members_are_loaded_again(
    daemon: DaemonProcess, http: httpclient.InferenceServerClient
) -> None:
    """No request fails while a member is loaded again and again under load."""
    http.load_model("e")
    with contextlib.closing(httpclient.InferenceServerClient(daemon.url, network_timeout=PATIENCE)) as beside:
        for _ in range(3):
            # Its files have not changed: loading it is nothing. With them changed it is another load.
            os.utime(Path(daemon.sections["repository"]["paths"][0]) / "b" / "1" / "model.py")
            http.load_model("b")
            assert answer(beside) == [13.0] * 4
