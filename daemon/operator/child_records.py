"""Asks fronts and workers for lists, such as their connections, and waits only for a short time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec

from tensord.daemon.processes.child import Child
from tensord.shm import descriptors
from tensord.shm.errors import ServingError
from tensord.shm.operations import Operation, RecentErrors

#: How long a child may take to list what it has.
_SECONDS = 5.0
#: The errors of all fronts together that are shown.
_MAX_ERRORS = 100


async def records(child: Child, operation: Operation) -> list[dict[str, Any]]:
    """Asks a child process for a list (``operation``), such as its connections. Returns it; empty: no answer came in time.

    A worker whose loop runs a long batch does not answer in time.
    """
    try:
        async with asyncio.timeout(_SECONDS):
            result, fds = await child.call(operation)
    except (ServingError, TimeoutError):
        return []
    descriptors.close(fds)
    return msgspec.json.decode(result, type=list[dict[str, Any]])


async def recent_errors(fronts: Iterable[Child], workers: Iterable[Child]) -> list[dict[str, Any]]:
    """Returns the latest errors that clients got from fronts, or from workers by lanes (direct sockets), the newest first.

    Each error is a row of JSON values, with the name of the front or worker as ``front``.
    """
    asked = [*fronts, *workers]
    told = await asyncio.gather(*(records(child, RecentErrors()) for child in asked))
    rows = [{**row, "front": child.name} for child, found in zip(asked, told, strict=True) for row in found]
    latest = sorted(rows, key=lambda row: row["time"], reverse=True)[:_MAX_ERRORS]
    return [
        row | {"time": datetime.fromtimestamp(row["time"], UTC).isoformat(timespec="milliseconds")} for row in latest
    ]
