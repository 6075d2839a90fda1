"""Builds the repository index: the state of every model, as clients and operators see it."""

from __future__ import annotations

from collections.abc import Mapping

from tensord.daemon.models.lifecycle import Lifecycle
from tensord.daemon.models.retries import Retries
from tensord.daemon.models.versions import IndexState
from tensord.shm.control_records import Footprint, ModelState


def index(
    lifecycle: Lifecycle, refused: Mapping[str, str], retries: Retries, ready: bool, detailed: bool
) -> list[dict[str, str | int]]:
    """Returns the repository index, sorted by model name and version: name, version, state and reason of each version.

    Args:
      refused: models that were refused before a worker was asked to load them, with the reason.
      retries: the planned retries of versions that were given up.
      ready: list only versions that serve.
      detailed: also say how many bytes each version takes.
    """
    found: dict[tuple[str, str], dict[str, str | int]] = {
        (entry["name"], entry.get("version", "")): {**entry} for entry in entries(lifecycle, ready)
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
    # The index is sorted by name and number; the versions of a name are in order already.
    return sorted(found.values(), key=lambda entry: str(entry["name"]))


def entries(lifecycle: Lifecycle, ready: bool = False) -> list[dict[str, str]]:
    """Returns name, version, state and reason of each version, sorted; of a model that was never loaded only the name.

    ``ready``: list only versions that serve.
    """
    found: list[dict[str, str]] = []
    models = lifecycle.models
    loaded = {name for name, model in models.items() if any(v.in_use for v in model.versions.values())}
    for name in sorted(lifecycle.known | loaded):
        versions = models[name].versions if name in models else {}
        for number, version in sorted(versions.items()):
            if ready and version.state is not IndexState.READY:
                continue
            entry = {"name": name, "version": str(number), "state": version.state.value}
            found.append(entry | ({"reason": version.reason} if version.reason else {}))
        if not versions and not ready and name in lifecycle.known:
            found.append({"name": name})
    return found


def refused_state(name: str, reason: str) -> ModelState:
    """Builds the record that tells fronts why a model cannot be sent to workers. Its version is 0, which no real version has."""
    return ModelState(name, 0, IndexState.UNAVAILABLE.value, reason)


def _takes(footprint: Footprint) -> dict[str, str | int]:
    return {
        "parameters": footprint.parameter_byte_size,
        "programs": footprint.programs,
        "program_bytes": footprint.program_byte_size,
        "largest_batch": footprint.batch_byte_size,
    }
