"""A model's messages are in the daemon's log at the level the model says, as far as the log settings let them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tensord.workers.python_backend.interface import Logger
from tests.daemon_process import DaemonProcess
from tests.repositories import write_model

MODEL = """
    import triton_python_backend_utils as pb_utils

    def say(logger, when):
        logger.log(f"{when}: nothing said")
        logger.log(f"{when}: info %s 100%", logger.INFO)
        logger.log(f"{when}: warning", logger.WARNING)
        logger.log(message=f"{when}: error", level=logger.ERROR)
        logger.log(f"{when}: verbose", logger.LogLevel.VERBOSE)
        logger.log_info(f"{when}: info")
        logger.log_warn(f"{when}: warning")
        logger.log_error(f"{when}: error")
        logger.log_verbose(f"{when}: verbose")

    class TritonPythonModel:
        def initialize(self, args):
            say(pb_utils.Logger, "initialize")

        def execute(self, requests):
            say(pb_utils.Logger, "execute")
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", each.inputs()[0].as_numpy())]) for each in requests]
"""
CONFIG = """
    input [ { name: "x" data_type: TYPE_INT32 dims: [ 1 ] } ]
    output [ { name: "y" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
SAID = [
    ("I", "nothing said"),
    ("I", "info %s 100%"),
    ("W", "warning"),
    ("E", "error"),
    ("V", "verbose"),
    ("I", "info"),
    ("W", "warning"),
    ("E", "error"),
    ("V", "verbose"),
]


@pytest.mark.parametrize(("switches", "letters"), [({"verbose": 1}, "IWEV"), ({}, "IWE"), ({"warning": False}, "IE")])
def test_levels(tmp_path: Path, switches: dict[str, int], letters: str) -> None:
    write_model(tmp_path / "models", "says", MODEL, CONFIG)
    with DaemonProcess(tmp_path, [tmp_path / "models"], {"log": switches}) as daemon:
        assert daemon.infer("says", [{"name": "x", "datatype": "INT32", "shape": [1], "data": [1]}])[0] == 200
        daemon.wait_log("execute: error", 2)
    for when in ("initialize", "execute"):
        found = re.findall(rf"^([A-Z])[0-9].*worker-0\] {when}: (.*)$", daemon.log, re.MULTILINE)
        assert found == [(letter, text) for letter, text in SAID if letter in letters]


@pytest.mark.parametrize("level", ["INFO", 0, None])
def test_no_level(level: object) -> None:
    with pytest.raises(TypeError, match=r"expected Logger\.INFO"):
        Logger.log("text", level)  # type: ignore[arg-type]
