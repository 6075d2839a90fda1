"""Looks at a GPU that nobody asks anything, over the tests' stand-in for the driver."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tensord.shm.cuda_regions import Context, DeviceLost
from tensord.workers.devices.idle_look import IdleLook, Marker
from tests.cuda_stub.library import CudaStub
from tests.daemon_process import wait_until


@pytest.fixture
def look(context: Context) -> Iterator[Callable[..., IdleLook]]:
    """Yields a function that makes idle checks which no clock calls."""
    made: list[IdleLook] = []

    def make(idle: Callable[[], bool] = lambda: True, patience: float = 0.0, interval: float = 3600.0) -> IdleLook:
        made.append(IdleLook(context, idle, lambda call: call(), patience, interval))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_it_looks_by_itself_while_the_loop_is_idle(context: Context) -> None:
    posted: list[Callable[[], None]] = []
    idle = threading.Event()
    looking = IdleLook(context, idle.is_set, posted.append, 0.0, interval=0.01)
    try:
        wait_until(lambda: posted, "the clock")
        # Once: the next is asked for when this is done.
        assert len(posted) == 1
        posted.pop()()
        assert repr(looking) == "<IdleLook waits=False>"
        idle.set()
        wait_until(lambda: posted, "the clock")
        posted.pop()()
        assert repr(looking) == "<IdleLook waits=True>"
    finally:
        looking.close()
        looking.close()


def test_a_mark_is_reached_behind_what_is_queued(context: Context) -> None:
    with contextlib.closing(Marker(context)) as marker:
        pointer, content = context.allocate(4096), np.zeros(64, np.uint8)
        for _ in range(50):
            context.to_device(pointer, content.__array_interface__["data"][0], 64)
        marker.set()
        assert not marker.reached
        context.synchronize()
        assert marker.reached
        context.free(pointer)


def test_a_gpu_that_does_nothing_for_too_long(context: Context, look: Callable[..., IdleLook]) -> None:
    """A program of somebody's that does not end, here many copies that take their time."""
    patient, other = look(), look(patience=0.02)
    pointer, content = context.allocate(4096), np.zeros(64, np.uint8)
    for _ in range(1000):
        context.to_device(pointer, content.__array_interface__["data"][0], 64)
    patient.look()
    patient.look()
    with pytest.raises(DeviceLost, match=r"it has done nothing for 0\.02 s"):
        wait_until(other.look, "its patience to end")
    context.synchronize()
    other.look()
    other.look()
    context.free(pointer)


@pytest.mark.parametrize("function", ["cuEventQuery", "cuEventRecord"])
def test_an_error_that_would_pass_elsewhere_does_not_here(
    cuda_stub: CudaStub, context: Context, look: Callable[..., IdleLook], function: str
) -> None:
    looking = look()
    looking.look()
    # What it waits for has happened, so the next look asks and sets another mark.
    context.synchronize()
    cuda_stub.fail(function, 999)
    with pytest.raises(DeviceLost, match=r"the GPU failed \(CUDA_ERROR_UNKNOWN\), though nobody asked it anything"):
        looking.look()
