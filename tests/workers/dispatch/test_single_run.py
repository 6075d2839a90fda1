"""Large requests that never reach Python's queue: answered as there where everything is as it was; all others go there."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensord.config.options import Arenas, ExecutablesOptions, Expert, Options
from tensord.shm.arena import Lease
from tensord.shm.arrays import DTYPES, Array
from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import AnswerRecord, Release, RequestedOutput, RequestRecord, Slice, TraceContext
from tensord.shm.record import encoder
from tensord.workers.native.extensions import available
from tensord.workers.processor import output_memory
from tensord.workers.requests.timeline import timeline_end
from tests.records import Tensor, WholeAnswer
from tests.repositories import write_model
from tests.workers.dispatch.test_fast_path import MOMENTS, Native, native, request
from tests.workers.worker_loop import PATIENCE_SECONDS, WorkerLoop, ever_queued

__all__ = ["native"]  # a fixture

pytestmark = pytest.mark.skipif(not available, reason="the C extension was not built")

PLACE = Slice(3, 640, 1 << 20)


# ------------------------------------------------------------------------------------------------ the C part by itself


class Alone:
    """Runs requests of prepared number 4, with an input of 1 MiB, and notes its calls."""

    def __init__(self, native: Native, **changed: Any) -> None:
        self.native = native
        self.asked: list[Any] = []
        self.chosen: list[tuple[Any, ...]] = []
        self.running: list[list[int]] = []
        self.makes: Callable[[], Any] = lambda: (5, 4096, 77, [])
        said: dict[str, Any] = {
            "inputs": (1 << 20,),
            "outputs": ((-1, 64, 1000),),
            "most": 1,
            "rows": 1,
            "share": 0.0,
            "sets": None,
            **changed,
        }
        native.fast.learn(
            native.lane.fileno(),
            4,
            (self, 7, 1000, said["share"], 0, 0, False, False, (), (-1,) * said["most"], None, native.histograms),
            said["rows"],
            tuple([(0, size, 0) for size in said["inputs"]]),
            tuple([(stack, start, 0, size, 0) for stack, start, size in said["outputs"]]),
            9,
            None,
            timeline_end(None),
            said["sets"],
            self.run,
        )

    def run(self, places: Any, *chosen: Any) -> Any:
        self.asked.append(places)
        self.chosen.append(chosen)
        self.running.append(self.native.page[512:515].tolist())
        return self.makes()


def large(number: int, *contents: Any) -> RequestRecord:
    return RequestRecord(number, 4, contents or (PLACE,))


def python_s(native: Native, *datagrams: bytes) -> tuple[Any, ...]:
    return [], [(native.lane.fileno(), (datagram, [], False)) for datagram in datagrams], []


def serve(native: Native) -> None:
    """Has the C part answer until nothing is left.

    A request that it leaves to Python after a long run is sent once more.
    """
    events, datagrams, unsent = native.fast.wait(0, True)
    while datagrams:
        ((_, (rest, _, _)),) = datagrams
        native.front.send(rest)
        more, datagrams, unsent_more = native.fast.wait(0, True)
        events, unsent = events + more, unsent + unsent_more
    assert (events, unsent) == ([], [])


def test_a_large_request_is_run_with_the_set_that_it_names(native: Native) -> None:
    """And by itself, although more rows have a program: what waits beside it names another one."""
    first = object()
    alone = Alone(native, sets={"a": first}, most=2)
    for number, name in enumerate(("a", "main", "a"), 1):
        native.send(RequestRecord(number, 4, (PLACE,), parameter_set=name))
    serve(native)
    assert alone.chosen == [(first,), (), (first,)]
    assert [answer.request_id for answer in native.answers()] == [1, 2, 3]


def test_a_large_request_is_told_where_its_tensors_lie(native: Native) -> None:
    alone = Alone(native)
    native.send(large(8))
    assert native.fast.wait(0, True) == ([], [], [])
    assert alone.asked == [((3, 640),)]
    assert alone.running == [[1, 7, 8]]
    assert native.page[512] == 0
    assert native.answers() == [AnswerRecord(8, 9, (Slice(5, 4160, 1000),), (5, 4096, 77))]


def test_a_traced_request_is_told_alike(native: Native) -> None:
    alone = Alone(native)
    native.send(TraceContext(8, "1"), RequestRecord(8, 4, (PLACE,), trace=1))
    assert native.fast.wait(0, True) == ([], [], [])
    assert alone.asked == [((3, 640),)]
    (answer,) = native.answers()
    assert (answer.contents, answer.lease) == ((Slice(5, 4160, 1000),), (5, 4096, 77))
    assert answer.trace is not None
    assert [name for name, _ in answer.trace.moments] == MOMENTS


def test_small_tensors_are_in_the_records(native: Native) -> None:
    outputs = ((1, 4, 8), (-1, 0, 1 << 40), (0, 0, 2))
    alone = Alone(native, inputs=(3, 1 << 33), outputs=outputs)
    alone.makes = lambda: ((1 << 63) - 1, 1 << 62, 1 << 61, [b"ab", np.arange(4, dtype=np.int32)])
    native.send(large(1, b"xyz", Slice(1 << 40, 1 << 50, 1 << 33)))
    assert native.fast.wait(0, True) == ([], [], [])
    assert alone.asked == [(b"xyz", (1 << 40, 1 << 50))]
    contents = (np.array([1, 2], np.int32).tobytes(), Slice((1 << 63) - 1, 1 << 62, 1 << 40), b"ab")
    assert native.answers() == [AnswerRecord(1, 9, contents, ((1 << 63) - 1, 1 << 62, 1 << 61))]


def test_without_large_outputs_there_is_no_lease(native: Native) -> None:
    Alone(native, outputs=((0, 0, 2),)).makes = lambda: (-1, 0, 0, [b"ab"])
    native.send(large(1))
    native.fast.wait(0, True)
    assert native.answers() == [AnswerRecord(1, 9, (b"ab",))]


def test_figures(native: Native) -> None:
    alone = Alone(native, outputs=((-1, 64, 1000), (0, 0, 2)), rows=3, most=3)
    alone.makes = lambda: (5, 4096, 77, [b"ab"])
    native.send(RequestRecord(1, 4, (PLACE,), received_ns=1))
    native.fast.wait(0, True)
    ((owner, answered, rows, runs, _, _, copied, _, sizes),) = native.fast.figures()
    assert (owner, answered, rows, runs, copied) == (alone, 1, 3, 1, 2)
    assert [size[:2] for size in sizes] == [(3, 1)]


@pytest.mark.parametrize(
    "odd",
    [
        large(2, Slice(3, 640, (1 << 20) - 1)),
        large(2, b"12345678"),
        large(2, PLACE, PLACE),
        RequestRecord(2, 4, ()),
        request(2, Slice(0, 0, 8)),  # type: ignore[arg-type]
    ],
    ids=["size", "bytes", "two", "none", "gathered"],
)
def test_what_is_not_as_it_was_is_python_s_affair(native: Native, odd: RequestRecord) -> None:
    native.learn()
    alone = Alone(native)
    datagram = native.send(large(1), odd)
    assert native.fast.wait(0, True) == python_s(native, datagram)
    assert (alone.asked, native.runs, native.answers()) == ([], [], [])


def test_what_cannot_be_run_now_is_python_s_affair_now(native: Native) -> None:
    alone = Alone(native)
    alone.makes = lambda: None
    datagram = native.send(large(1))
    assert native.fast.wait(0, True) == python_s(native, datagram)
    alone.makes = lambda: (5, 4096, 77, [])
    native.send(large(2))
    assert native.fast.wait(0, True) == ([], [], [])
    assert [answer.request_id for answer in native.answers()] == [2]


@pytest.mark.parametrize(
    "made",
    [ValueError("no"), (1, 2), (-1, 0, 0, []), (5, 0, 0, [b"a"] * 17), 7],
    ids=["error", "two", "none", "many", "7"],
)
def test_a_run_that_goes_wrong_is_python_s_affair_and_not_tried_again(native: Native, made: Any) -> None:
    alone = Alone(native)

    def makes() -> Any:
        if isinstance(made, Exception):
            raise made
        return made

    alone.makes = makes
    for number in (1, 2):
        datagram = native.send(large(number))
        assert native.fast.wait(0, True) == python_s(native, datagram)
    assert len(alone.asked) == 1
    assert native.answers() == []


def test_an_output_that_is_too_short_is_no_answer(native: Native) -> None:
    Alone(native, outputs=((0, 4, 8),)).makes = lambda: (-1, 0, 0, [bytes(11)])
    datagram = native.send(large(1))
    assert native.fast.wait(0, True) == python_s(native, datagram)


@pytest.mark.parametrize("most", [1, 2, 4])
def test_those_that_fit_into_one_run_are_gathered_in_python(native: Native, most: int) -> None:
    alone = Alone(native, most=most)
    datagram = native.send(large(1), large(2))
    if most == 1:
        serve(native)
        assert [answer.request_id for answer in native.answers()] == [1, 2]
    else:
        assert native.fast.wait(0, True) == python_s(native, datagram)
        assert alone.asked == []


def test_after_a_run_with_much_to_do_python_looks_what_else_has_come(native: Native) -> None:
    Alone(native, share=1.0)
    native.send(large(1), large(2), large(3))
    (events, ((_, (rest, _, _)),), unsent) = native.fast.wait(0, True)
    assert (events, unsent, [answer.request_id for answer in native.answers()]) == ([], [], [1])
    assert rest == b"\x01" + b"\xdc\0\2" + native.send(large(2), large(3))[4:]


def test_large_and_small_in_one_datagram(native: Native) -> None:
    native.learn()
    Alone(native)
    native.send(request(1), large(2), request(3))
    serve(native)
    assert [answer.request_id for answer in native.answers()] == [1, 2, 3]


RELEASES = (Release(((0, 1, 2), (3, 4, 1 << 50))), Release(()))


def in_a_datagram(*records: Release) -> bytes:
    return b"\x01\xdc" + len(records).to_bytes(2, "big") + b"".join(map(encoder.encode, records))


def test_leases_that_are_given_back_are_no_event(native: Native) -> None:
    Alone(native)
    native.send(RELEASES[0], large(1), RELEASES[1])
    native.send(RELEASES[0])
    assert native.fast.wait(0, True) == ([], [], [])
    assert native.returned == [in_a_datagram(*RELEASES), in_a_datagram(RELEASES[0])]
    assert len(native.answers()) == 1


def test_leases_that_are_not_on_loan_are_python_s_affair(native: Native) -> None:
    Alone(native)
    native.wrong = InvalidArgument("not on loan")
    datagram = native.send(large(1), RELEASES[0])
    assert native.fast.wait(0, True) == python_s(native, datagram)
    assert native.answers() == []


@pytest.mark.parametrize("odd", [request(1), Release(((0, -1, 2),)), RELEASES[1]], ids=["form", "negative", "many"])
def test_nothing_is_given_back_by_a_datagram_that_is_python_s_affair(native: Native, odd: Any) -> None:
    Alone(native)
    datagram = native.send(*[RELEASES[1]] * 8, large(1), odd)
    assert native.fast.wait(0, True) == python_s(native, datagram)
    assert (native.returned, native.answers()) == ([], [])


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"inputs": (1,) * 17}, "too many"),
        ({"outputs": ((0, 0, 1),) * 17}, "too many"),
        ({"rows": 0}, "too many"),
        ({"rows": 129}, "too many"),
        ({"inputs": (-1,)}, "fewer"),
        ({"outputs": ((-2, 0, 1),)}, "nowhere"),
        ({"outputs": ((0, -1, 1),)}, "nowhere"),
        ({"outputs": ((0, 0, 1 << 16),)}, "datagram"),
        ({"most": 0}, "rows"),
    ],
)
def test_what_cannot_be_is_not_learned(native: Native, said: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Alone(native, **said)


# --------------------------------------------------------------------------------------------------- in a worker's loop

COUNT = 1 << 17
SOURCE = """
import jax.numpy as jnp

def create(path, config, device):
    def apply(params, inputs):
        x = inputs["x"]
        return {outputs}
    return apply, {{}}
"""
X = 'input { name: "x" data_type: TYPE_FP32 dims: [ %s ] }'
OUTPUT = ' output { name: "%s" data_type: TYPE_FP32 dims: [ %s ] }'
#: Model -> its outputs, and its configuration.
MODELS = {
    "double": ('{"y": x * 2}', X % "-1" + OUTPUT % ("y", "-1")),
    "pair": ('{"y": x * 2, "z": x + 3}', X % "-1" + OUTPUT % ("y", "-1") + OUTPUT % ("z", "-1")),
    "sum": ('{"y": jnp.sum(x).reshape(1)}', X % "-1" + OUTPUT % ("y", "1")),
    "both": ('{"y": x * 2, "s": x[:2]}', X % "-1" + OUTPUT % ("y", "-1") + OUTPUT % ("s", "2")),
    "grow": (f'{{"y": jnp.tile(x, {COUNT})}}', X % "2" + OUTPUT % ("y", 2 * COUNT)),
    "rows": ('{"y": x * 2}', "max_batch_size: 4 " + X % COUNT + OUTPUT % ("y", COUNT)),
    "waits": (
        '{"y": x * 2}',
        "max_batch_size: 4 dynamic_batching { max_queue_delay_microseconds: 20000 } "
        + X % COUNT
        + OUTPUT % ("y", COUNT),
    ),
    "sums": ('{"y": x.sum(axis=1, keepdims=True)}', "max_batch_size: 4 " + X % COUNT + OUTPUT % ("y", 1)),
    "several": ('{"y": x * 2}', "instance_group [ { count: 2 kind: KIND_CPU } ] " + X % "-1" + OUTPUT % ("y", "-1")),
}
#: Model -> what it makes of x.
EXPECTED: dict[str, Callable[[Array], list[Array]]] = {
    "double": lambda x: [x * 2],
    "pair": lambda x: [x * 2, x + 3],
    "sum": lambda x: [x.sum(dtype=np.float32).reshape(1)],
    "both": lambda x: [x * 2, x[:2]],
    "grow": lambda x: [np.tile(x, COUNT)],
    "rows": lambda x: [x * 2],
}


@pytest.fixture(autouse=True, scope="module")
def collected(leaves_nothing: None) -> Iterator[None]:
    """Collects garbage at the end, because XLA releases arguments only with the next collection or call."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, (outputs, config) in MODELS.items():
        write_model(folder, name, SOURCE.format(outputs=outputs), f'name: "{name}" backend: "jax" {config}')
    return folder


class Asker:
    """Asks a model of a loop with tensors in the request arena."""

    def __init__(self, loop: WorkerLoop, models: Path, model: str, count: int = COUNT) -> None:
        self.loop, self.model, self.count = loop, model, count
        loop.load(models / model)
        (self.version,) = [version for version in loop.worker._models if version.name == model]
        self.rows = (1,) if self.version.signature.batches else ()
        self.outputs: tuple[RequestedOutput, ...] = ()
        self.skip = 0

    def submit(self, x: Array) -> Lease:
        """Queues one; its lease is the caller's to release when it is answered."""
        lease = self.loop.arena.loan(x.nbytes + self.skip)
        assert lease is not None
        lease.view[self.skip :] = x.tobytes()
        place = Slice(lease.place.segment, lease.place.offset + self.skip, x.nbytes)
        where = place if x.nbytes > 4096 else x.tobytes()
        tensor = Tensor("x", "FP32", (*self.rows, len(x)), where)
        self.loop.submit(self.model, [tensor], self.outputs, leases=[lease])
        return lease

    def ask(self, x: Array) -> list[Array]:
        lease = self.submit(x)
        (answer,) = self.loop.answers(1)
        lease.release()
        return self.read(answer)

    def read(self, answer: WholeAnswer) -> list[Array]:
        """Returns the outputs of an answer and gives its lease back."""
        assert answer.code == "", answer.message
        made = [self.content(tensor) for tensor in answer.outputs]
        if answer.lease is not None:
            self.loop.front.release(answer.lease)
        return made

    def content(self, tensor: Tensor) -> Array:
        place = tensor.place
        content = place if isinstance(place, bytes) else bytes(self.loop.front.view(place))  # type: ignore[arg-type]
        return np.frombuffer(content, DTYPES[tensor.datatype]).reshape(tensor.shape[len(self.rows) :])

    def next_x(self) -> Array:
        return np.random.default_rng().random(self.count, np.float32)

    @property
    def queued(self) -> int:
        """Returns how many requests were ever queued in Python."""
        return ever_queued(self.version.queue)

    def known(self) -> None:
        """Asks until nothing of it is Python's affair any more."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        quiet = 0
        while quiet < 3:
            before = self.queued
            self.ask(self.next_x())
            quiet = quiet + 1 if self.queued == before else 0
            assert time.monotonic() < deadline, "it never came about"

    def check(self) -> bool:
        """Asks once; the answer is right. Returns whether it came without Python's queue."""
        x, before = self.next_x(), self.queued
        for made, expected in zip(self.ask(x), EXPECTED[self.model](x), strict=True):
            np.testing.assert_allclose(made, expected, rtol=1e-4)
        return self.queued == before


def leases(loop: WorkerLoop) -> int:
    loop.front.flush()
    for _ in range(5):
        loop.worker.iterate()
    return sum(submitter.lane.arena.statistics()["leases"] for submitter in loop.worker._submitters.values())


@pytest.mark.parametrize("model", EXPECTED)
def test_answers_are_those_of_python(loop: WorkerLoop, models: Path, model: str) -> None:
    asker = Asker(loop, models, model, 2 if model == "grow" else COUNT)
    first = asker.check()
    assert not first
    asker.known()
    before = asker.version.statistics.to_dict()
    assert [asker.check() for _ in range(3)] == [True] * 3
    after = asker.version.statistics.to_dict()
    for name in ("success", "compute_infer", "compute_output"):
        assert after["inference_stats"][name]["count"] == before["inference_stats"][name]["count"] + 3
    assert after["execution_count"] == before["execution_count"] + 3
    # Of large tensors nothing is copied, of small ones their bytes.
    small = {"sum": 4, "both": 8, "grow": 8}.get(model, 0)
    assert after["copied_byte_size"] == before["copied_byte_size"] + 3 * small
    assert leases(loop) == 0


def test_what_is_asked_for_is_what_is_answered(loop: WorkerLoop, models: Path) -> None:
    asker = Asker(loop, models, "pair")
    asker.known()
    asker.outputs = (RequestedOutput("z"),)
    asker.known()
    x, before = asker.next_x(), asker.queued
    (made,) = asker.ask(x)
    np.testing.assert_array_equal(made, x + 3)
    assert asker.queued == before
    asker.outputs = ()
    assert asker.check()
    assert leases(loop) == 0


def test_another_length_is_another_form(loop: WorkerLoop, models: Path) -> None:
    asker = Asker(loop, models, "double")
    asker.known()
    for count in (COUNT // 8, COUNT, 2 * COUNT):
        asker.count = count
        asker.known()
        assert asker.check()
    assert leases(loop) == 0


@pytest.mark.parametrize("model", ["several", "waits"])
def test_what_needs_more_than_a_run_is_python_s(loop: WorkerLoop, models: Path, model: str) -> None:
    asker = Asker(loop, models, model)
    for number in range(1, 7):
        x = asker.next_x()
        (made,) = asker.ask(x)
        np.testing.assert_array_equal(made, x * 2)
        assert asker.queued == number


def test_those_that_fit_together_are_one_execution(loop: WorkerLoop, models: Path) -> None:
    asker = Asker(loop, models, "rows")
    asker.known()
    before, xs = asker.version.statistics.to_dict(), [asker.next_x() for _ in range(4)]
    held = [asker.submit(x) for x in xs]
    for answer, x in zip(loop.answers(4), xs, strict=True):
        np.testing.assert_array_equal(asker.read(answer)[0], x * 2)
    for lease in held:
        lease.release()
    after = asker.version.statistics.to_dict()
    assert after["execution_count"] == before["execution_count"] + 1
    assert asker.check()
    assert leases(loop) == 0


def test_those_that_were_gathered_first_run_alone_later(loop: WorkerLoop, models: Path) -> None:
    """A single request whose tensors lie in the arena is answered apart from how several were run together before."""
    asker = Asker(loop, models, "sums")
    for _ in range(4):
        xs = [asker.next_x() for _ in range(2)]
        held = [asker.submit(x) for x in xs]
        for answer, x in zip(loop.answers(2), xs, strict=True):
            np.testing.assert_allclose(asker.read(answer)[0], [x.sum()], rtol=1e-4)
        for lease in held:
            lease.release()
    asker.known()
    assert leases(loop) == 0


def test_tensors_that_lie_badly_are_copied_in_python(loop: WorkerLoop, models: Path) -> None:
    asker = Asker(loop, models, "double")
    asker.known()
    asker.skip = 4
    assert not asker.check()
    asker.skip = 64
    assert asker.check()


@pytest.mark.parametrize("place", [Slice(0, 1 << 40, 4 * COUNT), Slice(9, 0, 4 * COUNT)])
def test_places_outside_the_arena_are_refused(loop: WorkerLoop, models: Path, place: Slice) -> None:
    asker = Asker(loop, models, "double")
    asker.known()
    loop.submit("double", [Tensor("x", "FP32", (COUNT,), place)])
    (answer,) = loop.answers(1)
    assert answer.code
    # Whoever does that is not trusted with the form any more; everything else goes on.
    x = asker.next_x()
    np.testing.assert_array_equal(asker.ask(x)[0], x * 2)
    assert leases(loop) == 0


def test_a_model_loaded_again_answers_from_then_on(loop: WorkerLoop, tmp_path: Path) -> None:
    outputs, config = MODELS["double"]
    write_model(tmp_path, "double", SOURCE.format(outputs=outputs), f'name: "double" backend: "jax" {config}')
    asker = Asker(loop, tmp_path, "double")
    asker.known()
    write_model(tmp_path, "double", SOURCE.format(outputs='{"y": x * 3}'), f'name: "double" backend: "jax" {config}')
    asker = Asker(loop, tmp_path, "double")
    for _ in range(6):
        x = asker.next_x()
        np.testing.assert_array_equal(asker.ask(x)[0], x * 3)


def loop_with(arenas: Arenas) -> WorkerLoop:
    executables = ExecutablesOptions(cache_directory="/dev/null/none")
    return WorkerLoop(Options(expert=Expert(spin_us=0), arenas=arenas, executables=executables))


def test_where_the_answers_are_not_taken_they_wait(models: Path, leaves_nothing: None) -> None:
    """The response arena has room for two: the third waits in Python until one is given back."""
    arenas = Arenas(byte_size=4 << 20, max_byte_size=4 << 20)
    with contextlib.closing(loop_with(arenas)) as loop:
        asker = Asker(loop, models, "double", 1 << 18)
        asker.known()
        xs = [asker.next_x() for _ in range(6)]
        waiting: list[tuple[Array, WholeAnswer]] = []
        for x in xs[:4]:
            lease = asker.submit(x)
            (answer,) = loop.answers(1)
            lease.release()
            waiting.append((x, answer))
        held = asker.submit(xs[4])
        loop.front.flush()
        for _ in range(20):
            loop.worker.iterate()
        assert loop.front.receive() in (None, [])
        for x, answer in waiting:
            np.testing.assert_array_equal(asker.read(answer)[0], x * 2)
        (answer,) = loop.answers(1)
        np.testing.assert_array_equal(asker.read(answer)[0], xs[4] * 2)
        held.release()
        asker.known()
        assert leases(loop) == 0


def test_segments_of_their_own(models: Path, leaves_nothing: None) -> None:
    """Tensors larger than a block of the first segment; one that is closed is announced to the other end before anything else."""
    arenas = Arenas(byte_size=1 << 20, max_byte_size=64 << 20, keep_byte_size=4 << 20)
    with contextlib.closing(loop_with(arenas)) as loop:
        asker = Asker(loop, models, "double")
        for count in (COUNT, 8 * COUNT, 2 * COUNT):
            asker.count = count
            asker.known()
            for _ in range(3):
                assert asker.check()
        assert leases(loop) == 0
        (submitter,) = loop.worker._submitters.values()
        asker.check()
        assert set(loop.front._theirs._segments) <= set(submitter.lane.arena.segments)


def test_an_output_that_somebody_keeps_ends_it(loop: WorkerLoop, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asker = Asker(loop, models, "double")
    asker.known()
    monkeypatch.setattr(output_memory, "given_up", lambda address, view: False)
    assert asker.check()
    monkeypatch.undo()
    for _ in range(4):
        assert not asker.check()


def test_a_worker_serves_others_while_large_ones_come(loop: WorkerLoop, models: Path) -> None:
    """Two models in turn, one in C and one in Python's threads: nobody's answer is another's."""
    double, several = Asker(loop, models, "double"), Asker(loop, models, "several")
    double.known()
    for _ in range(5):
        x, y = double.next_x(), several.next_x()
        held = [double.submit(x), several.submit(y)]
        answers = sorted(loop.answers(2), key=lambda answer: answer.request_id)
        np.testing.assert_array_equal(double.read(answers[0])[0], x * 2)
        np.testing.assert_array_equal(several.read(answers[1])[0], y * 2)
        for lease in held:
            lease.release()
    assert leases(loop) == 0
