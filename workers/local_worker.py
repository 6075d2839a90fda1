"""Runs a worker inside the caller's process, without a daemon. ``tensord.testing`` runs models with it.

The worker's event loop has a thread of its own, in which it serves the models. ``load`` loads a model in the calling thread.
``ask`` passes a request to the event loop. Requests of several calling threads may share a batch.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import select
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, TypeVar

import jax

from tensord.config.options import Options
from tensord.shm.arrays import Array
from tensord.shm.channel import pair
from tensord.shm.control_records import Load
from tensord.shm.cuda_regions import Driver
from tensord.shm.errors import Internal, ServingError, Unavailable
from tensord.shm.lane import WorkerLane
from tensord.shm.messages import PreparedRequest, RequestRecord
from tensord.shm.status_page import SLOTS
from tensord.workers.engine import Engine
from tensord.workers.imports import import_system
from tensord.workers.loading.ensemble_declaration import joined
from tensord.workers.loading.loader import Loader
from tensord.workers.loading.target import LoadTarget
from tensord.workers.models.loaded_model import LoadedModel
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.programs.executable_cache import ExecutableCache, cache_directory
from tensord.workers.regions.region_table import RegionPolicy, RegionTable
from tensord.workers.requests.prepared import validate_inner
from tensord.workers.requests.request import Request
from tensord.workers.requests.submitter_link import SubmitterLink
from tensord.workers.threads.inbox import Inbox

if TYPE_CHECKING:
    from tensord.shm.common.local import LocalRequest

_log = logging.getLogger(__name__)
_BEAT_NS = 1_000_000_000
T = TypeVar("T")


class LocalWorker:
    """Serves models on one device in the caller's process, without a daemon. Any thread may call any method."""

    def __init__(self, options: Options, device: jax.Device) -> None:
        import_system.prepare()
        self._inbox = Inbox()
        self._driver = Driver()
        self._regions = RegionTable(RegionPolicy(options.regions), self._driver, None, None)
        gpu = None if device.platform == "cpu" else 0
        engine = self._engine = Engine(options, self._inbox, self._regions, gpu)
        self._sequences, self._models, self._dispatcher = engine.sequences, engine.models, engine.dispatcher
        self.took = self._dispatcher.took
        # Programs from JAX's own cache cannot be stored again; whether that cache is on is up to the process.
        theirs_is_on = jax.config.values["jax_compilation_cache_dir"]
        kept = None if theirs_is_on else cache_directory(options.executables.cache_directory)
        target = LoadTarget.borrowed(options, device, gpu, ExecutableCache(kept))
        self._loader = Loader(target, self._inbox, engine.page, self._dispatcher.calls)
        self._ours, theirs = pair()
        arenas = options.arenas
        # The lane stays unused: answers are passed as arrays.
        lane = WorkerLane(theirs, arenas.byte_size, arenas.max_byte_size, arenas.keep_byte_size)
        self._submitter: SubmitterLink[Request] = SubmitterLink(0, lane)
        self._asked: dict[LocalRequest, None] = {}
        self.numbers = itertools.count(1)
        self._closing = False
        #: Held while something is posted that must be answered, and where ``_closing`` is set: nothing is posted after that. The
        #: garbage collector may close the worker in the loop's thread, also while that holds it; who else posts keeps the model.
        self._posting = threading.RLock()
        self._loading = threading.Lock()
        self._thread = threading.Thread(target=self._main, name="tensord", daemon=True)
        self._thread.start()

    def post(self, call: Callable[[], None]) -> None:
        """Has the worker's loop call a function. Does not wait for that."""
        self._inbox.post(call)

    def load(self, record: Load) -> ModelVersion:
        """Loads and serves a model version. Raises ServingError: the version cannot be loaded."""

        def adopt() -> ModelVersion:
            self._check_open()
            version = self._adopt(loaded)
            self._models.add(version)
            return version

        with self._loading:
            loaded = self._loader.load(record)
            if loaded.ensemble is not None:
                loaded = self.call(lambda: joined(loaded, self._models))
            return self.call(adopt)

    def _adopt(self, loaded: LoadedModel) -> ModelVersion:
        for instance in (*loaded.instances, *loaded.passive):
            # None is of use where nobody looks for who killed this process.
            instance.status_slot = SLOTS
        version = self._engine.adopt(loaded)
        version.derivatives = [self._adopt(derivative) for derivative in loaded.derivatives]
        return version

    def call(self, function: Callable[[], T]) -> T:
        """Has the worker's loop call a function. Waits and returns the result. Errors of the function are raised unchanged."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._post(run)
        return future.result()

    def ask(
        self,
        answers: LocalRequest,
        prepared: PreparedRequest,
        own: RequestRecord,
        arrays: Mapping[str, Array],
        outputs: Collection[str],
    ) -> None:
        """Sends a request to a model, and returns at once. Raises Unavailable if the worker was closed.

        Args:
          answers: the caller's object for this request. It gets the responses, or the error.
          prepared: the model, its version and the request's parameters. It has no inputs.
          own: the other properties of the request, such as its sequence and its deadline. It has no contents of inputs.
          arrays: the inputs by name, in the shapes that clients send. Nobody may write to these arrays any more.
          outputs: the names of the wanted outputs. If it is empty, all outputs are wanted.
        """

        def enter() -> None:
            now_ns = time.monotonic_ns()
            self._asked[answers] = None
            try:
                version = self._models.find(prepared.model, prepared.version)
                if version.sequences is not None:
                    version = self._models.home(version, own.sequence_id, own.sequence_start)
                request = validate_inner(prepared, own, arrays, outputs, self._submitter, version, now_ns, answers.take)
                answers.request = request
                self._dispatcher.enter(version, request, now_ns)
            except ServingError as error:
                answers.fail(error)
            except Exception as error:
                _log.exception("validating a request for model '%s' failed", prepared.model)
                answers.fail(Internal(f"the request failed with {type(error).__name__}"))

        self._post(enter)

    def _post(self, call: Callable[[], None]) -> None:
        with self._posting:
            self._check_open()
            self._inbox.post(call)

    def _check_open(self) -> None:
        if self._closing:
            raise Unavailable("the model was closed")

    def close(self) -> None:
        """Waits for the answers to all requests in flight, then ends the models and the worker's thread. Idempotent."""
        with self._posting:
            if not self._closing:
                self._closing = True
                self._inbox.post(self._remove_all)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # --------------------------------------------------------------------------------------------------------- the loop

    def _main(self) -> None:
        try:
            with select.epoll() as epoll:
                epoll.register(self._inbox.fileno(), select.EPOLLIN)
                next_ns: int | None = None
                while not (self._closing and not any(self._models) and not self._models.draining):
                    now_ns = time.monotonic_ns()
                    until_ns = now_ns + _BEAT_NS if next_ns is None else min(next_ns, now_ns + _BEAT_NS)
                    if epoll.poll(max(0, until_ns - now_ns) / 1e9):
                        self._inbox.drain()
                    next_ns = self._iterate()
        except BaseException:
            _log.exception("the loop failed")
        self._end()

    def _iterate(self) -> int | None:
        now_ns = time.monotonic_ns()
        next_ns = self._dispatcher.run_due(now_ns)
        if self._models.draining:
            self._models.settle()
        if self._sequences.changed:
            self._sequences.tell()
        if self._sequences.ended:
            self._sequences.settle()
        if self._dispatcher.uncounted:
            self._dispatcher.count()
        for answers in [one for one in self._asked if one.request is None or not one.request.is_open]:
            del self._asked[answers]
        return next_ns

    def withdraw(self, answers: LocalRequest) -> None:
        """Cancels a request. Call it in the worker's loop, after ``ask``."""
        if answers.request is not None:  # it was validated
            self._dispatcher.withdraw(answers.request)

    def _remove_all(self) -> None:
        for version in list(self._models):
            version.planner.stop()
            self._models.remove(version.name, version.version, lambda: None)

    def _end(self) -> None:
        with self._posting:
            self._closing = True
        # Requests that came while the loop ended are answered with an error.
        self._inbox.drain()
        for answers in self._asked:
            answers.fail(Unavailable("the model was closed"))
        self._engine.compiler.finish()
        self._regions.close()
        self._driver.close()
        self._submitter.lane.close()
        self._ours.close()
        self._inbox.close()
        self._engine.close()

    def __repr__(self) -> str:
        return f"<LocalWorker {self._models!r}{', closed' if self._closing else ''}>"
