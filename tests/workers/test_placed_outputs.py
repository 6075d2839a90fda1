"""A worker whose programs write large outputs where they go: what may be written there is not copied, and everything is right."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import posix_ipc
import pytest

from bench import regions as measured_regions
from tensord.config.options import Arenas, Expert, Options, RegionsOptions
from tensord.shm.arena import Lease
from tensord.shm.arrays import Array, array
from tensord.shm.control_records import ControlCall, Reply
from tensord.shm.messages import RegionSlice, RequestedOutput, Slice
from tensord.shm.operations import RegisterSystemRegion, UnregisterRegion
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.native.extensions import available
from tensord.workers.processor import output_memory
from tensord.workers.requests.timeline import TENSORS, TIMESTAMPS
from tests.daemon_process import ROOT, DaemonProcess, tensorctl_status, wait_until
from tests.records import Tensor, WholeAnswer, WholeRequest
from tests.repositories import write_model
from tests.workers.worker_loop import OPTIONS, WorkerLoop, ever_queued

pytestmark = pytest.mark.skipif(not available, reason="the C extension was not built")

#: Elements and bytes of a tensor that is large enough.
COUNT = 1 << 17
SIZE = 4 * COUNT
MIB = 1 << 20
OBJECT = 4 * SIZE
INOUT = 'input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }'
#: Model -> what makes y of x.
FUNCTIONS = {
    "double": "x * 2 + 1",
    "reverse": "x[::-1] + 1",
    "sort": "jnp.sort(x)",
    "waves": "jnp.sin(jnp.exp(x)) * jnp.cos(x)",
    "softmax": "jax.nn.softmax(x.reshape(256, -1) @ x.reshape(256, -1).T @ x.reshape(256, -1)).reshape(-1)",
    "fails": "jax.pure_callback(check, jax.ShapeDtypeStruct(x.shape, x.dtype), x)",
}
SOURCE = """
import jax
import jax.numpy as jnp

def check(x):
    if x[0] < 0:
        raise ValueError("a model's own")
    return x * 2

def create(path, config, device):
    def apply(params, inputs):
        x = inputs["x"]
        return {{"y": {function}}}
    return apply, {{}}
"""
PAIR = """
def create(path, config, device):
    return (lambda params, inputs: {"y": inputs["x"] * 2, "z": inputs["x"] + 3}), {}
"""
ROWS = f"""
input {{ name: "x" data_type: TYPE_FP32 dims: [ {COUNT} ] }} output {{ name: "y" data_type: TYPE_FP32 dims: [ {COUNT} ] }}
max_batch_size: 4
"""


@pytest.fixture(autouse=True, scope="module")
def collected(leaves_nothing: None) -> Iterator[None]:
    """Collects garbage at the end, because XLA releases arguments, and so regions, only with a collection or call."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, function in FUNCTIONS.items():
        write_model(folder, name, SOURCE.format(function=function), f'name: "{name}" backend: "jax" {INOUT}')
    both = INOUT + ' output { name: "z" data_type: TYPE_FP32 dims: [ -1 ] }'
    write_model(folder, "pair", PAIR, f'name: "pair" backend: "jax" {both}')
    several = f'name: "several" backend: "jax" {INOUT} instance_group [ {{ count: 2 kind: KIND_CPU }} ]'
    write_model(folder, "several", SOURCE.format(function=FUNCTIONS["double"]), several)
    for name, more in (("rows", ""), ("waits", "dynamic_batching { max_queue_delay_microseconds: 200000 }")):
        config = f'name: "{name}" backend: "jax" {ROWS} {more}'
        write_model(folder, name, SOURCE.format(function=FUNCTIONS["double"]), config)
    return folder


@pytest.fixture
def loop(leaves_nothing: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerLoop]:
    with a_loop(OPTIONS, monkeypatch) as made:
        yield made


@contextlib.contextmanager
def a_loop(options: Options, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerLoop]:
    """Yields a worker's loop, and checks at its end that nothing is on loan and no output was kept."""
    kept: list[memoryview] = []
    monkeypatch.setattr(output_memory, "_kept", kept)
    made = WorkerLoop(options)
    assert output_memory.attached()
    try:
        yield made
        assert leases(made) == 0
        assert kept == []
        assert not any(region.leases for region in made.worker._regions._regions.values())
    finally:
        made.close()


def leases(loop: WorkerLoop) -> int:
    # Each datagram with what was given back takes one.
    for _ in range(20):
        loop.worker.iterate()
    return sum(submitter.lane.arena.statistics()["leases"] for submitter in loop.worker._submitters.values())


class Object:
    """A client's shared memory, registered as ``r``."""

    def __init__(self, loop: WorkerLoop, name: str = "r") -> None:
        self.loop, self.name = loop, name
        self.key = f"/tensord-test-placed-{os.getpid()}-{uuid.uuid4().hex}"
        self.fd = posix_ipc.SharedMemory(self.key, posix_ipc.O_CREX, size=OBJECT).fd
        self.mapping = mmap.mmap(self.fd, OBJECT)
        self.bytes = np.frombuffer(self.mapping, np.uint8)
        self.register()

    def register(self, name: str = "", offset: int = 0) -> None:
        record = RegisterSystemRegion(name or self.name, self.key, offset, OBJECT - offset)
        assert self.call(record).code == ""

    def unregister(self) -> None:
        assert self.call(UnregisterRegion("system", self.name)).code == ""

    def call(self, operation: Any) -> Reply:
        self.loop.tell(ControlCall(1, operation))
        reply: Reply = self.loop.hear(Reply)
        return reply

    def write(self, offset: int, values: Array) -> RegionSlice:
        self.bytes[offset : offset + values.nbytes] = values.view(np.uint8)
        return RegionSlice(self.name, offset, values.nbytes)

    def read(self, offset: int, count: int = COUNT) -> Array:
        return np.frombuffer(self.bytes[offset : offset + 4 * count].tobytes(), np.float32)

    def close(self) -> None:
        del self.bytes
        self.mapping.close()
        os.close(self.fd)
        posix_ipc.unlink_shared_memory(self.key)


@contextlib.contextmanager
def an_object(loop: WorkerLoop, name: str = "r") -> Iterator[Object]:
    with contextlib.closing(Object(loop, name)) as made:
        yield made


@pytest.fixture
def client(loop: WorkerLoop) -> Iterator[Object]:
    with an_object(loop) as made:
        yield made


def values(count: int = COUNT, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 1000, count).astype(np.float32)


X = values()


def submit(
    loop: WorkerLoop,
    model: str,
    x: Array | RegionSlice,
    outputs: Sequence[RequestedOutput] = (),
    rows: int = 0,
    trace: int = 0,
) -> Lease | None:
    """Sends a request; returns where its input lies, if that is the arena."""
    size = x.byte_size if isinstance(x, RegionSlice) else x.nbytes
    place: Any = x
    lease = None
    if not isinstance(x, RegionSlice):
        lease = loop.arena.loan(size)
        assert lease is not None
        lease.view[:] = x.tobytes()
        place = lease.place
    shape = (rows, size // 4 // rows) if rows else (size // 4,)
    loop.number += 1
    tensor = Tensor("x", "FP32", shape, place)
    if lease is not None:
        loop.front.announce(lease.place.segment)
    loop.front.submit(WholeRequest(loop.number, model, 0, (tensor,), tuple(outputs), trace=trace).record)
    return lease


def ask(loop: WorkerLoop, model: str, x: Array | RegionSlice, *outputs: RequestedOutput, **more: Any) -> WholeAnswer:
    lease = submit(loop, model, x, outputs, **more)
    (answer,) = loop.answers(1)
    if lease is not None:
        lease.release()
    return answer


def taken(loop: WorkerLoop, answer: WholeAnswer) -> dict[str, Array]:
    """Returns the outputs of an answer that are not in regions, and gives its lease back."""
    assert answer.code == "", answer.message
    found = {}
    for tensor in answer.outputs:
        if isinstance(tensor.place, RegionSlice):
            continue
        content = tensor.place if isinstance(tensor.place, bytes) else bytes(loop.front.view(tensor.place))
        found[tensor.name] = array(content, tensor.datatype, tensor.shape)
    if answer.lease is not None:
        loop.front.release(answer.lease)
        assert loop.front.flush()
    return found


def version(loop: WorkerLoop, model: str) -> ModelVersion:
    (found,) = [each for each in loop.worker._models if each.name == model]
    return found


def queue_of(loop: WorkerLoop, model: str) -> int:
    """Returns how many requests of a model were ever queued in Python."""
    return ever_queued(version(loop, model).queue)


def copied(loop: WorkerLoop, model: str, once: Callable[[], object], times: int = 3) -> list[int]:
    """Makes a request several times; returns the bytes that were copied for each."""
    found = []
    for _ in range(times):
        before = version(loop, model).statistics.to_dict()["copied_byte_size"]
        once()
        loop.worker.iterate()
        found.append(version(loop, model).statistics.to_dict()["copied_byte_size"] - before)
    return found


def into(offset: int, name: str = "y", byte_size: int = SIZE, region: str = "r") -> RequestedOutput:
    return RequestedOutput(name, RegionSlice(region, offset, byte_size))


# ------------------------------------------------------------------------------------------------ not copied, and right


def test_a_region_is_written_by_the_program(loop: WorkerLoop, client: Object, models: Path) -> None:
    """Once it is known how the output is allocated, which the first request of a shape tells."""
    loop.load(models / "double")
    x = client.write(0, X)

    def once() -> None:
        client.bytes[SIZE:] = 7
        answer = ask(loop, "double", x, into(2 * SIZE, byte_size=SIZE + 100))
        assert taken(loop, answer) == {}
        assert answer.outputs[0].place == RegionSlice("r", 2 * SIZE, SIZE + 100)
        np.testing.assert_array_equal(client.read(2 * SIZE), X * 2 + 1)
        np.testing.assert_array_equal(client.read(0), X)
        assert (client.bytes[SIZE : 2 * SIZE] == 7).all()
        assert (client.bytes[3 * SIZE :] == 7).all()

    assert copied(loop, "double", once) == [SIZE, 0, 0]


@pytest.mark.parametrize("model", ["double", "sort"])
def test_the_arena_is_written_by_the_program_whatever_it_is(loop: WorkerLoop, models: Path, model: str) -> None:
    loop.load(models / model)
    right = X * 2 + 1 if model == "double" else np.sort(X)

    def once() -> None:
        answer = ask(loop, model, X)
        assert isinstance(answer.outputs[0].place, Slice)
        np.testing.assert_array_equal(taken(loop, answer)["y"], right)

    assert copied(loop, model, once) == [SIZE, 0, 0]


def test_answers_that_are_held_keep_their_bytes(loop: WorkerLoop, models: Path) -> None:
    """Nothing is written again to what a reader has not given back."""
    loop.load(models / "double")
    inputs = [values(seed=seed) for seed in range(5)]
    answers = [ask(loop, "double", x) for x in inputs]
    assert leases(loop) == len(answers)
    for x, answer in reversed(list(zip(inputs, answers, strict=True))):
        np.testing.assert_array_equal(taken(loop, answer)["y"], x * 2 + 1)


def test_one_of_two_outputs(loop: WorkerLoop, client: Object, models: Path) -> None:
    loop.load(models / "pair")
    x = client.write(0, X)

    def once() -> None:
        assert taken(loop, ask(loop, "pair", x, into(SIZE, "z"))) == {}
        np.testing.assert_array_equal(client.read(SIZE), X + 3)

    assert copied(loop, "pair", once) == [SIZE, 0, 0]

    def arena() -> None:
        found = taken(loop, ask(loop, "pair", x, RequestedOutput("z")))
        assert list(found) == ["z"]
        np.testing.assert_array_equal(found["z"], X + 3)

    assert copied(loop, "pair", arena) == [0, 0, 0]

    def both() -> None:
        found = taken(loop, ask(loop, "pair", x, into(SIZE, "z"), RequestedOutput("y")))
        assert list(found) == ["y"]
        np.testing.assert_array_equal(found["y"], X * 2)
        np.testing.assert_array_equal(client.read(SIZE), X + 3)

    assert copied(loop, "pair", both) == [0, 0, 0]


def test_a_sampled_request_says_what_came_out(loop: WorkerLoop, client: Object, models: Path) -> None:
    loop.load(models / "double")
    x = client.write(0, X)

    def once() -> None:
        answer = ask(loop, "double", x, into(SIZE), trace=TIMESTAMPS | TENSORS)
        assert answer.trace is not None
        (output,) = [one for one in answer.trace.tensors if one.activity == "TENSOR_BACKEND_OUTPUT"]
        assert output.content.split(",")[:3] == [str(float(2 * value + 1)) for value in X[:3]]

    assert copied(loop, "double", once) == [SIZE, 0, 0]


# -------------------------------------------------------------------------------------------------- copied, and right


def check_copied(loop: WorkerLoop, models: Path, offset: int, expected: int) -> None:
    """Checks how many bytes are copied for a request whose output goes to that offset."""
    loop.load(models / "double")
    with an_object(loop) as client:
        x = client.write(0, X)

        def once() -> None:
            assert taken(loop, ask(loop, "double", x, into(offset))) == {}
            np.testing.assert_array_equal(client.read(offset), X * 2 + 1)

        assert copied(loop, "double", once) == [expected] * 3


def test_an_odd_place(loop: WorkerLoop, models: Path) -> None:
    check_copied(loop, models, SIZE + 4, SIZE)


def test_memory_that_is_not_mapped(models: Path, monkeypatch: pytest.MonkeyPatch, leaves_nothing: None) -> None:
    with a_loop(
        Options(expert=OPTIONS.expert, executables=OPTIONS.executables, regions=RegionsOptions(access="snapshot")),
        monkeypatch,
    ) as loop:
        check_copied(loop, models, SIZE, 2 * SIZE)


@pytest.mark.parametrize("model", ["sort", "softmax"])
def test_a_program_that_is_not_plain_writes_to_no_region(
    loop: WorkerLoop, client: Object, models: Path, model: str
) -> None:
    """It looks at its data, or has intermediate results where its output will be."""
    loop.load(models / model)
    x = client.write(0, X / 1000)
    right = taken(loop, ask(loop, model, X / 1000))["y"]

    def once() -> None:
        assert taken(loop, ask(loop, model, x, into(SIZE))) == {}
        np.testing.assert_array_equal(client.read(SIZE), right)

    assert copied(loop, model, once) == [SIZE] * 3


def test_small_outputs(loop: WorkerLoop, models: Path) -> None:
    loop.load(models / "double")
    x = values(4000)

    def once() -> None:
        np.testing.assert_array_equal(taken(loop, ask(loop, "double", x))["y"], x * 2 + 1)

    assert copied(loop, "double", once)[1:] == [16_000] * 2


def test_batches_and_padding(loop: WorkerLoop, models: Path) -> None:
    loop.load(models / "rows")
    rows = [values(seed=seed) for seed in range(3)]

    def alone(count: int) -> Callable[[], None]:
        def once() -> None:
            whole = np.concatenate(rows[:count])
            found = taken(loop, ask(loop, "rows", whole, rows=count))["y"]
            np.testing.assert_array_equal(found.ravel(), whole * 2 + 1)

        return once

    for count in (1, 2):
        assert copied(loop, "rows", alone(count)) == [count * SIZE, 0, 0]
    # Four rows are computed for them: they are gathered, and what is wanted is cut off.
    assert copied(loop, "rows", alone(3)) == [6 * SIZE] * 3

    def together() -> None:
        leases = [submit(loop, "waits", row, rows=1) for row in rows[:2]]
        answers = {answer.request_id: answer for answer in loop.answers(2)}
        for row, number in zip(rows, sorted(answers), strict=False):
            np.testing.assert_array_equal(taken(loop, answers[number])["y"].ravel(), row * 2 + 1)
        for lease in leases:
            assert lease is not None
            lease.release()

    loop.load(models / "waits")
    # Both are gathered for one program.
    assert copied(loop, "waits", together) == [4 * SIZE] * 3


def test_several_instances(loop: WorkerLoop, models: Path) -> None:
    loop.load(models / "several")

    def once() -> None:
        leases = [submit(loop, "several", X) for _ in range(4)]
        for answer in loop.answers(4):
            np.testing.assert_array_equal(taken(loop, answer)["y"], X * 2 + 1)
        for lease in leases:
            assert lease is not None
            lease.release()

    assert copied(loop, "several", once) == [4 * SIZE] * 3


@pytest.mark.parametrize("offset", [0, SIZE // 2, 64, SIZE - 64])
@pytest.mark.parametrize("alias", [False, True])
def test_an_output_over_its_own_input(loop: WorkerLoop, client: Object, models: Path, offset: int, alias: bool) -> None:
    """A program that wrote its first element early would read it as its last: by one region or by two of the same object."""
    loop.load(models / "reverse")
    if alias:
        client.register("s", offset=4096)
    start = offset + 8192

    def once() -> None:
        x = client.write(8192, X)
        wanted = into(start - 4096, region="s") if alias else into(start)
        assert taken(loop, ask(loop, "reverse", x, wanted)) == {}
        np.testing.assert_array_equal(client.read(start), X[::-1] + 1)

    assert copied(loop, "reverse", once) == [SIZE] * 3
    # And beside it.
    start = 8192 + SIZE
    assert copied(loop, "reverse", once, 1) == [0]


def test_two_outputs_in_one_place(loop: WorkerLoop, client: Object, models: Path) -> None:
    """They are written in the model's order, as ever."""
    loop.load(models / "pair")
    x = client.write(0, X)

    def once() -> None:
        assert taken(loop, ask(loop, "pair", x, into(SIZE, "z"), into(SIZE + SIZE // 2, "y"))) == {}
        np.testing.assert_array_equal(client.read(SIZE), X + 3)
        np.testing.assert_array_equal(client.read(2 * SIZE, COUNT // 2), (X * 2)[COUNT // 2 :])

    assert copied(loop, "pair", once) == [2 * SIZE] * 3


def test_classification(loop: WorkerLoop, models: Path) -> None:
    loop.load(models / "double")
    x = X.copy()
    x[77] = 5000

    def once() -> None:
        found = taken(loop, ask(loop, "double", x, RequestedOutput("y", classification=1)))
        assert found["y"].tolist() == [b"10001.000000:77"]

    counted = copied(loop, "double", once)
    assert max(counted) < 100


# --------------------------------------------------------------------------------------------------------- gone wrong


def test_a_model_that_fails_leaves_nothing_on_loan(loop: WorkerLoop, client: Object, models: Path) -> None:
    loop.load(models / "fails")
    for value in (1, 1, -1, -1, 1, 1):
        x = np.full(COUNT, value, np.float32)
        answer = ask(loop, "fails", x)
        if value > 0:
            np.testing.assert_array_equal(taken(loop, answer)["y"], x * 2)
        else:
            assert answer.code == "INTERNAL"
            assert answer.lease is None
        assert leases(loop) == 0
    assert ask(loop, "fails", X, into(OBJECT - 4)).code != ""
    assert leases(loop) == 0


def test_a_region_that_lost_its_memory(loop: WorkerLoop, client: Object, models: Path) -> None:
    """The program writes to pages that are not there: its client is told, and nobody else notices."""
    loop.load(models / "double")
    x = client.write(0, X)
    for _ in range(2):
        assert ask(loop, "double", x, into(2 * SIZE)).code == ""
    os.ftruncate(client.fd, 2 * SIZE)
    for _ in range(2):
        answer = ask(loop, "double", x, into(2 * SIZE))
        assert (answer.code, "lost its memory" in answer.message) == ("INVALID_ARGUMENT", True)
    with an_object(loop, name="other") as other:
        y = other.write(0, X)
        assert copied(loop, "double", lambda: ask(loop, "double", y, into(SIZE, region="other")), 1) == [0]
        np.testing.assert_array_equal(other.read(SIZE), X * 2 + 1)
    client.unregister()
    os.ftruncate(client.fd, OBJECT)
    client.register()
    client.bytes[2 * SIZE :] = 0
    assert copied(loop, "double", lambda: ask(loop, "double", x, into(2 * SIZE)), 1) == [0]
    np.testing.assert_array_equal(client.read(2 * SIZE), X * 2 + 1)


def test_a_region_that_was_read_lost_its_memory(loop: WorkerLoop, client: Object, models: Path) -> None:
    """The program has made an output in the arena, of what was not there: nothing of it stays on loan."""
    loop.load(models / "double")
    x = client.write(2 * SIZE, X)
    asked = queue_of(loop, "double")

    def answer() -> WholeAnswer:
        loop.submit("double", [Tensor("x", "FP32", (COUNT,), x)])
        (found,) = loop.answers(1)
        return found

    for _ in range(20):
        taken(loop, answer())
    assert queue_of(loop, "double") < asked + 20
    os.ftruncate(client.fd, 2 * SIZE)
    for _ in range(3):
        assert "lost its memory" in answer().message
        assert leases(loop) == 0
    os.ftruncate(client.fd, OBJECT)


@pytest.mark.parametrize("how", ["scribbled on", "truncated"])
def test_an_owner_who_interferes_harms_only_itself(loop: WorkerLoop, client: Object, models: Path, how: str) -> None:
    """While the program reads the client's memory and writes to it."""
    loop.load(models / "waves")
    loop.load(models / "double")
    x = client.write(0, X / 1000)
    assert copied(loop, "waves", lambda: ask(loop, "waves", x, into(SIZE)), 2) == [SIZE, 0]
    stop = threading.Event()

    def interfere() -> None:
        noise = np.random.default_rng(1)
        while not stop.is_set():
            if how == "scribbled on":
                at = int(noise.integers(0, 2 * SIZE - 4096))
                client.bytes[at : at + 4096] = noise.integers(0, 256, 4096)
            else:
                os.ftruncate(client.fd, int(noise.integers(SIZE, OBJECT)))

    owner = threading.Thread(target=interfere)
    owner.start()
    try:
        codes = {ask(loop, "waves", x, into(SIZE)).code for _ in range(30)}
    finally:
        stop.set()
        owner.join()
    assert codes <= {"", "INVALID_ARGUMENT"}
    for _ in range(2):
        np.testing.assert_array_equal(taken(loop, ask(loop, "double", X))["y"], X * 2 + 1)
    os.ftruncate(client.fd, OBJECT)


def test_a_name_that_means_another_region(loop: WorkerLoop, client: Object, models: Path) -> None:
    """A request that waits writes to the region it named; the next one to the region that has the name now."""
    loop.load(models / "waits")
    x = client.write(0, X)
    for _ in range(2):
        assert ask(loop, "waits", x, into(SIZE), rows=1).code == ""
    client.bytes[SIZE : 2 * SIZE] = 0
    submit(loop, "waits", x, [into(SIZE)], rows=1)
    assert loop.front.flush()
    loop.worker.iterate()
    # The waiting request is in it still.
    loop.tell(ControlCall(1, UnregisterRegion("system", "r")))
    with an_object(loop) as other:
        (answer,) = loop.answers(1)
        assert answer.code == ""
        np.testing.assert_array_equal(client.read(SIZE), X * 2 + 1)
        assert not other.bytes.any()
        client.bytes[SIZE : 2 * SIZE] = 0
        there = other.write(0, X + 1)
        assert copied(loop, "waits", lambda: ask(loop, "waits", there, into(SIZE), rows=1), 1) == [0]
        np.testing.assert_array_equal(other.read(SIZE), (X + 1) * 2 + 1)
        assert not client.bytes[SIZE : 2 * SIZE].any()


def test_a_full_arena(models: Path, monkeypatch: pytest.MonkeyPatch, leaves_nothing: None) -> None:
    """An answer waits for room, and for no longer than is said; a region needs none."""
    arenas = Arenas(byte_size=MIB, max_byte_size=2 * MIB, keep_byte_size=0, wait=0.2)
    options = Options(expert=Expert(spin_us=0), executables=OPTIONS.executables, arenas=arenas)
    with a_loop(options, monkeypatch) as loop:
        loop.load(models / "double")
        with an_object(loop) as client:
            x = client.write(0, X)
            held = [ask(loop, "double", x) for _ in range(2)]
            while held[-1].code == "":
                held.append(ask(loop, "double", x))
            refused = held.pop()
            assert refused.code == "UNAVAILABLE"
            assert f"no room for an answer of {SIZE} bytes in the response arena" in refused.message
            assert leases(loop) == len(held)
            assert copied(loop, "double", lambda: ask(loop, "double", x, into(SIZE)), 1) == [0]
            for answer in held:
                np.testing.assert_array_equal(taken(loop, answer)["y"], X * 2 + 1)
            np.testing.assert_array_equal(client.read(SIZE), X * 2 + 1)
            np.testing.assert_array_equal(taken(loop, ask(loop, "double", x))["y"], X * 2 + 1)


# ---------------------------------------------------------------------------------------------------- a whole daemon


def outputs_of_workers(control: Path) -> list[str]:
    return [worker["outputs"] for worker in tensorctl_status(control)["workers"]]


@pytest.mark.cpu_workers("XLA on a GPU writes to memory of its own")
@pytest.mark.parametrize("placed", [True, False])
def test_the_operator_is_told_whether_outputs_are_written_in_place(
    start_daemon: Callable[..., DaemonProcess], tmp_path: Path, placed: bool
) -> None:
    control = tmp_path / "control.sock"
    daemon = start_daemon(
        ROOT / "bench" / "models",
        repository={"control_mode": "explicit", "load": ["identity"]},
        expert={"place_outputs": placed},
        supervisor={"control_socket": str(control)},
        workers={"cpu": 2},
    )
    daemon.wait_ready()
    # Ready is the daemon with its first worker.
    wait_until(lambda: "unknown" not in outputs_of_workers(control), "both workers", daemon)
    assert outputs_of_workers(control) == ["in_place" if placed else "copied"] * 2
    assert daemon.log.count("XLA writes large outputs straight to the memory of their clients") == (2 if placed else 0)
    copied = f"{measured_regions.BYTE_SIZE} bytes were copied"
    with contextlib.nullcontext() if placed else pytest.raises(SystemExit, match=copied):
        measured_regions.check_access(daemon.url, "guarded")


def test_the_option() -> None:
    assert Expert().place_outputs
