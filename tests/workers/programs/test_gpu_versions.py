"""The key of a cached executable, in processes with another plugin, driver or cuDNN; JAX's CUDA plugin is the tests' stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.cuda_stub.library import CudaStub

_SCRIPT = """
import jax
jax.devices()
try:
    import jax_cuda12_plugin._versions
except ImportError:
    pass
import os
import sys
import tempfile
from pathlib import Path
from tensord.workers.programs.cache_directory import CacheDirectory
from tensord.workers.programs.executable_cache import ExecutableCache
from tensord.workers.programs.jax_cache import JaxCache
folder = Path(sys.argv[1])
JaxCache(CacheDirectory(folder)).put("a", b"program")
print(ExecutableCache.key(["a"]), *(path.name for path in folder.glob("*.program")))
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> CudaStub:
    return CudaStub(tmp_path_factory.mktemp("cuda"))


def keys(stub: CudaStub, folder: Path, platforms: str = "cuda,cpu", driver: str = "12080") -> tuple[str, str]:
    """The key of one program, and its name in JAX's own cache, with the packages in that folder."""
    environment = os.environ | stub.gpu_environment
    environment |= {"JAX_PLATFORMS": platforms, "CUDA_STUB_VERSION": driver, "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONPATH"] += os.pathsep + str(folder)
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        command = [sys.executable, "-c", _SCRIPT, cache]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    key, name = done.stdout.split()
    return key, name


def install(folder: Path, name: str, version: str) -> None:
    """A package, as far as its metadata goes."""
    for path in folder.glob(f"{name}-*.dist-info"):
        (path / "METADATA").unlink()
        path.rmdir()
    path = folder / f"{name}-{version}.dist-info"
    path.mkdir(parents=True)
    (path / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_every_version_is_in_the_key(stub: CudaStub, tmp_path: Path) -> None:
    """1. plugin and cuDNN from packages; 2. another driver; 3. another of each package; 4. a cuDNN that came with none."""
    install(tmp_path, "jax_cuda12_plugin", "0.10.2")
    install(tmp_path, "nvidia_cudnn_cu12", "9.8.0.87")
    found = [keys(stub, tmp_path), keys(stub, tmp_path, driver="12090")]
    assert keys(stub, tmp_path) == found[0]
    install(tmp_path, "nvidia_cudnn_cu12", "9.10.1.4")
    found.append(keys(stub, tmp_path))
    install(tmp_path, "jax_cuda12_plugin", "0.10.3")
    found.append(keys(stub, tmp_path))
    module = tmp_path / "jax_cuda12_plugin"
    module.mkdir()
    (module / "__init__.py").touch()
    for version in ("91001", "91100"):
        (module / "_versions.py").write_text(f"def cudnn_get_version(): return {version}\ncudnn_build_version = None\n")
        found.append(keys(stub, tmp_path))
    assert len({key for key, _ in found}) == len({name for _, name in found}) == len(found)


def test_a_cpu_worker_does_not_ask_for_them(stub: CudaStub, tmp_path: Path) -> None:
    before = keys(stub, tmp_path, "cpu")
    install(tmp_path, "nvidia_cudnn_cu12", "9.8.0.87")
    assert keys(stub, tmp_path, "cpu", driver="12090") == before
