"""Makes load targets for tests."""

from __future__ import annotations

import jax

from tensord.config.options import ExecutablesOptions, Expert, Options, Requests
from tensord.workers.loading.target import LoadTarget
from tensord.workers.processor.processor import Processor
from tensord.workers.programs.executable_cache import ExecutableCache


def target(queue: int = 100, unexpected_shapes: int = 4, batch: int = 1 << 20, state: int = 1 << 40) -> LoadTarget:
    """Returns a load target for the processor, without a cache. ``batch``, ``state``: bytes that are allowed."""
    executables = ExecutablesOptions(
        max_unexpected_shapes=unexpected_shapes, max_batch_byte_size=batch, max_state_byte_size=state
    )
    options = Options(requests=Requests(max_queue_size=queue), executables=executables, expert=Expert(long_compile=0))
    return LoadTarget(options, jax.devices()[0], None, ExecutableCache(None), Processor())
