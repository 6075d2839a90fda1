"""Runs a worker without models: it speaks the control channel and answers as the names of models tell it to.

It answers what comes on a client's lane with the lane's number and its client's pid. ``end`` ends the lane; after ``hold`` the
supervisor is not told of the lane's end.
``fails`` does not load; ``dies`` kills the process that loads it, ``dies_once`` the first that does; ``never`` is never answered.
``late`` is not served before a moment has passed since it was to be.
``breaks`` kills the first that loads it, too, and no other process can use that device.
Parameters are made of a file's name.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from tensord.daemon.control.channel import ControlChannel
from tensord.shm import child_process
from tensord.shm.channel import Channel
from tensord.shm.child_process import NO_DEVICE, die_with_parent
from tensord.shm.control_records import (
    ChildReady,
    ControlCall,
    LaneClient,
    LaneClosed,
    LaneOpened,
    Load,
    Loaded,
    Reply,
    Start,
    Stop,
    ToWorkerControl,
    Unload,
    Unloaded,
)
from tensord.shm.errors import ServingError
from tensord.shm.figures import Counts, Figures, VersionFigures
from tensord.shm.operations import (
    CommitParameters,
    EndIdleLanes,
    FileSource,
    MakeParameters,
    ModelStatistics,
    RegionRecords,
    RegisterSystemRegion,
    ServeLoaded,
    StageParameters,
    WorkerFigures,
)
from tensord.shm.record import decoder
from tensord.shm.regions import open_object
from tensord.shm.sequence_page import SequencePage
from tensord.shm.status_page import StatusPage, WorkerState


class FakeWorker:
    """The fake worker of one process."""

    def __init__(self, control_fd: int, device: str) -> None:
        self.device = device
        self.page = StatusPage.create()
        self.sequences = SequencePage.create(1)
        self.done = asyncio.Event()
        self.models: dict[tuple[str, int], int] = {}
        self.regions: dict[str, int] = {}
        self.lanes: list[int] = []
        self.client_lanes: dict[int, socket.socket] = {}
        self.held: set[int] = set()
        self.lane_requests = 0
        #: Push -> what was staged; set -> its number and content; versions that no request finds.
        self.staged: dict[int, list[tuple[str, int, bytes]]] = {}
        self.sets: dict[str, tuple[int, bytes]] = {}
        self.holding: set[tuple[str, int]] = set()
        self.folders: dict[str, Path] = {}
        self.began_ns = time.monotonic_ns()
        channel = Channel(socket.socket(fileno=control_fd), decoder(ToWorkerControl))
        self.connection = ControlChannel(channel, self.received, self.done.set)

    async def run(self) -> None:
        self.connection.start()
        while not self.done.is_set():
            if not Path(os.environ["XDG_RUNTIME_DIR"], f"hang-{os.getpid()}").exists():
                self.page.beat(time.monotonic_ns())
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.05)

    def received(self, record: Any, fds: list[int]) -> None:
        match record:
            case Start(incarnation):
                child_process.enable_stack_report(*fds)
                self.page.set_state(WorkerState.IDLE, time.monotonic_ns())
                self.connection.send(ChildReady(incarnation), self.page.fd, self.sequences.fd)
            case LaneOpened(number, client=LaneClient(peer, limits)):
                self.open_client_lane(number, f"{number} {peer.kind} {peer.pid} {limits.in_flight}", *fds)
                fds = []
            case LaneClosed(number):
                self.close_client_lane(number)
            case LaneOpened():
                self.lanes += fds
                fds = []
            case Load(name, version):
                self.load(record, name, version)
            case Unload(name, version):
                self.models.pop((name, version), None)
                self.connection.send(Unloaded(name, version))
            case ControlCall(call_id, operation):
                self.call(call_id, operation, fds)
                return
            case Stop():
                self.done.set()
        for fd in fds:
            os.close(fd)

    def open_client_lane(self, number: int, words: str, fd: int) -> None:
        lane = self.client_lanes[number] = socket.socket(fileno=fd)

        def readable() -> None:
            try:
                content = lane.recv(100)
            except OSError:
                content = b""
            self.lane_requests += bool(content)
            if content == b"hold":
                self.held.add(number)
            if content in (b"", b"end"):
                self.close_client_lane(number)
            else:
                lane.send(words.encode())

        asyncio.get_running_loop().add_reader(lane.fileno(), readable)

    def close_client_lane(self, number: int) -> None:
        lane = self.client_lanes.pop(number, None)
        if lane is not None:
            asyncio.get_running_loop().remove_reader(lane.fileno())
            lane.close()
            if number not in self.held:
                self.connection.send(LaneClosed(number))

    def load(self, load: Load, name: str, version: int) -> None:
        marker = Path(load.model_path, "died")
        if name == "dies" or (name == "dies_once" and not marker.exists()):
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "breaks":
            with contextlib.suppress(FileExistsError):
                marker.touch(exist_ok=False)
                _broken(self.device).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        if name == "never":
            return
        if name == "fails":
            self.connection.send(Loaded(name, version, reason="it always does"))
            return
        self.models[name, version] = self.models.get((name, version), 0) + 1
        self.folders[name] = Path(load.model_path)
        self.holding.add((name, version))
        described = msgspec.json.encode({"name": name, "loads": self.models[name, version]})
        self.connection.send(Loaded(name, version, metadata=described, config=b"{}"))

    def call(self, call_id: int, operation: Any, fds: list[int]) -> None:
        match operation:
            case RegisterSystemRegion(name, key):
                try:
                    sent = () if fds else (open_object(name, key),)
                except ServingError as error:
                    self.connection.send(Reply(call_id, error.code, error.message))
                    return
                self.regions[name] = 1
                self.connection.send(Reply(call_id, result=b"" if fds else b'{"access": "guarded"}'), *sent)
                for fd in (*sent, *fds):
                    os.close(fd)
            case RegionRecords():
                used = {name: (count, 0) for name, count in self.regions.items()}
                self.connection.send(Reply(call_id, result=msgspec.json.encode(used)))
            case WorkerFigures():
                versions = tuple(
                    VersionFigures(
                        name,
                        version,
                        self.began_ns,
                        2,
                        Counts(success=loads, copied_byte_size=os.getpid(), slow={"large": loads}),
                    )
                    for (name, version), loads in self.models.items()
                )
                figures = Figures(versions, {"system": len(self.regions), "cuda": 0}, (), self.lane_requests, 0)
                self.connection.send(Reply(call_id, result=msgspec.json.encode(figures)))
            case MakeParameters(source=FileSource(path)):
                memory = os.memfd_create("fake", os.MFD_ALLOW_SEALING)
                os.write(memory, f"made of {path}".encode())
                self.connection.send(Reply(call_id, result=b"{}"), memory)
                os.close(memory)
            case StageParameters(push, _, _, name, number):
                content = os.pread(fds[0], 1000, 0)
                os.close(fds[0])
                self.staged.setdefault(push, []).append((name, number, content))
                self.connection.send(Reply(call_id, result=b"{}"))
            case CommitParameters(push):
                self.sets |= {name: (number, content) for name, number, content in self.staged.pop(push)}
                self.connection.send(Reply(call_id, result=b"{}"))
            case ServeLoaded(model, version):
                self.holding.remove((model, version))
                reply = functools.partial(self.connection.send, Reply(call_id, result=b"{}"))
                asyncio.get_running_loop().call_later(0.3, reply) if model == "late" else reply()
            case ModelStatistics():
                # What requests find, with the sets that would answer them.
                counts: dict[str, Any] = {"inference_count": 3, "execution_count": 2}
                counts |= {"inference_stats": {"success": {"count": 3, "ns": 6000}}}
                if self.sets:
                    counts["sets"] = {name: number for name, (number, _) in self.sets.items()}
                stats = [{"name": n, "version": str(v), **counts} for n, v in self.models if (n, v) not in self.holding]
                self.connection.send(Reply(call_id, result=msgspec.json.encode({"model_stats": stats})))
            case EndIdleLanes():
                self.connection.send(Reply(call_id, result=b"0"))
            case _:
                self.regions.pop(getattr(operation, "name", ""), None)
                self.connection.send(Reply(call_id))


def _broken(device: str) -> Path:
    return Path(os.environ["XDG_RUNTIME_DIR"], f"broken-{device}")


def main() -> None:
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser()
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--device", required=True)
    arguments = parser.parse_args()
    if _broken(arguments.device).exists():
        sys.exit(NO_DEVICE)

    async def run() -> None:
        await FakeWorker(arguments.control_fd, arguments.device).run()

    asyncio.run(run())


if __name__ == "__main__":
    main()
