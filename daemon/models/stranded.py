"""Versions that only workers without a usable device would serve: unavailable, until one of these is there again. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tensord.daemon.models.instructions import Instruction, Publish
from tensord.daemon.models.versions import Model, VersionState


def give_up(models: Mapping[str, Model], usable: Collection[str]) -> list[Instruction]:
    """What was served, and is to be, and belongs to none of the ``usable`` devices; the first worker that joins loads it."""
    out: list[Instruction] = []
    for model in models.values():
        for number, version in model.versions.items():
            waits = version.state is VersionState.READY and not (version.ready or version.loading or version.postponed)
            if waits and not any(version.belongs(device) for device in usable):
                where = ", ".join(version.devices) or "any device"
                version.given_up, version.due = f"no worker can use {where} at present", True
                version.state, version.reason, version.described = VersionState.UNAVAILABLE, version.given_up, None
                out.append(Publish(version.told(number)))
    return out
