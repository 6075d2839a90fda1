"""Whether models load: each is tried in a process of its own, by a worker's own code, and nothing is served.

    found in the repositories ─▶ python -m workers.check, bounded in time ─▶ good, or the reason, or how the process ended

Whatever a model does to its process, its neighbours and this one are not touched.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from config.options import Options
from daemon.models.repository import FoundModel
from daemon.processes.child import child_environment, describe_exit
from daemon.processes.devices import Device
from shm.check import CheckLoads, LoadOutcome

#: At a time: each needs a core and the memory of its model.
_MAX_PROCESSES = 4
#: Of what a model's process printed, its end.
_MAX_PRINTED = 64 << 10


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one model."""

    model: FoundModel
    #: Why it cannot be served; "": every chosen version can.
    reason: str
    #: What its process printed, the end of it.
    printed: str = ""


def check(models: Sequence[FoundModel], options: Options, device: Device, timeout: float) -> Iterator[Verdict]:
    """Of each model, in order. Those that cannot even be read are not tried.

    Args:
      device: where they are loaded.
      timeout: seconds for each version.
    """
    # Beside a daemon that has most of a GPU's memory.
    workers = msgspec.structs.replace(options.workers, gpu_preallocate=False)
    encoded = msgspec.msgpack.encode(msgspec.structs.replace(options, workers=workers))
    most = min(_MAX_PROCESSES, len(os.sched_getaffinity(0)))
    waiting = deque(models)
    begun: deque[Verdict | _Attempt] = deque()
    try:
        while waiting or begun:
            running = [entry for entry in begun if isinstance(entry, _Attempt) and not entry.ended]
            if waiting and len(running) < most:
                model = waiting.popleft()
                begun.append(
                    Verdict(model, model.problem) if model.problem else _Attempt(model, encoded, device, timeout)
                )
            elif isinstance(begun[0], _Attempt):
                if begun[0].ended:
                    begun[0] = begun[0].verdict()
                else:
                    _wait(running)
            else:
                yield begun[0]
                begun.popleft()
    finally:
        for entry in begun:
            if isinstance(entry, _Attempt):
                entry.end()


def _wait(running: Sequence[_Attempt]) -> None:
    """Returns when one has ended, or was ended because its time is over."""
    poll = select.poll()
    for attempt in running:
        poll.register(attempt.pidfd, select.POLLIN)
    left = min(attempt.deadline for attempt in running) - time.monotonic()
    ready = {fd for fd, _ in poll.poll(max(0.0, left) * 1000)}
    for attempt in running:
        if attempt.pidfd in ready:
            attempt.end()
        elif attempt.deadline <= time.monotonic():
            attempt.late = True
            attempt.end()


class _Attempt:
    """A process that loads the chosen versions of one model. It and whatever it starts live until ``end``."""

    def __init__(self, model: FoundModel, options: bytes, device: Device, timeout: float) -> None:
        self._model = model
        self._loads = tuple(model.load(number) for number in model.chosen)
        self._timeout = timeout
        #: It was ended because its time was over.
        self.late = False
        self.ended = False
        self._files = contextlib.ExitStack()
        self._answers = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._printed = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        with tempfile.TemporaryFile() as asked:
            asked.write(msgspec.msgpack.encode(CheckLoads(msgspec.Raw(options), self._loads)))
            asked.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "workers.check", "--device", device.name],
                stdin=asked,
                stdout=self._answers,
                stderr=self._printed,
                env=child_environment(device.environment),
                start_new_session=True,
            )
        self.pidfd = os.pidfd_open(self._process.pid)
        self.deadline = time.monotonic() + timeout * len(self._loads)

    def end(self) -> None:
        """Kills what is left of it. Idempotent. ``verdict`` closes its files."""
        if self.ended:
            return
        self.ended = True
        os.close(self.pidfd)
        with contextlib.suppress(ProcessLookupError):
            # Before it is reaped: afterwards the number may be somebody else's.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def verdict(self) -> Verdict:
        """What came of it, once it has ended; closes its files."""
        with self._files:
            self._answers.seek(0)
            outcomes = [msgspec.json.decode(line, type=LoadOutcome) for line in self._answers]
            self._printed.seek(max(0, self._printed.seek(0, os.SEEK_END) - _MAX_PRINTED))
            text = self._printed.read().decode(errors="replace")
        reasons = [(outcome.version, outcome.reason) for outcome in outcomes if outcome.reason]
        if len(outcomes) < len(self._loads):
            how = describe_exit(self._process.returncode)
            why = (
                f"it was not loaded within {self._timeout:g} s" if self.late else f"its process {how} while loading it"
            )
            reasons.append((self._loads[len(outcomes)].version, why))
        return Verdict(self._model, "; ".join(f"version {number}: {reason}" for number, reason in reasons), text)
