"""Connects this process to a daemon on the same host. Requests go over lanes, or over HTTP if the daemon gives no lanes.

    socket for clients ─▶ daemon     asks for lanes to the workers of a model
    lanes              ─▶ workers    carry requests: one lane to each worker, for all models that the worker serves
    shared memory      ─▶ workers    holds arrays that requests name, and is shared with all workers

HTTP carries the requests for models to which the daemon gives no lanes.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensord_client.answer_memory import HeldResults
from tensord_client.clients_socket import ClientsSocket
from tensord_client.common.call import MAX_WAITING, Call
from tensord_client.common.connection import Connection, Prepared
from tensord_client.common.forks import forgotten_by_children
from tensord_client.common.pending import Pending, WaitEnded
from tensord_client.common.results import Answer, Array, Description
from tensord_client.common.scheduling import UNSCHEDULED
from tensord_client.common.submission import is_refusal, lost_sequence
from tensord_client.errors import (
    CLOSED,
    Cancelled,
    Internal,
    InvalidArgument,
    ServingError,
    Unavailable,
    Unsupported,
    too_many_waiting,
)
from tensord_client.http_channel import Buffer
from tensord_client.lane_request import LaneRequest, Sender
from tensord_client.lane_socket import LaneEnded
from tensord_client.memory import Memory
from tensord_client.native import say_missing, wire
from tensord_client.parameters import ModelParameters, sealed
from tensord_client.placement import Placement, own_fields
from tensord_client.worker_lane import ClientLane, OpenedModel

#: Request ids begin here, so that all of them have the same length on the wire.
_FIRST_ID = 1 << 32
#: Seconds that a request without a deadline waits for a daemon, or a worker, that is being replaced, unless the program says so.
_PATIENCE = 30.0
#: Seconds that the daemon may let one question wait, and between two questions of which it did not let the first wait.
_WAIT, _PAUSE = 0.5, 0.05
#: Seconds between two questions about workers that are to come.
_COMING_AFTER = 1.0


class LaneConnection(Sender, Connection):
    """The connection of this process to a daemon on the same host. Requests go over lanes, or over HTTP if there are none.

    Thread-safe. After a fork, the child process connects anew by itself. The child must not use arrays that the method
    ``empty`` returned before the fork.
    """

    def __init__(
        self,
        path: str,
        over_http: Callable[[Mapping[str, Any]], Connection] | None = None,
        max_results: int = 64,
        timeout: float = 10.0,
        patience: float = _PATIENCE,
        max_waiting: int = MAX_WAITING,
        keyed: bool = False,
    ) -> None:
        """Connects to the daemon's socket for clients, ``clients.sock``, at ``path``.

        Args:
          over_http: connects to the daemon over HTTP. Its argument is a mapping whose item "http" lists the daemon's HTTP
            addresses. If ``over_http`` is None, HTTP is never used.
          max_results: the most answers in workers' memory that this process may hold at a time. While it holds so many, ``ask``
            raises ResultsHeld.
          timeout: the seconds to wait for each answer of the daemon on its socket for clients.
          patience: the seconds that a request waits, within its deadline, for a daemon or worker that is being replaced.
          max_waiting: the most requests that may wait for one worker, and the most that may wait because there is no worker. A
            further request is refused with Unavailable.
          keyed: True if HTTP requests have a header with a key. If the daemon requires a key to change parameter sets, such
            changes are then sent over HTTP.

        Raises: Unavailable: no daemon answers at ``path``.
        """
        self.path = path
        self._keyed = keyed
        self._patience = patience
        self.max_results = max_results
        self.max_waiting = max_waiting
        self._timeout = timeout
        self._over_http = over_http
        self._http: Connection | None = None
        #: Models that are asked over HTTP, with their versions.
        self._apart: set[tuple[str, int]] = set()
        #: The daemon's answer to ``hello``: server, version, wire, lanes, http.
        self.hello: dict[str, Any] = {}
        #: True if the daemon gives lanes and speaks this wire; otherwise requests go over ``hello["http"]``.
        self.lanes = False
        self.is_closed = False
        self._socket: ClientsSocket | None = None
        self._begin()
        self._socket = self._connect()
        forgotten_by_children(self)

    def _begin(self) -> None:
        self._socket = None
        #: Held by the thread that asks the daemon, and by the one that connects over HTTP.
        self._asking, self._http_lock = threading.Lock(), threading.Lock()
        self.memory: Memory = Memory()
        #: One object, replaced when a model is opened: whoever keeps it notices that by one comparison.
        self.opened: list[object] = [object()]
        self.placement: Placement = Placement(self.memory)
        self._ids = itertools.count(_FIRST_ID)
        #: The encoded fields of a request that has none of its own; without a part in C there are no lanes.
        self._bare: bytes = b"" if wire is None else wire.own_fields("", 0, UNSCHEDULED)
        self.held = HeldResults(self.max_results)
        #: Lanes by their numbers at the daemon, and those of a daemon that has gone, whose numbers the next one gives anew.
        self._lanes: dict[int, ClientLane] = {}
        self._former: list[ClientLane] = []
        self._sequences: dict[tuple[str, int | str], ClientLane] = {}
        self.begin()

    # ------------------------------------------------------------------------------------------------- the daemon

    def _connect(self) -> ClientsSocket:
        """Connects to the daemon's socket at ``self.path``. Outside the constructor, callers must hold the lock ``_asking``."""
        connected = ClientsSocket(self.path, self._timeout)
        try:
            self.hello, _ = connected.ask({"hello": {}})
        except BaseException:
            connected.close()
            raise
        self.lanes = bool(self.hello.get("lanes"))
        if self.lanes and wire is None:
            self.lanes = False
            say_missing()
        self.lanes = self.lanes and self.hello.get("wire") == wire.WIRE_VERSION
        return connected

    def http(self) -> Connection:
        """Returns the connection over HTTP, which the first call makes.

        Raises: Unavailable: the daemon cannot be reached over HTTP.  Unsupported: the constructor's ``over_http`` is None.
        """
        with self._http_lock:
            if self._http is None:
                if self._over_http is None:
                    raise Unsupported("the daemon gives no lanes for it, and this connection does not use HTTP")
                self._http = self._over_http(self.hello)
            return self._http

    def open(self, model: str, version: int = 0) -> Description:
        # It decides as well whether requests to the model go over lanes or over HTTP from now on.
        if self.lanes or self._over_http is None:
            try:
                # Lanes outlive a version of their model: what it takes now is the daemon's to say.
                known = self._ask_for(model, version, time.monotonic(), anew=True)
                self._apart.discard((model, version))
                return known.description
            except Unsupported:
                if self._over_http is None:
                    raise
        self._apart.add((model, version))
        self.models.pop((model, version), None)
        self.opened[0] = object()
        return self.http().open(model, version)

    def _ask_for(self, model: str, version: int, until: float, anew: bool = False) -> OpenedModel:
        begun = time.monotonic()
        while True:
            left = max(0.0, until - time.monotonic())
            # Who asks may wait for a daemon that hangs; who has no time yet waits as long as for its own question.
            if not self._asking.acquire(timeout=left if until > begun else self._timeout):
                raise Unavailable(f"the daemon at {self.path} does not answer: {os.strerror(errno.ETIMEDOUT)}")
            try:
                if self.is_closed:
                    raise Unavailable(CLOSED)
                known = self.models.get((model, version))
                if known is not None and known.choose() is not None and (not anew or known.asked_at > begun):
                    return known
                asked, wait = time.monotonic(), min(left, _WAIT)
                try:
                    return self._open(model, version, wait)
                except Unavailable:
                    now = time.monotonic()
                    if now >= until:
                        raise
            finally:
                self._asking.release()
            # The daemon waits for a worker, but neither for the end of a drain nor for room, nor where it is not there.
            if now < asked + wait:
                time.sleep(_PAUSE)

    def _open(self, model: str, version: int, wait: float) -> OpenedModel:
        if self._socket is None or self._socket.has_ended():
            self._socket = None
            self._socket = self._connect()
            self._former.extend(self._lanes.values())
            self._lanes.clear()
        if not self.lanes:
            raise Unsupported("the daemon gives no lanes, or speaks another edition of their wire: ask over HTTP")
        ended = [number for number, lane in self._lanes.items() if not lane.usable]
        question = {"model": model, "version": version, "wait": wait, "ended": ended}
        asked_at = time.monotonic()
        answer, sockets = self._socket.ask({"open": question}, wait)
        try:
            description = Description(answer)
            limits = description.limits
            self.memory.limit(limits["segments"], limits["segment_byte_size"])
            self._close_idle(ended)
            lanes = []
            for each in answer["lanes"]:
                number = each["lane"]
                if each["new"]:
                    self._lanes[number] = ClientLane(
                        sockets.pop(0),
                        number,
                        self.memory,
                        self._ids,
                        self.held,
                        limits["response_byte_size"],
                        limits["in_flight"],
                        1000 * answer.get("spin_us", 0),
                    )
                lanes.append(self._lanes[number])
        except (LookupError, TypeError) as error:
            raise Internal(f"the daemon's answer about model '{model}' is malformed: {error!r}") from error
        finally:
            for sock in sockets:
                sock.close()
        opened = OpenedModel(description, lanes, answer.get("coming", 0), asked_at, time.monotonic())
        if opened.choose() is None:
            raise Unavailable(f"model '{model}' has no worker now")
        self.models[model, version] = opened
        self.opened[0] = object()
        return opened

    def _close_idle(self, ended: Sequence[int]) -> None:
        gone = [lane for lane in self._former if not lane.in_flight]
        self._former = [lane for lane in self._former if lane not in gone]
        gone += [self._lanes.pop(number) for number in ended if not self._lanes[number].in_flight]
        for lane in gone:
            lane.close(Unavailable("the worker process ended"))

    # --------------------------------------------------------------------------------------------------- requests

    def empty(self, shape: int | Sequence[int], dtype: Any) -> Array:
        return self.memory.empty(shape, dtype) if self.lanes else self.http().empty(shape, dtype)  # type: ignore[arg-type]

    def empty_on(self, device: str, shape: tuple[int, ...], dtype: Any) -> Any:
        return self.http().empty_on(device, shape, dtype)

    def model_of(self, call: Call) -> OpenedModel:
        """Returns the description and lanes of a call's model. If this connection does not have them yet, it asks the daemon.

        Raises: Unavailable: there is no worker now.  ServingError: the daemon's answer is any other error.
        """
        known = self.known(call)
        if known is not None:
            return known
        return self._ask_for(call.model, call.version, time.monotonic())

    def ask(self, call: Call) -> Pending[Answer]:
        """Sends a request. Returns an object that waits for the answer.

        If all lanes to the model's workers have ended, the request is sent once that object waits and there is a new lane.

        Raises: InvalidArgument: the request cannot be sent.  ResultsHeld: this process holds ``max_results`` answers already.
          Unavailable: no worker serves the model when this connection first uses the model, the worker of the request's
          sequence has ended, shared memory is full, too many requests wait, or ``close`` was called.  NotFound: the model is
          not served.
        """
        if self._apart and (call.model, call.version) in self._apart:
            return self.http().ask(call)
        if len(self.held.sizes) >= self.held.most and (held := self.held.too_many()) is not None:
            raise held
        model = self.models.get((call.model, call.version)) or self.model_of(call)
        placed = self.placement.place_again(call, model) if call.repeats else self.placement.place(call, model)
        is_bare = call.deadline is None and not call.request_id and call.scheduling == UNSCHEDULED
        return self._submit(LaneRequest(self, call, placed, self._bare if is_bare else own_fields(call)))

    def _submit(self, pending: LaneRequest) -> LaneRequest:
        if not self._send(pending, self.max_waiting):
            with self.laneless_lock:
                waiting = len(self.laneless)
                if waiting >= self.max_waiting:
                    raise too_many_waiting(waiting, self.max_waiting)
                pending.mark_astray()
        return pending

    def exchange(self, call: Call) -> Answer | Pending[Answer]:
        known, held = self.models.get((call.model, call.version)), self.held
        if known is None or len(held.sizes) >= held.most or call.traceparent:
            return self.ask(call)
        sequence_id = call.scheduling.sequence_id
        lane = self.lane_for(call) if known.alone is None or sequence_id else known.alone
        exchange = None if lane is None else lane.exchange or lane.greeted(call.deadline)
        if lane is None or exchange is None:
            return self.ask(call)
        if call.repeats:
            placed = self.placement.place_again(call, known)
            own = call.layout.own
            if placed is call.layout.placed and lane is known.alone and not sequence_id:
                call.layout.lane = lane
        else:
            placed = self.placement.place(call, known)
            is_bare = not call.request_id and call.scheduling == UNSCHEDULED
            own = self._bare if is_bare else own_fields(call)
        came: Answer | Pending[Answer] | None = exchange.ask(self, call, placed, own, call.deadline)
        if came is None:
            return self._submit(LaneRequest(self, call, placed, own_fields(call)))
        if sequence_id:
            self.sent(call, lane)
        if placed.slot is not None and type(came) is Answer:
            placed.slot.give_back()
        return came

    def begun(self, call: Call, placed: wire.Placed, lane: ClientLane, request_id: int) -> LaneRequest:
        """Makes the ``LaneRequest`` of a call whose request C code has already sent, and whose answer has not arrived yet.

        Args:
          placed: the request's inputs, as they were sent.
          lane: the lane that the request was sent on.
          request_id: the request's id.
        """
        pending = LaneRequest(self, call, placed, own_fields(call))
        pending.lane, pending.request_id = lane, request_id
        if call.repeats:
            call.last = pending
        return pending

    def prepare(self, call: Call) -> Prepared:
        if (call.model, call.version) in self._apart:
            return self.http().prepare(call)
        model = self.model_of(call)
        if model.description.streams:
            raise InvalidArgument(
                f"model '{call.model}' answers a request with several responses: it cannot be prepared"
            )
        made = LanePrepared(self, call)
        self.placement.keep_layout(call, model)
        return made

    def config(self, model: str, version: int) -> Mapping[str, Any]:
        try:
            over_http = self.http()
        except ServingError:  # the daemon serves no HTTP that this process can reach
            return {}
        return over_http.config(model, version)

    # ------------------------------------------------------------------------------------------------- parameter sets

    def parameters(self, model: str, version: int) -> ModelParameters:
        return ModelParameters(self.manage, model, version)

    def manage(
        self,
        operation: str,
        model: str,
        version: int,
        name: str = "",
        said: Mapping[str, Any] | None = None,
        pieces: Sequence[Buffer] = (),
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Lists or changes the parameter sets of a model. Returns the daemon's answer.

        If the operation is "parameters", the answer's item "parameters" is the list of sets. If the operation is "push" or
        "revert", the answer's item "number" is the number of the push whose parameters the set has now.

        Args:
          operation: "parameters" lists the sets, "push" changes a set, "drop" removes a set, and "revert" undoes a set's newest
            push.
          version: the model's version. 0 means the newest, or all versions if sets are listed.
          name: the name of the parameter set, or "" to list sets.
          said: more fields for the daemon, such as {"number": 7} to choose a push's number. None means no more fields.
          pieces: the parameters of a push as bytes in the safetensors format. Empty if no parameters are sent.
          timeout: seconds. The call waits for ``timeout`` plus the constructor's ``timeout``. None means no limit.

        Raises: ServingError: the answer is an error, or no answer came in time.
        """
        if self.is_closed:
            raise Unavailable(CLOSED)
        question = {operation: {"model": model, "version": version, **({"set": name} if name else {}), **(said or {})}}
        fds = [sealed(pieces)] if pieces else []
        try:
            with contextlib.closing(ClientsSocket(self.path, self._timeout)) as asked:
                return asked.ask(question, timeout, fds)[0]
        except Unsupported:
            if operation != "parameters" and not self._keyed:
                raise
            over_http: Any = self.http()
            return over_http.manage(operation, model, version, name, said, pieces, timeout)  # type: ignore[no-any-return]
        finally:
            for fd in fds:
                os.close(fd)

    def end_sequence(self, model: str, sequence_id: int | str) -> None:
        lane = self._place_sequence((model, sequence_id), None)
        if lane is not None:
            lane.say(wire.record("E", model, sequence_id))

    def _send(self, pending: LaneRequest, max_waiting: int | None = None) -> bool:
        call, loop, sequence_id = pending.call, _running_loop(), pending.call.scheduling.sequence_id
        while True:
            known = self.models.get((call.model, call.version))
            lane = None if known is None or sequence_id else known.alone
            if lane is None or lane.socket.closing:
                lane = self.lane_for(call)
                if lane is None:
                    return False
            pending.lane = lane
            try:
                pending.request_id = lane.submit(pending, loop, max_waiting)
            except LaneEnded:
                pending.lane = None
                continue
            except ServingError:
                pending.lane = None
                raise
            if sequence_id:
                self.sent(call, lane)
            if lane.queued and call.detached:
                # Perhaps nobody waits for an answer on this lane, which makes room for it.
                with contextlib.suppress(RuntimeError):  # there is no thread for it: whoever waits next does it
                    pending.watch()
            return True

    def lane_for(self, call: Call) -> ClientLane | None:
        """Chooses the lane for a request, and returns it. Returns None if no lane is usable.

        The first request of a sequence gets the lane with the fewest sequences of the model. The later ones get the same lane.
        Any other request gets the least busy lane. Raises Unavailable if the lane of a sequence that has begun has ended.
        """
        sequence_id = call.scheduling.sequence_id
        lane = self._sequences.get((call.model, sequence_id)) if sequence_id else None
        begun = None if call.scheduling.sequence_start else lane
        if begun is not None and begun.usable:
            return begun
        known = self.known(call)
        if begun is not None and (known is None or known.description.sequences):  # others ignore the id
            raise lost_sequence(call.model, sequence_id)
        if known is None:
            return None
        if known.lacks and time.monotonic() - known.opened_at > _COMING_AFTER:
            self._look_for_more(known, call)
        if not (sequence_id and call.scheduling.sequence_start) or len(known.lanes) == 1:
            return known.choose()
        if lane is not None and lane.usable and lane in known.lanes:
            # It is live there, and would keep its slot beside the one that begins.
            return lane
        return known.choose(call.model)

    def sent(self, call: Call, lane: ClientLane) -> None:
        """Records that the sequence of ``call`` is on ``lane``. If ``call`` ends the sequence, forgets the sequence instead."""
        key = call.model, call.scheduling.sequence_id
        if call.scheduling.sequence_end:
            self._place_sequence(key, None)
        elif self._sequences.get(key) is not lane:
            self._place_sequence(key, lane)

    def _place_sequence(self, key: tuple[str, int | str], lane: ClientLane | None) -> ClientLane | None:
        """Records that a sequence is on ``lane`` or, if that is None, has ended. Returns the lane that it was on before."""
        former = self._sequences.pop(key, None)
        if former is not None:
            former.sequences[key[0]].discard(key[1])
        if lane is not None:
            lane.sequences[key[0]].add(key[1])
            self._sequences[key] = lane
        return former

    # ---------------------------------------------------------------------------------- where workers or daemons end

    def _look_for_more(self, known: OpenedModel, call: Call) -> None:
        known.opened_at = time.monotonic()

        def look() -> None:
            with contextlib.suppress(ServingError):
                self._ask_for(call.model, call.version, time.monotonic(), anew=True)

        threading.Thread(target=look, name="tensord-lanes", daemon=True).start()

    def find_lanes(self, call: Call, until: float | None, since: float, anew: bool = False) -> None:
        """Asks the daemon for lanes to workers of the call's model, until this connection has a usable lane to one of them.

        Args:
          until: the time of ``time.monotonic()`` in seconds at which to stop, or None for no deadline.
          since: the time of ``time.monotonic()`` in seconds from which the constructor's ``patience`` counts.
          anew: if True, asks the daemon at least once, even if there is a usable lane.

        Raises: WaitEnded: ``until`` has passed.  Unavailable: ``patience`` seconds have passed since ``since``, or this
          connection was closed.  ServingError: the daemon answered with any other error than Unavailable.
        """
        patience = self._patience + since
        try:
            self._ask_for(call.model, call.version, patience if until is None else min(until, patience), anew)
        except Unavailable:
            if until is not None and time.monotonic() >= until:
                raise WaitEnded from None
            raise

    def _is_elsewhere(
        self, call: Call, until: float | None, since: float, refusal: ServingError, by: ClientLane | None
    ) -> bool:
        before = self.known(call)
        if before is None or before.choose() is None:
            self.find_lanes(call, until, since)
            return True
        if by not in before.lanes:
            return True  # the daemon has been asked since: for another request that was refused, or another daemon
        if not is_refusal(refusal.code, refusal.message, before.is_told):
            return any(not lane.usable for lane in before.lanes)
        try:
            after = self._ask_for(call.model, call.version, time.monotonic(), anew=True)
        except Unavailable:
            # Its worker is being replaced, or the daemon stops, perhaps to be started again.
            self.find_lanes(call, until, since, anew=True)
            return True
        return after.lanes != before.lanes or after.description.version != before.description.version

    def send_claimed(self, pending: LaneRequest, until: float | None) -> None:
        refusal, pending.refusal = pending.refusal, None
        lane, pending.former = pending.former, None
        # Not from now on: those before it, which this thread has sent, may have waited for all their patience.
        call, known, since = pending.call, self.known(pending.call), pending.astray_at
        if refusal is not None:
            if not self._is_elsewhere(call, until, since, refusal, lane):
                raise refusal
        elif pending.strikes and lane is not None and (known is None or known.asked_at <= lane.ended_at):
            # Other workers may be ending as well, with the daemon for example: the request is not to be lost with all of them.
            self.find_lanes(call, until, since, anew=True)
        while not (pending.done() or self._send(pending)):
            self.find_lanes(call, until, since)
        pending.watch_again()

    # ---------------------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """Closes the connection. Requests in flight fail with Cancelled. The caller's arrays stay valid. Idempotent."""
        self.is_closed = True
        with self._asking:
            lanes, self._lanes, self._former = [*self._lanes.values(), *self._former], {}, []
            self.models.clear()
        for lane in lanes:
            lane.close(Cancelled(CLOSED))
        # After the lanes: the daemon ends those of a client that it loses, as if their workers had died.
        if self._socket is not None:
            self._socket.close()
        self.deadlines.close()
        self.memory.close()
        with self._http_lock:
            if self._http is not None:
                self._http.close()
        # Who holds on to this holds no memory by it.
        self.placement = Placement(self.memory)

    def __del__(self) -> None:
        for lane in [*getattr(self, "_lanes", {}).values(), *getattr(self, "_former", ())]:
            lane.leave()

    def forget(self) -> None:
        """Resets the connection in a child process after a fork, and closes the child's copies of the parent's sockets."""
        lanes, sock = [*self._lanes.values(), *self._former], self._socket
        requests = [*self.laneless, *self.claimed]
        self.placement.slots.forget()
        self._begin()
        if sock is not None:
            sock.close()
        for lane in lanes:
            requests += lane.forget()
        for request in requests:
            request.forget()

    def __repr__(self) -> str:
        return f"<LaneConnection {self.path}{' closed' if self.is_closed else f' {len(self._lanes)} lanes'}>"


if wire is not None:

    class LanePrepared(wire.Repeated, Prepared):
        """A request that is sent over lanes many times, each time with the present values of its input arrays."""

        def __init__(self, connection: LaneConnection, call: Call) -> None:
            self._connection = connection
            super().__init__(self._found, call)

        def forget(self) -> None:
            super().forget()
            self._lock = wire.Lock()

        def _found(self, call: Call) -> Answer | Pending[Answer]:
            connection, opened = self._connection, self._connection.opened
            now = opened[0]
            came = connection.exchange(call)
            layout = call.layout
            if (
                type(came) is Answer
                and layout is not None
                and layout.lane is not None
                and not (call.traceparent or call.sources)
            ):
                exchange = layout.lane.exchange
                if exchange is not None:
                    self.keep(exchange, connection, call, layout.placed, layout.own, opened, now, self._lock)
            return came

        ask_slowly = Prepared.__call__


def _running_loop() -> Any:
    """Returns the asyncio event loop that runs in the calling thread, or None if no event loop runs there."""
    # No loop runs while another thread still imports it.
    running = getattr(sys.modules.get("asyncio"), "_get_running_loop", None)
    return None if running is None else running()
