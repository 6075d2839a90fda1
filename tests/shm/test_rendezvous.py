"""What belongs to whom."""

from __future__ import annotations

from tensord.shm import rendezvous


def test_a_name_that_goes_moves_what_was_its_own_and_nothing_else() -> None:
    names = [f"cpu:{number}" for number in range(4)]
    before = {number: rendezvous.choose(number, names) for number in range(200)}
    assert set(before.values()) == set(names)
    after = {number: rendezvous.choose(number, reversed(names[:-1])) for number in before}
    assert all(after[number] == name for number, name in before.items() if name != names[-1])
