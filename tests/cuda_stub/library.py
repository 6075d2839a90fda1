"""Builds the stand-in for the CUDA driver, and returns the environment in which a process finds it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.run_folder import only_one

#: Functions that driver.c has room for.
_CALLS = 80
#: The last bindings whose runtime API is written over the driver API.
_LAST_OVER_THE_DRIVER = (12, 8)


class HostMemory(NamedTuple):
    """The statistics of one process's host memory, in bytes where nothing else is said."""

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
    #: The most copies that were under way together, where they take time.
    at_once: int


def _library() -> Path:
    """Compiles the stand-in once for all processes of a run; returns its path.

    The management library and JAX's plugin are put beside it. Skips the test where there is no C compiler.
    """
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
            (folder / "runtime").mkdir()
            shutil.copy(here / "runtime.py", folder / "runtime" / "sitecustomize.py")
        for source, name in (("nvml.c", "libnvidia-ml.so.1"), ("driver.c", "libcuda.so.1")):
            library, made = folder / name, folder / "made.so"
            if not library.exists():
                command = [compiler, *options, f"-Wl,-soname,{name}", "-o", str(made), str(here / source)]
                subprocess.run([*command, "-lpthread", "-ldl"], check=True)
                made.rename(library)
    return library


def _path(first: Path, others: str | None) -> str:
    """Joins folders in the form of ``PYTHONPATH``."""
    return os.pathsep.join([str(first), *filter(None, [others])])


def _closed_runtime() -> bool:
    """Returns whether the bindings' runtime API works only with a real driver and is replaced by ``runtime.py``."""
    try:
        version = metadata.version("cuda-bindings")
    except metadata.PackageNotFoundError:
        return False
    return tuple(map(int, version.split(".")[:2])) > _LAST_OVER_THE_DRIVER


class CudaStub:
    """A host with stub devices. Processes started with ``environment`` share the devices' memory through ``folder``."""

    def __init__(
        self,
        folder: Path,
        devices: int = 1,
        delay_us: int = 0,
        freed: str = "refused",
        read_only: bool = False,
        lockable: int | None = None,
        peers: bool = False,
    ) -> None:
        """Sets up the devices.

        Args:
          delay_us: how long every queued copy takes. Host code cannot reach device memory.
          freed: what a copy finds where the owner has freed its memory: "refused", "fault", "there" (driver.c).
          read_only: whether host memory that is only read can be page-locked.
          lockable: how many bytes the system lets each process page-lock; None: all.
          peers: whether devices have access to each other's memory.
        """
        self.library, self.folder = _library(), folder / "devices"
        self.folder.mkdir()
        self.environment = {
            "LD_LIBRARY_PATH": str(self.library.parent),
            "CUDA_STUB_DIR": str(self.folder),
            "CUDA_STUB_DEVICES": str(devices),
            "CUDA_STUB_DELAY_US": str(delay_us),
            "CUDA_STUB_FREED": freed,
            "CUDA_STUB_HIDDEN": "1",
        }
        if read_only:
            self.environment["CUDA_STUB_READ_ONLY"] = "1"
        if peers:
            self.environment["CUDA_STUB_PEERS"] = "1"
        if lockable is not None:
            self.environment["CUDA_STUB_LOCKABLE"] = str(lockable)
        if _closed_runtime():
            self.environment["PYTHONPATH"] = _path(self.library.parent / "runtime", os.environ.get("PYTHONPATH"))

    @property
    def gpu_environment(self) -> dict[str, str]:
        """Returns the environment of a process that computes on the stub's devices.

        XLA:CPU plays XLA on a GPU there, so it has to reach the devices' memory.
        """
        return self.on_gpu(self.environment)

    @staticmethod
    def on_gpu(environment: Mapping[str, str]) -> dict[str, str]:
        """Returns ``gpu_environment`` of the stub that an ``environment`` belongs to."""
        visible = {key: value for key, value in environment.items() if key != "CUDA_STUB_HIDDEN"}
        plugins = Path(environment["LD_LIBRARY_PATH"]) / "plugins"
        path = _path(plugins, environment.get("PYTHONPATH", os.environ.get("PYTHONPATH")))
        return visible | {"CUDA_STUB_UNIFIED": "1", "PYTHONPATH": path}

    def load(self) -> None:
        """Makes the stand-in this process's driver until it ends: the first library loaded under the name is used."""
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

    def fail(self, function: str, code: int, after: int = 0, of_workers: bool = False) -> None:
        """Makes the next call of ``function`` fail with ``code``, after ``after`` calls that pass.

        ``of_workers``: only calls in GPU workers count; else those of any process do.
        """
        written = self.folder / "fail.new"
        written.write_text(f"{function} {code} {after} {of_workers:d}")
        written.rename(self.folder / "fail")

    def meets(self, device: int, kind: int, number: int = 0) -> None:
        """Sends an NVML event to all who watch a device.

        ``kind``: 8 is an XID with that number, 2 a double-bit error.
        """
        written = self.folder / "nvml-event.new"
        written.write_text(f"{device} {kind} {number}")
        written.rename(self.folder / "nvml-event")

    def lose(self, device: int) -> None:
        """Removes a device: for those who watch the devices, who use it, and who start afterwards."""
        written = self.folder / "gone.new"
        written.write_text(str(device))
        written.rename(self.folder / "gone")

    def find(self) -> None:
        """Brings the removed device back, for processes that start afterwards."""
        (self.folder / "gone").unlink()

    @property
    def failed(self) -> bool:
        """Returns whether the failure that was asked for has happened."""
        return not (self.folder / "fail").exists()

    @contextlib.contextmanager
    def hold(self, function: str) -> Iterator[None]:
        """Makes the next call of ``function``, in any process, wait until the block ends."""
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
        """Returns whether a call waits."""
        return (self.folder / "held").exists()

    def go_on(self) -> None:
        """Lets the call that waits go on."""
        (self.folder / "held").unlink()

    @staticmethod
    def uuid(device: int) -> str:
        """Returns a device's name for ``CUDA_VISIBLE_DEVICES``."""
        return f"GPU-00000000-0000-0000-0000-{device:012x}"

    def devices_of(self, pid: int) -> set[int]:
        """Returns the devices on which a process has memory, by the stub's own numbers."""
        found = set()
        for path in self.folder.glob(f"{pid}-*"):
            with path.open("rb") as file:
                _, device, freed = struct.unpack("<Qii", file.read(16))
                found |= set() if freed else {device}
        return found

    def host(self, pid: int) -> HostMemory:
        """Returns the statistics of a process's host memory; the process must use the driver."""
        with (self.folder / f"host-{pid}").open("rb") as file:
            return HostMemory(*struct.unpack("<8Q", file.read(64)))

    def calls(self, pid: int) -> Counter[str]:
        """Returns how often a process called each function of the driver since it opened the device."""
        with (self.folder / f"host-{pid}").open("rb") as file:
            file.seek(64)
            rows = struct.iter_unpack("<40sQ", file.read(_CALLS * 48))
        return Counter({name.rstrip(b"\0").decode(): count for name, count in rows if name[0]})

    @property
    def allocations(self) -> int:
        """Returns how many allocations there are now."""
        return len([path for path in self.folder.iterdir() if path.name[0].isdigit()])
