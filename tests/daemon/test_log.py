"""Log lines: one a message, whatever is in it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from config.options import Log
from daemon import log


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(Log(), "supervisor", {})
    logging.getLogger("x").info("a %s", "b\nERROR forged\x1b[0m")
    logging.getLogger("x").debug("hidden")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(" INFO supervisor: a b\\x0aERROR forged\\x1b[0m")


def test_journal_priorities_on_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(Log(verbose=1), "supervisor", {"JOURNAL_STREAM": "1:2"})
    logging.getLogger("x").debug("fine")
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("x").exception("it failed")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "<7>supervisor: fine"
    assert lines[1] == "<3>supervisor: it failed"
    assert all(line.startswith("<3>supervisor: ") for line in lines[1:])
    assert lines[-1] == "<3>supervisor: ValueError: bad"


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(Log(format="json"), "http-0", {})
    logging.getLogger("x").warning('a "quoted"\nline é')
    (line,) = capsys.readouterr().err.splitlines()
    fields = json.loads(line)
    assert fields.pop("time").endswith("Z")
    assert fields == {"level": "warning", "process": "http-0", "message": 'a "quoted"\\x0aline é'}


def test_switches(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(Log(info=False, warning=False), "supervisor", {})
    logger = logging.getLogger("x")
    logger.info("i")
    logger.warning("w")
    logger.error("e")
    logger.critical("c")
    assert [line[-1] for line in capsys.readouterr().err.splitlines()] == ["e", "c"]
