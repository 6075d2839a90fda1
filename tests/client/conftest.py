"""Provides a real daemon with small models, and connections to it that are closed at the end of their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tensord_client.lane import LaneConnection

from tests.daemon_process import ROOT, DaemonProcess
from tests.repositories import applying, of_x, total_model, write_model


def write_models(repository: Path) -> None:
    """Writes models of every kind that a client meets."""
    repository.mkdir()
    for name in ("addsub", "identity", "repeat"):
        (repository / name).symlink_to(ROOT / "bench/models" / name)
    write_model(
        repository,
        "slow",
        applying(
            """
            time.sleep(float(inputs["x"][0]))
            return {"y": inputs["x"] + 1}
            """,
            "x FP32[1]",
            "y FP32[1]",
            more="import time\nhost = True",
        ),
    )
    write_model(
        repository,
        "waits",
        applying(
            """
            until = pathlib.Path(inputs["path"][0].decode())
            until.with_suffix(".begun").touch()
            while not until.exists():
                time.sleep(0.01)
            return {"y": np.ones(1, np.int32)}
            """,
            "path BYTES[1]",
            "y INT32[1]",
            more="import pathlib, time\nhost = True",
        ),
    )
    write_model(
        repository,
        "strings",
        of_x("x[::-1]", "BYTES[n]", more="host = True"),
    )
    write_model(
        repository,
        "half",
        of_x("x * 2", "BF16[n]"),
    )
    write_model(
        repository,
        "brightness",
        """
        import jax.numpy as jnp

        inputs = {"image": "UINT8[6,8,3]"}
        outputs = {"score": "FP32[1]"}

        def create(path, config, device):
            return (lambda params, inputs: {"score": jnp.mean(inputs["image"].astype("float32")).reshape(1)}), {}
        """,
    )
    total_model(repository)


def clients_socket(folder: Path) -> str:
    """Returns the path of the socket for clients of a daemon with that folder."""
    return str(folder / "clients.sock")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("lanes")
    write_models(folder / "models")
    options = {
        "clients": {"socket": clients_socket(folder), "max_in_flight": 128},
        "workers": {"cpu": 2},
        "arenas": {"byte_size": 1 << 20, "wait": 5.0},
    }
    with DaemonProcess(folder, [folder / "models"], options) as started:
        yield started


@pytest.fixture
def connect(daemon: DaemonProcess) -> Iterator[Callable[..., LaneConnection]]:
    """Yields a function that opens connections; they are closed when the test ends."""
    opened: list[LaneConnection] = []

    def begin(**arguments: int) -> LaneConnection:
        opened.append(LaneConnection(clients_socket(daemon.folder), **arguments))
        return opened[-1]

    yield begin
    for connection in opened:
        connection.close()


@pytest.fixture
def connection(connect: Callable[..., LaneConnection]) -> LaneConnection:
    return connect()
