"""Describes where models are loaded: a worker's device, the cache of its programs, and the limits that the configuration sets."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

from tensord.config.options import Options
from tensord.workers.devices.device_cuda import CudaDevice
from tensord.workers.devices.pinned_memory import PinnedBudget
from tensord.workers.gpu.gpu import Gpu
from tensord.workers.parameters.device_room import DeviceRoom
from tensord.workers.processor.processor import Processor
from tensord.workers.processor.single_thread import choose
from tensord.workers.programs.executable import ExecutionDevice
from tensord.workers.programs.executable_cache import ExecutableCache, cache_directory, use_persistent_cache


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The device, cache and limits for which a worker's loader loads model versions."""

    options: Options
    device: jax.Device
    #: The device's number among the daemon's GPUs; None: it is a processor.
    gpu: int | None
    cache: ExecutableCache
    #: The device for the thread that will run what is loaded.
    execution: ExecutionDevice
    #: True if process-wide state is left alone, because the process also serves others, or is one model's own.
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
        alone: bool = False,
        pinned: PinnedBudget | None = None,
    ) -> LoadTarget:
        """Makes the settings with which a worker loads models. Turns on JAX's cache of compiled programs, if it can be used.

        Args:
          options: the daemon's configuration.
          gpu: the number of the worker's GPU. It is None if the device is a CPU.
          cuda: copies to and from the worker's GPU by CUDA. It is None if the device is a CPU, or if CUDA cannot be used.
          alone: whether the worker process runs only one model. This model may then change settings of the whole process.
          pinned: limits the page-locked host memory for parameters that have left the GPU. If it is None, none is page-locked.
        """
        directory = cache_directory(options.executables.cache_directory)
        cache = ExecutableCache(directory, use_persistent_cache(directory))
        execution = Gpu(cuda) if cuda is not None else Processor(choose(device, options.workers.single_thread_flops))
        room = DeviceRoom(options.workers.parameter_byte_size, pinned)
        return cls(options, device, gpu, cache, execution, alone, room)

    @classmethod
    def borrowed(cls, options: Options, device: jax.Device, gpu: int | None, cache: ExecutableCache) -> LoadTarget:
        """Makes settings for loading models in a process that is no worker. ``gpu``: the GPU's number; None on a CPU."""
        execution = Processor(choose(device, options.workers.single_thread_flops))
        return cls(options, device, gpu, cache, execution, room=DeviceRoom(options.workers.parameter_byte_size))

    @property
    def devices(self) -> list[jax.Device]:
        """All devices of the worker process; one model may run on several of them."""
        return list(self.device.client.local_devices())
