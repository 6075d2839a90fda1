"""Tests what one inference request costs a worker from the lane and back, counted in our own code; XLA's work is not in it."""

from __future__ import annotations

import gc
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from tensord.workers.dispatch.fast_path import FastPath
from tests import repositories
from tests.daemon_process import ROOT, wait_until
from tests.records import Tensor, WholeAnswer
from tests.work.baseline import Baseline, counts
from tests.work.counter import Work, without_collector
from tests.workers.worker_loop import OPTIONS, WorkerLoop

MIB = 1 << 20
COUNT = 10
#: Rounds between two looks at what they cost: programs are compiled meanwhile, which takes some time.
WARM = 50
PATIENCE = 1000
#: So many such looks, and what is seen then is stored.
STORED_AFTER = 40


def ask(loop: WorkerLoop, work: Work | None, row: Row) -> list[WholeAnswer]:
    """Sends a row's requests in one datagram; returns their answers. Only what the worker does is counted."""
    leases = []
    for number in range(row.together):
        content = np.zeros(row.shape, np.float32).tobytes()
        inline = len(content) <= OPTIONS.arenas.inline_byte_size
        lease = None if inline else loop.arena.loan(len(content))
        place = content if lease is None else lease.place
        inputs = [Tensor(name, "FP32", row.shape, place) for name in row.inputs]
        if lease is not None:
            lease.view[:] = content
            leases.append(lease)
        if row.whole:
            for lease in leases:
                loop.front.announce(lease.place.segment)
            loop.submit_whole(row.model, inputs)
        else:
            own = {"sequence_id": 1 + number, "sequence_start": True} if row.sequences else {}
            loop.submit(row.model, inputs, leases=leases, own=own)
    answers = loop.answers(row.together, work=work)
    for answer in answers:
        if answer.lease is not None:
            loop.front.release(answer.lease)
    for lease in leases:
        lease.release()
    return answers


@dataclass(frozen=True)
class Row:
    """Requests that come together, whose cost is counted for each of them."""

    name: str
    model: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    together: int = 1
    #: Not told as one of a form.
    whole: bool = False
    #: Each is of a sequence of its own, which begins anew.
    sequences: bool = False


_SLOW_CONFIG = """
    backend: "jax"
    input { name: "x" data_type: TYPE_FP32 dims: [-1, 16] }
    output { name: "y" data_type: TYPE_FP32 dims: [-1, 16] }
    """
_SLOW = """
    import jax

    def create(path, config, device):
        def apply(params, inputs):
            return {"y": jax.lax.fori_loop(0, 10_000, lambda i, x: x + 1, inputs["x"])}
        return apply, {}
    """

ROWS = [
    # The first seven are answered in C; what is left is a turn that finds nothing else to do, and of the seventh its run.
    Row("small", "addsub", ("INPUT0", "INPUT1"), (1, 16)),
    Row("small-together", "addsub", ("INPUT0", "INPUT1"), (1, 16), together=16),
    Row("mlp", "mlp", ("x",), (1, 784)),
    Row("mlp-together", "mlp", ("x",), (1, 784), together=8),
    # Without a batch dimension, and too slow to share a call: one after the other.
    Row("slow", "slow", ("x",), (1, 16)),
    Row("slow-together", "slow", ("x",), (1, 16), together=8),
    Row("1MiB", "identity", ("INPUT0",), (MIB // 4,)),
    Row("1MiB-whole", "identity", ("INPUT0",), (MIB // 4,), whole=True),
    # Of these the planner is asked in Python, and their state handed to the program.
    Row("sequence", "rnn", ("x",), (1, 64), sequences=True),
    Row("sequence-together", "rnn", ("x",), (1, 64), together=16, sequences=True),
]
rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


@pytest.fixture(scope="module")
def loop(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerLoop]:
    made = WorkerLoop()
    for name in ("addsub", "identity", "mlp", "rnn"):
        made.load(ROOT / "bench" / "models" / name)
    made.load(repositories.write_model(tmp_path_factory.mktemp("models"), "slow", _SLOW, _SLOW_CONFIG).parent)
    yield made
    made.close()


def warm(loop: WorkerLoop, row: Row, baseline: Baseline) -> None:
    """Sends requests until the count of a request is what the row allows, when all its programs are compiled."""
    for _ in range(STORED_AFTER if baseline.storing else PATIENCE):
        # Not counted, because what is counted is slow, and only quick programs get others beside them.
        for _ in range(WARM):
            assert {answer.code for answer in ask(loop, None, row)} == {""}
        work = Work()
        ask(loop, work, row)
        if baseline.allows(f"worker {row.name}", work.instructions / row.together):
            return


@counts
@rows
def test_instructions(loop: WorkerLoop, row: Row, baseline: Baseline) -> None:
    warm(loop, row, baseline)
    works = [Work() for _ in range(COUNT)]
    for work in works:
        for _ in range(WARM):
            ask(loop, None, row)
        assert {answer.code for answer in ask(loop, work, row)} == {""}
    baseline.check(f"worker {row.name}", typical(works) / row.together)
    # Received, looked for more, answered.
    calls = sum([work.system_calls for work in works], Counter[str]())
    assert calls.total() <= 3 * COUNT, calls


def typical(works: list[Work]) -> float:
    """Returns the median, because a request now and then pays for something that is learned again."""
    return statistics.median(work.instructions for work in works)


@counts
def test_what_is_never_seen_again_costs_little_more_than_the_ordinary_way(
    loop: WorkerLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that never repeats, sent whole or prepared, costs little more than a known one that Python answers."""
    content = np.zeros((1, 16), np.float32).tobytes()
    inputs = [Tensor(name, "FP32", (1, 16), content) for name in ("INPUT0", "INPUT1")]
    numbers = iter(range(1 << 30))

    def cost(send: Callable[[], int]) -> float:
        for _ in range(WARM):
            send()
            loop.answers(1)
        works = [Work() for _ in range(COUNT)]
        for work in works:
            send()
            assert loop.answers(1, work=work)[0].code == ""
        return typical(works)

    if isinstance(poller := loop.worker._poller, FastPath):
        monkeypatch.setattr(poller, "learn", lambda version, execution: None)
        poller.forget_gone()
    # A slow moment of the machine changes which program single requests are run by, and what that costs.
    for _ in range(5):
        known = cost(lambda: loop.submit("addsub", inputs))
        whole = cost(lambda: loop.submit_whole("addsub", inputs, parameters={"request": next(numbers)}))
        told = cost(lambda: loop.submit("addsub", inputs, parameters={"request": next(numbers)}))
        if max(whole, told) <= 1.3 * known:
            break
    assert 0 < max(whole, told) <= 1.3 * known, (known, whole, told)


@counts
def test_silent_sequences_cost_nobody_anything(loop: WorkerLoop, baseline: Baseline) -> None:
    """Small requests of another model, before and after many sequences have begun, of which none ends."""
    small, sequences = ROWS[0], next(row for row in ROWS if row.sequences)

    def cost() -> float:
        works = [Work() for _ in range(COUNT)]
        for work in works:
            ask(loop, work, small)
        return typical(works)

    def tell(flag: str) -> None:
        inputs = [Tensor(name, "FP32", sequences.shape, bytes(256)) for name in sequences.inputs]
        for number in range(100, 120):
            loop.submit(sequences.model, inputs, own={"sequence_id": number, flag: True})
        assert {answer.code for answer in loop.answers(20)} == {""}

    warm(loop, small, baseline)
    # A slow moment of the machine changes which program single requests are run by, and what that costs.
    for _ in range(5):
        tell("sequence_start")
        with_them = cost()
        tell("sequence_end")
        without = cost()
        if with_them <= without + 10:
            break
    assert 0 < with_them <= without + 10


@rows
def test_nothing_is_left_for_the_garbage_collector(loop: WorkerLoop, row: Row) -> None:
    """It runs in the middle of requests, and what it would have to find may hold megabytes."""

    def left_over() -> int:
        with without_collector():
            for _ in range(COUNT):
                ask(loop, None, row)
            return gc.collect()

    # What a compilation leaves, while there still is one, is not the requests'.
    wait_until(lambda: left_over() == 0, "requests that leave nothing")
