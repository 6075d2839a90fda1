"""Asks fronts and workers for what they can list, each for a moment only."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec

from tensord.daemon.processes.child import Child, FrontProcess
from tensord.shm import descriptors
from tensord.shm.errors import ServingError
from tensord.shm.operations import Operation, RecentErrors

#: How long a child may take to list what it has.
_SECONDS = 5.0
#: The errors of all fronts together that are shown.
_MAX_ERRORS = 100


async def records(child: Child, operation: Operation) -> list[dict[str, Any]]:
    """Returns what a child lists; nothing where it does not answer in time, as a worker whose loop executes a long batch."""
    try:
        async with asyncio.timeout(_SECONDS):
            result, fds = await child.call(operation)
    except (ServingError, TimeoutError):
        return []
    descriptors.close(fds)
    return msgspec.json.decode(result, type=list[dict[str, Any]])


async def recent_errors(fronts: Iterable[FrontProcess]) -> list[dict[str, Any]]:
    """Lists the last errors that fronts have answered, the latest first."""
    asked = list(fronts)
    told = await asyncio.gather(*(records(front, RecentErrors()) for front in asked))
    rows = [{**row, "front": front.name} for front, found in zip(asked, told, strict=True) for row in found]
    latest = sorted(rows, key=lambda row: row["time"], reverse=True)[:_MAX_ERRORS]
    return [
        row | {"time": datetime.fromtimestamp(row["time"], UTC).isoformat(timespec="milliseconds")} for row in latest
    ]
