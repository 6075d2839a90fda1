"""What users import."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

import tensord
from tests.daemon_process import ROOT


def test_it_is_the_installed_one() -> None:
    assert tensord.__version__ == importlib.metadata.version("tensord")


def test_the_programs_say_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tensord", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"tensord {tensord.__version__}\n"


@pytest.mark.parametrize("module", ["tensord", "tensord.__main__", "tensord.installation"])
def test_nothing_that_could_be_overwritten_is_imported_with_it(module: str) -> None:
    script = f"import sys, {module}; print(sorted({{'config', 'daemon', 'shm', 'workers'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
