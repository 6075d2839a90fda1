"""Runs ``tensord serve`` with the fake front and the fake worker: the real supervisor, real processes, no models."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from tensord.config import layers, log
from tensord.daemon.processes.spawned import spawn_workers
from tensord.daemon.supervisor import Programs, Supervisor

if __name__ == "__main__":
    file = Path(sys.argv[1])
    configured = layers.read(file)
    options = configured.options
    log.configure(options.log, "supervisor")
    programs = Programs("tests.daemon.fake_front", "tests.daemon.fake_front", "tests.daemon.fake_worker")
    workers = spawn_workers(options.workers, os.environ, programs.worker)
    sys.exit(asyncio.run(Supervisor(configured, lambda: layers.read(file), os.environ, workers, programs).run()))
