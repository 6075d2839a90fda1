"""Imports the client's C extension, which encodes, decodes and exchanges the records of lanes."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

__all__ = ["SOURCES", "say_missing", "wire"]

#: The part's sources, beside this file in a checkout.
SOURCES = ("_exchange.c", "_lane.c", "_lane.h", "_repeated.c", "_spin.c", "common/include/tensord_wire.h")

#: The part itself, ``_lane``; None: it was not built, or was built from other source files, so there are no lanes.
if TYPE_CHECKING:
    from tensord_client import _lane as wire
else:
    try:
        from tensord_client import _lane as wire
    except ImportError:
        wire = None
    else:
        try:
            # In a checkout: it may have been updated, and not built again.
            import zlib

            found = 0
            for name in SOURCES:
                with open(os.path.join(os.path.dirname(__file__), name), "rb") as source:
                    found = zlib.crc32(source.read(), found)
            if found != wire.SOURCE:
                wire = None
        except OSError:  # no source lies beside an installed one
            pass


@functools.cache
def say_missing() -> None:
    """Logs once that requests go over HTTP because the C extension is missing."""
    import logging

    logging.getLogger("tensord_client").warning(
        "requests go over HTTP, which copies their tensors, as the client's part in C is missing or older than its source: "
        "install a C compiler and Python's headers, then tensord-client again"
    )
