"""Workers that are killed: by the kernel, by an operator, or by the request they run."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from tests import repositories
from tests.daemon_process import PATIENCE, DaemonProcess, wait_until
from tests.faults import varied
from tests.faults.load import CheckedLoad, VariedLoad

#: The promise is stated for a minute of kills; a run by hand may ask for it.
KILLS = int(os.environ.get("TENSORD_TEST_KILLS", "2"))

ONES = [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 1, 1, 1]}]


def test_killed_again_and_again_before_it_is_up(start_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    """
    1. The only worker is killed, and so are those that come in its place, while they start. 2. One is left alone.
    Result: what is asked meanwhile waits for that one.
    """
    repository = repositories.scale_model(tmp_path / "repository")
    daemon = start_daemon(repository, workers={"device": "cpu", "pin": False})
    daemon.wait_ready()
    with ThreadPoolExecutor() as pool:
        asked = []
        for number in range(5):
            wait_until(lambda: daemon.workers, "a worker", daemon)
            (victim,) = daemon.workers
            victim.kill()
            daemon.wait_log(r"worker-0 \(process \d+\) was killed by SIGKILL.*; its replacement starts in", number + 1)
            asked.append(pool.submit(daemon.infer, "scale", ONES))
            assert daemon.get("/v2/models/scale")[0] == 200
        assert [future.result(PATIENCE)[0] for future in asked] == [200] * len(asked)


CALLS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        open({gate!r} + "-asked", "w").close()
        given = [pb_utils.Tensor("x", pb_utils.get_input_tensor_by_name(request, "x").as_numpy()) for request in requests]
        asked = [
            pb_utils.InferenceRequest(model_name="b_called", requested_output_names=["y"], inputs=[each]).exec() for each in given
        ]
        return [
            pb_utils.InferenceResponse(error=each.error())
            if each.has_error()
            else pb_utils.InferenceResponse([pb_utils.get_output_tensor_by_name(each, "y")])
            for each in asked
        ]
"""
CALLED = """
import os, time
inputs = {{"x": "FP32[4]"}}
outputs = {{"y": "FP32[4]"}}

def create(path, config, device):
    while not os.path.exists({gate!r}):
        time.sleep(0.01)
    assert not os.path.exists({gate!r} + "-broken")
    return (lambda params, inputs: {{"y": inputs["x"] + 1}}), {{}}
"""


def test_models_that_call_others_wait_for_them(start_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    """
    1. The worker is killed; its replacement has a model that calls another one, which takes its time. 2. A request comes.
    3. The other model is there; after another death it cannot be loaded.
    Result: the calls wait for it, and are answered; or they fail, once it has failed.
    """
    repository, gate = tmp_path / "repository", tmp_path / "gate"
    io = "".join(
        f'{way} [ {{ name: "{name}" data_type: TYPE_FP32 dims: [ 4 ] }} ]'
        for way, name in (("input", "x"), ("output", "y"))
    )
    repositories.write_model(repository, "a_caller", CALLS.format(gate=str(gate)), f'backend: "python"\n{io}')
    repositories.write_model(repository, "b_called", CALLED.format(gate=str(gate)))
    gate.touch()
    daemon = start_daemon(repository, workers={"device": "cpu", "pin": False})
    daemon.wait_ready()
    asked = [{"name": "x", "datatype": "FP32", "shape": [4], "data": [1, 1, 1, 1]}]
    for number in (2, 3):
        gate.unlink()
        (victim,) = daemon.workers
        victim.kill()
        daemon.wait_log("model 'a_caller' version 1 is loaded", number)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(daemon.infer, "a_caller", asked)
            wait_until(gate.with_name("gate-asked").exists, "the call", daemon)
            gate.with_name("gate-asked").unlink()
            assert not waiting.done()
            if number == 3:
                gate.with_name("gate-broken").touch()
            gate.touch()
            status, answer = waiting.result(PATIENCE)
        if number == 2:
            assert (status, answer["outputs"][0]["data"]) == (200, [2.0] * 4)
        else:
            assert (status, "Model 'b_called' is not ready." in answer["error"]) == (500, True), answer


def test_killed_under_requests_that_differ(start_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    """
    1. 12 clients ask over HTTP, gRPC and gRPC streams: models and shapes in turn, other ids, trace headers, priorities, timeouts,
       sequences and values each time, tensors here and there. Every answer is checked.
    2. Every two seconds a worker is killed.
    Result: no wrong answer and no failed one, on any of the three ways. No descriptor is left over.
    """
    repository = varied.write_models(tmp_path / "repository")
    daemon = start_daemon(repository, workers={"device": "cpu", "cpu": 2, "pin": False})
    daemon.wait_ready()
    processes = [psutil.Process(daemon.pid), *daemon.fronts]
    with VariedLoad(daemon, 12) as load:
        for number in range(KILLS):
            time.sleep(2)
            wait_until(lambda: len(daemon.workers) == 2, "all workers", daemon)
            victim = daemon.workers[number % 2]
            victim.kill()
            psutil.wait_procs([victim], timeout=PATIENCE)
            before = Counter(load.ways)
            wait_until(
                lambda seen=before: load.errors or all(load.ways[way] > seen[way] + 20 for way in seen),
                "answers after the death",
                daemon,
            )
            if not number:
                wait_until(lambda: len(daemon.workers) == 2, "a new worker", daemon)
                daemon.wait_ready()
                held = [process.num_fds() for process in processes]
    assert load.errors == []
    assert load.wrong == 0
    assert len(load.ways) == 3
    wait_until(lambda: len(daemon.workers) == 2, "all workers", daemon)
    daemon.wait_ready()
    # One more connection or a reply under way may differ; a leak would show as one or more for every kill.
    for process, most in zip(processes, held, strict=True):
        wait_until(lambda p=process, most=most: p.num_fds() <= most + 3, "descriptors to be closed", daemon)


def test_a_request_that_kills_two_workers_is_refused(
    start_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    """
    1. Clients use one model; one request to another model kills its worker, is run once more and kills again.
    Result: that request gets a 500 and no third try; nobody else notices; the workers are back.
    """
    repository = repositories.scale_model(tmp_path / "repository")
    repositories.deadly_model(repository)
    daemon = start_daemon(repository)
    daemon.wait_ready()
    ask = [{"name": "x", "shape": [1], "datatype": "INT32", "data": [21]}]
    poison = [{"name": "x", "shape": [1], "datatype": "INT32", "data": [-1]}]
    with CheckedLoad(daemon, 4) as load:
        assert daemon.infer("deadly", ask)[1]["outputs"][0]["data"] == [42]
        pids = {worker.pid for worker in daemon.workers}
        status, answer = daemon.infer("deadly", poison)
        assert status == 500
        assert "worker" in answer["error"]
        assert daemon.infer("deadly", ask)[1]["outputs"][0]["data"] == [42]
        assert not pids & {worker.pid for worker in daemon.workers}
    assert load.errors == []
    assert load.wrong == 0


def test_a_hung_worker_is_replaced(start_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    """
    1. A worker is stopped (SIGSTOP), as by a debugger or a driver that never returns.
    Result: the supervisor kills and replaces it, and the waiting request is answered by the new one.
    """
    repository = repositories.scale_model(tmp_path / "repository")
    daemon = start_daemon(
        repository, workers={"device": "cpu", "pin": False, "idle_timeout": 10, "execute_timeout": 20}
    )
    daemon.wait_ready()
    (worker,) = daemon.workers
    worker.send_signal(signal.SIGSTOP)
    status, answer = daemon.infer("scale", [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}])
    assert status == 200, answer
    assert answer["outputs"][0]["data"] == [4, 7, 10, 13]
    assert not worker.is_running()


def test_no_worker_is_said_so(start_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    """
    1. The only worker dies and its replacement does not load the model before the wait is over.
    Result: 503, not a hang; later the model answers again.
    """
    repository, go = tmp_path / "repository", tmp_path / "go"
    repositories.write_model(
        repository,
        "slow_start",
        f"""
        import pathlib
        import time
        inputs = {{"x": "FP32[1]"}}
        outputs = {{"y": "FP32[1]"}}

        def create(path, config, device):
            marker = path / "started"
            while marker.exists() and not pathlib.Path({str(go)!r}).exists():
                time.sleep(0.05)
            marker.touch()
            return (lambda params, inputs: {{"y": inputs["x"]}}), {{}}
        """,
    )
    daemon = start_daemon(repository, requests={"worker_wait": 0.5})
    daemon.wait_ready()
    ask = [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]
    assert daemon.infer("slow_start", ask)[0] == 200
    daemon.workers[0].kill()
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: daemon.infer("slow_start", ask), range(4)))
    assert {status for status, _ in answers} == {503}, answers
    go.touch()
    wait_until(lambda: daemon.infer("slow_start", ask)[0] == 200, "the model to be back", daemon)
