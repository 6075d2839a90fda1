"""Imports the client's optional part in C. Its names are None if it was not built, or not from the source that is here."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

__all__ = ["Exchange", "unpack_from"]

if TYPE_CHECKING:
    from tensord_client._exchange import Exchange, unpack_from
else:
    try:
        from tensord_client._exchange import SOURCE, Exchange, unpack_from
    except ImportError:
        Exchange = unpack_from = None
    else:
        try:
            with open(os.path.join(os.path.dirname(__file__), "_exchange.c"), "rb") as source:
                # In a checkout: it may have been updated, and not built again.
                import zlib

                if zlib.crc32(source.read()) != SOURCE:
                    Exchange = unpack_from = None
        except OSError:  # no source lies beside an installed one
            pass
