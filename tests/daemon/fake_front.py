"""Runs a front without HTTP: it answers a JSON question a line on its sockets with what the supervisor told it."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
from typing import Any

import msgspec

from tensord.daemon.control.channel import ControlChannel
from tensord.daemon.control.shared_counters import FrontCounters, SharedCounters
from tensord.daemon.front.acceptor import Acceptor
from tensord.daemon.front.socket_transport import SocketWatch
from tensord.shm import child_process
from tensord.shm.channel import Channel
from tensord.shm.child_process import die_with_parent
from tensord.shm.control_records import (
    ChildReady,
    ControlCall,
    LaneOpened,
    ModelGone,
    ModelState,
    Reply,
    Serve,
    Start,
    StateAcknowledged,
    StatePublished,
    Stop,
    ToFront,
    WorkerFenced,
)
from tensord.shm.operations import (
    ChangeLog,
    ChangeTrace,
    LoadModel,
    ModelStatistics,
    RegionStatus,
    RegisterSystemRegion,
    RepositoryIndex,
    UnloadModel,
    UnregisterRegion,
)
from tensord.shm.record import decoder

OPERATIONS = {
    kind.__name__: kind
    for kind in (
        ChangeLog,
        ChangeTrace,
        LoadModel,
        ModelStatistics,
        RegionStatus,
        RegisterSystemRegion,
        RepositoryIndex,
        UnloadModel,
        UnregisterRegion,
    )
}


class FakeFront:
    """The fake front of one process."""

    def __init__(self, control_fd: int, listeners: list[socket.socket], counters: FrontCounters) -> None:
        self.listeners = listeners
        self.counters = counters
        self.connections = 0
        self.serving = asyncio.Event()
        self.done = asyncio.Event()
        self.incarnation = 0
        self.server_name = ""
        self.models: dict[str, dict[str, Any]] = {}
        self.lanes: dict[int, list[int]] = {}
        self.fenced: list[int] = []
        #: States that named a worker before its lane was there.
        self.early: list[str] = []
        self.waiting: dict[int, asyncio.Future[Reply]] = {}
        channel = Channel(socket.socket(fileno=control_fd), decoder(ToFront))
        self.connection = ControlChannel(channel, self.received, self.done.set)

    async def run(self) -> None:
        self.connection.start()
        done = asyncio.create_task(self.done.wait())
        serving = asyncio.create_task(self.serving.wait())
        await asyncio.wait((done, serving), return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        sockets = SocketWatch()
        acceptor = Acceptor(self.listeners, self.counters, lambda socket, _: sockets.open(socket, self.connected()))
        if self.serving.is_set():
            acceptor.start()
        await done
        await acceptor.close(1)
        # What was asked is answered.
        while self.waiting:
            await asyncio.sleep(0.01)

    def received(self, record: Any, fds: list[int]) -> None:
        match record:
            case Start(incarnation, _, options):
                child_process.enable_stack_report(*fds)
                self.server_name = msgspec.msgpack.decode(options)["server_name"]
                self.incarnation = incarnation
            case StatePublished(edition):
                self.connection.send(StateAcknowledged(edition))
            case Serve():
                self.serving.set()
                self.connection.send(ChildReady(self.incarnation))
            case LaneOpened(peer):
                self.lanes[peer] = fds
                assert len(fds) == 3, "a lane and its worker's two pages"
                return
            case WorkerFenced(worker):
                self.fenced.append(worker)
                for fd in self.lanes.pop(worker, []):
                    os.close(fd)
            case ModelState(name, version):
                self.models[f"{name}/{version}"] = msgspec.to_builtins(msgspec.structs.asdict(record))
                self.early += [name for worker in record.workers if worker not in self.lanes]
            case ModelGone(name, version):
                self.models.pop(f"{name}/{version}", None)
            case Reply(call_id):
                self.waiting.pop(call_id).set_result(record)
            case Stop():
                self.done.set()

    def connected(self) -> asyncio.Protocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(), self.serve)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.count(1)
        try:
            await self.answer(reader, writer)
        finally:
            self.count(-1)

    def count(self, change: int) -> None:
        self.connections += change
        self.counters.count(self.connections)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            question = msgspec.json.decode(line)
            if "operation" in question:
                call_id = len(self.waiting) + 1
                reply = self.waiting[call_id] = asyncio.get_running_loop().create_future()
                self.connection.send(ControlCall(call_id, OPERATIONS[question["operation"]](**question["fields"])))
                answered = await reply
                answer: dict[str, Any] = {
                    "code": answered.code,
                    "message": answered.message,
                    "result": answered.result.decode(),
                }
            else:
                answer = {
                    "pid": os.getpid(),
                    "server_name": self.server_name,
                    "models": self.models,
                    "lanes": list(self.lanes),
                    "fenced": self.fenced,
                    "early": self.early,
                }
            writer.write(msgspec.json.encode(answer) + b"\n")
            await writer.drain()
        writer.close()


def main() -> None:
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser()
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--listen-fds", required=True)
    parser.add_argument("--counters-fd", type=int, required=True)
    parser.add_argument("--row", type=int, required=True)
    arguments = parser.parse_args()

    async def run() -> None:
        counters = SharedCounters(arguments.counters_fd).front(arguments.row)
        listeners = [socket.socket(fileno=int(fd)) for fd in arguments.listen_fds.split(",")]
        await FakeFront(arguments.control_fd, listeners, counters).run()

    asyncio.run(run())


if __name__ == "__main__":
    main()
