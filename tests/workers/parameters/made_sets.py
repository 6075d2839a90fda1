"""Makes parameter sets for tests, and memory in safetensors' layout as clients write it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from tensord.shm.arrays import Array
from tensord.workers.loading.parameters import host_sets
from tensord.workers.parameters import layout
from tensord.workers.parameters.parameter_set import ParameterSets
from tensord.workers.parameters.sealed_memory import MemoryPool
from tensord.workers.scheduling.agenda import NEVER

LIMIT = 1 << 30


def loaded(parameters: Any) -> ParameterSets:
    """Returns the sets of a model that was loaded with these parameters, which are not copied."""
    return host_sets("m", parameters)


def sealed(leaves: Mapping[str, Array]) -> int:
    """Returns a descriptor of sealed memory with these leaves; the caller closes it."""
    pool = MemoryPool()
    fd = pool.sealed(layout.laid_out([layout.leaf_of(*leaf) for leaf in leaves.items()], LIMIT, "these"))
    pool.expire(NEVER)
    return fd


def sealed_bytes(content: bytes, seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE) -> int:
    """Returns a descriptor of sealed memory with any bytes; the caller closes it."""
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(fd, content)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def unaligned(leaves: Mapping[str, Array]) -> int:
    """Returns a descriptor of sealed memory whose leaves XLA has to copy because of their alignment; the caller closes it."""
    content = layout_bytes(leaves)
    length = int.from_bytes(content[:8], "little")
    return sealed_bytes((length + 8).to_bytes(8, "little") + content[8 : 8 + length] + b" " * 8 + content[8 + length :])


def layout_bytes(leaves: Mapping[str, Array]) -> bytes:
    """Returns the bytes of memory with these leaves."""
    fd = sealed(leaves)
    try:
        return os.pread(fd, os.fstat(fd).st_size, 0)
    finally:
        os.close(fd)


def noise(byte_size: int) -> bytes:
    """Returns random bytes, the same for the same size."""
    return np.random.default_rng(byte_size).bytes(byte_size)
