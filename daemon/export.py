"""Exports a model with a model.py as one without Python files, in a process of its own, as the model's code uses JAX."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from tensord.config.options import Options
from tensord.daemon.models.repository import FoundModel
from tensord.daemon.processes.child import describe_exit
from tensord.daemon.processes.devices import Device
from tensord.daemon.processes.spawned import child_environment
from tensord.shm.check import CheckLoads, LoadOutcome
from tensord.shm.errors import InvalidArgument


def export(model: FoundModel, options: Options, device: Device, folder: Path, platforms: str) -> None:
    """Exports the newest chosen version. What the model prints goes to stderr.

    Raises: InvalidArgument: it cannot be exported; it says why.
    """
    if model.problem:
        raise InvalidArgument(f"model '{model.name}': {model.problem}")
    asked = CheckLoads(msgspec.Raw(msgspec.msgpack.encode(options)), (model.load(model.chosen[-1]),))
    arguments = ["--device", device.name, "--folder", os.path.abspath(folder), "--platforms", platforms]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tensord.workers.export", *arguments],
        input=msgspec.msgpack.encode(asked),
        stdout=subprocess.PIPE,
        env=child_environment(device.environment),
        check=False,
    )
    if not done.stdout:
        raise InvalidArgument(f"model '{model.name}': its process {describe_exit(done.returncode)} while exporting it")
    outcome = msgspec.json.decode(done.stdout, type=LoadOutcome)
    if outcome.reason:
        raise InvalidArgument(outcome.reason)
