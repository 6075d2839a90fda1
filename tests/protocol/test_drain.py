"""A daemon that is drained: not ready at once, serving on for a while, then nothing new, and done when nothing is in flight."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tensord.protocol import reflection_pb2
from tensord.shm.channel import ChannelClosed
from tensord.shm.messages import PreparedRequest
from tests import repositories, scrapes
from tests.daemon.clients.lane_client import LaneClient
from tests.daemon_process import PATIENCE, ROOT, DaemonProcess, tensorctl_status, wait_until
from tests.raw_lane import RawLane, tensor

BODY = [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]
REFUSED = "the server is draining: it takes no new requests"
#: What tensorctl says of a drain that no balancer has time to notice.
AT_ONCE = (
    "tensorctl: requests are refused at once: `--time 10` gives a balancer ten seconds to notice; a restart behind systemd's "
    "sockets needs no drain\n"
)


class Drained(DaemonProcess):
    """A daemon with one model, and tensorctl for it."""

    def __init__(self, folder: Path, drain_time: float, **more: float) -> None:
        self.control = folder / "control.sock"
        supervisor = {"control_socket": str(self.control), "drain_time": drain_time}
        clients = {"socket": str(folder / "clients.sock")}
        super().__init__(folder, [folder / "models"], {"supervisor": supervisor | more, "clients": clients})

    def tensorctl(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tensord.daemon.ctl", "--socket", str(self.control), *arguments]
        return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def told(self, *arguments: str) -> tuple[int, str]:
        """Runs tensorctl; returns its exit status and its error output."""
        with self.tensorctl(*arguments) as process:
            errors = process.communicate(timeout=PATIENCE)[1]
        return process.returncode, errors

    @property
    def phase(self) -> str:
        return str(tensorctl_status(self.control)["phase"])

    @property
    def ready(self) -> bool:
        return self.get("/v2/health/ready")[0] == 200


@pytest.fixture
def serve(leaves_nothing: None, tmp_path: Path) -> Iterator[Any]:
    repositories.scale_model(tmp_path / "models")
    running: list[Drained] = []

    def start(drain_time: float = 0.0, **more: float) -> Drained:
        daemon = Drained(tmp_path, drain_time, **more)
        daemon.start()
        running.append(daemon)
        daemon.wait_ready()
        return daemon

    yield start
    for daemon in running:
        with contextlib.suppress(ProcessLookupError):
            daemon.signal(signal.SIGTERM)
            # The second one does not wait for the time of a drain.
            wait_until(lambda: "stopping: " in daemon.log, "the daemon to stop")  # noqa: B023
        daemon.stop()


def test_what_is_in_flight_is_finished_and_nothing_new_begun(serve: Any, tmp_path: Path) -> None:
    repositories.sleepy_model(tmp_path / "models")
    daemon: Drained = serve()
    answers: list[tuple[int, Any]] = []

    def ask() -> None:
        delay = [{"name": "DELAY_MS", "shape": [1], "datatype": "INT32", "data": [0]}]
        told = {"began": str(tmp_path / "began"), "until": str(tmp_path / "until")}
        answers.append(daemon.infer("sleepy", delay, parameters=told))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until((tmp_path / "began").exists, "the request to run", daemon)
    draining = daemon.tensorctl("drain", "--wait")
    daemon.wait_log("new requests are refused")
    status, answer = daemon.infer("scale", BODY)
    assert (status, answer["error"]) == (503, REFUSED)
    assert (daemon.ready, daemon.told("health")[0]) == (False, 1)
    with grpc.insecure_channel(daemon.grpc_url) as channel:
        asked = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert asked.status == health_pb2.HealthCheckResponse.NOT_SERVING
        request = service_pb2.ModelInferRequest(model_name="scale")
        request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
        request.raw_input_contents.append(np.ones(4, np.float32).tobytes())
        with pytest.raises(grpc.RpcError) as refused:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
        assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.UNAVAILABLE, REFUSED)
    # It waits for the request.
    assert (draining.poll(), daemon.phase) == (None, "draining")
    (tmp_path / "until").touch()
    assert (draining.communicate(timeout=PATIENCE)[1], draining.returncode) == (AT_ONCE, 0)
    asking.join(PATIENCE)
    assert [status for status, _ in answers] == [200]
    assert daemon.phase == "drained"
    figures = scrapes.scrape(daemon.metrics_url)
    counted = {"front": "http-0", "protocol": "http", "reason": "draining"}
    assert figures.value("tensord_front_refused_total", **counted) == 1
    assert figures.value("tensord_ready") == 0
    assert daemon.told("drain", "--wait") == (0, AT_ONCE)
    assert daemon.told("undrain") == (0, "")
    assert (daemon.ready, daemon.phase, daemon.infer("scale", BODY)[0]) == (True, "serving", 200)
    assert daemon.told("undrain") == (0, "")


def test_a_drain_that_takes_longer_ends_all_the_same(serve: Any, tmp_path: Path) -> None:
    """Who waits for it is told after ``exit_timeout`` what is in flight; it goes on, and who asks again waits again."""
    repositories.sleepy_model(tmp_path / "models")
    daemon: Drained = serve(exit_timeout=0.5)
    delay = [{"name": "DELAY_MS", "shape": [1], "datatype": "INT32", "data": [0]}]
    told = {"began": str(tmp_path / "began"), "until": str(tmp_path / "until")}
    asking = threading.Thread(target=daemon.infer, args=("sleepy", delay), kwargs={"parameters": told})
    asking.start()
    wait_until((tmp_path / "began").exists, "the request to run", daemon)
    # Others may not have said yet that nothing is in flight with them.
    late = r"tensorctl: requests are still in flight after 0\.5 s: (\S+, )*http-0(, \S+)*\n"
    for _ in range(2):
        status, said = daemon.told("drain", "--time", "0", "--wait")
        assert status == 1
        assert re.fullmatch(late, said)
        assert daemon.phase == "draining"
    (tmp_path / "until").touch()
    asking.join(PATIENCE)
    wait_until(lambda: daemon.phase == "drained", "the drain to end", daemon)
    assert daemon.told("drain", "--time", "0", "--wait") == (0, "")


def test_a_front_that_is_replaced_refuses_as_well(serve: Any) -> None:
    daemon: Drained = serve()
    assert daemon.told("drain", "--time", "0", "--wait") == (0, "")
    (front,) = daemon.fronts
    front.kill()
    daemon.wait_log(r"http-0 \(process \d+\) is up", 2)
    assert (daemon.infer("scale", BODY)[1]["error"], daemon.ready) == (REFUSED, False)


def test_calls_that_are_owed_nothing_are_not_waited_for(serve: Any) -> None:
    """
    1. Calls are open in which no request waits for its answer: of health, reflection and inference, half-closed and not.
    2. The daemon is drained, and stopped.
    Result: neither waits for them, and who watches its health has heard of it.
    """
    daemon: Drained = serve()
    watched = health_pb2.HealthCheckRequest()
    listed = reflection_pb2.ServerReflectionRequest(list_services="")
    done = threading.Event()

    def once(*messages: Message) -> Iterator[bytes]:
        yield from (message.SerializeToString() for message in messages)
        done.wait()

    with grpc.insecure_channel(daemon.grpc_url) as channel:

        def opened(path: str, messages: Iterator[bytes], answer: type[Message]) -> Any:
            return channel.stream_stream(path, response_deserializer=answer.FromString)(messages)

        watch = "/grpc.health.v1.Health/Watch"
        calls = [
            health_pb2_grpc.HealthStub(channel).Watch(watched),
            opened(watch, once(watched), health_pb2.HealthCheckResponse),
            opened(
                "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
                once(listed),
                reflection_pb2.ServerReflectionResponse,
            ),
        ]
        for call in calls:
            next(call)
        stream = opened(
            "/inference.GRPCInferenceService/ModelStreamInfer", once(), service_pb2.ModelStreamInferResponse
        )
        try:
            assert daemon.told("drain", "--time", "0", "--wait") == (0, "")
            for call in calls[:2]:
                assert next(call).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert daemon.stop() == 0
            assert "were cut" not in daemon.log
            assert [list(call) for call in calls] == [[], [], []]
            assert stream.code() is grpc.StatusCode.UNAVAILABLE
        finally:
            done.set()


def test_requests_are_taken_for_a_while(serve: Any) -> None:
    daemon: Drained = serve(4 * PATIENCE)
    with daemon.tensorctl("drain", "--wait") as draining:
        wait_until(lambda: not daemon.ready, "the daemon to be not ready", daemon)
        assert (daemon.infer("scale", BODY)[0], daemon.phase) == (200, "draining")
        assert daemon.told("undrain") == (0, "")
        assert draining.communicate(timeout=PATIENCE)[1] == "tensorctl: the drain was ended\n"
    assert (daemon.ready, daemon.phase) == (True, "serving")


def test_sigterm_announces_the_end_first(serve: Any) -> None:
    """A second signal does not wait."""
    daemon: Drained = serve(4 * PATIENCE)
    daemon.signal(signal.SIGTERM)
    wait_until(lambda: not daemon.ready, "the daemon to be not ready", daemon)
    assert daemon.infer("scale", BODY)[0] == 200
    assert daemon.stop() == 0
    assert "not ready from now on, and serving on for 960 s" in daemon.log


def test_a_drain_has_its_own_time(serve: Any) -> None:
    """
    1. A daemon whose drain_time is 0 is drained with a time. 2. SIGTERM comes meanwhile, then a second one.
    Result: it is not ready and takes requests, also after the first signal; the second does not wait.
    """
    daemon: Drained = serve()
    assert daemon.told("drain", "--time", str(4 * PATIENCE)) == (0, "")
    assert (daemon.ready, daemon.infer("scale", BODY)[0], daemon.phase) == (False, 200, "draining")
    daemon.signal(signal.SIGTERM)
    daemon.wait_log("not ready from now on, and serving on for 9")
    assert daemon.infer("scale", BODY)[0] == 200
    assert daemon.stop() == 0


def ended(lane: RawLane) -> bool:
    """Waits for the end of a lane."""
    with contextlib.suppress(ChannelClosed):
        while lane.poll(PATIENCE):
            lane.receive()
        return False
    return True


def test_lanes_end_once_nothing_is_in_flight_there(serve: Any, tmp_path: Path) -> None:
    daemon: Drained = serve()
    with LaneClient(tmp_path / "clients.sock") as client:
        client.ask(hello={})
        (entry,) = client.open("scale")["lanes"]
        with contextlib.closing(RawLane(client.lanes.pop(entry["lane"]))) as lane:
            x = np.zeros((1, 4), np.float32)
            lane.ask(PreparedRequest("scale", 0, (tensor("x", x),)), x.tobytes())
            while not (answers := lane.receive()):
                assert lane.poll(PATIENCE)
            assert np.frombuffer(lane.outputs(answers[0])["y"], np.float32).tolist() == [1.0] * 4
            assert daemon.told("drain", "--time", "0", "--wait") == (0, "")
            assert ended(lane)
        assert "the server is draining: it opens no lanes" in str(client.open("scale"))
        assert daemon.told("undrain") == (0, "")
        (entry,) = client.open("scale")["lanes"]
        assert entry["new"]
