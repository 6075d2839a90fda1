"""Tries to load model versions as a worker does, and reports whether each can be loaded.

    stdin   one CheckLoads: the daemon's configuration, and the model versions to load in this order
    stdout  LoadSteps that say what the process does now, and one LoadOutcome after each version

``tensord.daemon.check`` starts this process. With ``--folder FOLDER``, the process exports one version into FOLDER instead. If
a version crashes the process, it is the first version without a LoadOutcome. What the models print goes to stderr.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import resource
import sys
from collections.abc import Callable
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tensord.config import log
from tensord.config.options import Options
from tensord.shm.child_process import die_with_parent, print_by_lines
from tensord.shm.control_records import CheckLoads, Load, Loading, LoadLine, LoadOutcome, LoadStep
from tensord.shm.errors import ServingError, Unavailable
from tensord.shm.operations import NOT_EXPLICIT, LoadModel, ModelReady, UnloadModel
from tensord.shm.status_page import StatusPage
from tensord.workers.devices import device_cpu
from tensord.workers.devices.device import DeviceName, NoDevice

if TYPE_CHECKING:
    import jax

    from tensord.workers.calls.call import ModelCall
    from tensord.workers.calls.caller import ModelPort
    from tensord.workers.loading.loader import Loader
    from tensord.workers.models.loaded_model import LoadedModel


class DaemonStandIn:
    """Stands in for the daemon while a model is only loaded as a check. Says that every model is ready. Refuses inference."""

    def __init__(self, explicit: bool) -> None:
        """Makes the stand-in for the daemon.

        ``explicit``: whether the daemon is configured to load models only on request. Only then may models load others.
        """
        self._explicit = explicit

    def ask(self, operation: LoadModel | UnloadModel | ModelReady, port: ModelPort) -> bytes:
        """Carries out nothing. Returns b"true" for ModelReady, and b"" for LoadModel and UnloadModel.

        Raises Unavailable for LoadModel and UnloadModel if the daemon is not configured to load models on request.
        """
        if self._explicit or isinstance(operation, ModelReady):
            return b"true" if isinstance(operation, ModelReady) else b""
        raise Unavailable(NOT_EXPLICIT)

    def begin(self, call: ModelCall) -> None:
        call.refused = True
        call.answered(Unavailable(f"model '{call.prepared.model}' is not asked while another one is only tried"), True)

    def cancel(self, call: ModelCall) -> None:
        """Does nothing, because no call to another model is ever in progress: each is refused at once."""

    stop = took = abandon = cancel


def main() -> None:
    die_with_parent()
    print_by_lines()
    # A crash is known by the exit status; no core file is needed.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    parser = argparse.ArgumentParser(prog="tensord.workers.check", description=__doc__)
    parser.add_argument("--device", type=DeviceName.parse, required=True)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--platforms", default="")
    parser.add_argument("--derivatives", type=int, default=0)
    arguments = parser.parse_args()
    device_name: DeviceName = arguments.device
    sys.argv[1:] = []
    device_name.prepare_environment()
    asked = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=CheckLoads)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    faulthandler.enable()
    options = msgspec.msgpack.decode(asked.options, type=Options)
    # Does not write into the log file of a daemon that runs beside this.
    said = msgspec.structs.replace(options.log, file="")
    log.configure(said, "check" if arguments.folder is None else "export", {})
    logging.getLogger().addHandler(logged := BufferingHandler(1000))

    # Imported after the environment is set.
    from tensord.workers.devices import device_cuda
    from tensord.workers.imports import import_system
    from tensord.workers.loading.loader import Loader
    from tensord.workers.loading.target import LoadTarget
    from tensord.workers.threads.inbox import Inbox

    if device_name.platform == "cpu":
        device_cpu.limit_threads(options.workers.threads)
    else:
        device_cuda.prepare_environment(options.workers)
    import_system.prepare()

    def say(line: LoadLine) -> None:
        answers.write(msgspec.json.encode(line) + b"\n")
        answers.flush()

    explicit = options.repository.control_mode == "explicit"
    try:
        device = device_name.open(options.workers.devices_per_worker)
        if arguments.folder is not None:
            told = (arguments.folder, arguments.platforms, arguments.derivatives)
            outcomes = (_exported(load, device, *told) for load in asked.loads)
        else:
            target = LoadTarget.configured(options, device, device_name.gpu, alone=bool(device_name.model))
            loader = Loader(target, Inbox(), StatusPage.create(), DaemonStandIn(explicit))
            kept: list[LoadedModel] = []
            outcomes = (_tried(loader, load, say, kept, asked.deep) for load in asked.loads)
    except NoDevice as error:
        reason = str(error)
        outcomes = (LoadOutcome(load.name, load.version, reason) for load in asked.loads)
    for outcome in outcomes:
        # Standard error is a file of whoever started this.
        warnings = tuple(each.getMessage() for each in logged.buffer if each.levelno == logging.WARNING)
        say(msgspec.structs.replace(outcome, warnings=warnings, printed=os.fstat(2).st_size))
        logged.flush()
    # Threads inside models cannot be ended, and must not keep the process.
    os._exit(0)


def _tried(
    loader: Loader, load: Load, say: Callable[[LoadLine], None], kept: list[LoadedModel], deep: bool
) -> LoadOutcome:
    def tell(number: int, total: int, compiled: int) -> None:
        say(LoadStep(str(Loading(load.name, load.version, number, total, compiled))))

    # Imported after the environment is set.
    from tensord.workers.models.warmup import Sample
    from tensord.workers.programs.purity import LEAKED
    from tensord.workers.programs.trials import trials

    asked: list[dict[str, str | float]] = []
    try:
        loaded = loader.load(load, tell)
        model = loaded.jitted
        if deep and model is not None and not model.ragged:
            asked += trials(
                model.executables,
                lambda inputs, rows: Sample("a generated request", inputs, rows, 1).run_jitted(model, model, load.name),
            )
    except Exception as error:  # the function may raise anything when it is traced for other shapes
        return LoadOutcome(load.name, load.version, str(error))
    kept.append(loaded)
    compiled = loaded.jitted or loaded.stepped
    if compiled is not None and compiled.executables.leaks():
        return LoadOutcome(load.name, load.version, f"model '{load.name}': {LEAKED}")
    reason = next((f"{trial['bucket']}: {trial['difference']}" for trial in asked if trial["difference"]), "")
    derivatives = {each.name: each.config.decode() for each in loaded.derivatives}
    config, lacking = loaded.config.decode(), loaded.lacking
    return LoadOutcome(
        load.name, load.version, reason, config, loaded.footprint, derivatives, lacking, trials=tuple(asked)
    )


def _exported(load: Load, device: jax.Device, folder: Path, platforms: str, derivatives: int) -> LoadOutcome:
    from tensord.workers.loading.exporting import export_version

    try:
        export_version(load, device, folder, platforms, derivatives)
    except ServingError as error:
        return LoadOutcome(load.name, load.version, error.message)
    return LoadOutcome(load.name, load.version, "")


if __name__ == "__main__":
    main()
