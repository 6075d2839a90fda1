"""Sequences that are answered outside of Python: sums as ever, and whatever is not simple goes the ordinary way."""

from __future__ import annotations

import logging
import random
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensord.shm.sequence_page import SequenceKeys, SequenceState
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.native.extensions import available
from tests.invariants import check_invariants
from tests.records import Tensor, WholeAnswer
from tests.repositories import applying
from tests.workers.worker_loop import PATIENCE_SECONDS, WorkerLoop

pytestmark = pytest.mark.skipif(not available, reason="the C extension was not built")

SLOTS = 6
#: The sum of each sequence. A negative number makes the program fail after it has the state.
SUMS = """
    import jax
    import numpy as np

    inputs = {"x": "FP32[1]"}
    outputs = {"y": "FP32[1]"}
    max_batch_size = 4
    state = {"sum": "FP32[1]"}


    def blow(x):
        if (np.asarray(x) < 0).any():
            raise ValueError("negative")
        return x


    def create(path, config, device):
        def apply(params, inputs, state):
            x = jax.pure_callback(blow, jax.ShapeDtypeStruct(inputs["x"].shape, np.float32), inputs["x"])
            total = state["sum"] + x
            return {"y": total}, {"sum": total}

        return apply, None
    """


class Sums:
    """The model in a worker's loop, and the requests to it."""

    def __init__(
        self, loop: WorkerLoop, path: Path, strategy: str = "oldest { max_candidate_sequences: 6 }", source: str = SUMS
    ) -> None:
        self.loop = loop
        self._path = path / "sums"
        (self._path / "1").mkdir(parents=True)
        (self._path / "1" / "model.py").write_text(textwrap.dedent(source))
        batching = f"sequence_batching {{ max_sequence_idle_microseconds: 1000000000 {strategy} }}"
        (self._path / "config.pbtxt").write_text(batching)
        self.load()

    def load(self) -> None:
        self.loop.load(self._path)
        self.admitted = 0
        table, admit = self.version.sequences.table, self.version.sequences.table.admit  # type: ignore[union-attr]

        def counted(request: Any) -> Any:
            self.admitted += 1
            return admit(request)

        table.admit = counted  # type: ignore[method-assign]

    @property
    def version(self) -> ModelVersion:
        (found,) = [each for each in self.loop.worker._models if each.name == "sums"]
        return found

    def say(self, correlation_id: int | str, x: float, flags: str = "") -> int:
        """Queues a request: S START, E END."""
        content = np.full((1, 1), x, np.float32).tobytes()
        own = {"sequence_id": correlation_id, "sequence_start": "S" in flags, "sequence_end": "E" in flags}
        return self.loop.submit("sums", [Tensor("x", "FP32", (1, 1), content)], own=own)

    def heard(self, count: int = 1) -> list[float | str]:
        """Returns so many answers in the order of their requests: a sum, or an error message."""
        answers = sorted(self.loop.answers(count), key=lambda answer: answer.request_id)
        return [answer.message if answer.code else value(answer) for answer in answers]

    def ask(self, *asked: tuple[Any, ...]) -> list[float | str]:
        """Sends requests in one datagram; returns their answers."""
        for each in asked:
            self.say(*each)
        return self.heard(len(asked))

    def known(self, once: Callable[[], object] | None = None) -> None:
        """Asks until nothing of it is Python's affair any more."""
        deadline, quiet = time.monotonic() + PATIENCE_SECONDS, 0
        while quiet < 10:
            before = self.admitted
            if once is None:
                assert self.ask(("warm", 1, "SE"), ("other", 2, "SE"), (7, 3, "SE")) == [1, 2, 3]
            else:
                once()
            quiet = quiet + 1 if self.admitted == before else 0
            assert time.monotonic() < deadline, "it never came about"
        self.admitted = 0

    def state(self, correlation_id: int | str) -> SequenceState | None:
        """Returns the state of a sequence that fronts see, or None."""
        found = self.loop.worker._sequences.page.find(SequenceKeys("sums", 1).key(correlation_id))
        return None if found is None else found[0]


def value(answer: WholeAnswer) -> float:
    (tensor,) = answer.outputs
    assert isinstance(tensor.place, bytes)
    return float(np.frombuffer(tensor.place, np.float32)[0])


@pytest.fixture(params=["oldest { max_candidate_sequences: 6 }", "direct { }"], ids=["oldest", "direct"])
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sums(loop: WorkerLoop, tmp_path: Path) -> Sums:
    made = Sums(loop, tmp_path)
    made.known()
    return made


def test_sums_are_right_whatever_comes_together(loop: WorkerLoop, tmp_path: Path, strategy: str) -> None:
    """Numbers and texts, several requests of one sequence in one datagram, sequences that end and begin again in one."""
    sums = Sums(loop, tmp_path, strategy)
    sums.known()
    slots, chance = 6 if "oldest" in strategy else 4, random.Random(3)
    totals: dict[int | str, float] = {}
    ids: tuple[int | str, ...] = (1, "1", 2, (1 << 64) - 1, "é" * 64, "a")
    asked_of_all = 0
    for _ in range(300):
        expected: list[float] = []
        asked: list[tuple[int | str, float, str]] = []
        for _ in range(chance.randint(1, 9)):
            who, x = chance.choice(ids), float(chance.randint(0, 9))
            if who not in totals and len(totals) == slots:
                continue
            start = who not in totals or chance.random() < 0.1
            end = chance.random() < 0.2
            totals[who] = x if start else totals[who] + x
            expected.append(totals[who])
            asked.append((who, x, "S" * start + "E" * end))
            if end:
                del totals[who]
        assert sums.ask(*asked) == expected
        asked_of_all += len(asked)
    assert asked_of_all > 1000
    # One that finds no slot yet, because one that ends has not run, waits in Python; others need it no more.
    assert sums.admitted < asked_of_all / (100 if "oldest" in strategy else 2)
    version = sums.version
    assert version.sequences is not None
    check_invariants(version.sequences)
    assert version.sequences.table.live == len(totals)
    assert all((sums.state(who) is SequenceState.BEGUN) == (who in totals) for who in ids)


def test_who_ends_is_off_the_page_when_its_answer_has_left(sums: Sums) -> None:
    assert sums.ask((1, 1, "S")) == [1]
    assert sums.state(1) is SequenceState.BEGUN
    assert sums.ask((1, 1, "E")) == [2]
    assert (sums.state(1), sums.admitted) == (None, 0)
    told = sums.loop.worker._sequences.page.slots(SequenceKeys("sums", 1).slots)
    assert told is not None
    assert (told.free, told.backlog) == (SLOTS, 0)


def test_who_finds_no_slot_waits_and_runs_later(sums: Sums) -> None:
    assert sums.ask(*[(who, who, "S") for who in range(1, SLOTS + 1)]) == [1, 2, 3, 4, 5, 6]
    assert sums.admitted == 0
    sums.say("late", 10, "S")
    sums.say("late", 1)
    assert sums.loop.front.flush()
    for _ in range(5):
        sums.loop.worker.iterate()
    assert sums.state("late") is SequenceState.WAITING
    sums.say(1, 1, "E")
    assert sums.heard(3) == [10, 11, 2]
    assert sums.admitted == 3
    assert sums.ask(("late", 1), (2, 1)) == [12, 3]
    assert sums.admitted == 3


def test_refusals_are_those_of_the_ordinary_way_and_change_nothing(sums: Sums) -> None:
    good, unknown, none, after = sums.ask((1, 1, "S"), (2, 1), (0, 1, "S"), (1, 1))
    assert (good, after) == (1, 2)
    assert "must specify the START flag" in str(unknown)
    assert "non-zero or non-empty correlation ID" in str(none)
    assert sums.admitted == 3
    assert sums.ask((1, 1)) == [3]
    assert sums.admitted == 3


def test_a_failure_with_the_state_is_told_once_to_each_sequence(sums: Sums, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    lost = "sequence {} of model 'sums' was lost after an execution error; start it again with the START flag"
    assert sums.ask((1, 1, "S"), ("b", 2, "S"), (3, 3, "S")) == [1, 2, 3]
    assert sums.ask((1, -1), ("b", 1), (4, 1, "S")) == [lost.format(1), lost.format("b"), lost.format(4)]
    assert sums.admitted == 0
    assert sums.version.sequences is not None
    assert sums.version.sequences.table.live == 0
    assert [sums.state(who) for who in (1, "b", 3, 4)] == [None] * 4
    assert (sums.version.statistics.fail.count, sums.version.statistics.lost_sequences) == (3, 4)
    # The third was in no batch: it is told at its next request, and from then on it is unknown.
    first, again = sums.ask((3, 1))[0], sums.ask((3, 1))[0]
    assert lost.format(3) in str(first)
    assert "must specify the START flag" in str(again)
    assert "must specify the START flag" in str(sums.ask((1, 1))[0])
    assert sums.ask((1, 5, "S"), (3, 7, "S")) == [5, 7]


def test_who_began_in_an_earlier_load_ends_there(sums: Sums) -> None:
    assert sums.ask((1, 1, "S"), (2, 2, "S")) == [1, 2]
    sums.load()
    assert sums.ask((3, 3, "S"), (3, 1)) == [3, 4]
    assert sums.ask((1, 10), (2, 10, "S"), (2, 1), (1, 1, "E")) == [11, 10, 11, 12]
    sums.known()
    assert sums.ask((2, 1), (3, 1)) == [12, 5]
    assert sums.admitted == 0


def test_who_is_silent_too_long_is_forgotten(loop: WorkerLoop, tmp_path: Path) -> None:
    made = Sums(loop, tmp_path, "")
    made.known()
    made.ask((1, 1, "S"))
    rules = made.version.sequences.table._rules  # type: ignore[union-attr]
    object.__setattr__(rules, "idle_ns", 1_000_000)
    time.sleep(0.01)
    assert "must specify the START flag" in str(made.ask((1, 1))[0])
    time.sleep(0.01)
    # Nobody asks again: the loop's own iterations find it, once it is time to look. (What was noted is of the longer time above.)
    made.loop.worker._dispatcher._end_silent(time.monotonic_ns())
    assert made.ask((1, 1, "S")) == [1]
    time.sleep(0.01)
    made.loop.worker.iterate()
    assert made.version.sequences is not None
    assert made.version.sequences.table.live == 0


TELLING = applying(
    """
    flags = inputs["START"] + 10 * inputs["END"] + 100 * inputs["READY"]
    return {"y": inputs["x"] * 1000000 + inputs["CORRID"] * 1000 + flags}
    """,
    "x FP32[1]",
    "y FP32[1]",
    more="max_batch_size = 4",
)
CONTROLS = """
    control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
    control_input { name: "END" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } }
    control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 2, 3 ] } }
    control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT32 } }
    """


def test_a_model_is_told_of_its_sequences_as_in_python(loop: WorkerLoop, tmp_path: Path, strategy: str) -> None:
    """Without a state; a text cannot be told in 32 bits, which is said to its client and to no other."""
    sums = Sums(loop, tmp_path, strategy + CONTROLS, TELLING)
    sums.known(lambda: sums.ask((1, 0, "SE"), (2, 0, "SE"), (3, 0, "SE")))
    assert sums.ask((1, 4, "S"), (2, 5, "S")) == [4001301, 5002301]
    assert sums.ask((2, 5), (1, 6), (2, 7, "E"), (1, 8, "SE")) == [5002300, 6001300, 7002310, 8001311]
    assert sums.admitted == 0
    first, text, last = sums.ask((1, 1, "S"), ("a", 1, "S"), (1, 2))
    assert (first, last) == (1001301, 2001300)
    assert "data-type is 'BYTES'" in str(text)
