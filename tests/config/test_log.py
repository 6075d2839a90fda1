"""Log lines: one a message, whatever is in it; the same formats and levels in every process."""

from __future__ import annotations

import json
import logging
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensord.config import log
from tensord.config.options import Log
from tensord.shm.seldom import Seldom


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    log.configure(Log(), "test", {})
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


def test_the_default_is_a_triton_servers(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(Log(), "supervisor", {})
    logging.getLogger("x").info("a %s", "b\nERROR forged\x1b[0m")
    logging.getLogger("x").debug("hidden")
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"I\d{{4}} \d\d:\d\d:\d\d\.\d{{6}} {os.getpid()} supervisor\] a b\\x0aERROR forged\\x1b\[0m", line
    )


def test_iso8601(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(Log(format="ISO8601"), "worker-1", {})
    logging.getLogger("x").error("bad")
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ERROR worker-1: bad", line)


def test_journal_priorities_on_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(Log(verbose=2), "supervisor", {"JOURNAL_STREAM": "1:2"})
    logging.getLogger("x").debug("fine")
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("x").exception("it failed")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "<7>supervisor: fine"
    assert lines[1] == "<3>supervisor: it failed"
    assert all(line.startswith("<3>supervisor: ") for line in lines[1:])
    assert lines[-1] == "<3>supervisor:   ValueError: bad"


def test_the_text_of_an_exception_looks_like_no_message(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(Log(format="ISO8601"), "worker-1", {})
    forged = "2026-11-21T10:20:30.123Z INFO supervisor: all is well"
    try:
        raise ValueError(f"bad\n{forged}\r{forged}")
    except ValueError:
        logging.getLogger("x").exception("it failed")
    first, *others = capsys.readouterr().err.splitlines()
    assert first.endswith("it failed")
    assert others[-1] == rf"  {forged}\x0d{forged}"
    assert all(line.startswith("  ") for line in others)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(Log(format="json"), "http-0", {})
    logging.getLogger("x").warning('a "quoted"\nline é')
    try:
        raise ValueError("näh\n")
    except ValueError:
        logging.getLogger("a").exception("it failed")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("careful", stacklevel=1)
    first, second, third = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {"level": "warning", "process": "http-0", "logger": "x", "message": 'a "quoted"\\x0aline é'}
    assert (second["level"], second["message"]) == ("error", "it failed")
    assert "ValueError: näh" in second["traceback"]
    assert "careful" in third["message"]


def test_json_in_the_journal(capsys: pytest.CaptureFixture[str]) -> None:
    """Each object stands behind its priority, which journald takes away; a request of the access log is an object in it."""
    log.configure(Log(format="json"), "http-0", {"JOURNAL_STREAM": "1:2"})
    logging.getLogger("a").error("it failed")
    logging.getLogger("tensord.access").info("{}", extra={"request": {"code": "200"}})
    first, second = capsys.readouterr().err.splitlines()
    assert (first[:3], json.loads(first[3:])["message"]) == ("<3>", "it failed")
    assert second[:3] == "<6>"
    assert (json.loads(second[3:])["message"], json.loads(second[3:])["request"]) == ("request", {"code": "200"})


def test_switches(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(Log(info=False, warning=False), "supervisor", {})
    logger = logging.getLogger("x")
    logger.info("i")
    logger.warning("w")
    logger.error("e")
    logger.critical("c")
    assert [line[-1] for line in capsys.readouterr().err.splitlines()] == ["e", "c"]


@pytest.mark.parametrize(("verbose", "shown"), [(0, ""), (1, "ours"), (2, "ours theirs")])
def test_verbose_levels(capsys: pytest.CaptureFixture[str], verbose: int, shown: str) -> None:
    """Loggers that one level switched on are switched off again by a lower one."""
    log.configure(Log(verbose=2), "worker-0", {})
    log.configure(Log(verbose=verbose), "worker-0", {})
    logging.getLogger("tensord.workers.control").debug("ours")
    logging.getLogger("somebody.else").debug("theirs")
    logging.getLogger("jax.compiler").debug("never")
    assert " ".join(line.split()[-1] for line in capsys.readouterr().err.splitlines()) == shown


def test_a_file_is_opened_again_after_it_was_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tensord.log"
    path.write_text("from before\n")
    log.configure(Log(file=str(path), format="json"), "supervisor", {"JOURNAL_STREAM": "1:2"})
    logging.getLogger("x").info("one")
    path.rename(tmp_path / "tensord.log.1")
    logging.getLogger("x").info("two")
    old, new = (tmp_path / "tensord.log.1").read_text().splitlines(), path.read_text().splitlines()
    assert (old[0], json.loads(old[1])["message"], json.loads(new[0])["message"]) == ("from before", "one", "two")
    assert capsys.readouterr().err == ""


def test_a_file_that_cannot_be_written_costs_no_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = Log(file=str(tmp_path / "nowhere" / "tensord.log"))
    with pytest.raises(FileNotFoundError):
        log.check_writable(options)
    log.configure(options, "supervisor", {})
    logging.getLogger("x").info("still here")
    assert capsys.readouterr().err.endswith("supervisor] still here\n")


def test_a_change_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    path = tmp_path / "tensord.log"
    log.check_writable(Log(file=str(path)))
    before = len(os.listdir("/proc/self/fd"))
    for verbose in range(3):
        log.configure(Log(file=str(path), verbose=verbose), "supervisor", {})
        logging.getLogger("x").info("line")
    log.configure(Log(), "supervisor", {})
    assert len(os.listdir("/proc/self/fd")) <= before
    assert path.read_text().count("line") == 3


def test_a_full_disk_is_named_once_and_costs_no_line(capfd: pytest.CaptureFixture[str]) -> None:
    log.configure(Log(file="/dev/full"), "p")
    try:
        for number in range(20):
            logging.getLogger("tensord").info("line %d", number)
    finally:
        log.configure(Log(), "p")
    written = capfd.readouterr().err
    assert "Logging error" not in written
    assert written.count("log file /dev/full cannot be written: No space left on device") == 1
    assert [f"line {number}" for number in range(20)] == re.findall(r"line \d+", written)
    assert len(written.splitlines()) == 21


def test_what_comes_often_is_due_once_a_minute() -> None:
    now = [0.0]
    seldom = Seldom(lambda: now[0])
    found = []
    for now[0] in (0.0, 1.0, 59.0, 60.0, 61.0, 200.0):
        found.append(seldom.is_due())
    assert found == [True, False, False, True, False, True]
    assert [seldom.is_due(what) for what in ("a", "b", "a", "")] == [True, True, False, False]
