"""What one inference request costs a worker from the lane and back, counted in our own code; XLA's work is not in it."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np
import pytest

from config import model_config
from config.options import Options, Regions
from shm.arena import Arena
from shm.channel import pair
from shm.cuda_regions import Driver
from shm.forms import Forms, request_template
from shm.lane import SubmitterLane, WorkerLane
from shm.messages import Cancel, Completion, FormSubmit, Inline, Load, RequestForm, Submit, Tensor
from shm.status_page import StatusPage
from tests.daemon_process import ROOT
from tests.fakes import whole_answers
from tests.work.counter import Work
from workers.dispatcher import Dispatcher
from workers.inbox import Inbox
from workers.known_form import KnownForm
from workers.model_table import ModelTable
from workers.model_version import ModelVersion
from workers.models.executable_cache import ExecutableCache
from workers.models.loader import Loader
from workers.region_policy import RegionPolicy
from workers.region_table import RegionTable
from workers.submitter import Submitter
from workers.work_thread import WorkThread

OPTIONS = Options()
MIB = 1 << 20
COUNT = 10
#: Rounds before counting begins: shapes are compiled, requests of a kind are known.
WARM = 5


class Bench:
    """A dispatcher, and both ends of one lane."""

    def __init__(self) -> None:
        self.inbox, self.page = Inbox(), StatusPage.create()
        self.models, self.regions = ModelTable(), RegionTable(RegionPolicy(Regions()), Driver(), None)
        self.compiler = WorkThread("compiler", self.inbox)
        self.dispatcher = Dispatcher(OPTIONS, self.models, self.regions, self.page, self.compiler, time.monotonic_ns)
        self.loader = Loader(jax.devices()[0], None, ExecutableCache(None), self.inbox, self.page, 50, 8)
        arenas = OPTIONS.arenas
        ours, theirs = pair()
        self.arena = Arena(arenas.byte_size, arenas.max_byte_size, arenas.keep_byte_size)
        self.front = SubmitterLane(ours, self.arena)
        self.submitter = Submitter(7, WorkerLane(theirs, arenas.byte_size, arenas.max_byte_size, arenas.keep_byte_size))
        self._forms: Forms[Submit] = Forms()
        self._number = 0

    def load(self, name: str) -> None:
        path = ROOT / "bench" / "models" / name
        config = model_config.parse_pbtxt((path / "config.pbtxt").read_text(), name)
        record = Load(name, 1, str(path), str(path / "1"), config.SerializeToString())
        self.models.add(ModelVersion(self.loader.load(record)))

    def ask(self, work: Work, row: Row) -> list[Completion]:
        """So many requests come in one datagram; returns their answers. Only what the worker does is counted."""
        leases = []
        for _ in range(row.together):
            self._number += 1
            content = np.zeros(row.shape, np.float32).tobytes()
            lease = self.arena.loan(len(content)) if len(content) > OPTIONS.arenas.inline_byte_size else None
            if lease is not None:
                lease.view[:] = content
                leases.append(lease)
            place = Inline(content) if lease is None else lease.place
            inputs = tuple(Tensor(name, "FP32", row.shape, place) for name in row.inputs)
            if lease is None:
                # As a front does it with what a client repeats.
                form = self._forms.form(request_template(Submit(0, row.model, 0, inputs)))
                contents = (content,) * len(inputs)
                record = FormSubmit(self._number, form.number, contents, received_ns=time.monotonic_ns())
                self.front.submit_formed(form, record)
            else:
                self.front.submit(Submit(self._number, row.model, 0, inputs, received_ns=time.monotonic_ns()))
        assert self.front.flush()
        answers: list[Completion] = []
        while len(answers) < row.together:
            with work.counting():
                self._turn()
            while (received := self.front.receive()) is not None:
                answers += whole_answers(received)
            self.inbox.drain()  # an executable may have been compiled
        for answer in answers:
            if answer.lease is not None:
                self.front.release(answer.lease)
        for lease in leases:
            lease.release()
        return answers

    def _turn(self) -> None:
        """As ``workers.worker`` does it."""
        now_ns = time.monotonic_ns()
        while (records := self.submitter.lane.receive()) is not None:
            for record in records:
                assert not isinstance(record, Cancel)
                if isinstance(record, RequestForm):
                    self.submitter.forms.learn(record.number, KnownForm(record.number, record.submit))
                else:
                    self.dispatcher.submit(self.submitter, record, now_ns)
        self.dispatcher.run_due(now_ns)
        self.submitter.lane.flush()
        self.dispatcher.count()

    def close(self) -> None:
        self.dispatcher.drop(self.submitter)
        self.submitter.lane.close()
        self.front.close()
        self.arena.close()
        self.inbox.close()
        self.page.close()


@dataclass(frozen=True)
class Row:
    """Requests that come together, and what each of them may cost: what was counted when it was set, and a tenth more."""

    name: str
    model: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    #: Bytecodes of CPython 3.11 in our own modules.
    instructions: int
    together: int = 1


ROWS = [
    Row("small", "addsub", ("INPUT0", "INPUT1"), (1, 16), 2910),
    Row("1MiB", "identity", ("INPUT0",), (MIB // 4,), 3860),
    Row("mlp", "mlp", ("x",), (1, 784), 2540),
    Row("mlp-together", "mlp", ("x",), (1, 784), 1090, together=8),
]
rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


@pytest.fixture(scope="module")
def bench(leaves_nothing: None) -> Iterator[Bench]:
    made = Bench()
    for name in ("addsub", "identity", "mlp"):
        made.load(name)
    yield made
    made.close()


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions of Python have other instructions")
@rows
def test_instructions(bench: Bench, row: Row) -> None:
    for _ in range(WARM):
        assert {answer.code for answer in bench.ask(Work(), row)} == {""}
    work = Work()
    for _ in range(COUNT):
        assert {answer.code for answer in bench.ask(work, row)} == {""}
    assert 0 < work.instructions / COUNT / row.together <= row.instructions
    # Received, looked for more, answered.
    assert work.system_calls.total() <= 3 * COUNT, work.system_calls


@rows
def test_nothing_is_left_for_the_garbage_collector(bench: Bench, row: Row) -> None:
    """It runs in the middle of requests, and what it would have to find may hold megabytes."""
    for _ in range(WARM):
        bench.ask(Work(), row)
    gc.collect()
    gc.disable()
    try:
        for _ in range(COUNT):
            bench.ask(Work(), row)
        assert gc.collect() == 0
    finally:
        gc.enable()
