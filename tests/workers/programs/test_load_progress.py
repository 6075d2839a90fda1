"""Tests in which order and threads the programs of a load are made, what it reports meanwhile, and what that adds up to."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import pytest

from tensord.workers.programs.load_progress import LoadProgress, ahead
from tensord.workers.programs.placement import CompiledProgram, Placement
from tests.workers.parameters.made_sets import loaded


def test_what_a_load_comes_to() -> None:
    told: list[tuple[int, int, int]] = []
    progress = LoadProgress("m", 1, lambda *at: told.append(at))
    parameters = {"w": jnp.ones((64, 64))}
    progress.parameters(parameters)

    def make(rows: int) -> tuple[CompiledProgram, bool]:
        lowered = jax.jit(lambda params, x: x @ params["w"]).lower(parameters, jnp.ones((rows, 64)))
        return CompiledProgram(lowered.compile(), Placement(loaded(parameters)), 1000 + rows), rows == 1

    for rows, program, is_new in progress.through([1, 4], make, 1):
        progress.made(f"{rows} rows", program, is_new)
    assert told == [(1, 2, 0), (2, 2, 1)]
    footprint = progress.footprint()
    assert (footprint.programs, footprint.compiled, footprint.largest) == (2, 1, "4 rows")
    assert (footprint.parameter_byte_size, footprint.program_byte_size) == (64 * 64 * 4, 2005)
    # Four rows in, and four rows out.
    assert footprint.batch_byte_size >= 2 * 4 * 64 * 4
    assert footprint.flops >= 2 * 4 * 64 * 64


def test_a_model_without_programs() -> None:
    footprint = LoadProgress("m", 1).footprint()
    assert (footprint.programs, footprint.parameter_byte_size, footprint.flops) == (0, 0, -1)


@pytest.mark.parametrize("threads", [1, 2, 3, 20])
@pytest.mark.parametrize("count", [0, 1, 10])
def test_in_their_order(threads: int, count: int) -> None:
    found = list(ahead(lambda number: (number * number, True), range(count), threads))
    assert found == [(number * number, True) for number in range(count)]


def test_several_at_once() -> None:
    """Behind the first, each waits for another."""
    meeting = threading.Barrier(2, timeout=60)

    def make(number: int) -> tuple[int, bool]:
        if number:
            meeting.wait()
        return number, True

    assert [number for number, _ in ahead(make, range(5), 2)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("threads", "new"), [(1, True), (3, False)])
def test_alone_each_is_made_when_it_is_asked_for_in_the_thread_that_asks(threads: int, new: bool) -> None:
    made: list[int] = []

    def make(number: int) -> tuple[int, bool]:
        made.append(number)
        return threading.get_ident(), new

    found = ahead(make, range(3), threads)
    for number in range(3):
        assert next(found) == (threading.get_ident(), new)
        assert made == list(range(number + 1))


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_failure_is_raised_and_little_begun_after_it(threads: int) -> None:
    begun = []

    def make(number: int) -> tuple[int, bool]:
        begun.append(number)
        if number == 2:
            raise ValueError("two")
        return number, True

    with pytest.raises(ValueError, match="two"):
        list(ahead(make, range(100), threads))
    assert len(begun) <= 3 + threads
