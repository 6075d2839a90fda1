"""Builds the repository index: the state of every model, as clients and operators see it."""

from __future__ import annotations

from collections.abc import Mapping

from tensord.daemon.models.lifecycle import Lifecycle
from tensord.daemon.models.versions import IndexState
from tensord.shm.control_records import Footprint, ModelState


def index(
    lifecycle: Lifecycle,
    refused: Mapping[str, str],
    waits: Mapping[tuple[str, int], float],
    ready: bool,
    detailed: bool,
) -> list[dict[str, str | int]]:
    """Returns the repository index, sorted: name, version, state and reason of each version; the name alone without versions.

    Args:
      refused: models that were refused before a worker was asked to load them, with the reason.
      waits: the seconds until a version that was given up is loaded again, by name and number.
      ready: list only versions that serve.
      detailed: also say how many bytes each version takes.
    """
    found: list[dict[str, str | int]] = []
    models = lifecycle.models
    names = lifecycle.known | {name for name, model in models.items() if any(v.in_use for v in model.versions.values())}
    for name in sorted(names | refused.keys()):
        versions = models[name].versions if name in names and name in models else {}
        for number, version in sorted(versions.items()):
            if not ready or version.state is IndexState.READY:
                entry: dict[str, str | int] = {"name": name, "version": str(number), "state": version.state.value}
                if version.reason:
                    planned = version.given_up and (name, number) in waits
                    again = f"; it is tried again in {waits[name, number]:.0f} s" if planned else ""
                    entry["reason"] = version.reason + again
                if detailed and version.described is not None:
                    entry |= _takes(version.described.footprint)
                found.append(entry)
        if not versions and not ready:
            unserved = {"state": "UNAVAILABLE", "reason": refused[name]} if name in refused else {}
            found.append({"name": name, **unserved})
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
