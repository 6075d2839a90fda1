"""Answers that a program holds in workers' memory: how many, how large, and how their memory is given back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from tensord_client.answer_memory import AnswerMemory, HeldResults
from tensord_client.common.results import Array
from tensord_client.errors import DeadlineExceeded, ResultsHeld
from tensord_client.lane import LaneConnection

from tests.client.test_lane import identity
from tests.daemon_process import wait_until

_PATIENCE = 120.0


def test_held_results_are_bounded_and_given_back(connect: Callable[..., LaneConnection]) -> None:
    connection = connect(max_results=3)
    values = np.zeros(10_000, np.float32)
    held = [connection.ask(identity(values + n)).result(_PATIENCE) for n in range(3)]
    with pytest.raises(ResultsHeld, match="3 results are held"):
        connection.ask(identity(values))
    held[0].release()
    assert held[0] == {}
    part = held[1]["OUTPUT0"][10:20]
    del held[1]
    fresh = connection.ask(identity(values)).result(_PATIENCE)
    # A view of an output holds it as the output does.
    with pytest.raises(ResultsHeld):
        connection.ask(identity(values))
    assert part.tolist() == [1.0] * 10
    del part
    gc.collect()
    with fresh:
        connection.ask(identity(values)).result(_PATIENCE).release()


@pytest.mark.parametrize(
    "keep",
    [
        lambda output: output,
        lambda output: output[100:],
        memoryview,
        np.from_dlpack,
        lambda output: np.frombuffer(output, np.int32),
        jax.device_put,
        jax.numpy.asarray,
        lambda output: jax.device_put({"a": [output]}),
    ],
    ids=["output", "view", "buffer", "dlpack", "frombuffer", "device_put", "asarray", "tree"],
)
def test_what_refers_to_an_answer_at_the_end_of_its_block_keeps_it(
    connect: Callable[..., LaneConnection], keep: Callable[[Array], Any]
) -> None:
    """JAX on a processor takes aligned memory as it is, as other libraries do: the numbers must not become later answers'."""
    connection = connect(max_results=2)
    values = np.arange(10_000, dtype=np.float32)
    for n in range(3):
        with connection.ask(identity(values + n)).result(_PATIENCE) as answer:
            kept, expected = keep(answer["OUTPUT0"]), np.array(answer["OUTPUT0"])
        assert not answer
        for later in range(20):
            with connection.ask(identity(values - later)).result(_PATIENCE):
                pass
        (found,) = jax.tree.leaves(kept)
        found = np.asarray(found).view(np.float32)
        np.testing.assert_array_equal(found, expected[-found.size :])
        del kept, found
        # JAX drops its references to others' memory when it is next asked for something.
        wait_until(lambda: jax.device_put(0) is not None and two_fit(connection), "the memory to be given back")


def two_fit(connection: LaneConnection) -> bool:
    """Returns whether the program may hold two more answers."""
    values = np.zeros(10_000, np.float32)
    try:
        held = [connection.ask(identity(values)).result(_PATIENCE) for _ in range(2)]
    except ResultsHeld:
        return False
    return len(held) == 2


def test_results_that_fill_the_servers_memory_are_named(connection: LaneConnection) -> None:
    """Where their bytes are too many before their number is: by the server's refusal, or the deadline that ends its wait."""
    values, held = connection.empty(20 << 20, np.float32), []
    text = r"^{} results of {} bytes are held in the server's memory: release them, or drop their arrays \({}\)$"
    size, call = values.nbytes, connection.prepare(identity(values))

    def fill() -> None:
        while True:
            held.append(call(_PATIENCE))

    with pytest.raises(ResultsHeld) as full:
        fill()
    assert full.match(text.format(len(held), len(held) * size, "no room for an answer of .* are in use"))
    assert full.value.held == len(held) < full.value.limit
    with pytest.raises(ResultsHeld, match=text.format(len(held), len(held) * size, "Deadline Exceeded")):
        connection.ask(identity(values)).result(0.5)
    held.clear()
    gc.collect()
    assert connection.ask(identity(values)).result(_PATIENCE)["OUTPUT0"].nbytes == size


class Silent:
    """Stands for a lane that is never told of leases."""

    def release(self) -> None:
        pass


def test_leases_of_two_lanes_may_have_the_same_key() -> None:
    """Leases of two lanes have the same number, as after a restart of the daemon: each is counted and released by itself."""
    held, lane, key = HeldResults(2), Silent(), (1, 0, 1)
    former, present = (AnswerMemory(held, 100, lane.release) for _ in range(2))
    held.sizes[former, key] = 60
    held.sizes[present, key] = 40
    assert held.too_many() is not None
    late = DeadlineExceeded()
    assert isinstance(former.explained(late), ResultsHeld)
    assert present.explained(late) is late
    del held.sizes[former, key]
    assert former.explained(late) is late
    held.sizes[present, (1, 64, 1)] = 40
    assert isinstance(present.explained(late), ResultsHeld)


def test_more_results_than_the_servers_memory_holds_at_once_come_one_after_the_other(
    connection: LaneConnection,
) -> None:
    """Memory that is given back reaches the worker: 40 times 16 MiB are more than it lends at once."""
    values = connection.empty(4 << 20, np.float32)
    for number in range(40):
        values[0] = number
        assert connection.ask(identity(values)).result(_PATIENCE)["OUTPUT0"][0] == number
