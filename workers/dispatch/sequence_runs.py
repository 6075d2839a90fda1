"""Runs requests of sequences for the C code that receives and answers requests (``workers/dispatch/fast_path.py``).

Before each run, the C code calls ``SequenceRuns.choose``, which chooses the requests that may run now. The C code runs the
chosen requests with a function that ``SequenceRuns.program`` returned, and sends the answers. If the run fails,
``SequenceRuns.fail`` answers the chosen requests with errors. Python code handles the requests that were not chosen.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from tensord.shm.arrays import Array
from tensord.shm.errors import Internal
from tensord.workers.dispatch.answers import failure
from tensord.workers.models.jax_model import JaxModel
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.models.sequence_register import SequenceRegister
from tensord.workers.models.statistics import Failure
from tensord.workers.programs.carry import StateLost
from tensord.workers.programs.executable import Content, Executable
from tensord.workers.requests.request import Request
from tensord.workers.requests.submitter_link import SubmitterLink
from tensord.workers.scheduling.sequence import Asked, LiveSequence, state_lost
from tensord.workers.scheduling.sequence_batcher import SequenceBatcher

_log = logging.getLogger(__name__)


class SequenceRuns:
    """Chooses which requests of one model version's sequences may run now, and runs these requests together."""

    def __init__(
        self,
        version: ModelVersion,
        model: JaxModel,
        sequences: SequenceBatcher[Request],
        submitters: Mapping[int, SubmitterLink[Request]],
        register: SequenceRegister,
    ) -> None:
        """Stores the arguments. ``sequences`` chooses the requests of each batch, which ``model`` then runs.

        ``submitters``: each submitter by the file descriptor of its lane. ``register``: counts the live sequences of all models.
        """
        self._version = version
        self._model = model
        self._sequences = sequences
        self._submitters = submitters
        self._register = register
        controls = version.loaded.made_inputs.controls
        self._controls = controls if controls is not None and controls.specs else None
        #: The sequences whose requests run now, and the (correlation id, START, END) of all requests that were looked at.
        self._chosen: list[LiveSequence[Request]] = []
        self._asked: list[Asked] = []
        #: The control inputs of each request.
        self._given: list[dict[str, Array]] = []

    def choose(self, asked: list[Asked], clients: list[int] | None = None) -> int:
        """Chooses all requests in ``asked`` before the first one that cannot run now. Returns how many requests it has chosen.

        ``asked``: the correlation id and the flags START and END of each request. ``clients``: for each request, the file
        descriptor of the client's lane, or -1 if a front sent the request. If ``clients`` is None, fronts sent all requests.
        """
        if self._sequences.table.holding:
            return 0  # not all of them are computed with the same parameters
        try:
            if self._controls is not None:
                self._given = self._controls.of_each(asked)
                asked = asked[: len(self._given)]
            self._asked = asked
            self._chosen = self._sequences.run_now(asked, time.monotonic_ns())
            for live, fd in zip(self._chosen, clients or (), strict=False):
                # With that client's lane the sequence ends.
                submitter = self._submitters.get(fd)
                live.client = 0 if submitter is None else submitter.peer
                if submitter is not None:
                    submitter.sequences = True
        except Exception:  # a defect of ours: the ordinary way says what becomes of them
            _log.exception("finding the sequences of requests for model '%s' failed", self._version.name)
            return 0
        return len(self._chosen)

    def program(self, executable: Executable) -> Callable[[], list[Content]]:
        """Returns a function that runs the requests that ``choose`` has chosen last, and returns the model's outputs.

        Before each call of the function, these requests' inputs must be written into the arrays of ``executable.gathered``.
        """
        step = self._model.gathered_run(executable)
        columns = {name: array.reshape(executable.rows, -1) for name, array in executable.gathered.items()}

        def run() -> list[Content]:
            chosen = self._chosen
            for row, controls in enumerate(self._given[: len(chosen)]):
                for name, control in controls.items():
                    columns[name][row] = control
            outputs = step(
                [live.slot.number for live in chosen],  # type: ignore[union-attr]
                [start for _, start, _ in self._asked[: len(chosen)]],
            )
            self._ran()
            return outputs

        return run

    def _ran(self) -> None:
        # This comes before any of their answers is sent.
        self._sequences.table.have_run(self._chosen, time.monotonic_ns())
        self._chosen = []
        if self._register.changed:
            self._register.tell()

    def fail(self, requests: list[tuple[int, int, int]], error: Exception | None) -> None:
        """Answers the requests of a failed run with an error. The requests are not run again.

        ``requests``: for each request, the file descriptor of its lane, its id and its arrival time (CLOCK_MONOTONIC, ns).
        ``error``: the exception that the run raised, or None if the run's outputs were wrong.
        """
        name, model, version = self._version.name, self._model, self._version
        lost = isinstance(error, StateLost)
        cause = error.__cause__ if isinstance(error, StateLost) and error.__cause__ else error
        sentence = Internal(model.describe(cause or LookupError()))
        also = ", and with it the state of all sequences" if lost else ""
        _log.error("%s%s", sentence.message, also, exc_info=cause)
        now_ns = time.monotonic_ns()
        for (fd, request_id, arrived_ns), (correlation_id, _, _) in zip(requests, self._asked, strict=False):
            refusal = state_lost(correlation_id, name) if lost else sentence
            self._submitters[fd].answer(failure(request_id, refusal, version.version))
            version.statistics.failed(now_ns - arrived_ns, Failure.BACKEND)
        if lost:
            version.lose(0, now_ns)
        if self._chosen:
            self._ran()

    def __repr__(self) -> str:
        return f"<SequenceRuns of {self._version.name}>"
