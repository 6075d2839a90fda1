"""The repository index: what is known of every model, as clients and operators are told."""

from __future__ import annotations

from collections.abc import Mapping

from daemon.models.lifecycle import Lifecycle
from daemon.models.retries import Retries
from shm.footprint import Footprint


def index(
    lifecycle: Lifecycle, refused: Mapping[str, str], retries: Retries, ready: bool, detailed: bool
) -> list[dict[str, str | int]]:
    """Sorted by name and number.

    Args:
      refused: names that could not be tried, with the reason.
      ready: only what serves.
      detailed: with what each version takes, in bytes.
    """
    found: dict[tuple[str, str], dict[str, str | int]] = {
        (entry["name"], entry.get("version", "")): {**entry} for entry in lifecycle.index(ready)
    }
    for name, version, seconds in retries:
        entry = found.get((name, str(version)))
        if entry is not None and lifecycle.reason(name, version):
            entry["reason"] = f"{entry['reason']}; it is tried again in {seconds:.0f} s"
    listed = {name for name, version in found if version}
    for name in refused.keys() - listed if not ready else ():
        found[name, ""] = {"name": name, "state": "UNAVAILABLE", "reason": refused[name]}
    if detailed:
        for name, model in lifecycle.models.items():
            for n, of in model.versions.items():
                if of.described is not None and (name, str(n)) in found:
                    found[name, str(n)] |= _takes(of.described.footprint)
    # By name and number; the versions of a name are in order already.
    return sorted(found.values(), key=lambda entry: str(entry["name"]))


def _takes(footprint: Footprint) -> dict[str, str | int]:
    return {
        "parameters": footprint.parameter_byte_size,
        "programs": footprint.programs,
        "program_bytes": footprint.program_byte_size,
        "largest_batch": footprint.batch_byte_size,
    }
