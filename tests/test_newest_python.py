"""Tests which interpreter ``make test-newest`` takes, and that CI finds the files that it runs there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.daemon_process import ROOT
from tests.newest_python import newest


def interpreter(folder: Path, version: str, said: str) -> Path:
    """Writes a program ``python3.N`` that answers as that version; ``said`` "": it fails, as a version manager's shim."""
    folder.mkdir(exist_ok=True)
    path = folder / f"python{version}"
    answer = f"printf '%s\\t%s\\t%s\\n' {said.replace('.', ' ')} {path}" if said else "echo 'not chosen' >&2; exit 127"
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(0o755)
    return path


def test_the_newest_that_runs(tmp_path: Path) -> None:
    interpreter(tmp_path / "shims", "3.14", "")
    older = interpreter(tmp_path / "a", "3.12", "3.12")
    found = interpreter(tmp_path / "b", "3.13", "3.13")
    interpreter(tmp_path / "b", "3.99", "3.99")
    interpreter(tmp_path / "c", "3.14", "3.11")
    folders = [tmp_path / name for name in ("shims", "nothing", "a", "b", "c")]
    assert newest(folders, (3, 11)) == str(found)
    assert newest(folders[:3], (3, 11)) == str(older)
    assert newest(folders, (3, 13)) == ""


def test_this_one_is_asked_as_any_other() -> None:
    folder = Path(sys.base_prefix) / "bin"
    major, minor = sys.version_info[:2]
    if (folder / f"python{major}.{minor}").exists():
        assert Path(newest([folder], (major, minor - 1))).name.startswith("python3")


def test_what_ci_runs_on_it_is_there() -> None:
    (listed,) = re.findall(r"^newest=\(\n(.*?)^\)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE | re.DOTALL)
    files = re.findall(r"tests/\S+", listed)
    assert len(files) > 20
    assert [name for name in files if not (ROOT / name).exists()] == []
