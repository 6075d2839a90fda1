"""How many files a process of the daemon may have open: as many as the host allows, and a word where that is little."""

from __future__ import annotations

import logging

from tensord.config.options import Options
from tensord.shm import descriptors

_log = logging.getLogger(__name__)


def raise_limit(options: Options) -> None:
    """For this process and those that it starts."""
    allowed = descriptors.raise_limit()
    wanted = max(options.http.max_connections, options.grpc.max_connections, options.regions.max_count)
    if allowed < wanted:
        _log.warning(
            "a process may have %d files open, connections or regions may be %d: raise the limit (ulimit -n, LimitNOFILE)",
            allowed,
            wanted,
        )
