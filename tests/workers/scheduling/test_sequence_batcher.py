"""The planner of sequences against the naive model, and what each event leads to."""

from __future__ import annotations

import pytest

from tensord.shm.errors import Cancelled, DeadlineExceeded, InvalidArgument, Unavailable
from tensord.workers.scheduling.sequence import Controls, IterativeIds
from tensord.workers.scheduling.sequence_batcher import DirectBatcher, DirectRules, SequenceBatcher
from tensord.workers.scheduling.sequence_table import SequenceRules
from tests.generated import examples
from tests.invariants import check_invariants
from tests.workers.scheduling.naive_sequences import Step
from tests.workers.scheduling.sequence_simulator import Churn, Heard, batcher_of, simulate

SEEDS = examples(20_000)
PARTS = 20


@pytest.mark.parametrize("part", range(PARTS))
def test_it_decides_what_the_naive_model_decides(part: int) -> None:
    for seed in range(part * SEEDS // PARTS, (part + 1) * SEEDS // PARTS):
        try:
            # Mostly short ones, and some in which much comes together.
            simulate(seed, 300 if seed % 200 == 0 else 12)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_many_ids_leave_nothing_behind() -> None:
    churn = Churn(ids=2000, seed=1)
    for _ in range(20_000):
        churn.step()
    table = churn._batcher.table
    check_invariants(churn._batcher)
    assert table.live == len(churn._heard.live) <= 4000
    assert len(table._slots._freed) + len(table.expiries) + len(table._idle) <= 2 * 4000
    assert churn.answered > 1000


class Scene:
    """A batcher and events for it; numbers are ids, texts are a request's flags: S START, E END."""

    def __init__(self, slots: int = 1, instances: int = 1, direct: bool = True, max_waiting: int = 100) -> None:
        self.heard = Heard()
        self.batcher = batcher_of(slots, instances, direct, 4, 1000, max_waiting, self.heard)
        self._number = 0

    def send(self, correlation_id: int | str, flags: str = "", key: str = "k", timeout_ns: int = 0) -> Step:
        self._number += 1
        controls = Controls(correlation_id, "S" in flags, "E" in flags)
        step = Step(self._number, key, self._number, controls, timeout_ns)
        self.batcher.arrived(step)
        check_invariants(self.batcher)
        return step

    def run(self, now_ns: int = 100, instance: int = 0) -> list[Step]:
        """Runs one batch; returns it."""
        batch = self.batcher.take(now_ns, instance)
        check_invariants(self.batcher)
        self.batcher.done(batch, now_ns)
        check_invariants(self.batcher)
        return batch

    def slots(self) -> dict[int | str, int]:
        """Returns which sequence has which slot of the first instance."""
        return {
            live.correlation_id: live.slot.number
            for live in self.batcher.table.sequences()
            if live.slot is not None and live.slot.instance == 0
        }


def test_one_row_for_a_request() -> None:
    scene = Scene()
    step = Step(1, "k", 1, Controls(5, True, False))
    step.rows = 2
    with pytest.raises(InvalidArgument, match="must specify batch-size 1 due to requirements of sequence batcher"):
        scene.batcher.arrived(step)


def test_numbers_and_texts_are_different_ids() -> None:
    scene = Scene(slots=4)
    scene.send(5, "S")
    with pytest.raises(InvalidArgument):
        scene.send("5")
    scene.send("5", "S")
    assert scene.slots() == {5: 0, "5": 1}


def test_silence_ends_a_sequence_only_when_nothing_of_it_waits_or_runs() -> None:
    scene = Scene()
    scene.send(1, "S")
    assert scene.batcher.tick(10**9) == []
    batch = scene.batcher.take(10**9)
    assert scene.batcher.tick(2 * 10**9) == []
    scene.batcher.done(batch, 2 * 10**9)
    assert scene.batcher.next_tick_ns == 0
    # When it ends matters to nobody before another one waits for the slot.
    waiting = scene.send(2, "SE")
    assert scene.batcher.next_tick_ns == 2 * 10**9 + 1000
    assert [step for step, _ in scene.batcher.cancelled(waiting)] == [waiting]
    scene.batcher.tick(2 * 10**9 + 999)
    assert scene.batcher.table.live == 1
    scene.batcher.tick(2 * 10**9 + 1000)
    assert scene.batcher.table.live == len(scene.heard.live) == 0
    with pytest.raises(InvalidArgument, match="START"):
        scene.send(1)


def test_a_sequence_waits_for_a_slot_only_as_long_as_it_wants() -> None:
    scene = Scene()
    scene.send(1, "S")
    late = [scene.send(2, "S"), scene.send(2, timeout_ns=50), scene.send(2, "E")]
    assert scene.batcher.next_tick_ns == late[1].arrived_ns + 50
    answers = scene.batcher.tick(late[1].arrived_ns + 50)
    assert [step for step, _ in answers] == late
    assert {(type(error), error.message) for _, error in answers} == {
        (Unavailable, "timeout of the corresponding sequence has been expired")
    }
    assert scene.batcher.table.live == 1


def test_a_deadline_is_a_cancel_that_says_so() -> None:
    scene = Scene()
    scene.send(1, "S")
    batch = scene.batcher.take(100)
    late = Step(9, "k", 5, Controls(1, False, False))
    late.deadline_ns = 200
    scene.batcher.arrived(late)
    behind = scene.send(1)
    answers = scene.batcher.tick(200)
    assert [(step, type(error)) for step, error in answers] == [(late, DeadlineExceeded), (behind, Cancelled)]
    assert answers[0][1].message == "Deadline Exceeded"
    scene.batcher.done(batch, 201)
    assert scene.batcher.table.live == 0


def test_a_worker_that_stops_lets_sequences_end_and_begins_none() -> None:
    scene = Scene(slots=2)
    scene.send(1, "S")
    scene.batcher.stop()
    with pytest.raises(Unavailable, match="has stopped accepting new inference requests"):
        scene.send(2, "S")
    scene.send(1, "E")
    assert [len(scene.run()), len(scene.run()), len(scene.run())] == [1, 1, 0]
    assert scene.batcher.table.live == 0


def test_what_was_taken_and_vanished_leaves_no_hole() -> None:
    scene = Scene()
    vanished, behind = scene.send(1, "S"), scene.send(1)
    scene.batcher.take(100)
    answers = scene.batcher.dropped(vanished, 101)
    assert [step for step, _ in answers] == [behind]
    check_invariants(scene.batcher)
    assert scene.batcher.table.live == len(scene.heard.live) == 0


def test_each_sequence_is_told_once_that_its_state_is_lost() -> None:
    """The one whose request ran with its answer, and the silent ones with their next request, unless that starts anew."""
    scene = Scene(slots=4, direct=False)
    for number in (1, 2, 3):
        scene.send(number, "S")
    scene.run()
    scene.send(1)
    running = scene.batcher.take(100)
    assert scene.batcher.lose(0, 100) == []
    scene.batcher.done(running, 100)
    check_invariants(scene.batcher)
    assert scene.batcher.table.live == 0
    with pytest.raises(Unavailable, match="sequence 2 of model 'm' was lost after an execution error; start it again"):
        scene.send(2)
    scene.send(3, "S")
    for number in (1, 2):
        with pytest.raises(InvalidArgument, match="must specify the START flag"):
            scene.send(number)
    scene.send(3)


def test_a_loss_is_forgotten_when_the_sequence_would_have_been_idle_too_long() -> None:
    scene = Scene()
    scene.send(1, "S")
    scene.run()
    scene.batcher.lose(0, 100)
    step = Step(9, "k", 1200, Controls(1, False, False))
    with pytest.raises(InvalidArgument, match="must specify the START flag"):
        scene.batcher.arrived(step)


def test_a_sequence_goes_on_elsewhere() -> None:
    """The model was loaded again, and a START of its id came there."""
    scene = Scene(slots=2)
    waits = scene.send(1, "S")
    scene.send(2, "S")
    scene.batcher.close(1)
    scene.batcher.close(7)
    assert [len(scene.run()), waits.live.closed] == [2, True]
    assert scene.slots() == {2: 1}
    scene.batcher.close_all()
    assert scene.batcher.table.live == len(scene.heard.live) == 0


def test_begun_is_told_when_the_first_request_is_taken() -> None:
    scene = Scene()
    scene.send(1, "S")
    assert list(scene.heard.live.values()) == ["waiting"]
    scene.run()
    assert list(scene.heard.live.values()) == ["begun"]


def test_who_has_no_room_for_another_sequence_refuses_it() -> None:
    class Full(Heard):
        def waiting(self, correlation_id: int | str) -> tuple[int | str, int]:
            raise Unavailable("no room")

    batcher: SequenceBatcher[Step] = SequenceBatcher(
        "m", SequenceRules(), lambda: DirectBatcher(DirectRules()), 1, Full()
    )
    with pytest.raises(Unavailable, match="no room"):
        batcher.arrived(Step(1, "k", 1, Controls(1, True, False)))
    check_invariants(batcher)
    assert batcher.table.live == 0


def test_more_slots_than_any_memory() -> None:
    scene = Scene(slots=1 << 31, direct=False)
    for number in range(1, 100):
        scene.send(number, "S")
    assert scene.batcher.table.free_slots == (1 << 31) - 99
    assert len(scene.run()) == 4


def test_a_request_that_comes_round_again() -> None:
    heard = Heard()
    rules = SequenceRules(slots=2, iterative=True)
    batcher: SequenceBatcher[Step] = SequenceBatcher("m", rules, lambda: DirectBatcher(DirectRules(2)), 1, heard)
    ids = IterativeIds()
    own, made = (Step(0, "k", 1, ids.first_round(Controls(*said))) for said in ((7, True, True), (0, False, False)))
    batcher.arrived(own)
    batcher.arrived(made)
    with pytest.raises(InvalidArgument, match="START"):
        batcher.arrived(Step(3, "k", 1, Controls(7, False, False)))
    batch = batcher.take(5)
    assert [step.controls for step in batch] == [(7, True, False), (1, True, False)]
    own.controls = own.controls._replace(start=False)
    assert batcher.restore([own], 6) == []
    batcher.done([made], 6)
    check_invariants(batcher)
    assert batcher.take(7) == [own]
    assert own.controls == (7, False, False)
    batcher.done([own], 8)
    check_invariants(batcher)
    assert batcher.table.live == len(heard.live) == 0
