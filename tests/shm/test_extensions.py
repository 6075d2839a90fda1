"""Parts in C: what is said of those that are missing, or were built from other sources than those beside them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tensord.shm import guard
from tensord.shm.extensions import STALE, check, missing, sources
from tests.daemon_process import ROOT

SAID = (
    "from tensord.shm import guard; from tensord.shm.extensions import missing; "
    "print(guard.available, *missing({'tensord.shm._guard': 'W'}))"
)
ADVICE = (
    "to build them, install a C compiler and Python's headers, then install tensord again "
    "(in a checkout: make serve, or pip install -e .)"
)


def test_sources_are_told_by_names_and_content(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    names = ("a.c", "../b.h")
    (tmp_path / "folder" / "a.c").write_bytes(b"one")
    (tmp_path / "b.h").write_bytes(b"two")
    told = sources(tmp_path / "folder", names)
    assert tuple(told.split()[:-1]) == names
    assert sources(tmp_path / "folder", names) == told
    (tmp_path / "b.h").write_bytes(b"other")
    assert sources(tmp_path / "folder", names) != told


def test_parts_that_were_built_with_the_newest_python_are_for_older_ones() -> None:
    """Python 3.13's headers parse "#" in a format otherwise, and return None without a reference: a part then fails in 3.11."""
    parts = [path for folder in ("client", "daemon", "shm", "workers") for path in (ROOT / folder).rglob("*.[ch]")]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in parts}
    assert [name for name, text in texts.items() if re.search(r'"[^"\n]*[esuyz]#[^"\n]*"', text)] == []
    # Each distribution includes Python's headers in one place.
    places = {name for name, text in texts.items() if "<Python.h>" in text}
    assert places == {"client/tensord_client/_lane.h", "shm/_python.h"}
    for name in places:
        for constant in ("NONE", "TRUE", "FALSE"):
            assert f"#define Py_RETURN_{constant} return Py_INCREF(" in texts[name], name


@pytest.mark.skipif(not guard.available, reason="the C extension was not built")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: None, "True"),
        # As in a wheel.
        (lambda folder: [(folder / name).unlink() for name in ("_guard.c", "_python.h")], "True"),
        (
            lambda folder: (folder / "_guard.c").write_text("/* newer */"),
            f"False W (tensord.shm._guard: {STALE}) {ADVICE}",
        ),
        (
            lambda folder: (folder / "_python.h").write_text("/* newer */"),
            f"False W (tensord.shm._guard: {STALE}) {ADVICE}",
        ),
        (
            lambda folder: ((folder / "_guard.c").unlink(), (folder / "_guard.c").mkdir()),
            f"False W (tensord.shm._guard: a source beside it cannot be read: Is a directory) {ADVICE}",
        ),
        (
            lambda folder: (folder / "_guard.abi3.so").unlink(),
            f"False W (tensord.shm._guard: it was not built) {ADVICE}",
        ),
    ],
    ids=["built", "no sources", "stale", "stale header", "unreadable", "not built"],
)
def test_a_checkout_in_each_state(tmp_path: Path, change: Callable[[Path], object], said: str) -> None:
    package = tmp_path / "tensord"
    package.mkdir()
    shutil.copy(ROOT / "tensord" / "__init__.py", package)
    shutil.copytree(ROOT / "shm", package / "shm")
    change(package / "shm")
    # Without the environment, whose finder knows the checkout.
    command = [sys.executable, "-S", "-c", SAID]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == said


@pytest.mark.skipif(not guard.available, reason="the C extension was not built")
def test_one_from_before_sources_were_told_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensord.shm import _guard

    check(_guard)
    monkeypatch.delattr(_guard, "SOURCES")
    with pytest.raises(ImportError, match="built from other sources"):
        check(_guard)
    assert len(missing({"tensord.shm._guard": "W"})) == 2
