"""The worker process: one loop that receives requests, runs models on the device, and sends answers.

An iteration of the loop waits with epoll until work is due, or until records or functions arrive:

    control channel    records of the supervisor, such as orders to load a model
    lanes              requests, cancellations and returned leases of submitters
    inbox              functions that the worker's threads ask the loop to call

Then the iteration runs the batches that are due, and sends answers.

Threads of the worker do what would hold up the loop, such as loading a model, compiling a program, or running a model that is
not jitted. These threads do not touch the loop's state. They post functions to the inbox.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tensord.config.options import Options
from tensord.shm import child_process, descriptors
from tensord.shm.channel import Channel, ChannelClosed, DescriptorsLost, new_buffer
from tensord.shm.control_records import ChildReady, LaneClosed, LaneOpened, Load
from tensord.shm.cuda_regions import DeviceLost, Driver, NoCuda
from tensord.shm.errors import InvalidArgument, ServingError
from tensord.shm.lane import CLIENT_BYTE_SIZE, Instruction, WorkerLane
from tensord.shm.messages import Cancel, EndSequence, Prepare, SegmentClosed, Taken, TraceContext
from tensord.shm.running_time import RunningTime
from tensord.shm.seldom import LineRate, Seldom
from tensord.shm.status_page import LOOP_SLOT, SLOTS, Outputs, WorkerState, model_key
from tensord.workers.control import Control
from tensord.workers.daemon_operations import DaemonOperations
from tensord.workers.devices.device import DeviceName
from tensord.workers.devices.device_cuda import CudaDevice
from tensord.workers.devices.host_staging import StagingPool
from tensord.workers.devices.idle_look import IdleLook
from tensord.workers.devices.pinned_memory import PinnedBudget, PinnedMemory
from tensord.workers.dispatch.dispatcher import FIRST_INSTANCE_SLOT
from tensord.workers.dispatch.fast_path import FastPath
from tensord.workers.dispatch.poller import Datagram, Poller
from tensord.workers.engine import Engine
from tensord.workers.jax_internals import interfaces
from tensord.workers.loading.loader import Loader
from tensord.workers.loading.target import LoadTarget
from tensord.workers.models.loaded_model import LoadedModel
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.native import extensions
from tensord.workers.parameter_pushes import ParameterPushes
from tensord.workers.processor import output_memory
from tensord.workers.programs.run_errors import works
from tensord.workers.regions.lane_segments import LaneSegments
from tensord.workers.regions.region_table import RegionPolicy, RegionTable
from tensord.workers.requests.preparation import Preparation
from tensord.workers.requests.request import Request
from tensord.workers.requests.response_cache import ResponseCache
from tensord.workers.requests.submitter_link import LaneOwner, SubmitterLink
from tensord.workers.threads.inbox import Inbox
from tensord.workers.threads.work_thread import WorkThread

_log = logging.getLogger(__name__)

#: Datagrams taken from one lane in an iteration, so that a busy submitter cannot starve the others; and records, of a client.
_MAX_DATAGRAMS = 32
_MAX_CLIENT_RECORDS = 256
#: When so much has come, on lanes that the C part knows, while requests waited here, these are run before more is received, in so
#: many iterations at most: then the C part takes what has come meanwhile. Clients that ask again at once would keep it out.
_MISSED, _MAX_DRAINING = 16, 32
#: Characters of what is wrong with a lane that are logged.
_MAX_SHOWN = 500
#: An iteration takes no longer than that if nothing happens: its beat is what the supervisor sees of an idle worker.
_BEAT_NS = 1_000_000_000
#: How often records that are not whole are looked at, while there are some.
_HALVES_NS = 1_000_000_000
#: The most lines in a second about lanes of clients that sent what is malformed.
_MAX_LINES = 10


class Worker:
    """Loads and serves models on one device in a loop (``run``), until the supervisor orders a stop or is gone."""

    def __init__(
        self, channel: Channel, options: Options, device_name: DeviceName, device: jax.Device, beat_ns: int = _BEAT_NS
    ) -> None:
        """Prepares the worker for ``run``. ``channel``: the connection to the supervisor, which ``close`` closes.

        ``beat_ns``: the longest time in ns that ``run`` waits for an event.
        """
        self._beat_ns = beat_ns
        self._channel = channel
        self._options = options
        self._inbox = Inbox()
        self._driver = Driver()
        self._cuda: CudaDevice | None = None
        self._pinned: PinnedMemory | None = None
        #: Closes what belongs to the GPU, the last made first.
        self._gpu = contextlib.ExitStack()
        budget: PinnedBudget | None = None
        if device_name.gpu is not None:
            try:
                context = self._driver.context(0)  # its process sees one device
            except NoCuda as error:
                # JAX found it nevertheless: XLA then copies what goes in and out.
                _log.warning("neither CUDA regions nor page-locked memory: %s", error)
            else:
                budget = PinnedBudget(options.workers.pinned_byte_size)
                locking = WorkThread("page-locking", self._inbox)
                staging = self._gpu.enter_context(contextlib.closing(StagingPool(context, budget)))
                locking.do(staging.prepare, lambda _: None)
                self._cuda = self._gpu.enter_context(contextlib.closing(CudaDevice(context, device, staging)))
                self._pinned = self._gpu.enter_context(contextlib.closing(PinnedMemory(context, budget, locking)))
                look = IdleLook(context, self._rests, self._inbox.post, options.workers.idle_timeout)
                self._gpu.enter_context(contextlib.closing(look))
        self._regions = RegionTable(RegionPolicy(options.regions), self._driver, device_name.gpu, self._pinned)
        check = works if self._cuda is None else self._cuda.check
        engine = self._engine = Engine(options, self._inbox, self._regions, device_name.gpu, check)
        self._page, self._sequences, self._models = engine.page, engine.sequences, engine.models
        self._dispatcher = engine.dispatcher
        in_place = device_name.platform == "cpu" and options.expert.place_outputs and output_memory.attach()
        self._page.outputs = Outputs.IN_PLACE if in_place else Outputs.COPIED
        target = LoadTarget.configured(options, device, device_name.gpu, self._cuda, bool(device_name.model), budget)
        thread = WorkThread("loader", self._inbox)
        loader = Loader(target, self._inbox, self._page, self._dispatcher.calls, thread.standing_aside)
        operations = self._dispatcher.calls.daemon = DaemonOperations(channel, thread, self._inbox)
        self._pushes = ParameterPushes(
            self._models, self._regions, WorkThread("parameters", self._inbox), options.workers, self._dispatcher.agenda
        )
        self._control = Control(
            self, channel, self._models, self._regions, loader, thread, operations, self._pushes, self._inbox
        )
        self._cache = ResponseCache(options.response_cache.byte_size)
        #: The submitters, by the descriptor of their lane; clients' lanes also by their number.
        self._submitters: dict[int, SubmitterLink[Request]] = {}
        self._clients: dict[int, SubmitterLink[Request]] = {}
        #: The users of these, by their names.
        self._owners: dict[str, LaneOwner] = {}
        #: The submitters that something is to be flushed to.
        self._unflushed: list[SubmitterLink[Request]] = []
        self._received = new_buffer()
        #: Clients that have sent a part of a record and not yet its end: which of their records, and since when; oldest first.
        self._halves: dict[SubmitterLink[Request], tuple[int, float]] = {}
        self._client_time = RunningTime()
        self._free_slots = list(range(SLOTS - 1, FIRST_INSTANCE_SLOT - 1, -1))
        self._epoll = select.epoll()
        self._epoll.register(channel.fileno(), select.EPOLLIN)
        self._epoll.register(self._inbox.fileno(), select.EPOLLIN)
        self._control_writing = False
        look_ns = options.expert.spin_us * 1000
        self._poller = (
            FastPath(
                self._epoll,
                look_ns,
                self._page,
                LOOP_SLOT,
                self._regions,
                self._sequences,
                self._models,
                self._dispatcher.ensembles.pipelines,
            )
            if extensions.available
            else Poller(self._epoll, look_ns)
        )
        self.lanes = self._dispatcher.lane_answers
        self.lanes.begin(self._poller, options.log.access)
        self._gathers = False  # responses: it looks by itself
        #: Lanes that cannot be written to now, of fronts and of clients. Nothing is taken from such a client.
        self._writing: set[int] = set()
        self._stalled: set[int] = set()
        #: Iterations in which nothing more is received, while what waits is run.
        self._draining = 0
        #: When something is due without an event; None: nothing is.
        self._next_ns: int | None = 0
        #: When to exit although something is in flight; 0: not told to stop.
        self._stop_ns = 0
        self._supervised = True
        #: Limits the lines about ended lanes of clients, and those about what could not be opened or loaded.
        self._refusals = LineRate(_MAX_LINES)
        self._seldom = Seldom()
        #: True if the loop's current iteration has removed an unloaded model version.
        self._gone = False
        #: When the memory of unloaded versions is collected once more, CLOCK_MONOTONIC ns; 0: it is not.
        self._free_again_ns = 0
        #: The thread that runs the garbage collector for them.
        self._collector = WorkThread("collector", self._inbox)

    def run(self, incarnation: int) -> None:
        """Serves requests until the supervisor orders a stop or is gone. ``incarnation``: the number of this worker process.

        Raises DeviceLost if the GPU has failed permanently.
        """
        self._page.set_state(WorkerState.IDLE, time.monotonic_ns())
        self.lanes.trace_as(incarnation, self._options.trace, self._channel, self._dispatcher.agenda)
        pages = self._page.fd, self._sequences.page.fd
        self._channel.put(ChildReady(incarnation, extensions.missing(), interfaces.missing()), *pages)
        # Our modules live as long as the process: the collector need not look at them again and again. Those of models do not, so
        # this comes before the first is loaded. It must go on looking at the rest as often as ever: arrays of XLA can be in
        # cycles, and each may hold megabytes (measured: with rare collections a 16 MiB request took 3 ms more, for fresh pages).
        gc.freeze()
        gc.enable()
        while self.iterate():
            if self._gone or 0 < self._free_again_ns <= time.monotonic_ns():
                self._free_gone()

    def iterate(self) -> bool:
        """Waits for events, receives and runs requests, and sends answers. Returns False if this was the last iteration."""
        for fd, events in self._wait():
            self._handle(fd, events)
        if self._gathers:
            self._inbox.run()
        now_ns = time.monotonic_ns()
        self._page.beat(now_ns)
        self._next_ns = self._dispatcher.run_due(now_ns)
        if self._regions.leaving:
            self._regions.settle()
        if self._models.draining:
            self._gone = self._models.settle()
        if self._sequences.changed:
            self._sequences.tell()
        if self._unflushed:
            self._flush_all()
        if self._channel.waiting:
            self._flush_control()
        if self._sequences.ended and not self._writing:
            self._sequences.settle()
        if self._dispatcher.uncounted:
            for version, execution in self._dispatcher.count():
                self._poller.learn(version, execution)
        if self._driver.lost:
            raise DeviceLost(f"the GPU failed ({self._driver.lost}), and no call on it can succeed any more")
        ends = self._stop_ns and (self._finished() or time.monotonic_ns() >= self._stop_ns)
        return self._supervised and not ends

    def _free_gone(self) -> None:
        """Has another thread collect the garbage of unloaded model versions."""
        # Python does not collect cycles while the worker is idle, and the next model may need their memory on the device.
        # Another thread, because freeing what a model has left may block for ever. Once more after ``beat_ns``, because a lane
        # or a thread that was about to end may still have referred to the memory.
        self._free_again_ns = time.monotonic_ns() + self._beat_ns if self._gone else 0
        self._gone = False
        self._poller.forget_gone()
        self._dispatcher.ensembles.pipelines.forget_gone()
        self._collector.do(child_process.free_garbage, lambda _: None)

    def _rests(self) -> bool:
        at_once = self._next_ns is not None and self._next_ns <= time.monotonic_ns()
        return not at_once and self._dispatcher.idle

    def _wait(self) -> list[tuple[int, int]]:
        now_ns, next_ns = time.monotonic_ns(), self._next_ns
        until_ns = now_ns + self._beat_ns if next_ns is None else min(next_ns, now_ns + self._beat_ns)
        if self._stop_ns:
            until_ns = min(until_ns, self._stop_ns)
        timeout_ns = max(0, until_ns - now_ns)
        at_once = next_ns is not None and next_ns <= now_ns
        idle = not (at_once or self._stop_ns or self._writing) and self._dispatcher.idle
        if self._drains(at_once):
            return []
        gathers = self._dispatcher.responses.look_ns > 0
        if gathers is not self._gathers:
            self._gathers = gathers
            if self._inbox.look(gathers):
                # They came without waking the loop, and nobody else calls them.
                self._inbox.run()
                timeout_ns = 0
        if self.lanes.watched:
            self.lanes.let_pass()
        # Who spins takes the time of whoever makes them.
        woken = self._poller.wait(timeout_ns, idle, gathers)
        if self.lanes.watched:
            self.lanes.passed()
        for fd, answers in woken.unsent:
            self._submitters[fd].lane.channel.adopt(answers)
            self._submitters[fd].flush_soon()
        for fd, datagram in woken.datagrams:
            submitter = self._submitters.get(fd)
            if submitter is not None:
                self._receive(submitter, datagram)
            else:  # an earlier one has closed its lane
                descriptors.close(datagram[1])
        return woken.events

    def _drains(self, at_once: bool) -> bool:
        # Many requests have come while others waited: the next iterations receive none.
        if self._poller.missed >= _MISSED:
            self._poller.missed, self._draining = 0, _MAX_DRAINING
        if not self._draining:
            return False
        # Beside long programs it matters little who serves them, and others should not have to wait for so many of them.
        goes_on = at_once and not self._stop_ns and self._dispatcher.runs_short_programs
        self._draining = self._draining - 1 if goes_on else 0
        return self._draining > 0

    # ----------------------------------------------------------------------------------------------------------- events

    def _handle(self, fd: int, events: int) -> None:
        submitter = self._submitters.get(fd)
        if submitter is not None:
            if events & ~select.EPOLLOUT:
                self._receive(submitter)
            if events & select.EPOLLOUT and not submitter.closed:
                submitter.flush_soon()
        elif fd == self._inbox.fileno():
            self._inbox.drain()
        elif events & ~select.EPOLLOUT:
            self._receive_control()

    def _receive(self, submitter: SubmitterLink[Request], datagram: Datagram | None = None) -> None:
        now_ns = time.monotonic_ns()
        try:
            if datagram is not None:
                self._take(submitter, submitter.lane.read(*datagram), now_ns)
            else:
                self._receive_all(submitter, now_ns)
            if submitter.segments is not None and not submitter.closed:
                self._look_at_half(submitter, now_ns)
        except ChannelClosed:
            self._close_lane(submitter)
        except InvalidArgument as error:
            self._refuse_lane(submitter, error.message)
        except Exception:  # a defect of ours, which a client must not be able to end this process by
            if submitter.segments is None:
                raise
            _log.exception("closing the lane of submitter %d", submitter.peer)
            self._close_lane(submitter)

    def _refuse_lane(self, submitter: SubmitterLink[Request], why: str) -> None:
        """Closes the lane of a submitter that has broken the protocol, and logs why."""
        if submitter.segments is None or self._refusals.admits():
            left_out = self._refusals.say_left_out()
            _log.error("closing the lane of submitter %d: %s%s", submitter.peer, why[:_MAX_SHOWN], left_out)
        self._close_lane(submitter)

    def _look_at_half(self, submitter: SubmitterLink[Request], now_ns: int) -> None:
        """Limits the time for the rest of a record that a client has sent in part. Lifts the limit if the record is complete.

        Raises InvalidArgument: the requests of the client's user take too many bytes.
        """
        number, byte_size = submitter.lane.channel.whole, submitter.lane.channel.half_byte_size
        known = self._halves.get(submitter)
        if byte_size == 0 and known is None:
            return
        submitter.note_half(byte_size)
        if known is None or known[0] != number:
            self._halves.pop(submitter, None)
            if byte_size:
                self._halves[submitter] = number, self._client_time.look()
                if len(self._halves) == 1:
                    self._dispatcher.agenda.put(self._end_halves, now_ns + _HALVES_NS)

    def _end_halves(self, now_ns: int) -> None:
        now, seconds = self._client_time.look(), self._options.clients.body_timeout
        for submitter, (_, since) in list(self._halves.items()):
            if since + seconds > now:
                break
            byte_size = submitter.lane.channel.half_byte_size
            why = f"{byte_size} bytes of a record came, and not its end within {seconds:g} s (clients.body_timeout)"
            self._refuse_lane(submitter, why)
        if self._halves:
            self._dispatcher.agenda.put(self._end_halves, now_ns + _HALVES_NS)

    def _receive_all(self, submitter: SubmitterLink[Request], now_ns: int) -> None:
        """Receives datagrams of a submitter, up to a bound, and carries out their records."""
        count = 0
        for _ in range(_MAX_DATAGRAMS):
            records = submitter.lane.receive() or ()
            self._take(submitter, records, now_ns)
            count += len(records)
            if submitter.segments is not None and (not records or count >= _MAX_CLIENT_RECORDS):
                # Whatever a client sends, others have their turn: mapping its memory takes a while, too.
                return
            # Asking whether more came costs less than trying to receive it in vain.
            if not submitter.lane.ready(0):
                return

    def _take(self, submitter: SubmitterLink[Request], records: Sequence[Instruction], now_ns: int) -> None:
        submit = self._dispatcher.submit if submitter.segments is None else self._dispatcher.submit_of_client
        for record in records:
            if type(record) is Cancel:
                self._dispatcher.cancel(submitter, record.request_id)
            elif type(record) is Taken:
                self._dispatcher.taken(submitter, record)
            elif type(record) is Prepare:
                submitter.learn(record, Preparation(record.prepared, record.number))
                self._poller.forget(submitter, record.number)
            elif type(record) is TraceContext:
                if submitter.segments is not None:
                    submitter.parent = record
                else:
                    submitter.context = record
            elif type(record) is EndSequence:
                self._dispatcher.end_sequence(submitter, record)
            elif type(record) is SegmentClosed:
                # What was learned may lie there.
                self._poller.forget_all(submitter)
                submitter.lane.close_segment(record.segment)
            else:
                submit(submitter, record, now_ns)  # type: ignore[arg-type]
        # What the lane has to say itself.
        if submitter.lane.unsaid:
            submitter.flush_soon()

    def _receive_control(self) -> None:
        try:
            while (received := self._received_control()) is not None:
                records, fds = received
                for record in records:
                    self._control.handle(record, fds if len(records) == 1 else [])
        except ChannelClosed:
            # Without a supervisor nobody would stop this process or use its answers.
            self._supervised = False
        except InvalidArgument as error:
            _log.error("leaving: the supervisor sent what is not understood: %s", error.message)
            self._supervised = False

    def _received_control(self) -> tuple[list[Any], list[int]] | None:
        try:
            return self._channel.receive()
        except DescriptorsLost as lost:
            self._control.refuse(lost)
            return [], []

    # ------------------------------------------------------------------------------------------------------------ lanes

    def open_lane(self, peer: int, sock: socket.socket, opened: LaneOpened) -> None:
        """Begins to receive requests from a submitter on a new lane with the socket ``sock``. ``peer``: the submitter's number.

        ``opened``: the record that came with the socket. If that fails, closes ``sock`` and calls ``lane_refused``.
        """
        client = opened.client
        try:
            with descriptors.needed("a lane"):
                if client is None:
                    lane = self._front_lane(sock)
                    self._open(SubmitterLink(peer, lane, self._unflushed, protocol=opened.protocol or "http"))
                    return
                descriptors.check_reserve(sock.fileno(), "a client's lane")
                limits, name = client.limits, client.peer.owner
                segments = LaneSegments(self._regions, limits)
                owner = self._owners.get(name) or LaneOwner(
                    name, limits.max_owner_response_byte_size, limits.max_owner_request_byte_size
                )
                lane = self._client_lane(sock, segments, owner)
                submitter = SubmitterLink(peer, lane, self._unflushed, segments, owner=owner)
                self._owners[name] = owner
                self._clients[peer] = submitter
                self._open(submitter)
        except (ServingError, OSError) as error:
            sock.close()
            self.lane_refused(opened, error)

    def lane_refused(self, opened: LaneOpened, error: Exception) -> None:
        """Logs why the lane of ``opened`` could not be opened. For a client's lane, sends LaneClosed to the supervisor."""
        who = "client" if opened.client else "front"
        if self._seldom.is_due(who):
            _log.error("a lane of a %s was not opened: %s", who, error)
        if opened.client is not None:
            self._forget_client(opened.peer)
            self._channel.put(LaneClosed(opened.peer))

    def load_waits(self, load: Load, error: Exception, begin: Callable[[], None]) -> None:
        """Logs that ``load`` failed because no file descriptor was free. A second later, calls ``begin`` to repeat the load."""
        if self._seldom.is_due(load.name):
            _log.error("loading model '%s' version %d has to wait: %s", load.name, load.version, error)
        due_ns = time.monotonic_ns() + int(descriptors.AGAIN_SECONDS * 1e9)
        self._dispatcher.agenda.put(lambda _: begin(), due_ns)

    def _front_lane(self, sock: socket.socket) -> WorkerLane:
        arenas, pinned = self._options.arenas, self._pinned
        on_segment = None if pinned is None else pinned.pin_segment
        sizes = arenas.byte_size, arenas.max_byte_size, arenas.keep_byte_size
        return WorkerLane(sock, *sizes, on_segment, writable=pinned is not None)

    def _client_lane(self, sock: socket.socket, segments: LaneSegments, owner: LaneOwner) -> WorkerLane:
        most = segments.limits.response_byte_size
        keep = min(most, self._options.arenas.keep_byte_size)
        on_segment = None if self._pinned is None else self._pinned.pin_segment
        first = min(CLIENT_BYTE_SIZE, most)
        return WorkerLane(sock, first, most, keep, on_segment, segments=segments, buffer=self._received, budget=owner)

    def _open(self, submitter: SubmitterLink[Request]) -> None:
        fd = submitter.lane.fileno()
        try:
            self._epoll.register(fd, select.EPOLLIN)
        except OSError:
            submitter.lane.close()
            raise
        self._submitters[fd] = submitter
        self._poller.open(submitter)
        # Who has a lane waits for its version, which the kernel may have had no memory to send.
        submitter.flush_soon()

    def end_lane(self, peer: int) -> None:
        """Ends the lane of a client. Does nothing if the lane has ended already. ``peer``: the client's number."""
        submitter = self._clients.get(peer)
        if submitter is not None:
            self._close_lane(submitter)

    def end_idle_lanes(self) -> int:
        """Ends all clients' lanes on which neither a request nor an answer is in flight. Returns how many lanes remain."""
        for submitter in list(self._clients.values()):
            if not (submitter.in_flight or submitter.lane.channel.waiting or submitter.lane.ready(0)):
                self._close_lane(submitter)
        return len(self._clients)

    def _close_lane(self, submitter: SubmitterLink[Request]) -> None:
        fd = submitter.lane.fileno()
        self._dispatcher.drop(submitter)
        self._poller.close_lane(submitter)
        self._epoll.unregister(fd)
        del self._submitters[fd]
        self._writing.discard(fd)
        self._stalled.discard(fd)
        submitter.lane.close()
        self._halves.pop(submitter, None)
        if submitter.segments is not None:
            submitter.leave()
            self._forget_client(submitter.peer)
            self._channel.put(LaneClosed(submitter.peer))

    def _forget_client(self, peer: int) -> None:
        submitter = self._clients.pop(peer, None)
        owner = None if submitter is None else submitter.owner
        if submitter is not None and owner is not None and owner.leave(submitter):
            del self._owners[owner.name]

    def _flush_all(self) -> None:
        unflushed = self._unflushed[:]
        self._unflushed.clear()
        for submitter in unflushed:
            if not submitter.closed:
                self._flush(submitter.lane.fileno(), submitter)

    def _flush(self, fd: int, submitter: SubmitterLink[Request]) -> None:
        submitter.unflushed, lane, client = False, submitter.lane, submitter.segments is not None
        waiting = self._stalled if client else self._writing
        if (writing := not lane.flush()) != (fd in waiting):
            if client:
                # Who does not take answers is asked nothing more until it does: what waits for it stays bounded.
                self._epoll.modify(fd, select.EPOLLOUT if writing else select.EPOLLIN)
            else:
                self._watch(fd, writing)
            waiting ^= {fd}
        if client and (writing or submitter.unsent_byte_size):
            submitter.unsent_byte_size = lane.channel.waiting_byte_size
            submitter.count_waiting()
        if lane.published.renumbered != submitter.renumbered:
            submitter.renumbered = lane.published.renumbered
            self._poller.forget_all(submitter)

    def _flush_control(self) -> None:
        if (writing := not self._channel.flush()) != self._control_writing:
            self._watch(self._channel.fileno(), writing)
            self._control_writing = writing

    def _watch(self, fd: int, writing: bool) -> None:
        """Has epoll report input and, if ``writing``, that the descriptor can be written to."""
        self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if writing else 0))

    @property
    def lane_requests(self) -> int:
        """The number of requests that have arrived on clients' lanes."""
        return self._dispatcher.lane_requests + self._poller.lane_requests

    @property
    def lane_answers(self) -> dict[str, int]:
        """The number of final answers on clients' lanes, by error code; "OK": no error."""
        answers = self.lanes.counts
        return {**answers, "OK": answers["OK"] + self._poller.lane_requests}

    # ------------------------------------------------------------------------------------------------- models, the end

    def adopt(self, loaded: LoadedModel) -> ModelVersion:
        """Makes and returns a ``ModelVersion`` of ``loaded``. Also makes a ``ModelVersion`` of each of ``loaded.derivatives``.

        Each instance of these models gets an entry on the worker's status page if an entry is free.
        """
        for instance in loaded.instances:
            # Those of the version before it have one.
            instance.status_slot = instance.status_slot or (self._free_slots.pop() if self._free_slots else SLOTS)
            instance.page_key = model_key(loaded.name, loaded.version)
        version = self._engine.adopt(loaded)
        version.derivatives = [self.adopt(derivative) for derivative in loaded.derivatives]
        if loaded.cached and self._cache.max_byte_size:
            version.use(self._cache)
        elif loaded.cached:
            _log.warning(
                "model '%s' asks for the response cache, and there is none: response_cache.byte_size is 0", loaded.name
            )
        version.when_closed(
            lambda: self._free_slots.extend(
                instance.status_slot for instance in version.ended_instances if 0 < instance.status_slot < SLOTS
            )
        )
        return version

    def stop(self, grace_ns: int) -> None:
        """Makes the worker's event loop end after all requests are answered, at the latest in ``grace_ns`` nanoseconds."""
        now_ns = time.monotonic_ns()
        self._stop_ns = now_ns + grace_ns
        self._page.resting = WorkerState.STOPPING
        for version in self._models:
            version.planner.stop()
        self._dispatcher.ask_all()
        self._page.set_state(WorkerState.STOPPING, now_ns)

    def _finished(self) -> bool:
        """If all requests are answered, begins to unload all models. Returns whether all models have been unloaded."""
        for fd, submitter in self._submitters.items():
            if submitter.in_flight or (submitter.lane.channel.waiting and fd not in self._stalled):
                return False
        for version in (*self._models, *self._models.held.values()):
            self._models.remove(version.name, version.version, lambda: None)
        self._models.settle()
        return not self._models.draining

    def close(self) -> None:
        """Closes all lanes, regions and descriptors of the worker. Does not wait for threads that still run a model."""
        for submitter in list(self._submitters.values()):
            self._close_lane(submitter)
        self.lanes.close()
        self._poller.close()
        self._pushes.close()
        self._regions.close()
        self._gpu.close()
        self._driver.close()
        self._epoll.close()
        self._inbox.close()
        self._engine.close()
        self._channel.close()
