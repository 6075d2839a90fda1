"""Tests that what tensord needs at run time exists as wheels for each Python it supports, so that nobody needs a compiler.

pip resolves for another Python than its own and downloads nothing but metadata. Where no index is reached the test is skipped.
"""

from __future__ import annotations

import configparser
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
#: As glibc 2.28 and later takes them.
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux_2_5", "manylinux1")
_UNREACHED = re.compile(r"Connection|Temporary failure|Name or service|Max retries|timed out|Network is unreachable")
_MARKER = re.compile(r'python_version < "3\.(\d+)"')


def requirements() -> list[str]:
    """Returns the run-time requirements of setup.cfg."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    return [line for line in settings["options"]["install_requires"].split("\n") if line.strip()]


def of(python: str, requirement: str) -> str:
    """Returns a requirement for a version of Python without its marker; "": it is none there.

    pip would judge markers by its own Python.
    """
    name, _, marker = requirement.partition(";")
    if not marker:
        return name
    found = _MARKER.fullmatch(marker.strip())
    assert found is not None, f"a marker that this test does not know: {requirement}"
    return name if int(python.partition(".")[2]) < int(found[1]) else ""


def test_markers_are_judged_by_the_python_that_is_asked_for() -> None:
    assert of("3.13", 'posix-ipc >=1.2,<2; python_version < "3.14"').strip() == "posix-ipc >=1.2,<2"
    assert of("3.14", 'posix-ipc >=1.2,<2; python_version < "3.14"') == ""


@pytest.mark.release("the environments of the tests find wheels of two versions, or are not made")
@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_has_a_wheel(python: str, tmp_path: Path) -> None:
    wanted = [found for requirement in requirements() if (found := of(python, requirement))]
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--dry-run"]
    command += ["--ignore-installed", "--only-binary=:all:", "--retries=1", "--timeout=15"]
    command += ["--implementation", "cp", "--python-version", python, "--target", str(tmp_path / "target")]
    command += [f"--abi={abi}" for abi in (f"cp{python.replace('.', '')}", "abi3", "none")]
    command += [f"--platform={platform}_x86_64" for platform in PLATFORMS]
    if subprocess.run([*command[:3], "--version"], capture_output=True).returncode:
        pytest.skip("this environment has no pip")
    done = subprocess.run([*command, f"--report={report}", *wanted], capture_output=True, text=True)
    if done.returncode and _UNREACHED.search(done.stderr):
        pytest.skip("no package index is reached")
    assert done.returncode == 0, done.stderr
    found = {
        each["metadata"]["name"]: each["download_info"]["url"] for each in json.loads(report.read_text())["install"]
    }
    assert {"jax", "jaxlib", "numpy"} <= {name.lower() for name in found}
    assert all(url.endswith(".whl") for url in found.values())
