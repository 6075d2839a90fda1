"""Pieces of page-locked memory, over the tests' stand-in for the driver: used again, within the bound, given back."""

from __future__ import annotations

import os

import pytest

from tensord.shm.cuda_regions import Context
from tensord.workers.devices.host_staging import TOGETHER, StagingPool
from tensord.workers.devices.pinned_memory import PinnedBudget
from tests.cuda_stub.library import CudaStub


def test_a_piece_goes_from_thread_to_thread(context: Context, cuda_stub: CudaStub) -> None:
    budget = PinnedBudget(2 * TOGETHER)
    pool, before = StagingPool(context, budget), cuda_stub.host(os.getpid())
    pool.prepare()
    first, second = pool.take(), pool.take()
    assert first is not second
    pool.give_back(first)
    assert pool.take() is first
    found = cuda_stub.host(os.getpid())
    assert (found.registered - before.registered, found.locked - before.locked) == (2, 2 * TOGETHER)
    pool.give_back(first)
    pool.close()
    assert budget.byte_size == TOGETHER
    pool.give_back(second)
    assert budget.byte_size == 0
    found = cuda_stub.host(os.getpid())
    assert (found.locked, found.violations) == (before.locked, before.violations)


@pytest.mark.parametrize("refused", [False, True])
def test_without_locked_memory_there_is_other(context: Context, cuda_stub: CudaStub, refused: bool) -> None:
    """Too much for the bound, or refused by the system: nothing of it is counted."""
    budget = PinnedBudget(TOGETHER if refused else TOGETHER - 1)
    pool, before = StagingPool(context, budget), cuda_stub.host(os.getpid()).locked
    if refused:
        cuda_stub.fail("cuMemHostRegister_v2", 2)
    piece = pool.take()
    assert (piece.locked, budget.byte_size, cuda_stub.host(os.getpid()).locked) == (False, 0, before)
    piece.content[:] = 1
    pool.give_back(piece)
    assert pool.take() is piece
    pool.close()
