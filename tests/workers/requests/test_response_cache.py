"""The response cache: what counts as the same question, and what makes room."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.workers.requests.response_cache import ENTRY_BYTE_SIZE, Insertion, Question, ResponseCache
from tensord.workers.requests.result import Response
from tests.invariants import check_invariants

LOAD = object()
X = np.arange(4, dtype=np.int32)


def asked(load: object = LOAD, outputs: tuple[str, ...] = (), **arrays: Any) -> Question:
    return Question.of(load, outputs, {name: np.asarray(array) for name, array in arrays.items()})


def answer(value: int) -> dict[str, Any]:
    return {"y": np.array([value])}


def test_the_same_bytes_have_the_same_answer_whatever_the_order_of_the_inputs() -> None:
    cache = ResponseCache(1 << 20)
    assert cache.insert(asked(a=X, b=X + 1), answer(1)) is Insertion.KEPT
    assert cache.insert(asked(b=X + 1, a=X), answer(2)) is Insertion.KNOWN
    found = cache.find(asked(b=X + 1, a=X.copy()))
    assert found is not None
    assert found["y"] == 1


@pytest.mark.parametrize(
    "other",
    [
        asked(x=X + 1),
        asked(x=X.view(np.float32)),
        asked(x=X.reshape(2, 2)),
        asked(z=X),
        asked(x=X, z=X),
        asked(),
        asked(object(), x=X),
        asked(outputs=("y",), x=X),
    ],
)
def test_whatever_differs_is_another_question(other: Question) -> None:
    cache, question = ResponseCache(1 << 20), asked(x=X)
    cache.insert(question, answer(1))
    assert cache.find(other) is None
    assert cache.insert(other, answer(2)) is Insertion.KEPT
    found = cache.find(question)
    assert found is not None
    assert (found["y"], len(cache)) == (1, 2)
    check_invariants(cache)


def test_strings_are_compared_with_their_lengths() -> None:
    cache = ResponseCache(1 << 20)
    cache.insert(asked(x=np.array([b"ab", b"c"], object)), answer(1))
    assert cache.find(asked(x=np.array([b"a", b"bc"], object))) is None
    assert cache.find(asked(x=np.array([b"ab", b"c"], object))) is not None


def test_entries_are_private() -> None:
    cache, x, y = ResponseCache(1 << 20), X.copy(), np.array([1])
    cache.insert(asked(x=x), Response({"y": y}, {"p": 1}))
    x[0], y[0] = 99, 99
    found = cache.find(asked(x=X))
    assert found is not None
    assert (found["y"], found.parameters) == (1, {"p": 1})
    with pytest.raises(ValueError, match="read-only"):
        found["y"][0] = 2


def test_the_least_recently_used_goes() -> None:
    size = ENTRY_BYTE_SIZE + 8
    cache = ResponseCache(2 * size)
    cache.insert(asked(x=X), answer(1))
    cache.insert(asked(x=X + 1), answer(2))
    assert cache.find(asked(x=X)) is not None
    cache.insert(asked(x=X + 2), answer(3))
    assert cache.find(asked(x=X)) is not None
    assert cache.find(asked(x=X + 1)) is None
    assert cache.byte_size == 2 * size


def test_what_could_never_fit_drives_nobody_out() -> None:
    cache = ResponseCache(2 * ENTRY_BYTE_SIZE)
    cache.insert(asked(x=X), answer(1))
    assert cache.insert(asked(x=X + 3), {"y": np.zeros(2 * ENTRY_BYTE_SIZE, np.uint8)}) is Insertion.TOO_LARGE
    assert cache.insert(asked(x=X + 1), {"y": np.array([b"s" * 2048], object)}) is Insertion.TOO_LARGE
    assert cache.insert(asked(x=X + 2), Response({}, {"p": "s" * 2048})) is Insertion.TOO_LARGE
    assert cache.find(asked(x=X)) is not None


def test_a_load_that_ends_takes_its_answers_along() -> None:
    cache, other = ResponseCache(1 << 20), object()
    cache.insert(asked(x=X), answer(1))
    cache.insert(asked(other, x=X), answer(2))
    cache.forget(LOAD)
    assert (len(cache), cache.find(asked(x=X))) == (1, None)
    cache.forget(other)
    assert cache.byte_size == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 700)), max_size=60))
def test_the_bound_holds_and_nothing_wrong_is_found(events: list[tuple[int, int]]) -> None:
    cache, kept = ResponseCache(4 * ENTRY_BYTE_SIZE), dict[int, int]()
    for number, size in events:
        question = asked(x=np.array([number]))
        found = cache.find(question)
        if found is None:
            cache.insert(question, {"y": np.full(size, number, np.uint8)})
            kept[number] = size
        else:
            assert np.array_equal(found["y"], np.full(kept[number], number, np.uint8))
        check_invariants(cache)
