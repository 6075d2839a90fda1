"""Tests what `pip install` gives somebody without a checkout: one wheel for every Python from 3.11 on, complete, and it serves.

1. The source archive is made, and the wheel out of it, so that both are whole; auditwheel says on which systems it runs.
2. The wheel is installed into a fresh environment, where what it needs comes from that of the tests: nothing is downloaded.
3. From there the daemon serves a model over HTTP, in a folder where nothing of the checkout lies.

``--from-index`` (``make test-wheel``): step 2 in an empty environment of each Python on this host, with what pip finds for it.
"""

from __future__ import annotations

import email
import math
import os
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests import repositories
from tests.daemon_process import ROOT, DaemonProcess
from tests.installation import NEIGHBOURS, ROOMS, Installation, made, needs_compiler, neighbours, ran, tool, wheel_of

#: Written by `make lint`, for this checkout.
STUBS = "tensord/protocol/*.pyi"
EXTENSIONS = {
    "tensord/daemon/grpc/_hpack.abi3.so",
    "tensord/daemon/grpc/_walk.abi3.so",
    "tensord/shm/_guard.abi3.so",
    "tensord/shm/_strings.abi3.so",
    "tensord/workers/native/_native.abi3.so",
}
#: Versions of Python, and what besides the wheel pip is given: the oldest JAX that setup.cfg allows.
ENVIRONMENTS = [("3.11", ()), ("3.11", ("jax==0.8.0",)), ("3.12", ()), ("3.13", ())]

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def archive() -> Path:
    return made()[0]


@pytest.fixture(scope="module")
def wheel() -> Path:
    return made()[1]


@pytest.fixture(scope="module")
def installation(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    installed = Installation(tmp_path_factory.mktemp("installation") / "venv")
    installed.install(wheel)
    return installed


def metadata(wheel: Path, name: str) -> Any:
    with zipfile.ZipFile(wheel) as opened:
        (found,) = (each for each in opened.namelist() if each.endswith(f".dist-info/{name}"))
        return email.message_from_bytes(opened.read(found))


def test_one_wheel_for_every_python(wheel: Path) -> None:
    """An index accepts the wheel's tag, which names the systems it runs on, unlike "linux"."""
    python, abi, platforms = wheel.stem.split("-")[2:]
    assert (python, abi) == ("cp311", "abi3")
    assert all(platform.startswith("manylinux") for platform in platforms.split(".")), platforms
    tags = metadata(wheel, "WHEEL").get_all("Tag")
    assert sorted(tags) == sorted(f"cp311-abi3-{platform}" for platform in platforms.split("."))


def test_what_is_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        (license,) = (name for name in names if name.endswith("/LICENSE"))
        assert opened.read(license) == (ROOT / "LICENSE").read_bytes()
    code = {name for name in names if ".dist-info/" not in name and not name.endswith("/")}
    files = {path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.*")}
    files = {path for path in files if path.suffix in (".py", ".pyi", ".proto", ".binpb") and not path.match(STUBS)}
    expected = {str(path if path.parts[0] == "tensord" else "tensord" / path) for path in files}
    assert code == expected | EXTENSIONS | {
        "tensord/config/default.toml",
        "tensord/daemon/http/openapi.yaml",
        "tensord/py.typed",
    }
    said = metadata(wheel, "METADATA")
    assert (said["License-Expression"], said["License-File"]) == ("Apache-2.0", "LICENSE")


def test_what_is_in_the_source_archive(archive: Path) -> None:
    """Folders and files, no links; every source of the C parts; of the tests none, as they want the whole checkout."""
    with tarfile.open(archive) as opened:
        members = {member.name.partition("/")[2]: member for member in opened}
    assert all(member.isdir() or member.isfile() for member in members.values())
    files = {name for name, member in members.items() if member.isfile()}
    sources = {
        path
        for room in ROOMS
        for end in ("py", "pyi", "c", "h", "toml", "proto", "binpb", "yaml")
        for path in (ROOT / room).rglob(f"*.{end}")
    }
    sources = {path.relative_to(ROOT) for path in sources if not path.match(STUBS)}
    expected = {str(path if path.parts[0] == "tensord" else "tensord" / path) for path in sources}
    assert {name for name in files if name.startswith("tensord/")} == expected | {"tensord/py.typed"}
    rest = {name for name in files if "/" not in name}
    assert rest == {
        *("CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md"),
        *("pyproject.toml", "setup.cfg", "setup.py"),
    }
    assert not [name for name in files if name.startswith("tests/")]


def test_an_index_takes_them(archive: Path, wheel: Path) -> None:
    """Their metadata and the description, which the page of the package shows."""
    assert tool("twine", "check", "--strict", archive, wheel, cwd=archive.parent).count("PASSED") == 2
    assert metadata(wheel, "METADATA")["Description-Content-Type"].startswith("text/markdown")


def test_what_hosts_with_gpus_ask_for(wheel: Path) -> None:
    """Each of the two brings JAX's plugin, the bindings and what watches the devices, all for one CUDA."""
    needed = metadata(wheel, "METADATA").get_all("Requires-Dist")
    for cuda in ("12", "13"):
        brought = [each.partition(";")[0].strip() for each in needed if each.endswith(f'extra == "cuda{cuda}"')]
        names = sorted(each.partition("<")[0].partition(">")[0] for each in brought)
        assert names == ["cuda-python", f"jax[cuda{cuda}]", "nvidia-ml-py"]
        (bindings,) = (each for each in brought if each.startswith("cuda-python"))
        assert f"<{int(cuda) + 1}" in bindings


def test_it_adds_one_name(wheel: Path, tmp_path: Path) -> None:
    """An environment differs by the package, its metadata and the two commands."""
    installed = Installation(tmp_path / "venv")
    packages, programs = set(os.listdir(installed.packages)), set(os.listdir(installed.folder / "bin"))
    installed.install(wheel)
    version = wheel.name.split("-")[1]
    assert set(os.listdir(installed.packages)) - packages == {"tensord", f"tensord-{version}.dist-info"}
    assert set(os.listdir(installed.folder / "bin")) - programs == {"tensord", "tensorctl"}


def test_it_serves(installation: Installation, tmp_path: Path) -> None:
    repository = repositories.scale_model(tmp_path / "models")
    with installation.daemon(tmp_path, [repository]) as daemon:
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
    with installation.daemon(tmp_path, [tmp_path / "models"]) as daemon:
        daemon.wait_ready()
        tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}
        status, answer = daemon.infer("asks", [tensor])
        assert (status, answer["outputs"][0]["data"]) == (200, [version])


def test_what_the_help_names_is_there(installation: Installation) -> None:
    """A user without a checkout reads the keys from the program."""
    tensord = installation.folder / "bin" / "tensord"
    assert "tensord config" in " ".join(ran(tensord, "--help", cwd=installation.folder).split())
    defaults = ran(tensord, "config", cwd=installation.folder)
    assert defaults == (ROOT / "config" / "default.toml").read_text()
    assert "config" in os.listdir(installation.packages / "tensord")


def test_type_checkers_see_our_types(wheel: Path, tmp_path: Path) -> None:
    """In a package without the marker they take everything for Any."""
    # Without our libraries, whose types take a checker half a minute to read.
    installed = Installation(tmp_path / "venv", libraries=[])
    installed.install(wheel)
    (tmp_path / "uses.py").write_text("from tensord.testing import load\n\nreveal_type(load)\n")
    options = ("--follow-imports=silent", "--ignore-missing-imports")
    mypy = ("mypy", "--python-executable", installed.python, *options, "uses.py")
    assert "-> tensord.shm.common.model.Model" in tool(*mypy, cwd=tmp_path)


#: What distributions with our folders' names bring.
OTHERS = {
    "python-daemon": {"daemon/__init__.py": "NAME = 'python-daemon'\n", "daemon/pidfile.py": "NAME = 'pidfile'\n"},
    "config": {"config/__init__.py": "NAME = 'config'\n", "config/default.toml": "theirs = true\n"},
}


@pytest.mark.parametrize(
    "order",
    [pytest.param("before", marks=pytest.mark.release("the other order is what pip does to more files")), "after"],
)
def test_distributions_with_our_folders_names(wheel: Path, tmp_path: Path, order: str) -> None:
    """Neither disturbs the other, whichever comes first."""
    installed = Installation(tmp_path / "venv")
    others = [wheel_of(tmp_path, name, files) for name, files in OTHERS.items()]
    for each in (*others, wheel) if order == "before" else (wheel, *others):
        installed.install(each)
    for files in OTHERS.values():
        for path, text in files.items():
            assert (installed.packages / path).read_text() == text
    said = "import config, daemon.pidfile, tensord.daemon; print(config.NAME, daemon.NAME, daemon.pidfile.NAME)"
    assert ran(installed.python, "-c", said, cwd=tmp_path).split() == ["config", "python-daemon", "pidfile"]
    serves_one(installed.folder / "bin", tmp_path)


def serves_one(programs: Path, folder: Path) -> None:
    """Runs ``tensord init`` and ``tensord serve`` in a folder with files of common module names; checks one answer."""
    here = folder / "here"
    here.mkdir()
    neighbours(here)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ran(programs / "tensord", "init", "models/double", cwd=here, environment=environment)
    daemon = DaemonProcess(folder, [here / "models"])
    daemon.program, daemon.cwd = [str(programs / "tensord")], here
    with daemon:
        daemon.wait_ready()
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0.1] * 4}
        status, answer = daemon.infer("double", [tensor])
        assert status == 200, answer
        assert answer["outputs"][0]["data"] == pytest.approx([math.tanh(0.4)] * 2, rel=1e-5)
        assert "neighbour" not in daemon.log
    assert {path.name for path in here.iterdir()} == {"models", *(Path(name).parts[0] for name in NEIGHBOURS)}


def interpreter(version: str) -> str | None:
    """Returns the path of a Python of that version, on the path or from the user's version manager, or None."""
    managed = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = sorted(managed.glob(f"{version}.*/bin/python"), key=lambda path: int(path.parts[-3].split(".")[2]))
    for candidate in (shutil.which(f"python{version}"), *map(str, reversed(found))):
        # A manager's command may be there for a version that is switched off.
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0:
            return candidate
    return None


@pytest.mark.parametrize(
    ("version", "besides"), ENVIRONMENTS, ids=lambda each: each if isinstance(each, str) else "".join(each) or "newest"
)
def test_an_empty_environment(
    wheel: Path,
    tmp_path: Path,
    version: str,
    besides: tuple[str, ...],
    pytestconfig: pytest.Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With all that pip finds for that Python. Minutes and hundreds of megabytes, so it is asked for."""
    if not pytestconfig.getoption("--from-index"):
        pytest.skip("downloads from the package index: make test-wheel")
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    venv = tmp_path / "venv"
    ran(python, "-m", "venv", venv, cwd=tmp_path)
    pip = venv / "bin" / "python", "-m", "pip", "-q", "--disable-pip-version-check"
    ran(*pip, "install", wheel, *besides, cwd=tmp_path)
    ran(*pip, "check", cwd=tmp_path)
    serves_one(venv / "bin", tmp_path)
