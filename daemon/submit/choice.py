"""Which worker a request goes to: of those that have its model and its regions, the one with the fewest requests in flight.

What requests of a form can be run by is remembered until anything changes that it depends on: the table of models, the places of
regions, the lanes. Of a model that keeps sequences nothing is remembered: each request goes to the worker that has its own
(``daemon.submit.routing``), and waits for its replacement where that one is gone.
"""

from __future__ import annotations

import contextlib

import msgspec

from daemon.submit.model_table import ModelTable
from daemon.submit.pending import Pending, Worker
from daemon.submit.region_places import RegionPlaces
from daemon.submit.routing import home
from shm.control_records import ModelGone, ModelState, RegionPlace
from shm.errors import InvalidArgument, NotFound
from shm.forms import MAX_FORMS, Form
from shm.messages import SequenceId, Submit


class Choice:
    """One per front, and the owner of its workers."""

    def __init__(self, table: ModelTable, row: int) -> None:
        """``row``: the front's place among those of its protocol."""
        self._table = table
        self._row = row
        self._places = RegionPlaces()
        self._workers: dict[int, Worker] = {}
        #: Of every worker that there ever was: whoever replaces one has its device.
        self._devices: set[str] = set()
        #: Whoever looks here finds some, or nothing.
        self.remembered: dict[Form[Submit] | None, tuple[Worker, ...]] = {}

    @property
    def workers(self) -> dict[int, Worker]:
        """Those that are not fenced, by incarnation. A closed one is never chosen."""
        return self._workers

    def add(self, worker: Worker) -> None:
        """Its lane is open."""
        self._workers[worker.incarnation] = worker
        self._devices.add(worker.device)
        self.remembered.clear()

    def close(self, worker: Worker) -> None:
        """Nothing is sent to it any more."""
        worker.closed = True
        self.remembered.clear()

    def model_changed(self, state: ModelState | ModelGone) -> None:
        """The supervisor told of a version."""
        if isinstance(state, ModelState):
            # Where all workers are idle the first is chosen: another one by each front.
            turn = self._row % max(1, len(state.workers))
            self._table.update(
                msgspec.structs.replace(state, workers=state.workers[turn:] + state.workers[:turn]) if turn else state
            )
        else:
            self._table.remove(state)
        self.remembered.clear()

    def region_placed(self, place: RegionPlace) -> None:
        """Requests that name the region go to that device from now on."""
        self._places.update(place)
        self.remembered.clear()

    def find(self, pending: Pending) -> Worker | None:
        """The one for that request; None: there is none now.

        Raises: NotFound: there is no such model.  InvalidArgument: it names regions of two GPUs, or of another one than its
          sequence is on.
        """
        submit, form = pending.submit, pending.form
        state = self._table.find(submit.model, submit.version)
        device = self._places.device_of(submit) if self._places else ""
        if state.sticky:
            device, form = self._home(state, pending.record.sequence_id, device), None
        workers: list[Worker] = []
        for incarnation in state.workers:
            worker = self._workers.get(incarnation)
            if worker is not None and not worker.closed and (not device or worker.device == device):
                workers.append(worker)
        if not workers:
            return None
        if form is not None:
            if len(self.remembered) >= MAX_FORMS:
                self.remembered.clear()
            self.remembered[form] = tuple(workers)
        return min(workers, key=load)

    def _home(self, state: ModelState, sequence: SequenceId, device: str) -> str:
        """The device of a sequence. A request of none goes anywhere, to be refused. ``device``: of the request's regions."""
        if not sequence:
            return device
        living = {worker.device: worker for worker in self._workers.values() if not worker.closed}
        posts = [name for name in self._devices if name not in living or living[name].incarnation in state.workers]
        found = home(state.name, state.version, sequence, posts) if posts else device
        if device and device != found:
            raise InvalidArgument(
                f"sequence {sequence} of model '{state.name}' is on {found}, its request names a region that is on {device}"
            )
        return found

    def state_of(self, submit: Submit) -> ModelState | None:
        """Of its model; None: that is gone."""
        with contextlib.suppress(NotFound):
            return self._table.find(submit.model, submit.version)
        return None

    def device_of(self, submit: Submit) -> str:
        """Where all of its regions are; "": anywhere, or nowhere."""
        with contextlib.suppress(InvalidArgument):
            return self._places.device_of(submit)
        return ""

    def __repr__(self) -> str:
        return f"<Choice of {len(self._workers)} workers>"


def load(worker: Worker) -> int:
    """Its requests in flight."""
    return len(worker.in_flight)
