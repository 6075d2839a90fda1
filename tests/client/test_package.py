"""The distribution of the client: complete, importable anywhere, and light."""

from __future__ import annotations

import ast
import email
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from tensord_client.native import SOURCES

from tests.daemon_process import ROOT, DaemonProcess
from tests.installation import Installation, client_made, needs_compiler, ran
from tests.repositories import echo_models, scale_model

CLIENT = ROOT / "client"
#: Its modules; ``common`` is a link, to what ``tensord`` has too.
MODULES = sorted(path for folder in ("", "common") for path in (CLIENT / "tensord_client" / folder).glob("*.py"))
COMMON = {path.stem for path in MODULES if path.parent.name == "common"}
#: What a module may import besides the standard library and its own package.
FOREIGN = {
    "numpy": None,
    "typing_extensions": None,
    "ml_dtypes": {"arrays.py"},
    "tensord": {"client.py"},
    "jax": {"in_jax.py"},
    # The gateways, whose extras have them.
    "msgpack": {"openpi.py"},
    "websockets": {"openpi.py"},
    "starlette": {"tesseract.py"},
    "uvicorn": {"tesseract.py"},
}
#: Versions of Python and of numpy.
ENVIRONMENTS = [
    ("3.9", "numpy==1.22.*"),
    ("3.10", "numpy==1.24.*"),
    ("3.11", "numpy==1.26.*"),
    ("3.12", "numpy==1.26.*"),
    ("3.13", "numpy>=2"),
]

#: Prints what an import adds to numpy's own: modules, KiB of memory, milliseconds.
_MEASURE = """
import json, re, sys, time
import numpy

def kib():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1])

before, modules, began = kib(), set(sys.modules), time.perf_counter()
import tensord_client
took = time.perf_counter() - began
print(json.dumps([sorted(set(sys.modules) - modules), kib() - before, round(took * 1e3, 1)]))
"""
#: Asks the model scale of the server that is named.
_ASK = """
import asyncio, os, sys
sys.modules["ml_dtypes"] = None  # BF16 is its bits
import numpy as np, tensord_client

x = np.arange(8, dtype=np.float32).reshape(2, 4)
with tensord_client.connect(sys.argv[1]) as client:
    model = client.model("scale", timeout=60)
    assert (model({"x": x})["y"] == 3 * x + 1).all()
    assert (model.submit({"x": x}).result(60)["y"] == 3 * x + 1).all()
    assert [(each["y"] == 3 * x + 1).all() for each in model.stream({"x": x})] == [True]
    child = os.fork()
    if not child:
        os._exit(int(not (model({"x": x})["y"] == 3 * x + 1).all()))
    assert os.waitpid(child, 0)[1] == 0
    assert (model({"x": x})["y"] == 3 * x + 1).all()
    try:
        model({"x": x[:, :3]})
    except tensord_client.InvalidArgument as error:
        assert "unexpected shape" in error.message
    else:
        raise AssertionError
    bits, halves = np.array([0x3F80, 0xC040], np.uint16), client.model("echo_bf16", timeout=60)
    assert all((halves({"x": each})["y"] == bits).all() for each in (bits, [1.0, -3.0]))

async def main():
    async with await tensord_client.connect_async(sys.argv[1]) as client:
        model = await client.model("scale")
        return await asyncio.gather(*(model({"x": x + i}) for i in range(9)))

assert all((got["y"] == 3 * (x + i) + 1).all() for i, got in enumerate(asyncio.run(main())))
print(sys.version_info[:2], np.__version__, tensord_client.__version__)
"""


@pytest.fixture(scope="module")
def distributions() -> tuple[Path, Path]:
    """Returns the client's source archive, and the wheel made from it."""
    return client_made()


@needs_compiler
def test_what_is_in_it(distributions: tuple[Path, Path]) -> None:
    archive, wheel = distributions
    expected = {str(path.relative_to(CLIENT)) for path in MODULES}
    expected |= {"tensord_client/py.typed", "tensord_client/_lane.pyi"}
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        inside = {name for name in names if ".dist-info/" not in name}
        assert inside == expected | {"tensord_client/_lane.abi3.so"}
        (metadata,) = (email.message_from_bytes(opened.read(name)) for name in names if name.endswith("/METADATA"))
    assert "-cp39-abi3-linux_" in wheel.name
    assert (metadata["Name"], metadata["Requires-Python"]) == ("tensord-client", ">=3.9")
    robots = [f'{each}; extra == "openpi"' for each in ("msgpack<2,>=1.0.5", "websockets<18,>=15")]
    programs = [f'{each}; extra == "tesseract"' for each in ("starlette<2,>=0.46", "uvicorn<1,>=0.34")]
    assert metadata.get_all("Requires-Dist") == ["numpy>=1.22", *robots, *programs]
    assert "has the surface of `tensord.testing`" in str(metadata.get_payload())
    with tarfile.open(archive) as packed:
        assert all(member.isdir() or member.isfile() for member in packed.getmembers())
        inside = {name.partition("/")[2] for name in packed.getnames()}
    sources = {"setup.py", "setup.cfg", "pyproject.toml", "include/tensord_lane.h", "include/tensord_wire.h"}
    sources |= {f"tensord_client/{name}" for name in SOURCES}
    assert expected | sources | {"LICENSE", "README.md"} <= inside


def test_importing_it_costs_little(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    installed = Installation(tmp_path / "venv")
    installed.install(distributions[1])
    modules, kib, took = json.loads(ran(installed.python, "-I", "-c", _MEASURE, cwd=tmp_path).splitlines()[-1])
    print(f"importing the client adds {len(modules)} modules, {kib} KiB and {took} ms to numpy's")
    roots = {name.partition(".")[0] for name in modules}
    assert not roots & {
        "jax",
        "jaxlib",
        "google",
        "grpc",
        "tensord",
        "asyncio",
        "concurrent",
        "http",
        "ssl",
        "ml_dtypes",
    }
    # What of these numpy has imported already differs from one edition to the next.
    assert len([name for name in modules if not name.startswith("tensord_client")]) <= 28, modules
    assert kib <= 4096


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_it_is_of_python_3_9_and_needs_numpy_alone(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # Of the link's own modules, and of no others.
            assert node.level == (path.parent.name == "common" and (node.module or node.names[0].name) in COMMON)
            found |= set() if node.level else {str(node.module).partition(".")[0]}
    for name in found - set(sys.stdlib_module_names) - {"tensord_client"}:
        assert name in FOREIGN, f"{path.name} imports {name}"
        where = FOREIGN[name]
        assert where is None or path.name in where, f"{path.name} imports {name}"


def interpreter(version: str) -> Path | None:
    """Finds that Python on the path, or where pyenv keeps its versions."""
    candidates = [Path(found) for found in [shutil.which(f"python{version}")] if found]
    candidates += sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    for candidate in candidates:
        if subprocess.run([candidate, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
            return candidate
    return None


@pytest.mark.parametrize("version", [each for each, _ in ENVIRONMENTS])
def test_every_python_reads_it(version: str, tmp_path: Path) -> None:
    """The syntax alone: without an index there is no numpy for it."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    copied = tmp_path / "tensord_client"
    shutil.copytree(CLIENT / "tensord_client", copied, ignore=shutil.ignore_patterns("__pycache__"))
    ran(python, "-W", "error", "-m", "compileall", "-q", copied, cwd=tmp_path)


@pytest.fixture
def daemon(tmp_path: Path) -> DaemonProcess:
    folder = tmp_path / "daemon"
    folder.mkdir()
    repository = echo_models(scale_model(tmp_path / "models"), ["BF16"])
    return DaemonProcess(folder, [repository], {"clients": {"socket": str(folder / "clients.sock")}})


def addresses(daemon: DaemonProcess) -> tuple[str, str, str]:
    """Returns the daemon's addresses: HTTP over TCP, HTTP on a unix socket, and the socket for lanes."""
    return f"127.0.0.1:{daemon.port}", str(daemon.folder / "http.sock"), str(daemon.folder / "clients.sock")


def test_a_fresh_environment(distributions: tuple[Path, Path], daemon: DaemonProcess, tmp_path: Path) -> None:
    installed = Installation(tmp_path / "venv")
    installed.install(distributions[1])
    with daemon:
        daemon.wait_ready()
        for address in addresses(daemon):
            ran(installed.python, "-I", "-W", "error", "-c", _ASK, address, cwd=tmp_path)


def test_other_environments(
    distributions: tuple[Path, Path], daemon: DaemonProcess, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """With the numpy that an index has for each Python."""
    if not pytestconfig.getoption("--from-index"):
        pytest.skip("downloads from the package index: make test-wheel")
    tried = 0
    with daemon:
        daemon.wait_ready()
        for version, numpy in ENVIRONMENTS:
            python = interpreter(version)
            if python is None:
                continue
            venv = tmp_path / version
            ran(python, "-m", "venv", venv, cwd=tmp_path)
            pip = venv / "bin/python", "-m", "pip", "-q", "--disable-pip-version-check"
            ran(*pip, "install", distributions[1], numpy, cwd=tmp_path)
            for address in addresses(daemon):
                print(ran(venv / "bin/python", "-I", "-W", "error", "-c", _ASK, address, cwd=tmp_path))
            tried += 1
    assert tried


def test_without_a_compiler(daemon: DaemonProcess, tmp_path: Path) -> None:
    """It installs all the same, asks over HTTP what it would ask over lanes, and says so once."""
    source = tmp_path / "source"
    shutil.copytree(CLIENT, source, ignore=shutil.ignore_patterns("*.egg-info", "*.so", "build", "__pycache__"))
    back_end = "import setuptools.build_meta as made; made.build_wheel('..')"
    ran(sys.executable, "-c", back_end, cwd=source, environment=os.environ | {"CC": "false", "CXX": "false"})
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        assert not [name for name in opened.namelist() if name.endswith(".so")]
    installed = Installation(tmp_path / "venv")
    installed.install(wheel)
    with daemon:
        daemon.wait_ready()
        program = f"import sys; sys.stderr = sys.stdout\n{_ASK}\ntensord_client.connect(sys.argv[1]).close()"
        said = ran(installed.python, "-I", "-W", "error", "-c", program, addresses(daemon)[2], cwd=tmp_path)
    assert said.count("the client's part in C is missing") == 1
    assert said.count("\n") == 2
