"""Builds the stand-in for the driver and says in which environment a process finds it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.run_folder import only_one


class HostMemory(NamedTuple):
    """Of one process, in bytes where nothing else is said."""

    #: Page-locked now.
    locked: int
    #: How often something was page-locked.
    registered: int
    #: Copied from and to such memory, and from and to any other.
    locked_copied: int
    other_copied: int
    #: How often memory was unmapped before it was unregistered.
    violations: int
    #: Copies and fills that were queued, and how often a stream was waited for.
    queued: int
    waited: int


def _library() -> Path:
    """Compiled once for all processes of a run, with the management library and JAX's plugin beside it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler: the stand-in for the CUDA driver cannot be built")
    warnings = ("-Wall", "-Wextra", "-Werror")
    options = ("-O1", "-std=gnu11", *warnings, "-shared", "-fPIC", "-fvisibility=hidden")
    here = Path(__file__).parent
    with only_one("cuda") as folder:
        plugin = folder / "plugins" / "jax_plugins" / "xla_cuda_stub.py"
        if not plugin.exists():
            plugin.parent.mkdir(parents=True)
            shutil.copy(here / "plugin.py", plugin)
        for source, name in (("nvml.c", "libnvidia-ml.so.1"), ("driver.c", "libcuda.so.1")):
            library, made = folder / name, folder / "made.so"
            if not library.exists():
                command = [compiler, *options, f"-Wl,-soname,{name}", "-o", str(made), str(here / source)]
                subprocess.run([*command, "-lpthread", "-ldl"], check=True)
                made.rename(library)
    return library


class CudaStub:
    """A host with stub devices. Processes started with ``environment`` share their memory through ``folder``."""

    def __init__(self, folder: Path, devices: int = 1, delay_us: int = 0) -> None:
        """``delay_us``: how long every queued copy takes. Device memory is out of reach for host code."""
        self.library, self.folder = _library(), folder / "devices"
        self.folder.mkdir()
        #: On the path of a process, JAX finds its plugin there.
        self.plugins = self.library.parent / "plugins"
        self.environment = {
            "LD_LIBRARY_PATH": str(self.library.parent),
            "CUDA_STUB_DIR": str(self.folder),
            "CUDA_STUB_DEVICES": str(devices),
            "CUDA_STUB_DELAY_US": str(delay_us),
            "CUDA_STUB_HIDDEN": "1",
        }

    @property
    def gpu_environment(self) -> dict[str, str]:
        """For a process that computes on the stub's devices: XLA:CPU plays XLA on a GPU, so it has to reach their memory."""
        visible = {key: value for key, value in self.environment.items() if key != "CUDA_STUB_HIDDEN"}
        path = [str(self.plugins), *filter(None, [os.environ.get("PYTHONPATH")])]
        return visible | {"CUDA_STUB_UNIFIED": "1", "PYTHONPATH": os.pathsep.join(path)}

    def load(self) -> None:
        """Makes it this process's driver, for good: whatever was loaded under the name first is used."""
        ctypes.CDLL(str(self.library), ctypes.RTLD_GLOBAL)
        with pytest.MonkeyPatch.context() as patch:
            # It reads them once. Children of this process must not find devices by accident.
            for key, value in self.environment.items():
                if key.startswith("CUDA_STUB_") and key != "CUDA_STUB_HIDDEN":
                    patch.setenv(key, value)
            patch.setenv("CUDA_STUB_UNIFIED", "1")
            from cuda.bindings import driver

            (code,) = driver.cuInit(0)
            assert code == driver.CUresult.CUDA_SUCCESS

    def fail(self, function: str, code: int, after: int = 0) -> None:
        """The next call of ``function``, in whatever process, fails with ``code``, after so many that pass."""
        written = self.folder / "fail.new"
        written.write_text(f"{function} {code} {after}")
        written.rename(self.folder / "fail")

    def meets(self, device: int, kind: int, number: int = 0) -> None:
        """Tells whoever watches the devices of an event of NVML's: 8 is an XID with that number, 2 an error of two bits."""
        written = self.folder / "nvml-event.new"
        written.write_text(f"{device} {kind} {number}")
        written.rename(self.folder / "nvml-event")

    def lose(self, device: int) -> None:
        """It has fallen off the bus, for whoever watches the devices."""
        (self.folder / "nvml-gone").write_text(str(device))

    @property
    def failed(self) -> bool:
        """Whether the failure that was asked for has happened."""
        return not (self.folder / "fail").exists()

    @contextlib.contextmanager
    def hold(self, function: str) -> Iterator[None]:
        """The next call of ``function``, in whatever process, waits until this ends."""
        written = self.folder / "hold.new"
        written.write_text(function)
        written.rename(self.folder / "hold")
        try:
            yield
        finally:
            (self.folder / "hold").unlink(missing_ok=True)
            (self.folder / "held").unlink(missing_ok=True)

    @property
    def held(self) -> bool:
        """Whether a call waits."""
        return (self.folder / "held").exists()

    @staticmethod
    def uuid(device: int) -> str:
        """As ``CUDA_VISIBLE_DEVICES`` takes it."""
        return f"GPU-00000000-0000-0000-0000-{device:012x}"

    def devices_of(self, pid: int) -> set[int]:
        """The devices on which a process has memory, by the stub's own numbers."""
        found = set()
        for path in self.folder.glob(f"{pid}-*"):
            with path.open("rb") as file:
                _, device, freed = struct.unpack("<Qii", file.read(16))
                found |= set() if freed else {device}
        return found

    def host(self, pid: int) -> HostMemory:
        """What a process that uses the driver does with host memory."""
        with (self.folder / f"host-{pid}").open("rb") as file:
            return HostMemory(*struct.unpack("<7Q", file.read(56)))

    @property
    def allocations(self) -> int:
        """How many allocations live."""
        return len([path for path in self.folder.iterdir() if path.name[0].isdigit()])
