"""Builds the distributions and installs them into environments of their own, once a run and without downloads.

source archive ─▶ wheel ─▶ auditwheel ─▶ the wheel of this run ─▶ ``Installation``, with the tests' libraries behind its own
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.daemon_process import ROOT, DaemonProcess
from tests.run_folder import only_one

ROOMS = ("config", "daemon", "shm", "tensord", "workers")
#: Names that lie beside whoever starts something, each as common as a word. Whoever imports one of them does not go on.
NEIGHBOURS = ("config.py", "daemon.py", "shm.py", "workers/__init__.py")
_BACK_END = "import sys, setuptools.build_meta as made; getattr(made, sys.argv[1])(sys.argv[2])"
_SOURCES = ("setup.py", "setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE")

needs_compiler = pytest.mark.skipif(
    shutil.which(sysconfig.get_config_var("CC").split()[0]) is None, reason="there is no compiler to build a wheel with"
)


def ran(*command: str | Path, cwd: Path, environment: Mapping[str, str] | None = None) -> str:
    """Runs a command, which has to succeed, and returns what it prints."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tool(name: str, *arguments: str | Path, cwd: Path) -> str:
    """Runs a program of the tests' own environment, which finds the environment's other programs."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    found = shutil.which(name, path=path)
    assert found is not None, f"{name} is not installed (pip install -e '.[test]')"
    return ran(found, *arguments, cwd=cwd, environment=os.environ | {"PATH": path})


def made() -> tuple[Path, Path]:
    """Builds the source archive and the wheel from a copy of the checkout without compiled files; returns both."""
    with only_one("wheel") as folder:
        finished = folder / "dist"
        if not finished.exists():
            source = folder / "source"
            shutil.rmtree(source, ignore_errors=True)
            source.mkdir()
            for name in _SOURCES:
                shutil.copy(ROOT / name, source)
            for name in ROOMS:
                ignored = shutil.ignore_patterns("*.so", "__pycache__")
                shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
            archive, wheel = built(source, folder)
            building = archive.parent
            tool("auditwheel", "repair", "--wheel-dir", building, wheel, cwd=folder)
            building.rename(finished)
    (archive,) = finished.glob("*.tar.gz")
    (wheel,) = finished.glob("*.whl")
    return archive, wheel


def client_made() -> tuple[Path, Path]:
    """Builds the client's source archive, and its wheel from that; returns both. Its folder has a link to one beside it."""
    with only_one("client-wheel") as folder:
        finished = folder / "dist"
        if not finished.exists():
            source = folder / "source"
            shutil.rmtree(source, ignore_errors=True)
            ignored = shutil.ignore_patterns("*.egg-info", "*.so", "build", "__pycache__")
            for name in ("client", "shm/common"):
                shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
            archive, wheel = built(source / "client", folder)
            shutil.move(wheel, archive.parent)
            archive.parent.rename(finished)
    (archive,) = finished.glob("*.tar.gz")
    (wheel,) = finished.glob("*.whl")
    return archive, wheel


def built(source: Path, folder: Path) -> tuple[Path, Path]:
    """Builds the source archive of ``source`` in ``folder / "building"``, and the wheel from that in ``folder``."""
    building, unpacked = folder / "building", folder / "unpacked"
    for each in (building, unpacked):
        shutil.rmtree(each, ignore_errors=True)
    building.mkdir()
    ran(sys.executable, "-c", _BACK_END, "build_sdist", building, cwd=source)
    (archive,) = building.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        # What was built here is trusted; Python before 3.11.4 knows no other way.
        opened.extraction_filter = lambda member, _: member  # type: ignore[method-assign,assignment]
        opened.extractall(unpacked)
    (inside,) = unpacked.iterdir()
    ran(sys.executable, "-c", _BACK_END, "build_wheel", folder, cwd=inside)
    (wheel,) = folder.glob("*.whl")
    return archive, wheel


class Installation:
    """An environment into which wheels are installed."""

    def __init__(self, folder: Path, libraries: Sequence[str] | None = None) -> None:
        """Makes the environment.

        ``libraries``: folders with packages that are found after its own; None: those of the tests.
        """
        self.folder = folder
        ran(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
        self.python = folder / "bin" / "python"
        self.packages = Path(
            ran(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
        )
        # Behind its own, so that only the libraries are found there; a checkout that is installed there is not.
        if libraries is None:
            libraries = [path for path in sys.path if Path(path).name == "site-packages"]
        (self.packages / "libraries.pth").write_text("\n".join(libraries) + "\n")

    def install(self, wheel: Path) -> None:
        """Installs a wheel by pip."""
        pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--python", self.python)
        ran(*pip, "install", "--no-index", "--no-deps", "--force-reinstall", wheel, cwd=self.folder)

    def daemon(self, folder: Path, repositories: Sequence[Path], cwd: Path | None = None) -> DaemonProcess:
        """Returns the environment's daemon, which keeps its files in ``folder`` and is started in ``cwd``."""
        daemon = DaemonProcess(folder, repositories)
        daemon.program, daemon.cwd = [str(self.folder / "bin" / "tensord")], cwd or folder
        return daemon


def neighbours(folder: Path) -> None:
    """Writes files with common module names into a folder; a program that imports one of them exits with an error."""
    for name in NEIGHBOURS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"raise SystemExit('the neighbour {name} was imported')\n")


def wheel_of(folder: Path, name: str, files: dict[str, str]) -> Path:
    """Writes a wheel with these files, as an index would have it; returns its path."""
    place = f"{name.replace('-', '_')}-1.0.dist-info"
    files = files | {
        f"{place}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{place}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{place}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{place}/RECORD"))
    made = folder / f"{name.replace('-', '_')}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return made
