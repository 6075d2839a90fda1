"""Tests what is special to programs for GPUs: keys of cached executables, and which programs copy memory.

Each key is made in a process with another plugin, driver or cuDNN; JAX's CUDA plugin is the tests' stand-in.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tensord.workers.programs.gpu_programs import WITHOUT_GRAPHS, copies_memory
from tests.cuda_stub.library import CudaStub

#: Imports JAX once; each line that it reads is a driver's version, and a process of its own, which opens the devices.
_SCRIPT = """
import os
import sys
import tempfile
from pathlib import Path
import jax
for line in sys.stdin:
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0
        continue
    os.environ["CUDA_STUB_VERSION"] = line.strip()
    jax.devices()
    try:
        import jax_cuda12_plugin._versions
    except ImportError:
        pass
    from tensord.workers.programs.cache_directory import CacheDirectory
    from tensord.workers.programs.executable_cache import ExecutableCache
    from tensord.workers.programs.executable_cache import JaxCache
    with tempfile.TemporaryDirectory() as folder:
        JaxCache(CacheDirectory(Path(folder))).put("a", b"program")
        print(ExecutableCache.key(["a"]), *(path.name for path in Path(folder).glob("*.program")), flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> CudaStub:
    return CudaStub(tmp_path_factory.mktemp("cuda"))


class Keys:
    """Runs processes with the packages in a folder; they print the key of one program, and its name in JAX's own cache."""

    def __init__(self, stub: CudaStub, folder: Path, platforms: str = "cuda,cpu") -> None:
        environment = os.environ | stub.gpu_environment
        environment |= {"JAX_PLATFORMS": platforms, "PYTHONDONTWRITEBYTECODE": "1"}
        environment["PYTHONPATH"] += os.pathsep + str(folder)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Keys:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        assert self._process.returncode == 0

    def said(self, driver: str = "12080") -> tuple[str, str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{driver}\n")
        self._process.stdin.flush()
        key, name = self._process.stdout.readline().split()
        return key, name


def install(folder: Path, name: str, version: str) -> None:
    """Writes a package's metadata, as if it were installed."""
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
    with Keys(stub, tmp_path) as keys:
        found = [keys.said(), keys.said("12090")]
        assert keys.said() == found[0]
        install(tmp_path, "nvidia_cudnn_cu12", "9.10.1.4")
        found.append(keys.said())
        install(tmp_path, "jax_cuda12_plugin", "0.10.3")
        found.append(keys.said())
        module = tmp_path / "jax_cuda12_plugin"
        module.mkdir()
        (module / "__init__.py").touch()
        for version in ("91001", "91100"):
            source = f"def cudnn_get_version(): return {version}\ncudnn_build_version = None\n"
            (module / "_versions.py").write_text(source)
            found.append(keys.said())
    assert len({key for key, _ in found}) == len({name for _, name in found}) == len(found)


def test_a_cpu_worker_does_not_ask_for_them(stub: CudaStub, tmp_path: Path) -> None:
    with Keys(stub, tmp_path, "cpu") as keys:
        before = keys.said()
        install(tmp_path, "nvidia_cudnn_cu12", "9.8.0.87")
        assert keys.said("12090") == before


def text_of(function: object) -> str:
    lowered = jax.jit(function).lower(jnp.ones((16, 64)), jnp.ones((64, 64)))  # type: ignore[arg-type]
    return lowered.compile(WITHOUT_GRAPHS).as_text() or ""


@pytest.mark.parametrize("function", [lambda x, w: {"same": x, "product": jnp.tanh(x @ w)}, lambda x, w: (x @ w, w)])
def test_an_output_that_is_an_input_is_a_copy(function: object) -> None:
    assert copies_memory(text_of(function))


@pytest.mark.parametrize("function", [lambda x, w: jnp.tanh(x @ w), lambda x, w: (x[:, 1:] * 2, w[0] + 1)])
def test_what_is_computed_is_no_copy(function: object) -> None:
    assert not copies_memory(text_of(function))


def test_a_copy_inside_of_a_kernel_is_none() -> None:
    text = """HloModule one

%fused_computation (param_0: f32[4,8]) -> f32[8,4] {
  %param_0 = f32[4,8]{1,0} parameter(0)
  %copy.1 = f32[4,8]{0,1} copy(%param_0)
  ROOT %bitcast.1 = f32[8,4]{1,0} bitcast(%copy.1)
}

ENTRY %main.1 (x.1: f32[4,8]) -> f32[8,4] {
  %x.1 = f32[4,8]{1,0} parameter(0)
  ROOT %fusion = f32[8,4]{1,0} fusion(%x.1), kind=kLoop, calls=%fused_computation
}
"""
    assert not copies_memory(text)
    assert copies_memory(text.replace("fusion(%x.1), kind=kLoop, calls=%fused_computation", "copy(%x.1)"))
    assert copies_memory(text.replace("fusion(%x.1), kind=kLoop, calls=%fused_computation", "copy-start(%x.1)"))
