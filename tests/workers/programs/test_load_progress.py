"""Tests what a load reports while its programs are made, and what that adds up to."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tensord.workers.programs.load_progress import LoadProgress
from tensord.workers.programs.placement import CompiledProgram, Placement
from tests.workers.parameters.made_sets import loaded


def test_what_a_load_comes_to() -> None:
    told: list[tuple[int, int, int]] = []
    progress = LoadProgress("m", 1, lambda *at: told.append(at))
    parameters = {"w": jnp.ones((64, 64))}
    progress.parameters(parameters)

    def make(what: str) -> tuple[CompiledProgram, bool]:
        rows = int(what.split()[0])
        lowered = jax.jit(lambda params, x: x @ params["w"]).lower(parameters, jnp.ones((rows, 64)))
        return CompiledProgram(lowered.compile(), Placement(loaded(parameters)), 1000 + rows), rows == 1

    assert [what for what, _, _ in progress.through(["1 rows", "4 rows"], make)] == ["1 rows", "4 rows"]
    assert told == [(1, 2, 0), (2, 2, 1)]
    footprint = progress.footprint()
    assert (footprint.programs, footprint.compiled, footprint.largest) == (2, 1, "4 rows")
    assert (footprint.parameter_byte_size, footprint.program_byte_size) == (64 * 64 * 4, 2005)
    # Four rows in, and four rows out.
    assert footprint.batch_byte_size >= 2 * 4 * 64 * 4


def test_a_model_without_programs() -> None:
    footprint = LoadProgress("m", 1).footprint()
    assert (footprint.programs, footprint.parameter_byte_size, footprint.largest) == (0, 0, "")
