"""Opens and ends the lanes between local clients and workers, and limits how many lanes each user may have.

When a client asks for lanes for a model, the supervisor opens a lane to each worker that serves the model. A connection of a
client to the supervisor never has two lanes to the same worker. A lane serves requests to any model of its worker.

If a client closes its connection to the supervisor, or reports that it no longer uses a lane, the supervisor asks the lane's
worker to end the lane. The lane counts towards the user's limit until the worker reports that the lane has ended, or dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from tensord.config import restrictions
from tensord.config.options import Options
from tensord.daemon.clients.client_messages import MAX_ANSWER, LaneEntry, OpenAnswer, OpenLanes
from tensord.daemon.submit.model_states import ModelStates, configured
from tensord.shm import descriptors
from tensord.shm.channel import pair
from tensord.shm.control_records import LaneClient, LaneClosed, LaneLimits, LaneOpened, ModelGone, ModelState, Readiness
from tensord.shm.errors import Unavailable, Unsupported
from tensord.shm.operations import Peer

if TYPE_CHECKING:
    from tensord.daemon.processes.child import WorkerProcess
    from tensord.daemon.supervisor import Supervisor

#: Bytes of an answer that are left for what is not the model's metadata.
_BESIDE_METADATA = 16 << 10
#: The most descriptors that one message can carry (SCM_MAX_FD).
_MAX_NEW_LANES = 253


@dataclass(slots=True, eq=False)
class ClientConnection:
    """The connection of a client to the daemon's Unix socket for clients, with the lanes that were opened for it."""

    peer: Peer
    #: Incarnation of a worker -> the number of the lane to it.
    lanes: dict[int, int] = field(default_factory=dict)
    #: How many clients had asked for lanes before this one. None: it has not asked yet.
    turn: int | None = None


@dataclass(slots=True)
class _OpenLane:
    """A client's lane that its worker has not yet reported as closed."""

    worker: WorkerProcess
    owner: str
    #: None: the client does not have it any more.
    connection: ClientConnection | None


class ClientLanes:
    """Opens and ends lanes between local clients and workers. Limits the number of lanes and of connected clients."""

    def __init__(self, options: Options, supervisor: Supervisor) -> None:
        clients = options.clients
        self._options = clients
        self._worker_wait = options.requests.worker_wait
        self._spin_us = options.expert.spin_us
        self._restricted = "inference" in restrictions.parse(options.http.restricted_api)
        self._supervisor = supervisor
        self._table = ModelStates()
        self._limits = LaneLimits(
            clients.max_in_flight,
            clients.max_segments,
            clients.segment_byte_size,
            clients.response_byte_size,
            clients.max_owner_response_byte_size,
            clients.max_owner_request_byte_size,
        )
        self._connections: set[ClientConnection] = set()
        self._lanes: dict[int, _OpenLane] = {}
        #: Owner -> lanes of which something is left.
        self._owned: Counter[str] = Counter()
        #: Set, and replaced, with every change of a model, a worker or a lane.
        self._changed = asyncio.Event()
        #: Lanes that were refused, ever.
        self.refused = 0
        self._turns = itertools.count()
        self._draining = False

    # -------------------------------------------------------------------------------------------------------- clients

    def admit(self, peer: Peer) -> ClientConnection:
        """Adds a new connection of a client. Raises Unavailable if there are too many, in total or from this client's user."""
        options = self._options
        if len(self._connections) >= options.max_count:
            raise Unavailable(
                f"{len(self._connections)} clients are connected, at most {options.max_count} are allowed (clients.max_count)"
            )
        owned = sum(connection.peer.owner == peer.owner for connection in self._connections)
        if owned >= options.max_owner_count:
            raise Unavailable(
                f"{owned} clients of this user are connected, at most {options.max_owner_count} are allowed "
                "(clients.max_owner_count)"
            )
        connection = ClientConnection(peer)
        self._connections.add(connection)
        return connection

    def leave(self, connection: ClientConnection) -> None:
        """Removes a connection that has ended, and ends its lanes."""
        self._connections.discard(connection)
        for number in list(connection.lanes.values()):
            self._end(number)

    # ---------------------------------------------------------------------------------------------------------- lanes

    @property
    def offered(self) -> bool:
        """Returns True if clients may have lanes: the options allow lanes, and do not require a secret key for inference."""
        return self._options.lanes and not self._restricted

    async def find(self, connection: ClientConnection, wanted: OpenLanes) -> ModelState:
        """Waits until a worker serves the model version that a client asks for, and returns the state of the version.

        First ends the lanes ``wanted.ended``, which the client no longer uses, and waits until their workers have closed them.
        Raises Unsupported if clients get no lanes from this server.
        Raises NotFound if the model or the version is unknown, or is not to be served.
        Raises Unavailable if the server is draining, if no worker serves the version within ``wanted.wait`` seconds (at most
        ``requests.worker_wait``), or if a worker does not close a lane of ``wanted.ended`` within ``requests.worker_wait`` s.
        """
        if not self._options.lanes:
            raise Unsupported("clients get no lanes on this server (clients.lanes = false): ask over HTTP")
        if self._restricted:
            raise Unsupported(
                "clients get no lanes on this server, because inference needs a key (http.restricted_api): ask over HTTP"
            )
        self._check_drain()
        loop = asyncio.get_running_loop()
        ended = {number for number in wanted.ended if number in connection.lanes.values()}
        for number in ended:
            self._end(number)
        deadline = loop.time() + self._worker_wait
        while ended := ended & self._lanes.keys():
            if loop.time() >= deadline:
                raise Unavailable(f"{len(ended)} lanes of this client have not ended yet: their workers are busy")
            await self._change(deadline - loop.time())
        deadline = loop.time() + min(wanted.wait, self._worker_wait)
        while not self._homes(state := self._table.expect(wanted.model, wanted.version)):
            if loop.time() >= deadline:
                of = f"model '{state.name}' version {state.version}"
                raise Unavailable(
                    f"{of} is being loaded"
                    if state.state == "LOADING"
                    else f"{of} has no worker: one is being replaced"
                )
            await self._change(deadline - loop.time())
        return state

    async def _change(self, seconds: float) -> None:
        """Waits until a model, a worker or a lane changes, for at most ``seconds``. Raises Unavailable if a drain begins."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._check_drain()

    def _check_drain(self) -> None:
        if self._draining:
            raise Unavailable("the server is draining: it opens no lanes")

    def drain(self, draining: bool) -> None:
        """Sets whether clients get no lanes, because the daemon is being drained. Clients that wait for lanes are refused."""
        self._draining = draining
        self._wake()

    def open(
        self, connection: ClientConnection, wanted: OpenLanes, state: ModelState
    ) -> tuple[OpenAnswer, list[socket.socket]]:
        """Opens a lane between a client and each worker that serves a model version and has no lane to the client yet.

        Returns the answer to the client, and the client's sockets of the new lanes, which the caller must close. The answer lists
        the client's lanes to all workers of the version, new or not. If this method raises an error, no new lane is open.
        ``wanted``: the client's request for lanes. ``state``: the state of the model version.
        Raises Unavailable if the client's user would have too many lanes, or if too few file descriptors are free. Raises
        Unsupported if the model's metadata is too long for an answer.
        """
        if len(state.metadata) > MAX_ANSWER - _BESIDE_METADATA:
            raise Unsupported(
                f"the description of model '{state.name}' has {len(state.metadata)} bytes, at most "
                f"{MAX_ANSWER - _BESIDE_METADATA} can be sent here: ask over HTTP"
            )
        if connection.turn is None:
            connection.turn = next(self._turns)
        homes = self._homes(state)
        # A client that asks one thing at a time only ever uses the first.
        first = connection.turn % max(1, len(homes))
        homes = homes[first:] + homes[:first]
        known = {worker.incarnation for worker in homes if worker.incarnation in connection.lanes}
        sockets = self._opened(connection, [worker for worker in homes if worker.incarnation not in known], state.name)
        entries = [
            LaneEntry(connection.lanes[home.incarnation], home.device, home.incarnation not in known) for home in homes
        ]
        return self._answer(state, wanted.version, entries), sockets

    def _opened(self, connection: ClientConnection, workers: list[WorkerProcess], model: str) -> list[socket.socket]:
        owner, options = connection.peer.owner, self._options
        if workers and self._owned[owner] + len(workers) > options.max_owner_lanes:
            raise Unavailable(
                f"{self._owned[owner]} lanes are open by this user, at most {options.max_owner_lanes} are allowed "
                f"(clients.max_owner_lanes), and {len(workers)} more are needed for model '{model}'"
            )
        made: list[socket.socket] = []
        opened: list[int] = []
        what = f"a lane to model '{model}'"
        try:
            for worker in workers:
                with descriptors.needed(what):
                    ours, theirs = pair()
                    made.append(ours)
                    with theirs:
                        descriptors.check_reserve(theirs.fileno(), what)
                        number = self._supervisor.next_incarnation()
                        client = LaneClient(connection.peer, self._limits)
                        worker.send(LaneOpened(number, client=client), theirs.fileno())
                self._lanes[number] = _OpenLane(worker, owner, connection)
                self._owned[owner] += 1
                connection.lanes[worker.incarnation] = number
                opened.append(number)
        except BaseException:
            for sock in made:
                sock.close()
            for number in opened:
                self._end(number)
            raise
        return made

    def withdraw(self, connection: ClientConnection, answer: OpenAnswer) -> None:
        """Ends the lanes that were opened for ``answer``, because the answer could not be sent."""
        for entry in answer.lanes:
            if entry.new and entry.lane in connection.lanes.values():
                self._end(entry.lane)

    def _answer(self, state: ModelState, version: int, entries: list[LaneEntry]) -> OpenAnswer:
        metadata = msgspec.json.decode(state.metadata)
        versions = [str(number) for number in ((version,) if version else self._table.ready_versions(state.name))]
        described = {"name": metadata.pop("name"), "versions": versions, **metadata}
        return OpenAnswer(
            state.name,
            state.version,
            msgspec.Raw(msgspec.json.encode(described)),
            configured(state).max_batch_size,
            state.streams,
            state.sticky,
            state.pure,
            entries,
            self._limits,
            max(0, self._expected(state) - len(entries)),
            self._spin_us,
        )

    def _homes(self, state: ModelState) -> list[WorkerProcess]:
        """Returns the running workers that serve the version of ``state``, at most 253."""
        found = (self._supervisor.workers.by_incarnation.get(incarnation) for incarnation in state.workers)
        return [worker for worker in found if worker is not None and worker.alive and not worker.stopping][
            :_MAX_NEW_LANES
        ]

    def _expected(self, state: ModelState) -> int:
        """Returns how many workers would serve the model version of ``state`` if every worker with a usable device ran."""
        workers = self._supervisor.workers
        wanted = {*(state.devices or workers.devices)} & {*workers.usable}
        return sum(device in wanted for device in workers.slots.values())

    def _end(self, number: int) -> None:
        lane = self._lanes[number]
        self._take(lane)
        lane.worker.send(LaneClosed(number))

    @staticmethod
    def _take(lane: _OpenLane) -> None:
        if lane.connection is not None:
            del lane.connection.lanes[lane.worker.incarnation]
            lane.connection = None

    # --------------------------------------------------------------------------------------------------------- changes

    def lane_ended(self, worker: WorkerProcess, number: int) -> None:
        """Removes the lane ``number``, which its worker reports as closed."""
        lane = self._lanes.get(number)
        if lane is not None and lane.worker is worker:
            self._forget(number)
            self._wake()

    def worker_left(self, worker: WorkerProcess) -> None:
        """Removes the lanes to a worker that has died."""
        for number in [number for number, lane in self._lanes.items() if lane.worker is worker]:
            self._forget(number)
        self._wake()

    def _forget(self, number: int) -> None:
        lane = self._lanes.pop(number)
        self._take(lane)
        self._owned[lane.owner] -= 1
        if not self._owned[lane.owner]:
            del self._owned[lane.owner]

    def model_changed(self, record: ModelState | ModelGone | Readiness) -> None:
        """Stores the new state of a model version, or removes a version that is gone. Does nothing for a ``Readiness``."""
        if isinstance(record, Readiness):
            return
        if isinstance(record, ModelState):
            self._table.update(record)
        else:
            self._table.remove(record)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # ----------------------------------------------------------------------------------------------------- statistics

    def open_by_worker(self) -> Counter[str]:
        """Returns how many lanes clients have to each worker, by the name of the worker."""
        return Counter(lane.worker.name for lane in self._lanes.values() if lane.connection is not None)

    def statistics(self) -> dict[str, Any]:
        """Returns the numbers of client connections and of lanes, in total and by user, and the number of refused lanes."""
        connections = Counter(connection.peer.owner for connection in self._connections)
        lanes = Counter(lane.owner for lane in self._lanes.values() if lane.connection is not None)
        owners: Iterable[str] = sorted(connections | lanes)
        return {
            "connections": connections.total(),
            "lanes": lanes.total(),
            "refused_lanes": self.refused,
            "owners": {owner: {"connections": connections[owner], "lanes": lanes[owner]} for owner in owners},
        }

    def records(self) -> list[dict[str, Any]]:
        """Returns the user, process id and number of lanes of each connected client, as values for JSON."""
        return [
            {
                "front": "clients",
                "owner": connection.peer.owner,
                "pid": connection.peer.pid,
                "lanes": len(connection.lanes),
            }
            for connection in self._connections
        ]

    @property
    def connections(self) -> int:
        """Returns how many clients are connected."""
        return len(self._connections)

    def __repr__(self) -> str:
        return f"<ClientLanes {len(self._connections)} clients, {len(self._lanes)} lanes>"
