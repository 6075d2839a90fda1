"""Adds up the statistics of models over all workers, each of which counts its own requests. Does no I/O.

Source: Triton docs/protocol/extension_statistics.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec


def merge(answers: Iterable[bytes]) -> bytes:
    """Merges workers' answers, each {"model_stats": [...]} in JSON, into one that is sorted by model name and version.

    Raises msgspec.DecodeError: an answer is not JSON.
    """
    models: dict[tuple[str, int], dict[str, Any]] = {}
    for answer in answers:
        for entry in msgspec.json.decode(answer)["model_stats"]:
            key = (entry["name"], int(entry["version"]))
            models[key] = _add(models[key], entry) if key in models else entry
    return msgspec.json.encode({"model_stats": [entry for _, entry in sorted(models.items())]})


def _add(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _join(key, one[key], other[key]) if key in one and key in other else {**other, **one}[key]
        for key in one | other
    }


def _join(key: str, one: Any, other: Any) -> Any:
    if key in ("name", "version", "batch_size"):
        return one
    if key == "last_inference":
        return max(one, other)
    if isinstance(one, dict):
        return _add(one, other)
    if key == "batch_stats":
        sizes: dict[int, dict[str, Any]] = {}
        for entry in [*one, *other]:
            size = entry["batch_size"]
            sizes[size] = _add(sizes[size], entry) if size in sizes else entry
        return [entry for _, entry in sorted(sizes.items())]
    # Numbers add; the remaining list, memory_usage, names its devices, which differ between workers.
    return one + other
