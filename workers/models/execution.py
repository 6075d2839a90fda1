"""One run of a model over a batch, and the rule that a bad request costs only its own answer.

``run`` catches twice: an error of our family keeps its code, anything else is a defect of the model and becomes one calm
sentence, with the traceback in the worker's log. A batch that fails as a whole is run again request by request; of a model that
keeps anything between requests, or may have answered some, it fails for all of them.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from shm.errors import Internal, ServingError
from workers.programs.carry import StateLost
from workers.programs.executables import Executable
from workers.programs.run_errors import CheckDevice, is_out_of_memory, out_of_memory, works
from workers.programs.series_program import SeriesProgram
from workers.requests.places import Places
from workers.requests.request import Request, named
from workers.requests.result import Result
from workers.scheduling.sequence import state_lost
from workers.tensors.batch_outputs import BatchOutputs

_log = logging.getLogger(__name__)
#: A link, which stays, or a path of this host: in quotes with whatever is in it, or to the end of a word.
_LINK_OR_PATH = re.compile(
    r"\b(?:https?|ftp|gs|s3|grpcs?|wss?)://[^/\s'\"][^\s'\"]*"
    r"|(?<=(?P<quote>['\"]))/[^'\"]+(?=(?P=quote))"
    r"|(?<![\w.])/[^\s'\"():,;]+"
)


class Execution:
    """A batch on its way through a model. The three moments are what statistics are made of."""

    __slots__ = (
        "_cut",
        "_results",
        "again",
        "began_ns",
        "computed_ns",
        "copied_byte_size",
        "executable",
        "gathered_ns",
        "intact",
        "lost",
        "outputs",
        "places",
        "requests",
        "rows_of_nobody",
        "runs",
    )

    def __init__(
        self, requests: Sequence[Request], began_ns: int, executable: Executable | SeriesProgram | None = None
    ) -> None:
        self.requests = requests
        #: Its run has failed and taken the state of all sequences of its instance along.
        self.lost = False
        #: Whatever fails, no sequence has gone on by it.
        self.intact = False
        #: Of the batch as the model saw it: rows that belong to none of ``requests``.
        self.rows_of_nobody = 0
        #: Requests that were in it and have no answer yet: they are to be run once more.
        self.again: list[Request] = []
        #: How often the model was applied: once to a batch, or to each request of a series.
        self.runs = 1
        #: Of a jitted model, where it is known already.
        self.executable = executable
        self._results: list[Result] = []
        self._cut: Callable[[], list[Result]] | None = None
        #: What ``results`` would be cut from, where an answer can be made of that directly.
        self.outputs: BatchOutputs | None = None
        #: Of a lone request: where its outputs go, if that was found before the run, so that the program may write them there.
        self.places: Places | None = None
        self.began_ns = began_ns
        #: Inputs are where the model wants them.
        self.gathered_ns = began_ns
        #: The model is done and its outputs are readable.
        self.computed_ns = began_ns
        #: Input bytes that were copied because of batching, padding or alignment.
        self.copied_byte_size = 0

    @property
    def moments(self) -> tuple[int, int, int]:
        """When it began, had its inputs, had computed; in ns."""
        return self.began_ns, self.gathered_ns, self.computed_ns

    @property
    def results(self) -> list[Result]:
        """One for each request, in the same order."""
        if self._cut is not None:
            self.results = self._cut()
        return self._results

    @results.setter
    def results(self, results: list[Result]) -> None:
        self._results = results
        self._cut = None

    def finish(self, results: list[Result | None]) -> None:
        """Fills in the results; of a request that is to be run once more, None."""
        pairs = list(zip(self.requests, results, strict=True))
        self.again = [request for request, result in pairs if result is None]
        if self.again:
            self.requests = [request for request, result in pairs if result is not None]
            self.rows_of_nobody += len(self.again)
        self.results = [result for result in results if result is not None]

    def computed(self, outputs: BatchOutputs | None, cut: Callable[[], list[Result]]) -> None:
        """Fills in the results, which are cut only if somebody asks for them."""
        self.outputs = outputs
        self._cut = cut


class Model(Protocol):
    """What runs: a jitted function, a host-side function, or an instance of a Triton Python model."""

    def execute(self, execution: Execution) -> None:
        """Fills in the results and the moments. Raises whatever the model raises; then nothing is filled in."""

    def describe(self, error: BaseException) -> str:
        """The sentence for a client when the model failed: no path, no traceback."""


def run(model: Model, execution: Execution, check: CheckDevice = works) -> None:
    """Runs a batch; every request has its result afterwards. ``check``: of the model's device."""
    try:
        model.execute(execution)
    except BaseException as error:  # also sys.exit() in a model: it must cost its request an answer, not the thread
        requests = execution.requests
        if isinstance(error, StateLost):
            execution.lost = True
            execution.results = _lost(model, error, execution, check)
        elif len(requests) == 1 or not (execution.intact or requests[0].version.repeatable):
            execution.results = [_own(model, error, execution, check)] * len(requests)
        else:
            execution.results = []
            for request in requests:
                single = Execution([request], execution.began_ns)
                run(model, single, check)
                execution.results += single.results
        now_ns = time.monotonic_ns()
        execution.gathered_ns = min(max(execution.gathered_ns, execution.began_ns), now_ns)
        execution.computed_ns = now_ns


def _lost(model: Model, error: StateLost, execution: Execution, check: CheckDevice) -> list[Result]:
    requests = execution.requests
    cause = error.__cause__ or error
    _log.error("%s, and with it the state of all sequences", model.describe(cause), exc_info=cause)
    try:
        check()
    except ServingError as lost:
        return [lost.with_traceback(None)] * len(requests)
    return [state_lost(request.controls.correlation_id, request.submit.model) for request in requests]


def _own(model: Model, error: BaseException, execution: Execution, check: CheckDevice) -> ServingError:
    if isinstance(error, ServingError):
        # Without the frames: they hold the requests, and the result they become holds them.
        return error.with_traceback(None)
    if is_out_of_memory(error):
        program = execution.executable
        failed = out_of_memory(error, execution.requests, None if program is None else program.memory_needed)
        _log.error("%s%s", named(execution.requests[0].client_id), failed.message)
        return failed
    name = named(execution.requests[0].client_id)
    _log.error("%s%s", name, model.describe(error), exc_info=error)
    try:
        check()
    except ServingError as lost:
        return lost.with_traceback(None)
    return Internal(model.describe(error))


def describe_failure(model: str, version: int, error: BaseException) -> str:
    """The sentence for a client: what kind of error it was, and nothing of what that says."""
    return f"model '{model}' version {version} failed with {type(error).__name__}"


def describe_exception(error: BaseException) -> str:
    """Type and message of a model's own exception, on one line and without the paths in it."""
    text = " ".join(str(error).split())
    reason = _LINK_OR_PATH.sub(lambda found: "<path>" if found[0].startswith("/") else found[0], text)[:1000]
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__
