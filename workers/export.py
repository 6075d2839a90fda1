"""Exports a model version for ``tensord export``: ``python -m tensord.workers.export --device cpu:0``.

stdin   CheckLoads: the configuration, and the version to export
stdout  one LoadOutcome: empty, or why the version cannot be exported
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import msgspec

from tensord.config import log
from tensord.config.options import Options
from tensord.shm.check import CheckLoads, LoadOutcome
from tensord.shm.child_process import die_with_parent, print_by_lines
from tensord.shm.errors import ServingError
from tensord.workers.devices.device import DeviceName


def main() -> None:
    die_with_parent()
    print_by_lines()
    parser = argparse.ArgumentParser(prog="tensord.workers.export", description=__doc__)
    parser.add_argument("--device", type=DeviceName.parse, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--platforms", default="")
    arguments = parser.parse_args()
    arguments.device.prepare_environment()
    asked = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=CheckLoads)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    options = msgspec.msgpack.decode(asked.options, type=Options)
    log.configure(msgspec.structs.replace(options.log, file=""), "export")

    # Imported after the environment is set.
    from tensord.workers.imports import import_system
    from tensord.workers.loading.exported_version import export_version

    import_system.prepare()
    reason = ""
    try:
        export_version(asked.loads[0], arguments.device.open(), arguments.folder, arguments.platforms)
    except ServingError as error:
        reason = error.message
    answers.write(msgspec.json.encode(LoadOutcome(asked.loads[0].name, asked.loads[0].version, reason)) + b"\n")
    answers.flush()
    # Threads inside models cannot be ended, and must not keep the process.
    os._exit(0)


if __name__ == "__main__":
    main()
