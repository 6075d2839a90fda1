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
    first, second = tmp_path / "a.c", tmp_path / "b.h"
    first.write_bytes(b"one")
    second.write_bytes(b"two")
    told = sources([first, second])
    assert told.split()[:-1] == ["a.c", "b.h"]
    assert sources([first, second]) == told
    second.write_bytes(b"other")
    assert sources([first, second]) != told


def test_parts_that_were_built_with_the_newest_python_are_for_older_ones() -> None:
    """Python 3.13's headers parse "#" in a format otherwise, and return None without a reference: a part then fails in 3.11."""
    parts = [path for folder in ("client", "daemon", "shm", "workers") for path in (ROOT / folder).rglob("*.[ch]")]
    texts = {path.name: path.read_text() for path in parts}
    assert {"_guard.c", "_records.c"} <= texts.keys()
    assert [name for name, text in texts.items() if re.search(r'"[^"\n]*[esuyz]#[^"\n]*"', text)] == []
    for name, text in texts.items():
        for constant in ("NONE", "TRUE", "FALSE") if "<Python.h>" in text else ():
            assert f"#define Py_RETURN_{constant} return Py_INCREF(" in text, name


@pytest.mark.skipif(not guard.available, reason="the C extension was not built")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: None, "True"),
        # As in a wheel.
        (lambda folder: (folder / "_guard.c").unlink(), "True"),
        (
            lambda folder: (folder / "_guard.c").write_text("/* newer */"),
            f"False W (tensord.shm._guard: {STALE}) {ADVICE}",
        ),
        (
            lambda folder: (folder / "_guard.abi3.so").unlink(),
            f"False W (tensord.shm._guard: it was not built) {ADVICE}",
        ),
    ],
    ids=["built", "no sources", "stale", "not built"],
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
