"""tensord for those who use it: what a program or a model imports of it.

The server itself is in four packages of other names (``config``, ``daemon``, ``shm``, ``workers``), which are nobody else's to
import. This module imports nothing of them: it is what runs first, and they may have been overwritten.
"""

from __future__ import annotations

import importlib.metadata


def _version() -> str:
    try:
        return importlib.metadata.version("tensord")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"


#: Of the distribution that is installed.
__version__ = _version()
