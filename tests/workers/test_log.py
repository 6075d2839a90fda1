"""Lines on standard error: text or JSON, by level."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator

import pytest

from config.options import Log
from workers.log import set_up


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers, root.level
    yield
    logging.captureWarnings(False)
    root.handlers, _ = before
    root.setLevel(before[1])


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    set_up("worker-3", Log(warning=False))
    logging.getLogger("a").info("hello %d", 5)
    logging.getLogger("a").warning("quiet")
    logging.getLogger("a").debug("quiet")
    logging.getLogger("a").critical("loud")
    assert capsys.readouterr().err == "INFO worker-3 a: hello 5\nCRITICAL worker-3 a: loud\n"


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    set_up("worker-3", Log(format="json", verbose=2))
    try:
        raise ValueError("näh\n")
    except ValueError:
        logging.getLogger("a").exception("it failed")
    logging.getLogger("a").debug("seen")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("careful", stacklevel=1)
    first, second, third = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["level"], first["process"], first["message"]) == ("error", "worker-3", "it failed")
    assert "ValueError: näh" in first["traceback"]
    assert second["message"] == "seen"
    assert "careful" in third["message"]
