"""A daemon that follows its repository: models appear, change, break and go while it serves."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable

import pytest

from tests.daemon_process import PATIENCE, DaemonOf, DaemonProcess
from tests.repositories import of_x, write_model

MODEL = of_x("x * FACTOR", "FP32[1]")
ASKED = [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    folder = tmp_path_factory.mktemp("poll")
    write_model(folder / "models", "steady", MODEL.replace("FACTOR", "1.0"))
    options = {"repository": {"control_mode": "poll", "poll_interval": 0.2}}
    return daemon_of(folder / "models", options, folder=folder)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def answer(daemon: DaemonProcess, name: str) -> float | str:
    status, body = daemon.infer(name, ASKED)
    return float(body["outputs"][0]["data"][0]) if status == 200 else str(body["error"])


def test_models_come_change_and_go(daemon: DaemonProcess) -> None:
    models = daemon.folder / "models"
    write_model(models, "m", MODEL.replace("FACTOR", "2.0"))
    until(lambda: answer(daemon, "m") == 2)
    write_model(models, "m", MODEL.replace("FACTOR", "3.0"))
    until(lambda: answer(daemon, "m") == 3)
    shutil.rmtree(models / "m")
    until(lambda: "unknown model" in str(answer(daemon, "m")))
    assert answer(daemon, "steady") == 1


def test_a_version_that_is_a_link_to_a_release(daemon: DaemonProcess) -> None:
    """Names, sizes and times of both releases are the same. What no model is beside it is said once, and costs no readiness."""
    models, releases = daemon.folder / "models", daemon.folder / "releases"
    for factor in ("2.0", "3.0"):
        folder = write_model(releases, factor, MODEL.replace("FACTOR", factor))
        os.utime(folder / "model.py", (1, 1))
    (models / "linked").mkdir()
    for name in ("@eaDir", "notes"):
        (models / name).mkdir()
    for factor in (2, 3):
        (models / "next").symlink_to(releases / f"{factor}.0" / "1")
        (models / "next").rename(models / "linked" / "7")
        until(lambda: answer(daemon, "linked") == factor)  # noqa: B023
    (models / "linked" / "7" / ".#model.py").symlink_to("somebody@host.1234:5678")
    write_model(models, "later", MODEL.replace("FACTOR", "4.0"))
    until(lambda: answer(daemon, "later") == 4)
    assert answer(daemon, "linked") == 3
    assert daemon.get("/v2/health/ready")[0] == 200
    assert daemon.log.count("notes' is no model: it has no version folder") == 1
    assert "cannot be read" not in daemon.log


def test_a_mistake_leaves_the_former_one_serving(daemon: DaemonProcess) -> None:
    models = daemon.folder / "models"
    write_model(models, "typed", MODEL.replace("FACTOR", "2.0"))
    until(lambda: answer(daemon, "typed") == 2)
    write_model(models, "typed", MODEL.replace("FACTOR", "missing_name"))
    until(lambda: "missing_name" in daemon.log)
    assert answer(daemon, "typed") == 2
    write_model(models, "typed", MODEL.replace("FACTOR", "5.0"))
    until(lambda: answer(daemon, "typed") == 5)


def test_clients_may_not_load(daemon: DaemonProcess) -> None:
    status, body = daemon.request("POST", "/v2/repository/models/steady/load", b"{}")
    assert status >= 400
    assert b"explicit model load / unload is not allowed if polling is enabled" in body
