"""What every record that crosses a process border is (``shm.messages``)."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, array_like=True, frozen=True, tag=True, forbid_unknown_fields=True, gc=False):
    """Base of everything that travels. Positional on the wire: both ends come from one source tree."""
