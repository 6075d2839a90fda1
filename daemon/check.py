"""Checks whether models load (``tensord check``) or exports one (``tensord export``), in child processes that have JAX.

    a model      ─▶ loaded by ``python -m tensord.workers.check`` ─▶ a verdict: good, or why the model cannot be served
    an ensemble  ─▶ after its members were checked: a verdict whether its configuration fits its members' configurations

One process loads all models of a device one after the other. A model that asks for a worker of its own is loaded in a separate
process. If a model crashes its process or exceeds its time limit, a new process loads the remaining models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tensord.config import ensemble_checks, model_config
from tensord.config.model_config import ModelConfig
from tensord.config.options import Options
from tensord.daemon.models import ensembles, placement, repository
from tensord.daemon.models.repository import FoundModel
from tensord.daemon.processes.child import describe_exit
from tensord.daemon.processes.devices import Device
from tensord.daemon.processes.spawned import child_environment
from tensord.daemon.progress_bar import ProgressBar
from tensord.shm import device_names
from tensord.shm.common.derivatives import described, original
from tensord.shm.control_records import CheckLoads, LoadLine, LoadOutcome, LoadStep
from tensord.shm.errors import InvalidArgument

#: The most processes at a time, of different devices: each needs a core.
_MAX_PROCESSES = 4
#: The most bytes that are kept of what a model's process printed, from its end.
_MAX_PRINTED = 64 << 10
#: Seconds between looks at their progress.
_LOOK_SECONDS = 0.25
_LINES = msgspec.json.Decoder(LoadLine)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of checking one model: whether the model can be served, and what the process that loaded it printed."""

    model: FoundModel
    #: The reason why it cannot be served; "": every chosen version can.
    reason: str
    #: The end of what its process printed while it was loaded.
    printed: str = ""
    #: The completed configurations of the versions that can be served.
    configs: Mapping[int, ModelConfig] = field(default_factory=dict)
    #: The outcome of each version's load; empty if nothing was loaded.
    outcomes: Sequence[LoadOutcome] = ()


def placed(models: Iterable[FoundModel], devices: Sequence[Device], options: Options) -> list[FoundModel]:
    """Decides for each model on which devices it would be loaded, and returns copies of the models.

    The field ``devices`` of a copy names these devices. If no worker can load the model, the field ``error`` has the reason.
    ``devices``: the devices of all workers.
    """
    found: list[FoundModel] = []
    taken: dict[str, float] = {}
    needed: dict[str, Mapping[str, str | None]] = {}
    for model in models:
        each = model
        try:
            each = repository.placed(model, [device.name for device in devices], options)
            repository.check_isolated(each, taken, options.workers)
            if each.resources:
                placement.check_resources(each.name, each.resources, needed)
                needed[each.name] = each.resources
            taken |= repository.isolated(each, options.workers)
        except InvalidArgument as error:
            each = dataclasses.replace(model, error=error.message)
        found.append(each)
    return found


def check(
    models: Sequence[FoundModel], options: Options, devices: Sequence[Device], timeout: float, deep: bool = False
) -> Iterator[Verdict]:
    """Loads ``models`` in child processes. Yields a verdict on each model in the order of ``models``, but ensembles last.

    Ensembles are not loaded, only checked. A model with an invalid configuration is not loaded, but gets a verdict.
    Args:
      devices: the devices of all workers. A model is loaded on the first device that it may use.
      timeout: how many seconds the load of each version of a model may take. It may take three times as long if ``deep``.
      deep: whether models also run a generated request for each bucket. Host, stepped and ragged models do not.
    """
    tried: dict[str, Verdict] = {}
    for verdict in _tried([model for model in models if not model.members], options, devices, timeout, deep):
        tried[verdict.model.name] = verdict
        yield verdict
    waiting = {model.name: model for model in models if model.members}
    while waiting:
        # An ensemble is checked once its members are all known.
        ready = [model for model in waiting.values() if not waiting.keys() & dict(model.members)]
        if not ready:
            # All of these are in a circle, or lead into one.
            for model in waiting.values():
                yield Verdict(model, model.problem or _circle(model.name, waiting))
            return
        for model in ready:
            del waiting[model.name]
            yield tried.setdefault(model.name, _ensemble(model, tried))


def _circle(name: str, waiting: Mapping[str, FoundModel]) -> str:
    way = [name]
    while (member := next(each for each in dict(waiting[way[-1]].members) if each in waiting)) not in way:
        way.append(member)
    return f"circular dependency between ensembles: {member} -> ... -> {way[-1]} -> {member}"


def _ensemble(model: FoundModel, tried: Mapping[str, Verdict]) -> Verdict:
    """Checks whether the ensemble ``model`` fits its members. Returns the verdict. ``tried``: earlier verdicts, by model name."""
    reason, name = model.problem, model.name
    members = {
        member: tried[member].model if member in tried else FoundModel(member, Path()) for member in dict(model.members)
    }

    def find(member: str, number: int) -> ModelConfig:
        verdict = tried[original(member)[0]]
        if not verdict.configs:
            raise ensemble_checks.not_loaded(name, member, -1, verdict.reason)
        if number > 0 and number not in verdict.configs:
            raise ensemble_checks.not_loaded(name, member, number, "")
        number = number if number > 0 else max(verdict.configs)
        own = {outcome.version: outcome for outcome in verdict.outcomes}.get(number, LoadOutcome(member, number, ""))
        derivatives = {each: model_config.parse_json(config, each) for each, config in own.derivatives.items()}
        return described(member, verdict.configs[number], derivatives, own.lacking)

    try:
        if not reason:
            ensembles.check_found(name, members)
            config = ensemble_checks.completed(model.config, find)
            return Verdict(model, "", configs=dict.fromkeys(model.chosen, config))
    except InvalidArgument as error:
        reason = error.message
    return Verdict(model, reason)


def _tried(
    models: Sequence[FoundModel], options: Options, devices: Sequence[Device], timeout: float, deep: bool
) -> Iterator[Verdict]:
    # A daemon beside this process may have most of a GPU's memory.
    workers = msgspec.structs.replace(options.workers, gpu_preallocate=False)
    encoded = msgspec.msgpack.encode(msgspec.structs.replace(options, workers=workers))
    most = min(_MAX_PROCESSES, len(os.sched_getaffinity(0)))
    known = {device.name: device for device in devices}
    waiting: dict[str, list[FoundModel]] = {}
    verdicts: dict[str, Verdict] = {}
    for model in models:
        if model.problem:
            verdicts[model.name] = Verdict(model, model.problem)
        else:
            waiting.setdefault(model.devices[0] if model.devices else devices[0].name, []).append(model)
    running: list[_Attempt] = []
    yielded, bar = 0, ProgressBar()
    try:
        while yielded < len(models):
            for name in [name for name in waiting if name not in {attempt.device for attempt in running}]:
                if len(running) < most:
                    device = known[device_names.shared(name)]
                    running.append(
                        _Attempt(waiting.pop(name), encoded, dataclasses.replace(device, name=name), timeout, deep)
                    )
            while yielded < len(models) and models[yielded].name in verdicts:
                bar.clear()
                yield verdicts[models[yielded].name]
                yielded += 1
            if running:
                bar.draw(len(verdicts), len(models), "; ".join(filter(None, (attempt.at for attempt in running))))
                _wait(running)
            for attempt in [attempt for attempt in running if attempt.look(verdicts)]:
                running.remove(attempt)
                if attempt.left:
                    waiting[attempt.device] = attempt.left
    finally:
        for attempt in running:
            attempt.end()


def _wait(running: Sequence[_Attempt]) -> None:
    poll = select.poll()
    for attempt in running:
        poll.register(attempt.pidfd, select.POLLIN)
    left = min(attempt.deadline for attempt in running) - time.monotonic()
    ready = {fd for fd, _ in poll.poll(min(_LOOK_SECONDS, max(0.0, left)) * 1000)}
    for attempt in running:
        attempt.late = attempt.pidfd not in ready and attempt.deadline <= time.monotonic()
        if attempt.late or attempt.pidfd in ready:
            attempt.end()


class _Attempt:
    """A process that tries to load ``models``, one after the other, on one device, for the command ``check``."""

    def __init__(
        self, models: Sequence[FoundModel], options: bytes, device: Device, timeout: float, deep: bool
    ) -> None:
        self.device = device.name
        #: Models that have no verdict yet, in the order in which they are loaded.
        self.left = list(models)
        # Each bucket is compiled once more, without us.
        self._timeout = timeout * (3 if deep else 1)
        #: True if the process was killed because a model exceeded its timeout.
        self.late = False
        self.ended = False
        #: Where the printed lines of the first model in ``left`` begin.
        self._printed_from = 0
        self._files = contextlib.ExitStack()
        self._answers = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._printed = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        loads = tuple(model.load(number) for model in models for number in model.chosen)
        with tempfile.TemporaryFile() as asked:
            asked.write(msgspec.msgpack.encode(CheckLoads(msgspec.Raw(options), loads, deep)))
            asked.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tensord.workers.check", "--device", device.name],
                stdin=asked,
                stdout=self._answers,
                stderr=self._printed,
                env=child_environment(device.environment),
                start_new_session=True,
            )
        self.pidfd = os.pidfd_open(self._process.pid)
        self.deadline = self._deadline()

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout * len(self.left[0].chosen)

    @property
    def at(self) -> str:
        """Returns what this model-loading process does now, such as ``loading m``, or "" if no model is left to load."""
        if not self.left:
            return ""
        steps = [line.at for line in self._lines() if isinstance(line, LoadStep)]
        return steps[-1] if steps else f"loading {self.left[0].name}"

    def _lines(self) -> list[LoadLine]:
        content = os.pread(self._answers.fileno(), os.fstat(self._answers.fileno()).st_size, 0)
        return [_LINES.decode(line) for line in content.splitlines(keepends=True) if line.endswith(b"\n")]

    def end(self) -> None:
        # The output stays open until ``look`` is called once more.
        if self.ended:
            return
        self.ended = True
        os.close(self.pidfd)
        with contextlib.suppress(ProcessLookupError):
            # The group is killed before the process is reaped: afterwards the number may be somebody else's.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def look(self, verdicts: dict[str, Verdict]) -> bool:
        lines = self._lines()
        outcomes = {(line.name, line.version): line for line in lines if isinstance(line, LoadOutcome)}
        while self.left:
            model = self.left[0]
            found = [outcomes[key] for number in model.chosen if (key := (model.name, number)) in outcomes]
            if len(found) < len(model.chosen) and not self.ended:
                return False
            verdicts[model.name] = self._verdict(model, found)
            self.left.pop(0)
            if len(found) < len(model.chosen):
                break
            self._printed_from = found[-1].printed
            if self.left:
                self.deadline = self._deadline()
        if self.ended:
            self._files.close()
        return self.ended

    def _verdict(self, model: FoundModel, outcomes: Sequence[LoadOutcome]) -> Verdict:
        reasons = [(outcome.version, outcome.reason) for outcome in outcomes if outcome.reason]
        configs = {
            outcome.version: model_config.parse_json(outcome.config, model.name)
            for outcome in outcomes
            if outcome.config
        }
        until = self._printed.seek(0, os.SEEK_END)
        if len(outcomes) < len(model.chosen):
            how = describe_exit(self._process.returncode)
            late = f"it was not loaded within {self._timeout:g} s"
            reasons.append((model.chosen[len(outcomes)], late if self.late else f"its process {how} while loading it"))
        else:
            until = outcomes[-1].printed
        begin = max(self._printed_from, until - _MAX_PRINTED)
        text = os.pread(self._printed.fileno(), until - begin, begin).decode(errors="replace")
        reason = "; ".join(f"version {number}: {reason}" for number, reason in reasons)
        return Verdict(model, reason, text, configs, outcomes)


def export(model: FoundModel, options: Options, device: Device, folder: Path, platforms: str, derivatives: int) -> None:
    """Writes the newest version of a model as a model without Python code: a program of jax.export and its parameters.

    Args:
      device: the device on which the model is loaded for this.
      folder: the folder of the new model, which is created if it is missing.
      platforms: the platforms on which the program can run, such as "cpu,cuda", or "" for the platform of ``device``.
      derivatives: how many orders of derivatives the program carries.
    Raises InvalidArgument if the model cannot be exported, or if the folder has a version 1 already or cannot be written.
    """
    if model.problem:
        raise InvalidArgument(f"model '{model.name}': {model.problem}")
    asked = CheckLoads(msgspec.Raw(msgspec.msgpack.encode(options)), (model.load(model.chosen[-1]),))
    arguments = ["--device", device.name, "--folder", os.path.abspath(folder), "--platforms", platforms]
    arguments += ["--derivatives", str(derivatives)]
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
