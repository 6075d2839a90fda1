"""What an operator reads whose environment holds another distribution with packages named like ours."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon_process import ROOT

ROOMS = ("config", "daemon", "shm", "tensord", "workers")
#: As python-daemon has it.
FOREIGN = '"""Library to implement a well-behaved Unix daemon process."""\n__all__ = ["DaemonContext"]\n'


class Packages:
    """A folder as pip leaves it: packages, and a record of what belongs to which distribution."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for room in ROOMS:
            shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
        self.record("tensord", "0.1.0", [path for room in ROOMS for path in (folder / room).rglob("*.py")])

    def record(self, name: str, version: str, paths: list[Path]) -> None:
        lines = []
        for path in paths:
            digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
            lines.append(f"{path.relative_to(self.folder)},sha256={digest},{path.stat().st_size}\n")
        place = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        place.mkdir()
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (place / "RECORD").write_text("".join(lines))

    def install(self, name: str, *files: str) -> None:
        """Another distribution, over whatever is there."""
        paths = [self.folder / file for file in files]
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(FOREIGN)
        self.record(name, "3.1.2", paths)

    def run(self, program: str, *before: Path) -> tuple[int, str, str]:
        """Status, standard output and standard error of ``PROGRAM --help``."""
        folders = [*map(str, before), str(self.folder)]
        done = subprocess.run(
            [sys.executable, "-P", "-c", f"from tensord.__main__ import {program}; {program}()", "--help"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr


@pytest.fixture
def packages(tmp_path: Path) -> Packages:
    return Packages(tmp_path / "packages")


@pytest.mark.parametrize("program", ["tensord", "tensorctl"])
def test_a_whole_installation_says_nothing(packages: Packages, program: str) -> None:
    packages.install("lockfile", "lockfile/__init__.py", "daemon_tools/__init__.py", "tests/daemon/__init__.py")
    status, out, error = packages.run(program)
    assert (status, error) == (0, "")
    assert "Usage: " in out


@pytest.mark.parametrize("program", ["tensord", "tensorctl"])
@pytest.mark.parametrize("room", ROOMS)
def test_overwritten(packages: Packages, program: str, room: str) -> None:
    """Only a docstring is lost, so it works."""
    packages.install("python-daemon", f"{room}/__init__.py", f"{room}/pidfile.py")
    assert packages.run(program)[::2] == (
        0,
        f"{program}: python-daemon 3.1.2 wrote its own over {room}/__init__.py: install it again "
        "(pip install --force-reinstall --no-deps tensord) in an environment of its own\n",
    )


@pytest.mark.parametrize("program", ["tensord", "tensorctl"])
def test_what_another_distribution_wrote_is_named_before_it_runs(packages: Packages, program: str) -> None:
    """Theirs does not work here, for want of what it imports."""
    packages.install("python-daemon", "daemon/__init__.py")
    (packages.folder / "daemon" / "__init__.py").write_text("import lockfile_that_is_not_there\n")
    status, out, error = packages.run(program)
    assert (status, out) == (1, "")
    assert error.startswith(f"{program}: python-daemon 3.1.2 wrote its own over daemon/__init__.py: install it again ")


def test_code_that_is_overwritten_is_never_run(packages: Packages) -> None:
    packages.install("config", "config/__init__.py", "config/layers.py", "config/options.py")
    packages.install("settings", "config/log.py")
    status, out, error = packages.run("tensord")
    assert (status, out) == (1, "")
    assert error.startswith("tensord: config 3.1.2 and settings 3.1.2 wrote its own over config/")
    assert " and 1 more: install it again" in error
    assert error.count("\n") == 1


def test_one_that_was_there_before(packages: Packages) -> None:
    """Ours are whole: it is the other one that does not work any more."""
    mine = (packages.folder / "daemon" / "__init__.py").read_text()
    packages.install("python-daemon", "daemon/__init__.py", "daemon/daemon.py")
    (packages.folder / "daemon" / "__init__.py").write_text(mine)
    assert packages.run("tensord")[::2] == (
        0,
        "tensord: python-daemon 3.1.2 has files of the same names and does not work beside tensord: "
        "give each an environment of its own\n",
    )


def test_one_that_was_uninstalled_again(packages: Packages) -> None:
    (packages.folder / "daemon" / "__init__.py").unlink()
    status, _, error = packages.run("tensord")
    assert status == 0
    assert error.startswith("tensord: daemon/__init__.py is missing, as after another distribution")


def test_an_operators_own_change_is_his(packages: Packages) -> None:
    with (packages.folder / "daemon" / "supervisor.py").open("a") as file:
        file.write("# patched\n")
    assert packages.run("tensord")[::2] == (0, "")


@pytest.mark.parametrize("name", ["config.py", "shm/__init__.py", "workers/__init__.py"])
@pytest.mark.parametrize("program", ["tensord", "tensorctl"])
def test_hidden(packages: Packages, program: str, name: str, tmp_path: Path) -> None:
    """By a folder of the operator's that stands earlier on the path."""
    file = tmp_path / "mine" / name
    file.parent.mkdir(parents=True)
    file.write_text("raise SystemExit('run')\n")
    status, out, error = packages.run(program, tmp_path / "mine")
    assert (status, out) == (1, "")
    room = name.split("/")[0].removesuffix(".py")
    assert error == (
        f"{program}: the package '{room}' is {file} here and not tensord's own: take its folder out of PYTHONPATH, or "
        "install tensord into an environment of its own\n"
    )


def test_a_checkout_says_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tensord", "--version"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
