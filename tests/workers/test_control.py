"""Tests what the supervisor asks, and the one answer each question gets, also when things cross."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tensord.config.model_config import empty
from tensord.config.options import RegionsOptions, Workers
from tensord.shm.channel import DescriptorsLost, pair
from tensord.shm.control_records import (
    ControlCall,
    LaneClient,
    LaneClosed,
    LaneLimits,
    LaneOpened,
    Load,
    Reply,
    Stop,
    Unload,
)
from tensord.shm.cuda_regions import Driver
from tensord.shm.descriptors import limit
from tensord.shm.errors import Internal, InvalidArgument
from tensord.shm.figures import Compiles, Figures
from tensord.shm.operations import (
    AwaitRegion,
    ModelStatistics,
    Peer,
    RepositoryIndex,
    ServeLoaded,
    UnregisterRegion,
    WorkerFigures,
)
from tensord.workers.calls.metric_registry import MetricRegistry
from tensord.workers.control import Control
from tensord.workers.daemon_operations import DaemonOperations
from tensord.workers.models.model_table import ModelTable
from tensord.workers.models.model_version import ModelVersion, VersionState
from tensord.workers.parameter_pushes import ParameterPushes
from tensord.workers.regions.region_table import RegionPolicy, RegionTable
from tensord.workers.scheduling.agenda import Agenda
from tensord.workers.threads.inbox import Inbox
from tests.workers.models.test_model_table import version_of


class Bench:
    """A worker's control, with everything around it under the test's control."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.loads: list[Callable[[Any], None]] = []
        self.lanes: list[tuple[int, socket.socket, LaneOpened]] = []
        self.ended: list[int] = []
        self.refused: list[tuple[int, str]] = []
        self.stopped: list[int] = []
        self.models = ModelTable()
        worker: Any = SimpleNamespace(
            open_lane=lambda *opened: self.lanes.append(opened),
            end_lane=self.ended.append,
            lane_refused=lambda opened, error: self.refused.append((opened.peer, str(error))),
            lane_requests=7,
            lane_answers={"OK": 5, "NOT_FOUND": 2},
            adopt=ModelVersion,
            stop=self.stopped.append,
        )
        self.control = Control(
            worker,
            channel := cast(Any, SimpleNamespace(put=lambda record, *fds: self.sent.append(record))),
            self.models,
            regions := RegionTable(RegionPolicy(RegionsOptions()), Driver(), None),
            cast(Any, SimpleNamespace(metrics=MetricRegistry(), compiles=SimpleNamespace(figures=Compiles))),
            thread := cast(Any, SimpleNamespace(do=lambda job, done: self.loads.append(done))),
            DaemonOperations(channel, thread, Inbox()),
            ParameterPushes(self.models, regions, thread, Workers(), Agenda()),
            Inbox(),
        )

    def load(self) -> Callable[[Any], None]:
        self.control.handle(Load("m", 1, "", "", empty("m").SerializeToString()), [])
        return self.loads[-1]

    def serve(self) -> None:
        self.control.handle(ControlCall(0, ServeLoaded("m", 1)), [])
        assert self.sent.pop() == Reply(0, result=b"{}")

    def kinds(self) -> list[str]:
        found = [type(record).__name__ for record in self.sent]
        self.sent.clear()
        return found


def loaded() -> Any:
    return version_of().loaded


def test_load_and_unload() -> None:
    bench = Bench()
    done = bench.load()
    assert bench.sent == []
    done(loaded())
    assert bench.sent[0].reason == ""
    assert bench.kinds() == ["Loaded"]
    assert list(bench.models) == []
    bench.serve()
    assert bench.models.find("m", 0).version == 1
    bench.control.handle(Unload("m", 1), [])
    bench.models.settle()
    assert bench.kinds() == ["Unloaded"]


def test_a_load_that_fails() -> None:
    bench = Bench()
    bench.load()(Internal("no weights"))
    bench.load()(KeyError("x"))
    assert [record.reason for record in bench.sent] == ["no weights", "loading failed with KeyError"]


def test_an_unload_overtakes_a_load() -> None:
    bench = Bench()
    done = bench.load()
    bench.control.handle(Unload("m", 1), [])
    assert bench.kinds() == ["Unloaded"]
    done(loaded())
    bench.models.settle()
    # Each load has its answer, which the supervisor waits for.
    assert "it was unloaded" in bench.sent[0].reason
    assert bench.kinds() == ["Loaded"]
    assert list(bench.models) == []


def test_of_two_loads_the_later_one_counts() -> None:
    """It begins when the earlier one is answered: loads of others run side by side, and the supervisor counts answers."""
    bench = Bench()
    first, _ = bench.load(), bench.load()
    assert bench.loads == [first]
    first(loaded())
    _, second = bench.loads
    assert "another load of it came" in bench.sent[0].reason
    assert bench.kinds() == ["Loaded"]
    assert list(bench.models) == []
    second(loaded())
    assert bench.sent[0].reason == ""
    assert bench.kinds() == ["Loaded"]
    bench.serve()
    assert len(list(bench.models)) == 1


def test_what_was_not_served_ends_when_another_load_of_it_comes() -> None:
    """What is served is always what the last Load brought, whatever the supervisor knew when it had it served."""
    bench = Bench()
    bench.load()(loaded())
    first = bench.models.held["m", 1]
    done = bench.load()
    bench.serve()
    assert (list(bench.models), bench.models.held) == ([], {})
    bench.models.settle()
    assert first.state is VersionState.CLOSED
    done(loaded())
    bench.serve()
    assert bench.models.find("m", 1) is not first


def test_lanes_and_stop() -> None:
    bench = Bench()
    client = LaneClient(Peer("unix", "", 7, 1000, 1000), LaneLimits(1, 2, 3, 4))
    for number, whose in ((9, None), (10, client)):
        ours, theirs = pair()
        bench.control.handle(LaneOpened(number, client=whose), [theirs.detach()])
        (peer, sock, told) = bench.lanes.pop()
        assert (peer, told.client) == (number, whose)
        sock.close()
        assert ours.recv(1) == b""
        ours.close()
    bench.control.handle(LaneClosed(10), [])
    assert bench.ended == [10]
    bench.control.handle(Stop(5), [])
    assert bench.stopped == [5]


def test_a_lane_that_came_without_its_descriptor() -> None:
    """The worker goes on without it."""
    bench = Bench()
    client = LaneClient(Peer("unix", "", 7, 1000, 1000), LaneLimits(1, 2, 3, 4))
    bench.control.refuse(DescriptorsLost([LaneOpened(10, client=client)]))
    bench.control.refuse(DescriptorsLost([LaneOpened(9)]))
    assert bench.refused == [(10, error := f"this process has as many files open as it may, {limit()}"), (9, error)]


def test_every_call_has_one_reply() -> None:
    bench = Bench()
    bench.control.handle(ControlCall(1, ModelStatistics()), [])
    bench.control.handle(ControlCall(2, UnregisterRegion("system", "nobody")), [])
    bench.control.handle(ControlCall(3, AwaitRegion("nobody")), [])
    bench.control.handle(ControlCall(4, RepositoryIndex()), [])
    bench.control.handle(ControlCall(5, WorkerFigures()), [])
    assert [(reply.call_id, reply.code, reply.result) for reply in bench.sent] == [
        (1, "", b'{"model_stats":[]}'),
        (2, "", b"0"),
        (3, "", b""),
        (4, "UNSUPPORTED", b""),
        (5, "", b'[[],{"system":0,"cuda":0},[],7,0,[0,0,0],{"OK":5,"NOT_FOUND":2}]'),
    ]


def test_figures_are_those_of_the_versions_that_serve() -> None:
    bench = Bench()
    bench.load()(loaded())
    bench.serve()
    version = bench.models.find("m", 1)
    version.statistics.copied_byte_size += 12
    bench.control.handle(ControlCall(1, WorkerFigures()), [])
    figures = msgspec.json.decode(bench.sent[-1].result, type=Figures)
    assert figures.versions == (version.figures(0),)
    assert (figures.lane_requests, figures.lane_answers) == (7, {"OK": 5, "NOT_FOUND": 2})
    assert figures.versions[0].counts.copied_byte_size == 12


def test_what_is_not_expected_is_refused_and_its_descriptors_closed() -> None:
    bench = Bench()
    read, write = os.pipe()
    with pytest.raises(InvalidArgument, match="LaneOpened with 2 descriptors"):
        bench.control.handle(LaneOpened(1), [read, write])
    for fd in (read, write):
        with pytest.raises(OSError):
            os.fstat(fd)
