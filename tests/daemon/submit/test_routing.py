"""Where a sequence is: every front says the same, and it moves only when its own worker comes or goes."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from daemon.submit.routing import home

DEVICES = [f"cpu:{number}" for number in range(5)]
SEQUENCES = st.one_of(st.integers(0, (1 << 64) - 1), st.text(max_size=128))


@given(SEQUENCES, st.permutations(DEVICES))
def test_the_order_in_which_workers_came_does_not_matter(sequence: int | str, devices: list[str]) -> None:
    assert home("m", 1, sequence, devices) == home("m", 1, sequence, DEVICES)


@given(SEQUENCES, st.sampled_from(DEVICES))
def test_a_worker_that_goes_takes_its_own_sequences_along_and_no_others(sequence: int | str, gone: str) -> None:
    before = home("m", 1, sequence, DEVICES)
    after = home("m", 1, sequence, [device for device in DEVICES if device != gone])
    assert after == before or before == gone


def test_sequences_are_shared_out() -> None:
    counts = Counter(home("m", 1, number, DEVICES) for number in range(1000))
    assert set(counts) == set(DEVICES)
    assert min(counts.values()) > 100


def test_models_versions_and_kinds_of_ids_are_told_apart() -> None:
    def homes(model: str, version: int, kind: type[int] | type[str]) -> list[str]:
        return [home(model, version, kind(number), DEVICES) for number in range(100)]

    different = [homes("m", 1, int), homes("m", 1, str), homes("m", 2, int), homes("other", 1, int)]
    assert len({tuple(each) for each in different}) == len(different)
