"""A load target: a worker's device, the cache of its programs, and the limits that the configuration sets."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

from tensord.config.options import Options
from tensord.workers.devices.device_cuda import CudaDevice
from tensord.workers.devices.pinned_budget import PinnedBudget
from tensord.workers.gpu.gpu import Gpu
from tensord.workers.parameters.device_room import DeviceRoom
from tensord.workers.processor.outside_compiler import OutsideCompiler
from tensord.workers.processor.processor import Processor
from tensord.workers.programs.executable_cache import ExecutableCache, cache_directory
from tensord.workers.programs.execution_device import ExecutionDevice
from tensord.workers.programs.jax_cache import use_persistent_cache


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Says for what a loader loads model versions; a worker has one."""

    options: Options
    device: jax.Device
    #: The device's number among the daemon's GPUs; None: it is a processor.
    gpu: int | None
    cache: ExecutableCache
    #: The device for the thread that will run what is loaded.
    execution: ExecutionDevice
    #: Whether process-wide state is left alone, because the process also serves others, or is one model's own.
    shared: bool = True
    #: The room on the device for parameters that are pushed.
    room: DeviceRoom = field(default_factory=lambda: DeviceRoom(0))

    @classmethod
    def configured(
        cls,
        options: Options,
        device: jax.Device,
        gpu: int | None,
        cuda: CudaDevice | None = None,
        outside: OutsideCompiler | None = None,
        alone: bool = False,
        pinned: PinnedBudget | None = None,
    ) -> LoadTarget:
        """Makes the target of a worker process, with the configured cache, and turns JAX's own on in the process.

        Args:
          outside: compiles for the cache.
          alone: whether one model has the process to itself, and may change its state.
          pinned: host memory that may be page-locked for parameters that leave a GPU.
        """
        directory = cache_directory(options.executables.cache_directory)
        cache = ExecutableCache(directory, use_persistent_cache(directory), outside)
        execution = Gpu(cuda) if cuda is not None else Processor.opened(device, options.workers.single_thread_flops)
        room = DeviceRoom(options.workers.parameter_byte_size, pinned)
        return cls(options, device, gpu, cache, execution, alone, room)

    @classmethod
    def borrowed(cls, options: Options, device: jax.Device, gpu: int | None, cache: ExecutableCache) -> LoadTarget:
        """Makes the target of a process that is not the daemon's."""
        execution = Processor.opened(device, options.workers.single_thread_flops)
        return cls(options, device, gpu, cache, execution, room=DeviceRoom(options.workers.parameter_byte_size))

    @property
    def devices(self) -> list[jax.Device]:
        """The worker's devices, of which a model may have several."""
        return list(self.device.client.local_devices())
