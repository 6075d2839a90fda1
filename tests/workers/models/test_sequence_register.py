"""Tests what a worker's page says of its sequences, in step with the table that has them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tensord.shm.errors import Unavailable
from tensord.shm.sequence_page import SequenceKeys, SequencePage, SequenceState
from tensord.workers.models.sequence_register import RegisteredSequences, SequenceRegister
from tensord.workers.scheduling.sequence import Controls, Sequenced
from tensord.workers.scheduling.sequence_table import SequenceRules, SequenceTable

KEYS = SequenceKeys("m", 1)


@pytest.fixture
def register() -> Iterator[SequenceRegister]:
    made = SequenceRegister(SequencePage.create(3), 3)
    yield made
    made.page.close()


def load(register: SequenceRegister, slots: int = 1) -> tuple[RegisteredSequences, SequenceTable[Sequenced]]:
    """Returns a new load of the same model version: its events and its table."""
    events = register.of("m", 1)
    table: SequenceTable[Sequenced] = SequenceTable("m", SequenceRules(slots), 1, events)
    events.serve(table)
    return events, table


def ask(who: int | str, flags: str = "") -> Sequenced:
    return Sequenced(None, 0, Controls(who, "S" in flags, "E" in flags))


def state(register: SequenceRegister, who: int | str) -> SequenceState | None:
    found = register.page.find(KEYS.key(who))
    return None if found is None else found[0]


def slots(register: SequenceRegister) -> tuple[int, int] | None:
    register.tell()
    told = register.page.slots(KEYS.slots)
    return None if told is None else (told.free, told.backlog)


def test_a_sequence_is_on_the_page_from_its_admission_until_its_answers_have_left(register: SequenceRegister) -> None:
    _, table = load(register)
    assert slots(register) == (1, 0)
    first, second = table.admit(ask(5, "SE")), table.admit(ask("5", "SE"))
    assert [state(register, who) for who in (5, "5")] == [SequenceState.WAITING] * 2
    assert slots(register) == (0, 1)
    taken = table.take(first)
    assert state(register, 5) is SequenceState.BEGUN
    assert table.done(taken, 1) is second
    assert (state(register, 5), register.ended) == (SequenceState.ENDED, True)
    assert slots(register) == (0, 0)
    register.settle()
    assert (state(register, 5), register.ended) == (None, False)
    assert not table.done(table.take(second), 2)
    assert slots(register) == (1, 0)


def test_more_than_may_live(register: SequenceRegister) -> None:
    _, table = load(register)
    _, other = load(register)
    lives = [table.admit(ask(1, "S")), other.admit(ask(2, "S")), table.admit(ask(3, "S"))]
    with pytest.raises(Unavailable, match=r"3 sequences are live on this worker, requests.max_sequences allows 3"):
        other.admit(ask(4, "S"))
    assert state(register, 4) is None
    table.cancel(lives[2])
    other.admit(ask(4, "S"))
    assert state(register, 4) is SequenceState.WAITING
    assert "3 of 3" in repr(register)


def test_a_model_that_is_loaded_again(register: SequenceRegister) -> None:
    """Its sequences keep their places, those that begin anew get later ones, and the new load tells what is free."""
    old_events, old = load(register, slots=2)
    running = old.take(old.admit(ask(1, "S")))
    old.take(old.admit(ask(2, "S")))
    _, new = load(register, slots=5)
    old_events.retire()
    assert slots(register) == (5, 0)
    assert [state(register, who) for who in (1, 2)] == [SequenceState.BEGUN] * 2
    old.close(1)
    new.admit(ask(1, "S"))
    assert state(register, 1) is SequenceState.WAITING
    assert slots(register) == (4, 0)
    # The end of the old one concerns its own place alone.
    old.done(running, 1)
    register.settle()
    assert state(register, 1) is SequenceState.WAITING
    assert slots(register) == (4, 0)


def test_a_model_that_is_unloaded_tells_of_no_slots(register: SequenceRegister) -> None:
    events, table = load(register)
    table.admit(ask(1, "S"))
    events.retire()
    assert slots(register) is None
    assert not register.serving
    assert repr(events) == "<RegisteredSequences of None>"
