"""Parses the name of a worker's device, and opens the device with JAX.

Call ``DeviceName.prepare_environment`` before you import jax, so that a CPU worker does not look for GPUs. A GPU worker sees
only the GPUs that ``CUDA_VISIBLE_DEVICES`` names. CUDA and JAX number these GPUs from 0.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensord.shm import device_names

if TYPE_CHECKING:
    import jax


class NoDevice(Exception):
    """Raised if the worker's device cannot be used. The message is for the log."""


@dataclass(frozen=True, slots=True)
class DeviceName:
    """The name of a worker's device: ``cpu:0``, ``cuda:1``, ``cuda:1/2`` (worker 2 of GPU 1) or ``cuda:1#m`` (only model m)."""

    platform: str
    index: int
    #: Number of the worker among those of its GPU, from 0.
    share: int = 0
    #: The model that has the process to itself; "": models share it.
    model: str = ""

    @classmethod
    def parse(cls, text: str) -> DeviceName:
        """Parses the name of a worker's device, such as ``cuda:1`` for GPU 1. Raises ValueError if the name is malformed."""
        device, model = device_names.shared(text), device_names.model_of(text)
        match = re.fullmatch(r"(cpu|cuda):(\d{1,4})(?:/(\d{1,4}))?", device, re.ASCII)
        if match is None or (match[1] == "cpu" and match[3]):
            raise ValueError(f"device '{text}': expected cpu:N, cuda:N, cuda:N/M, or one of these with #MODEL")
        return cls(match[1], int(match[2]), int(match[3] or 0), model)

    def __str__(self) -> str:
        device = f"{self.platform}:{self.index}" + (f"/{self.share}" if self.share else "")
        return device_names.alone(device, self.model) if self.model else device

    @property
    def gpu(self) -> int | None:
        return self.index if self.platform == "cuda" else None

    def prepare_environment(self) -> None:
        """Sets the environment variables that tell JAX which platforms to use. Call it before jax is imported."""
        # Beside the GPU a model has the CPU: callbacks run there, and whatever it puts there itself.
        os.environ["JAX_PLATFORMS"] = "cuda,cpu" if self.platform == "cuda" else self.platform

    def open(self, count: int = 1) -> jax.Device:
        """Makes JAX start on this device's platform, and returns the platform's first JAX device.

        ``count`` is the number of JAX devices into which a CPU is divided. It has no effect on GPUs. Raises NoDevice if JAX
        cannot use the device.
        """
        import jax

        if self.platform == "cpu":
            # The calling thread computes a program. Else XLA hands all but the tiniest to another thread, while the calling one
            # has nothing to do: 110 instead of 60 us for one row of three small layers. Outputs would be allocated there
            # as well (workers/processor/output_memory.py). jax reads this from no environment variable.
            jax.config.update("jax_cpu_enable_async_dispatch", False)
            if count > 1:
                jax.config.update("jax_num_cpu_devices", count)
        try:
            # Devices by their platform's name: without a plugin or a device node, JAX would compute on the CPU.
            return jax.devices(self.platform)[0]
        except RuntimeError as error:
            # Drops JAX's advice about a variable that the worker sets.
            reason = " ".join(str(error).split()).partition(" (set JAX_PLATFORMS")[0]
            raise NoDevice(f"JAX cannot use {self}: {reason}") from error
