"""The parts of a worker that are written in C, and what is done where they are missing."""

from __future__ import annotations

from tensord.shm import extensions

#: Module -> what is so without it.
PARTS = {
    "tensord.shm._guard": "clients' shared memory is copied with system calls (access = snapshot), never mapped",
    "tensord.workers.native._fast_path": "small requests are received and answered in Python",
    "tensord.workers.native._large_copy": "large tensors are copied through the processor's caches",
    "tensord.workers.native._output_memory": "outputs are copied to their places",
}


def missing() -> tuple[str, ...]:
    """A sentence for each part that is off, and what to do (``tensord.shm.extensions``)."""
    return extensions.missing(PARTS)
