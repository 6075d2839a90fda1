"""Exports a model that has a model.py as a model without Python files (``tensord export``), in a child process that has JAX."""

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
from tensord.shm.control_records import CheckLoads, LoadOutcome
from tensord.shm.errors import InvalidArgument


def export(model: FoundModel, options: Options, device: Device, folder: Path, platforms: str) -> None:
    """Writes the newest version of a model as a new model without Python code: a program of jax.export and its parameters.

    What the model's code prints goes to stderr.

    Args:
      device: what the model is loaded on.
      folder: the new model's folder, which is made if it is missing.
      platforms: the platforms that it shall run on, such as "cpu,cuda"; "": that of ``device``.
    Raises: InvalidArgument: the model cannot be exported, or the folder has a version 1 or cannot be written.
    """
    if model.problem:
        raise InvalidArgument(f"model '{model.name}': {model.problem}")
    asked = CheckLoads(msgspec.Raw(msgspec.msgpack.encode(options)), (model.load(model.chosen[-1]),))
    arguments = ["--device", device.name, "--folder", os.path.abspath(folder), "--platforms", platforms]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tensord.workers.check", *arguments],
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
