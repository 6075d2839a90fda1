"""Tests what users import."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

import tensord
from tests.daemon_process import ROOT


def test_it_is_the_installed_one() -> None:
    assert tensord.__version__ == importlib.metadata.version("tensord")
    with pytest.raises(AttributeError, match="module 'tensord' has no attribute 'versions'"):
        tensord.versions  # noqa: B018


def test_the_programs_say_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tensord", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"tensord {tensord.__version__}\n"


def test_the_package_imports_nothing() -> None:
    """Every process imports it first."""
    script = "import sys; before = set(sys.modules); import tensord; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-I", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "tensord\n"
