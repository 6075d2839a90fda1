"""Imports the client's optional part in C; its names are None if it was not built, or was built from other source files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

__all__ = ["SOURCES", "Exchange", "Spin", "arrays", "request", "small_inputs", "unpack_from"]

#: The part's source, beside this file in a checkout.
SOURCES = ("_exchange.c", "_records.c", "_records.h", "_spin.c", "_spin.h")

if TYPE_CHECKING:
    from tensord_client._exchange import Exchange, Spin, arrays, request, small_inputs, unpack_from
else:
    try:
        from tensord_client._exchange import SOURCE, Exchange, Spin, arrays, request, small_inputs, unpack_from
    except ImportError:
        Exchange = Spin = arrays = request = small_inputs = unpack_from = None
    else:
        try:
            # In a checkout: it may have been updated, and not built again.
            import zlib

            found = 0
            for name in SOURCES:
                with open(os.path.join(os.path.dirname(__file__), name), "rb") as source:
                    found = zlib.crc32(source.read(), found)
            if found != SOURCE:
                Exchange = Spin = arrays = request = small_inputs = unpack_from = None
        except OSError:  # no source lies beside an installed one
            pass
