"""The sequence page: a table that others read while it is written, and after its writer was killed in the middle."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tensord.shm.errors import InvalidArgument
from tensord.shm.segment import Segment
from tensord.shm.sequence_page import FreeSlots, Key, SequenceKeys, SequencePage, SequenceState
from tests.generated import examples

_KEYS = 12


def crowded(page: SequencePage, number: int) -> Key:
    """Returns a key whose home is one of a few places around the table's end, so that keys collide and wrap around."""
    bits = page._words[3]
    home = (number % 3 - 2) % (1 << bits)
    low = pow(page._words[2], -1, 1 << 64) * ((home << 64 - bits) + number) % (1 << 64)
    return low, 7 + number % 2


@pytest.fixture
def page() -> Iterator[SequencePage]:
    made = SequencePage.create(4)
    yield made
    made.close()


def test_what_the_worker_notes_is_what_others_read(page: SequencePage) -> None:
    reader = SequencePage.attach(os.dup(page.fd))
    keys = SequenceKeys("m", 1)
    assert reader.find(keys.key(5)) is reader.slots(keys.slots) is None
    since = page.admit(keys.key(5), 1000)
    text_since = page.admit(keys.key("5"), 1000)
    page.begin(keys.key(5), since)
    page.publish_slots(keys.slots, 3, 2)
    assert reader.find(keys.key(5)) == (SequenceState.BEGUN, 1000)
    assert reader.find(keys.key("5")) == (SequenceState.WAITING, text_since) == (SequenceState.WAITING, 1001)
    assert reader.slots(keys.slots) == FreeSlots(1, 3, 2)
    page.publish_slots(keys.slots, 1 << 30, 1 << 30)
    assert reader.slots(keys.slots) == FreeSlots(2, (1 << 20) - 1, (1 << 20) - 1)
    page.end(keys.key(5), since)
    assert reader.find(keys.key(5)) == (SequenceState.ENDED, since)
    page.settle()
    page.withdraw_slots(keys.slots)
    page.close()
    assert reader.find(keys.key(5)) is reader.slots(keys.slots) is None
    assert list(reader.sequences()) == [(keys.key("5"), SequenceState.WAITING, 1001)]
    assert "1 sequences" in repr(reader)
    reader.close()


def test_a_later_sequence_of_the_same_id_has_the_place(page: SequencePage) -> None:
    """The end of the one before it comes after its beginning."""
    key = SequenceKeys("m", 1).key("who")
    first = page.admit(key, 5)
    page.begin(key, first)
    second = page.admit(key, 5)
    page.end(key, first)
    page.begin(key, first)
    page.settle()
    assert page.find(key) == (SequenceState.WAITING, second)
    page.end(key, second)
    third = page.admit(key, 5)
    page.settle()
    assert page.find(key) == (SequenceState.WAITING, third)
    assert len(page) == 1


def test_not_too_many_that_ended_are_kept(page: SequencePage) -> None:
    """A front does not read its answers, and sequences go on coming."""
    keys = SequenceKeys("m", 1)
    for number in range(1, 3001):
        page.end(keys.key(number), page.admit(keys.key(number), number))
    assert [page.find(keys.key(number)) is not None for number in (1, 2000, 2900, 3000)] == [False, False, True, True]
    assert len(page) == len(list(page.sequences())) < 1000
    page.settle()
    assert len(page) == len(list(page.sequences())) == 0


def test_models_versions_and_kinds_of_ids_are_told_apart() -> None:
    keys = [SequenceKeys(*model) for model in (("m", 1), ("m", 2), ("m1", 1), ("", 11))]
    found = {each.key(who) for each in keys for who in (1, 11, 2**64 - 1, "1", "#1", "11", "\udcff")}
    found |= {each.slots for each in keys}
    assert len(found) == 4 * 8
    assert all(low and high for low, high in found)


class AgainstDict(RuleBasedStateMachine):
    """Compares the page with a dict under operations in any order, with keys that collide."""

    def __init__(self) -> None:
        super().__init__()
        self.page = SequencePage.create(1)
        self.reader = SequencePage.attach(os.dup(self.page.fd))
        self.there: dict[Key, tuple[SequenceState, int]] = {}
        self.ended: list[tuple[Key, int]] = []

    @rule(number=st.integers(0, _KEYS))
    def admit(self, number: int) -> None:
        key = crowded(self.page, number)
        self.there[key] = SequenceState.WAITING, self.page.admit(key, 0)

    @rule(number=st.integers(0, _KEYS), stale=st.booleans())
    def begin(self, number: int, stale: bool) -> None:
        key = crowded(self.page, number)
        state, since = self.there.get(key, (None, 1 << 40))
        self.page.begin(key, since - stale)
        if state is SequenceState.WAITING and not stale:
            self.there[key] = SequenceState.BEGUN, since

    @rule(number=st.integers(0, _KEYS))
    def end(self, number: int) -> None:
        key = crowded(self.page, number)
        _, since = self.there.get(key, (None, 1 << 40))
        self.page.end(key, since)
        if key in self.there:
            self.there[key] = SequenceState.ENDED, since
            self.ended.append((key, since))

    @rule()
    def settle(self) -> None:
        self.page.settle()
        for key, since in self.ended:
            if self.there.get(key) == (SequenceState.ENDED, since):
                del self.there[key]
        self.ended.clear()

    @invariant()
    def readers_see_the_same(self) -> None:
        for number in range(_KEYS + 1):
            key = crowded(self.page, number)
            assert self.reader.find(key) == self.there.get(key)
        assert len(self.page) == len(self.there)

    def teardown(self) -> None:
        assert {key: (state, since) for key, state, since in self.reader.sequences()} == self.there
        self.page.close()
        self.reader.close()


AgainstDict.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestAgainstDict = AgainstDict.TestCase


# ------------------------------------------------------------------------------------------- in the middle of a change


class Words:
    """Wraps the page's words and calls a function before each access."""

    def __init__(self, words: Any, before: Any) -> None:
        self._words = words
        self._before = before

    def __getitem__(self, at: int) -> int:
        self._before(None)
        return int(self._words[at])

    def __setitem__(self, at: int, value: int) -> None:
        self._before((at, value))
        self._words[at] = value


def words_read(page: SequencePage, key: Key) -> int:
    """Returns how many words of the page a reader looks at to find a key that is there."""
    real, read = page._words, 0

    def count(_: object) -> None:
        nonlocal read
        read += 1

    page._words = Words(real, count)  # type: ignore[assignment]
    assert page.find(key) is not None
    page._words = real
    return read


Change = tuple[bool, int]
CHANGES = st.lists(st.tuples(st.booleans(), st.integers(0, _KEYS)), min_size=1, max_size=12)


def apply(page: SequencePage, changes: list[Change], present: set[Key]) -> None:
    """Applies changes to the page. True: the sequence is added if it is absent; False: it is removed."""
    for comes, number in changes:
        key = crowded(page, number)
        if comes and key not in present:
            page.begin(key, page.admit(key, number))
            present.add(key)
        elif not comes and key in present:
            page.end(key, page.find(key)[1])  # type: ignore[index]
            page.settle()
            present.discard(key)


@given(CHANGES, CHANGES, st.lists(st.sampled_from([0, 0, 1, 6, 12]), max_size=20))
@settings(deadline=None, max_examples=examples(300))
def test_who_stays_is_found_at_every_moment(first: list[Change], then: list[Change], pace: list[int]) -> None:
    """A reader is overtaken by the writer's stores, so many before each word that it reads."""
    page = SequencePage.create(1)
    present: set[Key] = set()
    apply(page, first, present)
    # Those that the following changes leave alone, and those that are never there.
    touched = {crowded(page, number) for _, number in then}
    expected = {crowded(page, n): page.find(crowded(page, n)) for n in range(_KEYS + 1)}
    expected = {key: value for key, value in expected.items() if key not in touched}
    before = bytes(page._segment.view)
    stores: list[tuple[int, int]] = []
    real = page._words
    page._words = Words(real, lambda store: stores.append(store) if store else None)  # type: ignore[assignment]
    apply(page, then, present)
    for key, value in expected.items():
        page._segment.view[:] = before
        left, steps = list(stores), list(pace)

        def overtaken(_: object, left: list[tuple[int, int]] = left, steps: list[int] = steps) -> None:
            for _ in range(steps.pop(0) if steps else 0):
                if left:
                    at, store = left.pop(0)
                    real[at] = store

        page._words = Words(real, overtaken)  # type: ignore[assignment]
        assert page.find(key) == value
    page._words = real
    page.close()


@given(CHANGES, CHANGES)
@settings(deadline=None)
def test_a_writer_that_is_killed_leaves_a_page_that_can_be_read(first: list[Change], then: list[Change]) -> None:
    """After each of its stores: who was there before and after is there, and nobody who was at no time."""
    page = SequencePage.create(1)
    present: set[Key] = set()
    apply(page, first, present)
    touched = {crowded(page, number) for _, number in then}
    kept = {key: (state, since) for key, state, since in page.sequences() if key not in touched}
    real = page._words

    def killed(store: object) -> None:
        if store:
            found = {key: (state, since) for key, state, since in reader.sequences()}
            assert {key: found[key] for key in kept} == kept
            assert found.keys() <= kept.keys() | touched
            assert all(reader.find(key) == kept[key] for key in kept)

    reader = SequencePage.attach(os.dup(page.fd))
    page._words = Words(real, killed)  # type: ignore[assignment]
    apply(page, then, present)
    page._words = real
    reader.close()
    page.close()


# --------------------------------------------------------------------------------------------------------------- bounds


def test_ways_stay_short_however_many_come_and_go() -> None:
    most = 256
    page = SequencePage.create(most)
    keys, numbers = SequenceKeys("m", 1), random.Random(1)
    living: dict[int, int] = {}
    longest = 0
    for who in range(100_000):
        if len(living) == most:
            gone = numbers.choice(list(living)) if who % 8 == 0 else next(iter(living))
            page.end(keys.key(gone), living.pop(gone))
            if who % 64 == 0:
                page.settle()
        living[who] = page.admit(keys.key(who), who)
        if who % 2000 == 1999:
            longest = max(longest, *(words_read(page, keys.key(one)) for one in living))
    # Six of them whatever the way: the key and its value, and whether an entry has moved meanwhile.
    assert longest <= 6 + 32
    page.settle()
    assert {key for key, _, _ in page.sequences()} == {keys.key(who) for who in living}
    assert len(page) == most
    page.close()


def test_slots_of_too_many_models_are_not_told(page: SequencePage) -> None:
    keys = [SequenceKeys("m", number).slots for number in range(1, 1027)]
    for key in keys:
        page.publish_slots(key, 1, 0)
    assert [page.slots(key) is not None for key in keys[-3:]] == [True, False, False]
    page.withdraw_slots(keys[0])
    page.publish_slots(keys[-1], 1, 0)
    page.publish_slots(keys[5], 9, 0)
    assert (page.slots(keys[-1]) or FreeSlots(0, 0, 0)).free == 1
    assert (page.slots(keys[5]) or FreeSlots(0, 0, 0)).free == 9


@pytest.mark.parametrize("words", [(), (0,) * 4, (2, 0, 1, 11), (1, 0, 1, 60), (1, 0, 1, 1, 0)])
def test_what_is_no_sequence_page(words: tuple[int, ...]) -> None:
    segment = Segment.create(max(8, 8 * len(words)))
    with segment.view.cast("Q") as view:
        for at, word in enumerate(words):
            view[at] = word
    segment.share(writable=False)
    with pytest.raises(InvalidArgument, match="not a sequence page"):
        SequencePage.attach(os.dup(segment.fd))
    segment.close()
