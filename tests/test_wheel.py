"""What `pip install` gives somebody who has no checkout: one wheel for every Python from 3.11 on, complete, and it serves.

1. The source archive is made, and the wheel out of it, so that both are whole.
2. The wheel is installed into a fresh environment, where what it needs comes from that of the tests: nothing is downloaded.
3. From there the daemon serves a model over HTTP, in a folder where nothing of the checkout lies.
"""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests import repositories
from tests.daemon_process import ROOT, DaemonProcess

EXTENSIONS = {
    "tensord/daemon/grpc/_walk.abi3.so",
    "tensord/shm/_guard.abi3.so",
    "tensord/workers/native/_fast_path.abi3.so",
    "tensord/workers/native/_large_copy.abi3.so",
    "tensord/workers/native/_output_memory.abi3.so",
}
ROOMS = ("config", "daemon", "shm", "tensord", "workers")
BACK_END = "import sys, setuptools.build_meta as made; getattr(made, sys.argv[1])(sys.argv[2])"

pytestmark = pytest.mark.skipif(
    shutil.which(sysconfig.get_config_var("CC").split()[0]) is None, reason="there is no compiler to build a wheel with"
)


def ran(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from a copy: what was compiled in the checkout is not in it."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    source.mkdir()
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ROOMS:
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    ran(sys.executable, "-c", BACK_END, "build_sdist", folder, cwd=source)
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder / "unpacked")
    (unpacked,) = (folder / "unpacked").iterdir()
    ran(sys.executable, "-c", BACK_END, "build_wheel", folder, cwd=unpacked)
    (made,) = folder.glob("*.whl")
    return made


class Installation:
    """An environment of its own that the wheel was installed into."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        ran(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
        self.python = folder / "bin" / "python"
        self.packages = Path(
            ran(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
        )
        # Behind its own, so that only the libraries are found there; the checkout's own .pth is not read from it.
        (self.packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
        self.install(wheel)

    def install(self, wheel: Path) -> None:
        pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--python", self.python)
        ran(*pip, "install", "--no-index", "--no-deps", "--force-reinstall", wheel, cwd=self.folder)

    def daemon(self, repository: Path) -> DaemonProcess:
        daemon = DaemonProcess(self.folder, [repository])
        daemon.program, daemon.cwd = [str(self.folder / "bin" / "tensord")], self.folder
        return daemon


@pytest.fixture(scope="module")
def installation(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return Installation(tmp_path_factory.mktemp("installation") / "venv", wheel)


def test_one_wheel_for_every_python(wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name, wheel.name
    with zipfile.ZipFile(wheel) as opened:
        (tags,) = (name for name in opened.namelist() if name.endswith(".dist-info/WHEEL"))
        tag = email.message_from_bytes(opened.read(tags))["Tag"]
    assert tag.startswith("cp311-abi3-linux")


def test_what_is_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        said = email.message_from_bytes(opened.read(metadata))
        (license,) = (name for name in names if name.endswith("/LICENSE"))
        assert opened.read(license) == (ROOT / "LICENSE").read_bytes()
    code = {name for name in names if ".dist-info/" not in name}
    files = {path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py*")}
    files = {path for path in files if path.suffix in (".py", ".pyi")}
    expected = {str(path if path.parts[0] == "tensord" else "tensord" / path) for path in files}
    assert code == expected | EXTENSIONS | {"tensord/config/default.toml"}
    assert (said["License-Expression"], said["License-File"]) == ("Apache-2.0", "LICENSE")


def test_it_serves(installation: Installation, tmp_path: Path) -> None:
    repository = repositories.scale_model(tmp_path / "models")
    with installation.daemon(repository) as daemon:
        daemon.wait_ready()
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [2.0] * 4}
        status, answer = daemon.infer("scale", [tensor])
        assert (status, answer["outputs"][0]["data"]) == (200, [7.0] * 4)
        # Everything that runs is the installed one, compiled parts included.
        mapped = {Path(each.path) for process in daemon.family() for each in process.memory_maps()}
        compiled = {path for path in mapped if path.name.endswith(".abi3.so") and installation.packages in path.parents}
        compiled = {path for path in compiled if path.relative_to(installation.packages).parts[0] == "tensord"}
        assert compiled == {installation.packages / name for name in EXTENSIONS}


def test_what_users_import(installation: Installation, tmp_path: Path) -> None:
    """A model as well."""
    version = ran(installation.python, "-c", "import tensord; print(tensord.__version__)", cwd=tmp_path).strip()
    assert version == ran(installation.folder / "bin" / "tensord", "--version", cwd=tmp_path).split()[-1]
    source = """
    import numpy as np
    import tensord


    class TritonPythonModel:
        def execute(self, requests):
            import triton_python_backend_utils as utils

            said = np.array([tensord.__version__], np.object_)
            return [utils.InferenceResponse([utils.Tensor("y", said)]) for _ in requests]
    """
    config = "backend: 'python' input { name: 'x' data_type: TYPE_FP32 dims: [1] } "
    config += "output { name: 'y' data_type: TYPE_STRING dims: [1] }"
    repositories.write_model(tmp_path / "models", "asks", source, config)
    with installation.daemon(tmp_path / "models") as daemon:
        daemon.wait_ready()
        tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}
        status, answer = daemon.infer("asks", [tensor])
        assert (status, answer["outputs"][0]["data"]) == (200, [version])


def test_what_the_help_names_is_there(installation: Installation) -> None:
    """Whoever has no checkout reads the keys from the program."""
    tensord = installation.folder / "bin" / "tensord"
    assert "tensord config" in " ".join(ran(tensord, "--help", cwd=installation.folder).split())
    defaults = ran(tensord, "config", cwd=installation.folder)
    assert defaults == (ROOT / "config" / "default.toml").read_text()
    assert "config" in os.listdir(installation.packages / "tensord")


def wheel_of(folder: Path, name: str, files: dict[str, str]) -> Path:
    """A distribution as an index has it."""
    place = f"{name}-1.0.dist-info"
    files = files | {
        f"{place}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{place}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{place}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{place}/RECORD"))
    made = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return made
