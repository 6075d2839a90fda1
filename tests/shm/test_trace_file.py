"""Trace files: whole JSON after every write, whoever writes; bounded; nobody's file is overwritten."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import time
from pathlib import Path

import pytest

from tensord.shm import trace_file
from tensord.shm.trace_file import TraceFiles, append


def test_many_writers_one_array(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace_file.begin(str(path))

    def write(number: int) -> None:
        for serial in range(50):
            trace_file.append(str(path), b'{"id":%d},{"id":%d}' % (number, serial))
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH)
                json.loads(file.read())

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(json.loads(path.read_text())) == 4 * 50 * 2


def test_a_start_empties_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("[1]")
    trace_file.begin(str(path))
    trace_file.append(str(path), b"2")
    assert json.loads(path.read_text()) == [2]


def test_indexed_files_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "t.1").write_text("mine")
    files = TraceFiles(1 << 20, 100)
    for number in range(2):
        files.write(str(tmp_path / "t"), b"%d" % number, indexed=True)
    files.close()
    assert [(tmp_path / f"t.{index}").read_text() for index in range(3)] == ["[0]", "mine", "[1]"]


def test_files_that_cannot_be_written_do_not_count(tmp_path: Path) -> None:
    files = TraceFiles(1 << 20, 3)
    for _ in range(4):
        files.write(str(tmp_path / "later" / "t"), b"lost", indexed=True)
    files.write(str(tmp_path / "t"), b"written", indexed=False)
    while not (tmp_path / "t").exists():
        time.sleep(0.01)
    (tmp_path / "later").mkdir()
    for number in range(4):
        files.write(str(tmp_path / "later" / "t"), b"%d" % number, indexed=True)
    files.close()
    assert [file.read_text() for file in sorted((tmp_path / "later").iterdir())] == ["[0]", "[1]", "[2]"]


def test_what_cannot_be_written_is_said_and_nothing_else_happens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "other").write_text("a letter")
    files = TraceFiles(1 << 20, 100)
    files.write(str(tmp_path / "nowhere" / "t"), b"1", indexed=False)
    files.write(str(tmp_path / "other"), b"1", indexed=False)
    files.write(str(tmp_path / "good"), b"1", indexed=False)
    files.close()
    assert (tmp_path / "good").read_text() == "[1]"
    assert (tmp_path / "other").read_text() == "a letter"
    assert "No such file or directory" in caplog.text
    assert "holds something else" in caplog.text


def test_the_bound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = TraceFiles(10, 100)
    for traces in (b"longer than all", *[b"12345"] * 4):
        files.write(str(tmp_path / "t"), traces, indexed=False)
    files.close()
    assert (tmp_path / "t").read_text().count("12345") == 2
    assert caplog.text.count("traces are dropped: this process writes no more than trace.max_byte_size (10) bytes") == 1


def test_a_full_disk_is_named_once_and_the_file_stays_an_array(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a trace is taken, as by a disk that becomes full."""
    files = TraceFiles(1 << 20, 5)
    for number in range(50):
        files.write("/dev/full", f'{{"id":{number}}}'.encode(), indexed=False)
    files.close()
    lines = [record.message for record in caplog.records]
    assert lines == [f"traces cannot be written to /dev/full: {os.strerror(errno.ENOSPC)}"]
    path = tmp_path / "traces"
    append(str(path), b'{"id":1}')
    usual = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, content, at: usual(fd, content[: max(1, len(content) // 2)], at))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        append(str(path), b'{"id":2}')
    monkeypatch.undo()
    append(str(path), b'{"id":3}')
    assert json.loads(path.read_text()) == [{"id": 1}, {"id": 3}]


def test_the_series_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Any client may ask for a file with each request: of all that is asked for so many are made, by however many fronts."""
    (tmp_path / "t.1").write_text("mine")
    fronts = [TraceFiles(1 << 20, 5) for _ in range(2)]
    for number in range(20):
        fronts[number % 2].write(str(tmp_path / "t"), b"%d" % number, indexed=True)
    for files in fronts:
        files.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"t.{index}" for index in range(5)]
    assert (tmp_path / "t.1").read_text() == "mine"
    assert "there are trace.max_files (5) files" in caplog.text
    assert caplog.text.count("traces are dropped") == 2
