"""The clients' socket: who is admitted, what is asked, memory handed over; no descriptor is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import importlib.metadata
import itertools
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tensord.config.options import ClientsOptions, Http, Options, RegionsOptions, SupervisorOptions
from tensord.daemon.clients import client_socket
from tensord.daemon.clients.client_lanes import ClientLanes
from tensord.daemon.clients.client_messages import OpenLanes
from tensord.daemon.clients.client_socket import ClientSocket
from tensord.daemon.operator.audit import Audit
from tensord.daemon.operator.operations import Operations
from tensord.daemon.regions.region_registry import RegionRegistry
from tensord.shm import descriptors
from tensord.shm.control_records import ControlCall, LaneClosed, LaneOpened, ModelState
from tensord.shm.errors import InvalidArgument, Replaced, Unavailable, Unsupported
from tensord.shm.messages import WIRE_VERSION
from tensord.shm.operations import (
    ANONYMOUS,
    DropParameters,
    ListParameters,
    MemorySource,
    Operation,
    Peer,
    PushParameters,
    RegionStatus,
    RegisterCudaRegion,
    RegisterSystemRegion,
    RevertParameters,
)
from tensord.shm.record import Record
from tests.daemon.regions.test_region_registry import FakeHolder
from tests.daemon_process import PATIENCE

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Holder(FakeHolder):
    async def call(self, operation: Operation, *fds: int) -> tuple[bytes, list[int]]:
        if isinstance(operation, RegisterSystemRegion):
            assert operation.access == "sealed"
            assert len(fds) == 1
        return await super().call(operation, *fds)


@pytest.fixture(autouse=True)
def no_descriptor_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= before


class NoFronts:
    def urls(self, protocol: str) -> list[str]:
        return ["http://127.0.0.1:8000", "unix:/x/http.sock"] if protocol == "http" else []

    async def settled(self) -> None:
        """Returns at once, because there are no fronts."""


class Worker:
    """The parts of a worker that client lanes use; it notes what it is told."""

    alive, stopping = True, False

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.name, self.device = f"worker-{incarnation}", f"cpu:{incarnation}"
        self.told: list[Record] = []
        #: Raised by the next record.
        self.fails: OSError | None = None

    def send(self, record: Record, *fds: int) -> None:
        if self.fails is not None:
            raise self.fails
        assert len(fds) == isinstance(record, LaneOpened)
        self.told.append(record)


def lanes_of(options: Options, *workers: Worker) -> ClientLanes:
    """Returns the lanes of a daemon with these workers, which have the model "m"."""
    pool = SimpleNamespace(
        by_incarnation={worker.incarnation: worker for worker in workers},
        devices=[worker.device for worker in workers],
        usable=[worker.device for worker in workers],
        slots={worker.name: worker.device for worker in workers},
    )
    supervisor: Any = SimpleNamespace(workers=pool, next_incarnation=itertools.count(100).__next__)
    lanes = ClientLanes(options, supervisor)
    has = tuple(worker.incarnation for worker in workers)
    lanes.model_changed(
        ModelState("m", 1, "READY", "", has, metadata=b'{"name": "m"}', config=b'{"max_batch_size": 4}')
    )
    return lanes


class Pushes:
    """Stands for the daemon's parameters and notes the operations it is asked for."""

    def __init__(self) -> None:
        self.asked: list[Operation] = []
        self.contents: list[bytes] = []
        self.peers: list[Peer] = []
        self.sets = b"[]"

    async def push(self, wanted: PushParameters, peer: Peer, memory: int) -> bytes:
        self.asked.append(wanted)
        self.peers.append(peer)
        if wanted.number == 15:
            raise OSError(errno.EMFILE, "too many")
        if wanted.number == 16:
            raise Replaced("number 16 of set 'main' of model 'm' is not newer than 17")
        if memory >= 0:
            self.contents.append(os.pread(memory, 100, 0))
        return b'{"number": 17, "version": 1, "byte_size": 12}'

    async def revert(self, wanted: RevertParameters, peer: Peer) -> bytes:
        self.asked.append(wanted)
        return b'{"number": 16, "version": 1, "byte_size": 12}'

    async def drop(self, wanted: DropParameters, peer: Peer) -> bytes:
        self.asked.append(wanted)
        return b""

    def listed(self, wanted: ListParameters) -> bytes:
        self.asked.append(wanted)
        return self.sets


def listening(
    options: Options,
    registry: RegionRegistry,
    environment: dict[str, str] | None = None,
    *workers: Worker,
    pushes: Pushes | None = None,
) -> ClientSocket:
    """Returns a clients' socket that serves, of a daemon with these workers."""
    fronts: Any = NoFronts()
    parameters: Any = pushes or Pushes()
    lanes = lanes_of(options, *workers)
    audit = Audit()
    operations = operations_of(registry, parameters, fronts, audit)
    served = ClientSocket(options, environment or {}, registry, fronts, lanes, operations, audit)
    served.listen()
    served.serve()
    return served


def operations_of(registry: RegionRegistry, parameters: Any, fronts: Any, audit: Audit) -> Operations:
    """Returns the operations of a daemon without models, of which only those on regions and parameters work."""
    models: Any = SimpleNamespace(lifecycle=None)
    rest: Any = SimpleNamespace()
    return Operations(models, parameters, registry, rest, rest, rest, fronts, audit)


def registry_of(holder: Holder, options: RegionsOptions) -> RegionRegistry:
    """Returns a registry of regions with one worker and no fronts."""
    workers: Any = SimpleNamespace(ready=lambda: [holder], devices=["cpu:0"])
    fronts: Any = SimpleNamespace(publish=lambda place: None)
    return RegionRegistry(options, workers, fronts)


@pytest.fixture
async def registry(tmp_path: Path) -> AsyncIterator[RegionRegistry]:
    holder = Holder(1, -1)
    registry = registry_of(holder, RegionsOptions(max_owner_count=2))
    served = listening(Options(clients=ClientsOptions(socket=str(tmp_path / "s"))), registry)
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o660
    yield registry
    served.close()
    served.close()
    await asyncio.sleep(0)
    registry.close()
    assert not (tmp_path / "s").exists()


def memory(byte_size: int, seals: int = SEALS) -> int:
    fd = os.memfd_create("tensord-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, byte_size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


async def ask(path: Path, *questions: tuple[Any, list[int]]) -> list[dict[str, str]]:
    """Sends questions over one connection; returns the answers and closes their descriptors."""

    def talk() -> list[dict[str, str]]:
        answers = []
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(str(path))
            for question, fds in questions:
                content = question if isinstance(question, bytes) else json.dumps(question).encode()
                socket.send_fds(sock, [content], fds)
                for fd in fds:
                    os.close(fd)
                answers.append(json.loads(sock.recv(1 << 16)))
        return answers

    return await asyncio.to_thread(talk)


def register(name: str, byte_size: int, offset: int = 0) -> dict[str, Any]:
    return {"register": {"name": name, "byte_size": byte_size, "offset": offset}}


async def test_a_region_of_any_kind_is_unregistered(registry: RegionRegistry, tmp_path: Path) -> None:
    """The clients' socket unregisters CUDA regions as well, by name or together with all regions of the user."""
    for name in ("g", ""):
        here = Peer("unix", uid=os.getuid())
        await registry.register(RegisterCudaRegion("g", bytes(64), 0, 64), here)
        assert await ask(tmp_path / "s", ({"unregister": {"name": name}}, [])) == [{}]
        assert registry.status(RegionStatus("cuda", "")) == b"[]"


async def test_sealed_memory_is_registered_and_is_its_owners(
    registry: RegionRegistry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    answers = await ask(
        tmp_path / "s", (register("a", 4096), [memory(4096)]), (register("b", 4096, 4096), [memory(8192)])
    )
    assert answers == [{}, {}]
    records = json.loads(await registry.records(""))
    assert [(r["name"], r["access"], r["owner"], r["pid"]) for r in records] == [
        (name, "sealed", f"uid {os.getuid()}", os.getpid()) for name in "ab"
    ]
    (refused,) = await ask(tmp_path / "s", (register("c", 4096), [memory(4096)]))
    assert "2 regions are registered by this client's user or host, at most 2 are allowed" in refused["error"]
    assert await ask(tmp_path / "s", ({"unregister": {"name": "a"}}, []), ({"unregister": {"name": ""}}, [])) == [
        {},
        {},
    ]
    assert registry.status(RegionStatus("system", "")) == b"[]"
    by = f"by uid {os.getuid()}, pid {os.getpid()}"
    assert [
        record.message.partition(", refused")[0] for record in caplog.records if record.name == "tensord.audit"
    ] == [
        f"audit: registration of region 'a' (4096 bytes of a memfd from 0) {by}",
        f"audit: registration of region 'b' (4096 bytes of a memfd from 4096) {by}",
        f"audit: registration of region 'c' (4096 bytes of a memfd from 0) {by}",
        f"audit: unregistration of region 'a' {by}",
        f"audit: unregistration of all regions {by}",
    ]


@pytest.mark.parametrize(
    ("question", "make", "words"),
    [
        (register("r", 64), lambda: [memory(64, fcntl.F_SEAL_SHRINK)], "lacks the seals F_SEAL_GROW, F_SEAL_SEAL"),
        (register("r", 64), lambda: [os.open("/dev/null", os.O_RDWR)], "is not a memfd"),
        (register("r", 64), lambda: [os.open("/etc/passwd", os.O_RDONLY)], "is not a memfd"),
        (register("r", 64), list, "0 descriptors came with the request, 1 is expected"),
        (register("r", 64), lambda: [memory(64), memory(64)], "2 descriptors came"),
        (register("r", 0), lambda: [memory(64)], "byte_size 0 must be at least 1"),
        (register("r", 64, -4096), lambda: [memory(64)], "offset -4096"),
        (register("r", 1 << 63), lambda: [memory(64)], "Integer overflow|malformed"),
        (register("", 64), lambda: [memory(64)], "1 to 255 characters"),
        ({}, list, "'open', 'register', 'unregister', 'push'"),
        ({"hello": {}, "unregister": {"name": ""}}, list, "'open', 'register', 'unregister', 'push'"),
        ({"hello": {"who": "me"}}, list, "malformed request"),
        ({"open": {}}, list, "malformed request"),
        ({"open": {"model": "m", "version": -1}}, list, "malformed request"),
        ({"open": {"model": "m", "wait": -1}}, list, "malformed request"),
        ({"open": {"model": "m", "ended": [1 << 64]}}, list, "malformed request"),
        ({"register": {"name": "r"}}, list, "malformed request"),
        ({"register": {"name": "r", "byte_size": 1, "path": "/etc"}}, list, "malformed request"),
        (b"\xff\xfe", lambda: [memory(64)], "malformed request"),
    ],
)
async def test_what_is_refused(registry: RegionRegistry, tmp_path: Path, question: Any, make: Any, words: str) -> None:
    (answer,) = await ask(tmp_path / "s", (question, make()))
    assert any(word in answer["error"] for word in words.split("|")), answer
    assert answer["code"] == "INVALID_ARGUMENT"
    assert registry.status(RegionStatus("system", "")) == b"[]"


async def test_memory_goes_with_the_connection_that_handed_it_over(tmp_path: Path) -> None:
    """Two clients; each region goes when its own connection is closed, where ``regions.reclaim`` says so."""
    options = RegionsOptions(reclaim="connection")
    holder = Holder(1, -1)
    registry = registry_of(holder, options)
    served = listening(Options(clients=ClientsOptions(socket=str(tmp_path / "s")), regions=options), registry)

    def hand_over(name: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(str(tmp_path / "s"))
        fd = memory(4096)
        socket.send_fds(sock, [json.dumps(register(name, 4096)).encode()], [fd])
        os.close(fd)
        assert sock.recv(4096) == b"{}"
        return sock

    first, second = await asyncio.to_thread(hand_over, "a"), await asyncio.to_thread(hand_over, "b")
    assert set(holder.regions) == {"a", "b"}
    first.close()
    while "a" in holder.regions:
        await asyncio.sleep(0.001)
    assert set(holder.regions) == {"b"}
    second.close()
    while holder.regions or registry.statistics():
        await asyncio.sleep(0.001)
    served.close()
    await asyncio.sleep(0)
    registry.close()


async def test_a_client_is_told_who_serves_and_where(registry: RegionRegistry, tmp_path: Path) -> None:
    hello, unknown = await ask(tmp_path / "s", ({"hello": {}}, []), ({"open": {"model": "n"}}, []))
    assert hello == {
        "server": "tensord",
        "version": importlib.metadata.version("tensord"),
        "wire": WIRE_VERSION,
        "lanes": True,
        "http": ["127.0.0.1:8000", "unix:/x/http.sock"],
    }
    assert unknown == {"error": "Request for unknown model: 'n' is not found", "code": "NOT_FOUND"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clients": {"lanes": False}}, "clients.lanes = false"),
        ({"http": {"restricted_api": ("inference:key=value",)}}, "http.restricted_api"),
    ],
)
async def test_no_lanes_are_offered(tmp_path: Path, options: dict[str, dict[str, Any]], words: str) -> None:
    clients = ClientsOptions(socket=str(tmp_path / "s"), **options.get("clients", {}))
    registry = registry_of(Holder(1, -1), RegionsOptions())
    served = listening(Options(clients=clients, http=Http(**options.get("http", {}))), registry)
    hello, refused = await ask(tmp_path / "s", ({"hello": {}}, []), ({"open": {"model": "m"}}, []))
    assert hello["lanes"] is False
    assert (words in refused["error"], refused["code"]) == (True, "UNSUPPORTED")
    served.close()
    await asyncio.sleep(0)
    registry.close()


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"max_count": 2}, "2 clients are connected, at most 2 are allowed (clients.max_count)"),
        (
            {"max_owner_count": 2},
            "2 clients of this user are connected, at most 2 are allowed (clients.max_owner_count)",
        ),
    ],
)
async def test_one_client_more_than_may_be_is_told_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bounds: dict[str, int], words: str
) -> None:
    """The second of two goes, so that a later one is admitted."""
    registry = registry_of(Holder(1, -1), RegionsOptions())
    served = listening(Options(clients=ClientsOptions(socket=str(tmp_path / "s"), **bounds)), registry)

    def connected() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(str(tmp_path / "s"))
        return sock

    def hello(sock: socket.socket) -> Any:
        """The answer, or what was said without being asked."""
        with contextlib.suppress(BrokenPipeError):
            sock.send(b'{"hello": {}}')
        return json.loads(sock.recv(1 << 16))

    def talk() -> None:
        with connected() as first:
            assert "wire" in hello(first)
            with connected() as second:
                assert "wire" in hello(second)
                for _ in range(3):
                    with connected() as third:
                        assert hello(third) == {"error": words, "code": "UNAVAILABLE"}
                        assert third.recv(1) == b""
            while True:
                with connected() as later:
                    if "wire" in hello(later):
                        return

    await asyncio.to_thread(talk)
    (line,) = [record.message for record in caplog.records if "is refused" in record.message]
    assert line == f"a connection is refused to uid {os.getuid()} (process {os.getpid()}): {words}"
    served.close()
    await asyncio.sleep(0)
    registry.close()


async def test_the_reserve_of_descriptors_is_left(
    registry: RegionRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three may be open, and are: whichever number the connection gets, it is of the reserve.
    monkeypatch.setattr(descriptors, "limit", lambda: 4)

    def told() -> Any:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(PATIENCE)
            sock.connect(str(tmp_path / "s"))
            return json.loads(sock.recv(1 << 16))

    answer = await asyncio.to_thread(told)
    assert "files are open in a process of the server" in answer["error"]
    assert answer["code"] == "UNAVAILABLE"


@pytest.mark.parametrize("how", ["reserve", "send"])
async def test_no_lane_is_opened_where_not_all_can_be(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor is left for the second of two: the first one's worker ends its lane again, and the client has none."""
    first, second = Worker(1), Worker(2)
    lanes = lanes_of(Options(), first, second)
    connection = lanes.admit(Peer("unix", "", 7, 1000, 1000))
    wanted = OpenLanes("m")
    state = await lanes.find(connection, wanted)
    if how == "send":
        second.fails = OSError(errno.EMFILE, "too many")
    else:
        free = [os.dup(0) for _ in range(3)]
        descriptors.close(free)
        # The first pair takes the lowest two, and keeps one; the worker's of the second pair is beyond what may be used.
        monkeypatch.setattr(descriptors, "_RESERVE", 0)
        monkeypatch.setattr(descriptors, "limit", lambda: free[2])
    with pytest.raises(Unavailable, match="a lane to model 'm'"):
        lanes.open(connection, wanted, state)
    opened, closed = first.told
    assert isinstance(opened, LaneOpened)
    assert closed == LaneClosed(opened.peer)
    assert (second.told, connection.lanes) == ([], {})
    lanes.leave(connection)
    assert len(first.told) == 2


async def test_a_description_that_is_too_large_for_the_socket() -> None:
    lanes = lanes_of(Options(), Worker(1))
    lanes.model_changed(ModelState("m", 1, "READY", "", (1,), metadata=b" " * 200_000, config=b"{}"))
    connection, wanted = lanes.admit(Peer("unix", "", 7, 1000, 1000)), OpenLanes("m")
    with pytest.raises(Unsupported, match="has 200000 bytes, at most 114688 can be sent here"):
        lanes.open(connection, wanted, await lanes.find(connection, wanted))


async def test_lanes_that_cannot_be_handed_over(
    registry: RegionRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host has too many descriptors on their way: the client is told, the worker ends the lane, the connection stays."""
    worker = Worker(1)
    served = listening(Options(clients=ClientsOptions(socket=str(tmp_path / "t"))), registry, None, worker)
    send_fds = socket.send_fds

    def sent(sock: socket.socket, buffers: Any, fds: Any, *more: Any) -> int:
        if fds:
            raise OSError(errno.ETOOMANYREFS, "too many references")
        return send_fds(sock, buffers, fds, *more)

    monkeypatch.setattr(socket, "send_fds", sent)
    refused, hello = await ask(tmp_path / "t", ({"open": {"model": "m"}}, []), ({"hello": {}}, []))
    assert refused == {
        "error": "lanes to model 'm' cannot be handed over now: too many references",
        "code": "UNAVAILABLE",
    }
    assert hello["lanes"]
    assert [type(record) for record in worker.told] == [LaneOpened, LaneClosed]
    served.close()
    await asyncio.sleep(0)


async def test_the_socket_stands_beside_the_control_socket(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By configuration, else in the user's own folder; a second daemon goes without, and says so."""
    registry = registry_of(Holder(1, -1), RegionsOptions())
    (tmp_path / "named").mkdir()
    named = SupervisorOptions(control_socket=str(tmp_path / "named" / "control.sock"))
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    first = listening(Options(), registry, environment)
    second = listening(Options(), registry, environment)
    third = listening(Options(supervisor=named, clients=ClientsOptions(http=False)), registry, environment)
    service = listening(Options(), registry, environment | {"RUNTIME_DIRECTORY": str(tmp_path)})
    assert [each.path for each in (first, third, service)] == [
        tmp_path / "tensord" / "clients.sock",
        tmp_path / "named" / "clients.sock",
        tmp_path / "clients.sock",
    ]
    assert (first.http_path, second.http_path, third.http_path) == (tmp_path / "tensord" / "http.sock", None, None)
    assert "no clients' socket by default (another daemon has it)" in caplog.text
    assert second.describe()["socket"] is None
    with pytest.raises(InvalidArgument, match=r"clients\.socket: '.*/nowhere/s'"):
        listening(Options(clients=ClientsOptions(socket=str(tmp_path / "nowhere" / "s"))), registry)
    for each in (first, second, third, service):
        each.close()
    assert not [*tmp_path.rglob("*.sock")]
    registry.close()


@contextlib.asynccontextmanager
async def pushing(path: Path, **http: Any) -> AsyncIterator[Pushes]:
    registry, pushes = registry_of(Holder(1, -1), RegionsOptions()), Pushes()
    served = listening(Options(clients=ClientsOptions(socket=str(path)), http=Http(**http)), registry, pushes=pushes)
    try:
        yield pushes
    finally:
        served.close()
        await asyncio.sleep(0)
        registry.close()


async def test_a_push_for_which_no_file_can_be_opened(registry: RegionRegistry) -> None:
    """However it comes, it is refused for now, and is no defect of the server."""
    operations = operations_of(registry, Pushes(), NoFronts(), Audit())
    reply = await operations.reply(ControlCall(1, PushParameters("m", 0, "main", MemorySource(12), 15)), ANONYMOUS)
    assert reply.code == "UNAVAILABLE"
    assert reply.message.startswith("no file can be opened for parameters of model 'm'")


async def test_pushes_that_are_refused_here(tmp_path: Path) -> None:
    async with pushing(tmp_path / "s") as pushes:
        pushes.sets = b"[" + b" " * (128 << 10) + b"]"
        answers = await ask(
            tmp_path / "s",
            ({"push": {"model": "m"}}, [memory(1), memory(1)]),
            ({"push": {"model": "m"}}, []),
            ({"push": {"model": "m", "typo": 1}}, []),
            ({"push": {"model": "m"}, "drop": {"model": "m"}}, []),
            ({"parameters": {"model": "m"}}, []),
        )
        words = ["2 descriptors came", "given: none", "unknown field `typo`", "an object with one of", "ask over HTTP"]
        assert [word in answer["error"] for answer, word in zip(answers, words, strict=True)] == [True] * 5
        assert pushes.asked == [ListParameters("m")]
    async with pushing(tmp_path / "t", restricted_api=("parameters:key=value",)) as pushes:
        (answer,) = await ask(tmp_path / "t", ({"push": {"model": "m"}}, [memory(1)]))
        assert answer["code"] == "UNSUPPORTED"
        assert pushes.asked == []


def test_descriptors_that_come_are_not_inherited() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        socket.send_fds(theirs, [b"{}"], [theirs.fileno()])
        content, fds = asyncio.run(client_socket._receive(ours)) or (b"", [])
        assert (content, [os.get_inheritable(fd) for fd in fds]) == (b"{}", [False])
        os.close(fds[0])


async def test_a_wait_that_is_cancelled_when_its_descriptor_becomes_ready() -> None:
    """The loop calls what it has found ready, also where who waited for it was cancelled before: that is no defect."""
    found: list[Callable[[], None]] = []
    waiting = asyncio.create_task(client_socket._ready(lambda _, now: found.append(now), lambda _: True, 0))
    await asyncio.sleep(0)
    waiting.cancel()
    found[0]()
    with pytest.raises(asyncio.CancelledError):
        await waiting
