"""Chooses the worker for each request: among the workers that have the model, the one with the fewest requests in flight.

If the request's regions are on a GPU where the model may run, only workers on this GPU are considered.
The module ``tensord.daemon.submit.sequences`` chooses the workers for requests of a sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import msgspec

from tensord.daemon.submit.in_flight import InFlight, WorkerLink
from tensord.daemon.submit.model_states import ModelStates
from tensord.daemon.submit.sequences import SequencedModel, SequenceRouting, is_meant_for, nearest
from tensord.shm.common.submission import least_busy
from tensord.shm.control_records import ModelGone, ModelState, RegionPlace
from tensord.shm.errors import ServingError
from tensord.shm.messages import PreparedRequest, RegionSlice
from tensord.shm.prepared import MAX_NUMBERS, Numbered

#: The number of workers that were full of sequences and died whose sequences are remembered.
_LOST = 4


class Routing:
    """Chooses the worker for each request of a front. Stores the front's connections to workers."""

    def __init__(self, table: ModelStates, row: int, in_flight: Mapping[int, InFlight], max_sequences: int) -> None:
        """Starts without workers.

        Args:
          table: the states of all model versions.
          row: the number of this front among the fronts of its protocol. Fronts with other numbers prefer other idle workers.
          in_flight: all requests of the front that are in flight, by id.
          max_sequences: the most sequences that one worker keeps.
        """
        self._table = table
        self._row = row
        self._places = RegionPlaces()
        #: The workers by incarnation, without those whose process is certainly gone (fenced). One that is ``closed`` is still
        #: here, but is never chosen.
        self.workers: dict[int, WorkerLink] = {}
        self._sequences = SequenceRouting(in_flight, self.workers, _LOST * max_sequences)
        self.steps_behind = self._sequences.steps_behind
        #: Whoever looks here finds some, or nothing.
        self.remembered: dict[Numbered[PreparedRequest] | None, tuple[WorkerLink, ...]] = {}
        #: The model of each kind of request that is for a model with sequences.
        self._sequenced: dict[Numbered[PreparedRequest] | None, SequencedModel] = {}

    def _forget(self) -> None:
        self.remembered.clear()
        self._sequenced.clear()

    def add(self, worker: WorkerLink) -> None:
        """Adds a worker whose lane is open, so that requests can be sent to it."""
        self.workers[worker.incarnation] = worker
        self._forget()

    def close(self, worker: WorkerLink) -> None:
        """Marks the link of a worker as closed, so that no more requests are sent to the worker."""
        worker.closed = True
        self._forget()

    def bury(self, worker: WorkerLink) -> set[InFlight]:
        """Removes a dead worker. Returns the worker's unanswered requests whose sequences were lost with the worker."""
        del self.workers[worker.incarnation]
        for request in worker.in_flight.values():
            request.worker = None
        return self._sequences.bury(worker, worker.in_flight.values())

    def model_changed(self, state: ModelState | ModelGone) -> None:
        """Stores the state of a model version, or its removal, by which later requests are routed."""
        self._sequences.model_changed(state.name, state.version)
        if isinstance(state, ModelState):
            # Where all workers are idle the first is chosen: another one by each front.
            turn = self._row % max(1, len(state.workers))
            self._table.update(
                msgspec.structs.replace(state, workers=state.workers[turn:] + state.workers[:turn]) if turn else state
            )
        else:
            self._table.remove(state)
        self._forget()

    def region_placed(self, place: RegionPlace) -> None:
        """Stores on which GPU a region lies. Requests with the region prefer workers on that GPU."""
        self._places.note(place)
        self._forget()

    def find(self, request: InFlight, state: ModelState | None = None) -> WorkerLink | None:
        """Returns the worker to which a request should be sent, or None if no worker can run it now.

        ``state``: the state of the model. If it is None, it is looked up.
        Raises NotFound if the model does not exist. Raises Unavailable if the model cannot be served now, or if the sequence
        of the request was lost with its worker.
        """
        numbered = request.numbered
        sequenced = self._sequenced.get(numbered)
        if sequenced is not None and request.record.sequence_id:
            return self._sequences.find(request, sequenced, "")
        prepared: PreparedRequest = request.record.prepared if numbered is None else numbered.prepared  # type: ignore[assignment]
        if state is None:
            state = self._table.expect(prepared.model, prepared.version)
        gpu = self._places.gpu_of(prepared) if self._places else ""
        if state.sticky:
            # A request of no sequence goes anywhere, to be refused.
            if request.record.sequence_id:
                sequenced = self._sequences.model(state)
                if numbered is not None and not self._places:
                    if len(self._sequenced) >= MAX_NUMBERS:
                        self._sequenced.clear()
                    self._sequenced[numbered] = sequenced
                return self._sequences.find(request, sequenced, gpu)
            numbered = None
        workers: list[WorkerLink] = []
        for incarnation in state.workers:
            worker = self.workers.get(incarnation)
            if worker is not None and not worker.closed:
                workers.append(worker)
        if gpu:
            workers = [*nearest(workers, gpu, state)]
        if not workers:
            return None
        if numbered is not None:
            if len(self.remembered) >= MAX_NUMBERS:
                self.remembered.clear()
            self.remembered[numbered] = tuple(workers)
        return workers[0] if len(workers) == 1 else least_busy(workers)

    def state_of(self, prepared: PreparedRequest) -> ModelState | None:
        """Returns the state of the model that ``prepared`` asks for, or None if it is unknown or cannot be served now."""
        with contextlib.suppress(ServingError):
            return self._table.expect(prepared.model, prepared.version)
        return None

    def is_loading(self, model: str, version: int) -> bool:
        """Returns whether a model version is being loaded and does not serve. ``version`` 0 means the newest version."""
        with contextlib.suppress(ServingError):
            return self._table.expect(model, version).state == "LOADING"
        return False

    def gpu_of(self, prepared: PreparedRequest) -> str:
        """If the model may run on the GPU with most bytes of the request's regions, returns this GPU. Otherwise returns ""."""
        gpu, state = self._places.gpu_of(prepared), self.state_of(prepared)
        return gpu if state is not None and is_meant_for(state, gpu) else ""

    def __repr__(self) -> str:
        return f"<Routing to {len(self.workers)} workers>"


# ------------------------------------------------------------------------------------------------------------- regions on GPUs


class RegionPlaces(dict[str, str]):
    """Maps the name of each region in GPU memory to the GPU where the region lies, such as "cuda:1"."""

    __slots__ = ()

    def note(self, place: RegionPlace) -> None:
        """Records on which GPU a region lies. If ``place`` has no device, the region is gone."""
        if place.device:
            self[place.region] = place.device
        else:
            self.pop(place.region, None)

    def gpu_of(self, prepared: PreparedRequest) -> str:
        """Returns the GPU, such as "cuda:1", that has most bytes of the regions in ``prepared``, or "" if none is on a GPU."""
        sizes: dict[str, int] = {}
        for place in _regions(prepared):
            if gpu := self.get(place.region, ""):
                sizes[gpu] = sizes.get(gpu, 0) + place.byte_size
        return max(sizes, key=lambda gpu: sizes[gpu], default="")


def _regions(prepared: PreparedRequest) -> list[RegionSlice]:
    inputs = [tensor.region for tensor in prepared.inputs if tensor.region is not None]
    return inputs + [output.region for output in prepared.outputs if output.region is not None]
