"""What a model gives along with a call: arrays that nobody writes to any more, and a sequence that can be one."""

from __future__ import annotations

import numpy as np

from tensord.shm.arrays import Array
from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import MAX_SEQUENCE_ID
from tensord.workers.tensors.strings import strings


def snapshot(array: Array) -> Array:
    """A copy: whoever made it may write to it again, or it lies where the next request of a client will."""
    made = strings(array) if array.dtype.kind in "SUO" else np.array(array)
    made.flags.writeable = False
    return made


def check_sequence(sequence_id: int | str) -> None:
    """Raises InvalidArgument."""
    if isinstance(sequence_id, int) and not 0 <= sequence_id < 1 << 64:
        raise InvalidArgument(f"correlation ID {sequence_id} is no unsigned number of 64 bits")
    if isinstance(sequence_id, str) and (size := len(sequence_id.encode())) > MAX_SEQUENCE_ID:
        raise InvalidArgument(f"string correlation ID has {size} bytes, at most {MAX_SEQUENCE_ID} are taken")
