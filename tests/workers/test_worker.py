"""A whole worker process, driven as its supervisor and a front would."""

from __future__ import annotations

import json
import mmap
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import posix_ipc
import pytest

from tensord.shm.arena import Arena
from tensord.shm.control_records import Stop, Unload, Unloaded
from tensord.shm.errors import Internal, InvalidArgument, NotFound
from tensord.shm.messages import RegionSlice, RequestedOutput
from tensord.shm.operations import AwaitRegion, ModelStatistics, RegisterSystemRegion, UnregisterRegion
from tests import repositories
from tests.records import Tensor, WholeRequest
from tests.workers.worker_process import PATIENCE_S, PEER, WorkerProcess, small_arenas, wait_until


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    repositories.echo_models(folder)
    repositories.scale_model(folder)
    repositories.faulty_models(folder)
    repositories.sleepy_model(folder)
    return folder


@pytest.fixture(scope="module")
def worker(leaves_nothing: None, repository: Path) -> Iterator[WorkerProcess]:
    with WorkerProcess() as running:
        running.serve(repository, "scale", "sleepy", "echo_bytes", "echo_fp32", "echo_bf16", "echo_int64", "echo_bool")
        yield running


def test_it_runs_on_the_cores_near_its_device() -> None:
    core = max(os.sched_getaffinity(0))
    with WorkerProcess(cores=str(core)) as worker:
        tasks = [int(task.name) for task in Path(f"/proc/{worker.process.pid}/task").iterdir()]
        assert {frozenset(os.sched_getaffinity(task)) for task in tasks} == {frozenset({core})}


def test_arena_answer_and_its_lease(worker: WorkerProcess) -> None:
    """Large tensors lie in arenas both ways; a lease given back is used again, so that nothing grows."""
    for n in (5000, 5000, 5001, 300_000):
        x = np.random.default_rng(n).random(n, np.float32)
        for _ in range(3):
            np.testing.assert_array_equal(worker.infer("echo_fp32", {"x": x})["y"], x)


def test_an_unexpected_shape_stops_nobody(worker: WorkerProcess) -> None:
    """While one shape is compiled, other requests are answered, and all that wait for it are answered after."""
    x = np.ones((1, 4), np.float32)
    odd = np.arange(123, dtype=np.float32)
    waiting = [worker.submit("echo_fp32", {"x": odd}) for _ in range(5)]
    np.testing.assert_array_equal(worker.infer("scale", {"x": x})["y"], 3 * x + 1)
    for request_id in waiting:
        np.testing.assert_array_equal(worker.arrays(worker.answer(request_id))["y"], odd)


def test_batches_give_everyone_his_own(worker: WorkerProcess) -> None:
    rng = np.random.default_rng(0)
    before = statistics(worker, "scale")
    sent = [rng.random((rows, 4), np.float32) for rows in rng.integers(1, 9, 100)]
    # In one piece: one by one they could be answered one by one.
    ids = [worker.submit("scale", {"x": x}, flush=x is sent[-1]) for x in sent]
    for request_id, x in zip(ids, sent, strict=True):
        np.testing.assert_allclose(worker.arrays(worker.answer(request_id))["y"], 3 * x + 1, rtol=1e-6)
    after = statistics(worker, "scale")
    assert after["inference_count"] - before["inference_count"] == sum(len(x) for x in sent)
    assert after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"] == 100
    assert after["execution_count"] - before["execution_count"] < 100


def statistics(worker: WorkerProcess, name: str) -> dict[str, Any]:
    reply, _ = worker.call(ModelStatistics(name))
    (found,) = json.loads(reply.result)["model_stats"]
    assert isinstance(found, dict)
    return found


GOOD = Tensor("x", "FP32", (1, 4), bytes(16))


class Gate:
    """Holds requests to the sleepy models until it opens, however long a test takes."""

    def __init__(self, worker: WorkerProcess, file: Path) -> None:
        self._worker = worker
        self._file = file

    def ask(self, count: int = 1, model: str = "sleepy", inputs: Any = None) -> list[int]:
        """Sends requests at once that end when the gate opens; returns when the model runs the first."""
        given = inputs or {"DELAY_MS": np.array([7], np.int32)}
        parameters = {"until": str(self._file)}
        ids = [
            self._worker.submit(model, given, flush=number == count - 1, parameters=parameters)
            for number in range(count)
        ]
        wait_until(lambda: (PEER, ids[0]) in self._worker.page.executing())
        return ids

    def open(self) -> None:
        self._file.touch()


@pytest.fixture
def gate(worker: WorkerProcess, tmp_path: Path) -> Gate:
    return Gate(worker, tmp_path / "open")


def test_a_sleeping_model_stalls_nobody(worker: WorkerProcess, gate: Gate) -> None:
    (slow,) = gate.ask()
    x = np.ones((1, 4), np.float32)
    for _ in range(20):
        worker.infer("scale", {"x": x})
    assert worker.page.executing() == {(PEER, slow)}
    gate.open()
    assert worker.arrays(worker.answer(slow))["OUTPUT"] == 7
    assert worker.page.executing() == set()


def test_cancel_and_deadline(worker: WorkerProcess, gate: Gate) -> None:
    """A cancelled or late request that waits is not run; one that runs is answered when it is done."""
    (running,) = gate.ask()
    cancelled = worker.submit("sleepy", {"DELAY_MS": np.array([60_000], np.int32)})
    late = worker.submit(
        "sleepy", {"DELAY_MS": np.array([60_000], np.int32)}, deadline_ns=time.monotonic_ns() + 10_000_000
    )
    worker.lane.cancel(cancelled)
    worker.lane.cancel(123_456_789)
    worker.lane.flush()
    assert worker.answer(cancelled).code == "CANCELLED"
    answer = worker.answer(late)
    assert (answer.code, answer.message) == ("DEADLINE_EXCEEDED", "Deadline Exceeded")
    gate.open()
    assert worker.arrays(worker.answer(running))["OUTPUT"] == 7


def test_a_request_with_a_strike_runs_alone(worker: WorkerProcess) -> None:
    before = statistics(worker, "scale")["execution_count"]
    x = np.ones((1, 4), np.float32)
    ids = [worker.submit("scale", {"x": x}, strikes=1) for _ in range(5)]
    for request_id in ids:
        assert worker.answer(request_id).code == ""
    assert statistics(worker, "scale")["execution_count"] - before == 5


def test_regions(worker: WorkerProcess, gate: Gate) -> None:
    """Input and output in one region, in place; errors leave it untouched; unregister unmaps it."""
    key = f"/tensord-test-{os.getpid()}"
    made = posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=4096)
    try:
        with mmap.mmap(made.fd, 4096) as region:
            reply, fds = worker.call(RegisterSystemRegion("r", key, 0, 4096))
            assert reply.code == ""
            (fd,) = fds
            assert os.fstat(fd).st_ino == os.fstat(made.fd).st_ino
            os.close(fd)
            assert worker.call(RegisterSystemRegion("r", key, 0, 4096))[0].code == "ALREADY_EXISTS"

            region[8:24] = np.arange(4, dtype=np.float32).tobytes()
            given = Tensor("x", "FP32", (1, 4), RegionSlice("r", 8, 16))
            answer = worker.answer(worker.submit("scale", [given], [RequestedOutput("y", RegionSlice("r", 64, 100))]))
            assert answer.code == ""
            (output,) = answer.outputs
            assert (output.shape, output.place) == ((1, 4), RegionSlice("r", 64, 100))
            assert np.frombuffer(region[64:80], np.float32).tolist() == [1, 4, 7, 10]
            assert region[80:164] == bytes(84)

            for place, words in {
                RegionSlice("r", 4096, 16): "Invalid offset for shared memory region: 'r'",
                RegionSlice("r", 4090, 16): "Invalid offset + byte size for shared memory region: 'r'",
                RegionSlice("r", 1 << 63, 16): "'r'",
                RegionSlice("r", (1 << 63) - 8, 16): "'r'",
                RegionSlice("r", 8, (1 << 64) - 8): "'r'",
                RegionSlice("r", 0, 20): "Expected 16, got 20",
            }.items():
                with pytest.raises(InvalidArgument) as caught:
                    worker.infer("scale", [GOOD._replace(place=place)])
                assert words in caught.value.message
            with pytest.raises(Internal, match=r"\(8 bytes\) should be at least 16 bytes"):
                worker.infer("scale", [given], RequestedOutput("y", RegionSlice("r", 2000, 8)))
            assert region[2000:2100] == bytes(100)

            # A running request holds the region: it is closed when that is done.
            region[0:4] = np.array([0], np.int32).tobytes()
            (slow,) = gate.ask(inputs=[Tensor("DELAY_MS", "INT32", (1,), RegionSlice("r", 0, 4))])
            assert worker.call(UnregisterRegion("system", "r"))[0].result == b"1"
            closed = worker.ask(AwaitRegion("r"))
            with pytest.raises(NotFound):
                worker.infer("scale", [given])
            assert worker.page.executing() == {(PEER, slow)}
            gate.open()
            assert worker.reply(closed)[0].code == ""
            assert worker.page.executing() == set()
            assert worker.answer(slow).code == ""
            with pytest.raises(NotFound):
                worker.infer("scale", [given])
            assert worker.call(UnregisterRegion("system", "r"))[0].result == b"0"
            # Another worker gets the descriptor instead of opening the key again.
            assert worker.call(RegisterSystemRegion("r", key, 0, 4096), made.fd)[0].code == ""
            np.testing.assert_array_equal(worker.infer("scale", [given])["y"], [[1, 4, 7, 10]])
            assert worker.call(UnregisterRegion("system", "r"))[0].result == b"0"
    finally:
        os.close(made.fd)
        posix_ipc.unlink_shared_memory(key)
    reply, _ = worker.call(RegisterSystemRegion("gone", key, 0, 4096))
    assert (reply.code, reply.message) == ("INTERNAL", f"Unable to open shared memory region: '{key}'")


def test_unload_finishes_what_waits(worker: WorkerProcess, gate: Gate, repository: Path) -> None:
    repositories.sleepy_model(repository, "dozing")
    worker.serve(repository, "dozing")
    ids = gate.ask(3, "dozing")
    worker.send(Unload("dozing", 1))
    gate.open()
    worker.wait(lambda record: record == Unloaded("dozing", 1))
    assert all(worker.answer(request_id).code == "" for request_id in ids)
    with pytest.raises(NotFound):
        worker.infer("dozing", {"DELAY_MS": np.array([1], np.int32)})


def test_another_submitter_and_its_death(worker: WorkerProcess) -> None:
    """Ids of two submitters may be the same; one that dies takes only its own requests along."""
    arena = Arena(1 << 20, 1 << 20, 0)
    other = worker.open_lane(arena, PEER + 1)
    next_id = worker.submit("sleepy", {"DELAY_MS": np.array([100], np.int32)})
    other.submit(WholeRequest(next_id, "scale", 0, (GOOD,)).record)
    for request_id in range(next_id + 1, next_id + 50):
        other.submit(WholeRequest(request_id, "sleepy", 0, (Tensor("DELAY_MS", "INT32", (1,), bytes(4)),)).record)
    other.flush()
    other.close()
    arena.close()
    assert worker.answer(next_id).code == ""
    np.testing.assert_array_equal(worker.infer("scale", [GOOD])["y"], np.ones((1, 4)))


def test_stop_answers_what_was_accepted(repository: Path, tmp_path: Path) -> None:
    with WorkerProcess() as worker:
        worker.serve(repository, "sleepy", "scale")
        gate = Gate(worker, tmp_path / "open")
        ids = gate.ask(3)
        worker.send(Stop(int(PATIENCE_S * 1e9)))
        gate.open()
        assert [worker.answer(request_id).code for request_id in ids] == ["", "", ""]
        assert worker.process.wait(PATIENCE_S) == 0


def test_stop_does_not_wait_for_ever(repository: Path) -> None:
    with WorkerProcess() as worker:
        worker.serve(repository, "sleepy")
        worker.submit("sleepy", {"DELAY_MS": np.array([3_600_000], np.int32)})
        assert worker.stop(grace_s=0.2) == 0


def test_without_its_supervisor_a_worker_leaves(repository: Path) -> None:
    with WorkerProcess() as worker:
        worker.channel.close()
        assert worker.process.wait(PATIENCE_S) == 0


def test_signals_are_ignored(repository: Path) -> None:
    with WorkerProcess() as worker:
        for number in (signal.SIGTERM, signal.SIGINT):
            worker.process.send_signal(number)
        assert worker.stop() == 0


def test_a_killed_worker_left_word_of_what_it_ran(repository: Path) -> None:
    repositories.deadly_model(repository)
    with WorkerProcess() as worker:
        worker.serve(repository, "deadly", "sleepy")
        waiting = worker.submit("sleepy", {"DELAY_MS": np.array([3_600_000], np.int32)})
        wait_until(lambda: (PEER, waiting) in worker.page.executing())
        fatal = worker.submit("deadly", {"x": np.array([-1], np.int32)})
        worker.process.wait(PATIENCE_S)
        assert worker.page.executing() == {(PEER, waiting), (PEER, fatal)}


def test_a_full_response_arena(repository: Path) -> None:
    """
    1. Answers larger together than the response arena, none of them taken.
    2. Leases come back one by one.
    Result: every answer is right; nothing was refused, nothing grew beyond the bound.
    """
    with WorkerProcess(arenas=small_arenas()) as worker:
        worker.serve(repository, "echo_fp32", "scale")
        x = np.random.default_rng(1).random(100_000, np.float32)
        place = worker.place("x", x)
        ids = [worker.submit("echo_fp32", [place]) for _ in range(20)]
        for request_id in ids:
            np.testing.assert_array_equal(worker.arrays(worker.answer(request_id))["y"], x)


def test_a_response_arena_that_stays_full(repository: Path) -> None:
    """Answers that find no room in time are given up with both numbers; small ones and other requests are not."""
    with WorkerProcess(arenas=small_arenas(wait=0.3)) as worker:
        worker.serve(repository, "echo_fp32", "scale")
        place = worker.place("x", np.ones(100_000, np.float32))
        answers = [worker.answer(request_id) for request_id in [worker.submit("echo_fp32", [place]) for _ in range(12)]]
        refused = [answer for answer in answers if answer.code]
        assert {answer.code for answer in refused} == {"UNAVAILABLE"}
        assert "no room for an answer of 400000 bytes" in refused[0].message
        assert 0 < len(refused) < 12
        huge = worker.place("x", np.ones(1_000_000, np.float32))
        with pytest.raises(InvalidArgument, match="cannot fit"):
            worker.infer("echo_fp32", [huge])
        np.testing.assert_array_equal(worker.infer("scale", [GOOD])["y"], np.ones((1, 4)))
