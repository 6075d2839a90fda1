"""Routes the requests of a sequence to the worker that has it, and refuses those of a sequence that was lost with its worker.

Only requests of models that keep sequences come here. The first request of a sequence is called its START. Each worker lists
its sequences in memory that the fronts can read (``tensord.shm.sequence_page``). The first rule that applies decides:

1. If the START was sent and is not answered yet, the request goes to the worker that got the START.
2. If a worker lists the sequence as unfinished, the request goes to this worker. If two workers do, it goes to the one that
   accepted the sequence last.
3. If the request is a START, it goes to a worker with room for another sequence. If no worker has room, it goes to the worker
   where the fewest sequences wait for room. If workers are equal in this, rendezvous hashing chooses one, so that all fronts
   mostly choose the same worker for a sequence.
4. If this front has no lane yet to one of the model's workers, the request waits for this lane.
5. If the sequence was lost with its worker, the request is refused.
6. Otherwise the request goes to any worker of the model, which answers that the sequence was not begun.

A worker lists a sequence before it sends any answer of the sequence. So a client that waits for the answer to its START may
send the later requests to any front. A client that does not wait must send all requests of the sequence on one connection.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from tensord.daemon.submit.in_flight import InFlight, WorkerLink
from tensord.daemon.submit.model_states import configured
from tensord.shm.common.submission import lost_sequence
from tensord.shm.control_records import ModelState
from tensord.shm.device_names import gpu_of
from tensord.shm.sequence_page import Key, SequenceKeys, SequenceState

_log = logging.getLogger(__name__)

_MASK = (1 << 64) - 1
_MIX = 0x9E3779B97F4A7C15
_ENDED = int(SequenceState.ENDED)
#: STARTs that were answered are looked for when there are so many more than requests in flight.
_MORE_STARTS = 256


class SequenceRouting:
    """Chooses the workers for a front's requests that belong to sequences."""

    def __init__(
        self,
        in_flight: Mapping[int, InFlight],
        workers: Mapping[int, WorkerLink],
        most_lost: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts without sequences.

        Args:
          in_flight: all requests of the front that are in flight, by id.
          workers: the front's links to workers, by the number of the worker process.
          most_lost: the most sequences that are remembered as lost because their worker died.
          clock: returns a time in seconds.
        """
        self._in_flight = in_flight
        self._workers = workers
        self._clock = clock
        self._models: dict[tuple[str, int], SequencedModel] = {}
        #: The last START of each that was sent, or waits for a worker; some are answered.
        self._starts: dict[Key, InFlight] = {}
        self._lost = LostSequences(most_lost)
        #: The workers that died last, which a state may name still.
        self._dead: deque[int] = deque(maxlen=16)

    def model_changed(self, name: str, version: int) -> None:
        """Forgets the cached ``SequencedModel`` of a model version. Call it when the state of the version has changed."""
        self._models.pop((name, version), None)

    def model(self, state: ModelState) -> SequencedModel:
        """Returns the ``SequencedModel`` of a model version. It is valid until ``model_changed`` is called for this version."""
        model = self._models.get((state.name, state.version))
        if model is None:
            model = self._models[state.name, state.version] = SequencedModel(state)
        return model

    def find(self, request: InFlight, model: SequencedModel, gpu: str) -> WorkerLink | None:
        """Returns the worker for a request of a sequence.

        Returns None if the worker that has the sequence cannot be used now, or if there is no worker for a new sequence.
        ``gpu``: the GPU on which the regions of the request lie, or "". It only counts for the first request of a sequence.
        Raises Unavailable if the sequence was lost with its worker.
        """
        record, state = request.record, model.state
        key = request.sequence = model.keys.key(record.sequence_id)
        first = self._starts.get(key)
        if first is not None and not record.sequence_start and record.request_id < first.record.request_id:
            # It has waited since before that START: its own sequence went with its worker.
            raise lost_sequence(model.state.name, record.sequence_id)
        if first is None or first is request or first.record.request_id not in self._in_flight:
            # Of the only worker there is nothing has to be read, unless others had sequences that were lost.
            alone = len(self._workers) == 1 == len(state.workers) and not self._lost
            worker = (self._sole(state) if alone else None) or self._holder(key)
            if record.sequence_start:
                self._lost.forget(key)
                if worker is None or worker.closed:
                    worker = self._place(key, model.keys.slots, state, gpu)
                self._note(key, request)
            elif worker is None:
                if set(state.workers) - self._workers.keys() - set(self._dead):
                    return None  # there is no lane yet to a worker that may have it
                if self._lost.holds(key, model.idle_seconds, self._clock()):
                    raise lost_sequence(model.state.name, record.sequence_id)
                worker = max(self._candidates(state, gpu), key=lambda each: _rank(key, each), default=None)
        else:
            worker = first.worker
            # Where that one has to be sent again, this one stays behind it.
            if record.sequence_start and worker is not None and not worker.closed:
                self._note(key, request)
        if worker is None or worker.closed:
            return None
        return worker

    def bury(self, worker: WorkerLink, orphans: Iterable[InFlight]) -> set[InFlight]:
        """Remembers the sequences of a dead worker as lost.

        Returns the requests of ``orphans`` whose sequence is lost. The caller must not send them to another worker.
        ``orphans``: all unanswered requests of the worker.
        """
        self._dead.append(worker.incarnation)
        runs: dict[Key, list[InFlight]] = {}
        for request in orphans:
            if request.sequence is not None:
                runs.setdefault(request.sequence, []).append(request)
        states = {key: state for key, state, _ in worker.sequences.sequences()}
        had = [key for key, state in states.items() if state is not SequenceState.ENDED]
        now = self._clock()
        # What has ended is there while its last answers have not left: its client learns that it is lost, by whichever front.
        for key in states:
            self._lost.add(key, now)
        if had:
            _log.warning("the worker on %s had %d sequences: what had begun of them is lost", worker.device, len(had))
        gone: set[InFlight] = set()
        for key, run in runs.items():
            if self._starts.get(key) in run:
                del self._starts[key]
            kept = _runnable_elsewhere(run, states.get(key))
            if len(kept) < len(run):
                gone.update(run[: len(run) - len(kept)])
            if not kept:
                self._lost.add(key, now)
        return gone

    def steps_behind(self, failed: Iterable[InFlight]) -> list[InFlight]:
        """Returns each request in flight that has no worker and came after a failed request of the same sequence.

        ``failed``: requests that have failed and were never sent to a worker.
        If a client began the sequence again after the failed request, the requests from that START on are not returned.
        """
        last = {_sequence(request): request.record.request_id for request in failed if request.record.sequence_id}
        in_flight = list(self._in_flight.values()) if last else []
        anew: dict[tuple[str, int, int | str], int] = {}
        for start in (*in_flight, *self._starts.values()) if last else ():
            number, sequence = start.record.request_id, _sequence(start)
            if start.record.sequence_start and number > last.get(sequence, number):
                anew[sequence] = min(number, anew.get(sequence, number))
        behind: list[InFlight] = []
        for request in in_flight:
            number, sequence = request.record.request_id, _sequence(request)
            if request.worker is None and last.get(sequence, number + 1) <= number < anew.get(sequence, number + 1):
                behind.append(request)
        return behind

    # ---------------------------------------------------------------------------------------------------------- choosing

    def _sole(self, state: ModelState) -> WorkerLink | None:
        """Returns the only worker if it serves the version of ``state``, else None. Call it only if there is one worker."""
        (worker,) = self._workers.values()
        return worker if worker.incarnation in state.workers else None

    def _holder(self, key: Key) -> WorkerLink | None:
        found, newest = None, 0
        for worker in self._workers.values():
            value = worker.sequences.value(key)
            if value > newest and value & 3 != _ENDED:
                found, newest = worker, value
        return found

    def _candidates(self, state: ModelState, gpu: str) -> Sequence[WorkerLink]:
        found = [self._workers[number] for number in state.workers if number in self._workers]
        found = [worker for worker in found if not worker.closed]
        return nearest(found, gpu, state) if gpu else found

    def _place(self, key: Key, slots: Key, state: ModelState, gpu: str) -> WorkerLink | None:
        best, best_rank = None, (0, -1)
        for worker in self._candidates(state, gpu):
            rank = (min(1, _spare(worker, slots)), _rank(key, worker))
            if best is None or rank > best_rank:
                best, best_rank = worker, rank
        if best is not None and (published := best.sequences.slots(slots)) is not None:
            edition, count = best.starts.get(slots, (0, 0))
            best.starts[slots] = (published.edition, count + 1 if edition == published.edition else 1)
        return best

    def _note(self, key: Key, start: InFlight) -> None:
        if len(self._starts) > 2 * len(self._in_flight) + _MORE_STARTS:
            alive = self._in_flight
            self._starts = {key: each for key, each in self._starts.items() if each.record.request_id in alive}
        self._starts[key] = start

    def __repr__(self) -> str:
        return f"<SequenceRouting {len(self._starts)} STARTs, {len(self._lost)} lost>"


def _runnable_elsewhere(run: list[InFlight], state: SequenceState | None) -> list[InFlight]:
    if state is SequenceState.BEGUN or state is SequenceState.ENDED:
        return []
    kept = run
    if state is SequenceState.WAITING:
        # That is said of the sequence that it admitted last; one before it, of the same id, may have run.
        ends = [number for number, request in enumerate(run[:-1]) if request.record.sequence_end]
        kept = run[ends[-1] + 1 :] if ends else run
        if not kept[0].record.sequence_start:
            return []
    return [] if any(request.cancelled for request in kept) else kept


def _rank(key: Key, worker: WorkerLink) -> int:
    return (key[0] ^ worker.seed) * _MIX & _MASK


def _spare(worker: WorkerLink, slots: Key) -> int:
    published = worker.sequences.slots(slots)
    if published is None:
        return 0
    edition, count = worker.starts.get(slots, (0, 0))
    # Those that were sent since it said so are not in what it said.
    return published.free - published.backlog - (count if edition == published.edition else 0)


# ------------------------------------------------------------------------------------------------------ what is known of a model


class SequencedModel:
    """Stores data of one model version with which ``SequenceRouting`` chooses the workers for the version's sequences."""

    __slots__ = ("idle_seconds", "keys", "state")

    def __init__(self, state: ModelState) -> None:
        self.state = state
        self.keys = SequenceKeys(state.name, state.version)
        #: The seconds of silence after which a sequence is forgotten anyway.
        self.idle_seconds = configured(state).sequence_batching.max_sequence_idle_microseconds / 1e6


def nearest(workers: Sequence[WorkerLink], gpu: str, state: ModelState) -> Sequence[WorkerLink]:
    """Returns the ``workers`` on the GPU ``gpu``, or []. Returns all workers if the model of ``state`` may not run there."""
    if not is_meant_for(state, gpu):
        return workers
    return [worker for worker in workers if gpu_of(worker.device) == gpu]


def is_meant_for(state: ModelState, gpu: str) -> bool:
    """Returns whether workers on the GPU ``gpu``, such as "cuda:1", are to load a model. Returns False if ``gpu`` is ""."""
    return bool(gpu) and (not state.devices or any(gpu_of(device) == gpu for device in state.devices))


# --------------------------------------------------------------------------------------------------------------- what was lost


class LostSequences:
    """Remembers which sequences were lost because their worker died. ``most``: how many sequences are remembered at most."""

    def __init__(self, most: int) -> None:
        self._most = most
        #: When each was lost (seconds); the earliest first.
        self._since: dict[Key, float] = {}

    def add(self, key: Key, now: float) -> None:
        """Remembers that the sequence ``key`` was lost at ``now``, in seconds."""
        self._since.pop(key, None)
        while len(self._since) >= self._most:
            del self._since[next(iter(self._since))]
        self._since[key] = now

    def holds(self, key: Key, idle: float, now: float) -> bool:
        """Returns whether the sequence ``key`` was lost in the ``idle`` seconds before ``now``."""
        since = self._since.get(key)
        if since is not None and now - since > idle:
            del self._since[key]
            return False
        return since is not None

    def forget(self, key: Key) -> None:
        """Forgets that the sequence ``key`` was lost, because a client begins the sequence again."""
        self._since.pop(key, None)

    def __len__(self) -> int:
        return len(self._since)

    def __repr__(self) -> str:
        return f"<LostSequences {len(self._since)}>"


def _sequence(request: InFlight) -> tuple[str, int, int | str]:
    return request.prepared.model, request.prepared.version, request.record.sequence_id
