"""Outputs come to lie where they are wanted, or anywhere else: their bytes are right, and nothing else changes."""

from __future__ import annotations

import functools
import gc
import logging
import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.shm.arrays import Array, address_of
from tensord.workers.native.extensions import available
from tensord.workers.processor import output_memory
from tensord.workers.processor.output_memory import OutputMemory, given_up, watched
from tests import prepared
from tests.generated import examples
from tests.workers.worker_loop import DEVICE

pytestmark = pytest.mark.skipif(not available, reason="the C extension was not built")
if available:
    from tensord.workers.native import _native

COUNT = 1 << 16
SIZE = 4 * COUNT
#: Room on both sides of a place, of which every byte is looked at.
MARGIN = 4096
MARK = 0xA5


@pytest.fixture(autouse=True, scope="module")
def attached(leaves_nothing: None) -> None:
    """Attaches the module for the rest of the process, as in a worker: without offers it changes nothing."""
    assert DEVICE.platform == "cpu"
    output_memory.attach()
    assert output_memory.attached()


class Place:
    """Memory of ours with marked margins."""

    def __init__(self, byte_size: int = SIZE, misaligned: int = 0) -> None:
        self.mapping = mmap.mmap(-1, byte_size + 2 * MARGIN)
        self.whole = np.frombuffer(self.mapping, np.uint8)
        self.whole[:] = MARK
        self.start = MARGIN + misaligned
        self.view = memoryview(self.mapping)[self.start : self.start + byte_size]

    @property
    def address(self) -> int:
        return address_of(self.view)

    @property
    def untouched(self) -> bool:
        return bool((self.whole == MARK).all())

    @property
    def surroundings_untouched(self) -> bool:
        end = self.start + len(self.view)
        return bool((self.whole[: self.start] == MARK).all() and (self.whole[end:] == MARK).all())


def aligned(count: int = COUNT, misaligned: int = 0) -> Array:
    """Returns an array of small numbers that begins ``misaligned`` bytes behind a multiple of 64."""
    memory = np.zeros(4 * count + 128, np.uint8)
    start = -address_of(memory) % 64 + misaligned
    array = memory[start : start + 4 * count].view(np.float32)
    array[:] = np.arange(count) % 1000
    return array


class Program:
    """A compiled function, and what was learned of its outputs with an aligned argument."""

    def __init__(self, function: Callable[[Any], dict[str, Any]], count: int = COUNT) -> None:
        self.compiled: Any = jax.jit(function).lower(jax.ShapeDtypeStruct((count,), np.float32)).compile()
        self.x = aligned(count)
        made, self.memory = watched(self.call, jax.eval_shape(function, self.x))
        self.right = {name: np.array(made[name]) for name in made}

    def call(self, x: Array | None = None) -> dict[str, Any]:
        return dict(self.compiled(self.x if x is None else x))

    def run(self, places: dict[str, Place]) -> dict[str, Array]:
        """Runs the program with places for outputs; returns the outputs after checking them."""
        made = self.memory.run(self.call, {name: place.address for name, place in places.items()})
        return self.check(made)

    def check(self, made: dict[str, Any]) -> dict[str, Array]:
        outputs = {name: np.asarray(made[name]) for name in self.right}
        for name, right in self.right.items():
            np.testing.assert_array_equal(outputs[name], right)
        return outputs


@functools.cache
def two() -> Program:
    """Returns a program with two outputs of one size."""
    return Program(lambda x: {"y": x * 2, "z": x + 3})


def lies_at(output: Array, place: Place) -> bool:
    return address_of(output) == place.address


def test_an_output_lands_where_it_is_offered_and_nothing_else_changes() -> None:
    place = Place()
    outputs = two().run({"y": place})
    assert lies_at(outputs["y"], place)
    np.testing.assert_array_equal(np.frombuffer(place.view, np.float32), two().right["y"])
    assert place.surroundings_untouched
    assert not given_up_quietly(place)
    del outputs
    assert given_up(place.address, place.view)
    # Once freed it is nobody's: the next run lies elsewhere.
    place.whole[:] = MARK
    two().run({})
    assert place.untouched


def given_up_quietly(place: Place) -> bool:
    return not _native.holds(place.address)


@pytest.mark.parametrize("order", [("y", "z"), ("z", "y")])
def test_outputs_of_one_size_are_told_apart_in_either_order(order: tuple[str, str]) -> None:
    assert two().memory.offerable == {"y", "z"}
    places = {name: Place() for name in order}
    outputs = two().run(places)
    for name, place in places.items():
        assert lies_at(outputs[name], place)
        assert place.surroundings_untouched
    alone = Place()
    outputs = two().run({order[0]: alone})
    assert lies_at(outputs[order[0]], alone)


def test_a_place_that_is_not_aligned_is_not_taken() -> None:
    place = Place(misaligned=32)
    outputs = two().run({"y": place})
    assert not lies_at(outputs["y"], place)
    assert place.untouched
    assert given_up(place.address, place.view)


@pytest.mark.parametrize("difference", [-64, 64])
def test_a_place_for_another_size_is_not_taken(difference: int) -> None:
    place = Place(SIZE + difference)
    try:
        _native.offer(SIZE + difference, 0, place.address)
        two().check(two().call())
    finally:
        _native.withdraw_offers()
    assert place.untouched


def test_another_thread_s_outputs_are_its_own_affair() -> None:
    place, program = Place(), two()
    found: list[bool] = []

    def elsewhere() -> None:
        found.extend(lies_at(output, place) for output in program.check(program.call()).values())

    def call() -> dict[str, Any]:
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
        return program.call()

    outputs = program.check(program.memory.run(call, {"y": place.address}))
    assert found == [False, False]
    assert lies_at(outputs["y"], place)


def test_programs_that_run_before_are_counted() -> None:
    program, place = two(), Place()
    other = Program(lambda x: {"w": x - 1})

    def call() -> dict[str, Any]:
        other.check(other.call())
        return program.call()

    made, memory = watched(call, ["y", "z"])
    program.check(made)
    del made
    outputs = program.check(memory.run(call, {"z": place.address}))
    assert lies_at(outputs["z"], place)


def test_a_program_that_returns_its_input() -> None:
    program = Program(lambda x: {"same": x, "y": x * 2})
    places = {name: Place() for name in program.memory.offerable}
    outputs = program.run(places)
    assert lies_at(outputs["y"], places["y"])
    np.testing.assert_array_equal(program.x, np.arange(COUNT) % 1000)


def test_an_argument_that_xla_copies() -> None:
    """XLA's copy takes memory of the output's size first, and may get the place; the answer is right, and the loss is seen."""
    program, place = Program(lambda x: {"y": x * 2}), Place()
    unaligned = aligned(misaligned=4)
    made = program.memory.run(lambda: program.call(unaligned), {"y": place.address})
    outputs = program.check(made)
    np.testing.assert_array_equal(unaligned, program.x)
    assert place.surroundings_untouched
    del made, outputs
    # jax may keep the arguments of a call until the next one.
    program.call()
    gc.collect()
    assert given_up(place.address, place.view)


def test_offers_end_with_an_error() -> None:
    place = Place()

    def fail() -> dict[str, Any]:
        raise RuntimeError("a program's own")

    with pytest.raises(RuntimeError, match="a program's own"):
        two().memory.run(fail, {"y": place.address})
    two().check(two().call())
    assert place.untouched


def test_watching_ends_with_an_error() -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError("a program's own")

    with pytest.raises(RuntimeError, match="a program's own"):
        watched(fail, ["y"])
    two().call()
    assert _native.watched_allocations() == []


def test_more_outputs_than_can_be_offered() -> None:
    names = [f"y{number:02}" for number in range(_native.MAX_OFFERS + 4)]
    program = Program(lambda x: {name: x + number for number, name in enumerate(names)})
    assert program.memory.sizes == dict.fromkeys(names, SIZE)
    assert len(program.memory.offerable) == _native.MAX_OFFERS
    places = {name: Place() for name in program.memory.offerable}
    outputs = program.run(places)
    assert all(lies_at(outputs[name], place) for name, place in places.items())
    for place in places.values():
        _native.offer(64, 0, place.address)
    with pytest.raises(OverflowError, match=f"{_native.MAX_OFFERS} offers at most"):
        _native.offer(64, 0, 64)
    _native.withdraw_offers()


@pytest.mark.parametrize(("byte_size", "skip", "address"), [(0, 0, 64), (-1, 0, 64), (64, -1, 64), (64, 0, 0)])
def test_what_cannot_be_is_not_offered(byte_size: int, skip: int, address: int) -> None:
    with pytest.raises(ValueError, match="bytes at"):
        _native.offer(byte_size, skip, address)


def test_more_than_can_be_known_at_once() -> None:
    """The others are ordinary, and there is room again when some are freed."""
    program = Program(lambda x: {"y": x * 2}, 1 << 12)
    places = [Place(4 << 12) for _ in range(70)]
    kept = [program.run({"y": place})["y"] for place in places]
    landed = [lies_at(output, place) for output, place in zip(kept, places, strict=True)]
    assert landed == [True] * 64 + [False] * 6
    assert all(place.untouched for place in places[64:])
    del kept[:2]
    assert lies_at(program.run({"y": places[-1]})["y"], places[-1])
    kept.clear()
    assert all(given_up(place.address, place.view) for place in places)


def test_one_place_twice() -> None:
    """It is free when both are."""
    place = Place()
    first, second = two().run({"y": place}), two().run({"y": place})
    assert lies_at(first["y"], place)
    assert lies_at(second["y"], place)
    del first
    assert not given_up_quietly(place)
    del second
    assert given_up(place.address, place.view)


def test_an_output_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory stays, and its program is offered nothing more; another thread may free it."""
    kept: list[memoryview] = []
    monkeypatch.setattr(output_memory, "_kept", kept)
    program, place = Program(lambda x: {"y": x * 2}), Place()
    holder = [program.run({"y": place})["y"]]
    assert not given_up(place.address, place.view)
    assert kept == [place.view]
    program.memory.refuse()
    assert program.memory.offerable == frozenset()
    assert program.memory.sizes == {"y": SIZE}
    dropping = threading.Thread(target=holder.clear)
    dropping.start()
    dropping.join()
    assert given_up(place.address, place.view)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_nothing_is_lost() -> None:
    """Neither room for what is known, nor memory: with offers that are taken, and with some that are not."""
    program, place, odd = two(), Place(), Place(misaligned=16)
    program.run({"y": place, "z": odd})
    before = resident()
    for number in range(3000):
        outputs = program.run({"y": place, "z": odd} if number % 3 else {"z": place})
        assert lies_at(outputs["y" if number % 3 else "z"], place)
        del outputs
        assert given_up(place.address, place.view)
    # Had each run lost one output it were 750 MiB.
    assert resident() - before < 100 << 20


def test_where_no_such_libraries_are(tmp_path: Path) -> None:
    assert not _native.redirect_allocations(f"{tmp_path}/")
    place = Place()
    assert lies_at(two().run({"y": place})["y"], place)


@pytest.mark.parametrize("kept", [True, False])
def test_what_does_not_come_true_at_the_start_is_never_relied_upon(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kept: bool
) -> None:
    """A first output that is not given up as it should be, and one that lies elsewhere."""
    arrays: list[Any] = []

    def keep(address: int, byte_size: int) -> str:
        program = Program(lambda x: {"y": x * 2}, byte_size // 4)
        arrays.append(program.memory.run(program.call, {"y": address}))
        return ""

    monkeypatch.setattr(output_memory, "_attached", False)
    if kept:
        monkeypatch.setattr(output_memory, "_tried_at", keep)
    else:
        monkeypatch.setattr(OutputMemory, "run", lambda self, call, addresses: call())
    with caplog.at_level(logging.INFO, "tensord.workers.processor.output_memory"):
        assert not output_memory.attach()
    assert not output_memory.attached()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    reason = "give back memory in the way" if kept else "put outputs into the memory that it requests"
    assert f"outputs are copied to their places: XLA does not {reason}" in record.message


def test_attaching_again_changes_nothing() -> None:
    output_memory.attach()
    assert output_memory.attached()
    place = Place()
    assert lies_at(two().run({"y": place})["y"], place)
    assert given_up(place.address, place.view)


def test_no_output_is_learned_where_another_thread_computes() -> None:
    """Where another thread computes, as jax's default is, no memory is offered, and all works as ever."""
    script = (
        "import sys\nimport jax, numpy as np\n"
        "jax.config.update('jax_cpu_enable_async_dispatch', sys.argv[1] == 'True')\njax.devices()\n"
        "from tensord.workers.processor import output_memory\noutput_memory.attach()\n"
        "call = jax.jit(lambda x: {'y': x * 2}).lower(jax.ShapeDtypeStruct((1 << 22,), np.float32)).compile()\n"
        "x = np.ones((1 << 22) + 16, np.float32)\nat = -x.__array_interface__['data'][0] % 64 // 4\n"
        "x = x[at : at + (1 << 22)]\n"
        "print(output_memory.attached())\n"
        "for _ in range(4):\n"
        "    made, memory = output_memory.watched(lambda: call(x), ['y'])\n"
        "    place = bytearray(1 << 25)\n    start = -output_memory.address_of(memoryview(place)) % 64\n"
        "    address = output_memory.address_of(memoryview(place)[start:])\n"
        "    made = memory.run(lambda: call(x), dict.fromkeys(memory.offerable, address))\n"
        "    assert (np.asarray(made['y']) == 2).all()\n"
        "    print(len(memory.offerable), np.asarray(made['y']).__array_interface__['data'][0] == address)\n"
        "    del made\n    assert not output_memory._native.holds(address)\n"
    )
    for elsewhere in (True, False):
        said = prepared.run_script(script, str(elsewhere))
        assert said.split("\n")[:-1] == [str(not elsewhere), *["0 False" if elsewhere else "1 True"] * 4]


# ------------------------------------------------------------------------------------------------------ what is learned


@given(
    st.lists(
        st.tuples(st.integers(1, 4).map(lambda n: 64 * n), st.integers(1, 6).map(lambda n: 4096 * n)), max_size=12
    ),
    st.lists(st.integers(0, 11), max_size=4, unique=True),
)
def test_the_last_allocation_of_a_size_at_an_address_is_the_one_that_is_left(
    allocations: list[tuple[int, int]], chosen: list[int]
) -> None:
    live = {allocations[at] for at in chosen if at < len(allocations)}
    outputs = {f"y{number}": Lying(*allocation) for number, allocation in enumerate(sorted(live))}
    memory = OutputMemory(outputs, allocations)  # type: ignore[arg-type]
    offered = dict(zip(outputs, sorted(live), strict=True))
    assert memory.offerable == set(outputs)
    for name, (byte_size, address) in offered.items():
        last = max(at for at, one in enumerate(allocations) if one == (byte_size, address))
        assert memory._skips[name] == [size for size, _ in allocations[:last]].count(byte_size)


class Lying:
    """The parts of an array that are asked for: its size and its address."""

    def __init__(self, byte_size: int, address: int) -> None:
        self.nbytes = byte_size
        self.__array_interface__ = {"data": (address, False)}


def test_what_was_not_allocated_as_a_whole_is_not_offered() -> None:
    outputs: Any = {"inside": Lying(64, 4096 + 64), "other": Lying(128, 4096), "empty": Lying(0, 4096)}
    assert OutputMemory(outputs, [(256, 4096), (64, 4096)]).offerable == frozenset()


# ---------------------------------------------------------------------------------------------------- whatever is asked


@functools.cache
def program_of(rows: tuple[int, ...]) -> Program:
    """Returns a program with an output for each of ``rows``, so many times 4 KiB large; 0: an empty one."""
    count = 1 << 10

    def function(x: Any) -> dict[str, Any]:
        return {f"y{number}": jax.numpy.tile(x + number, (times, 1)) for number, times in enumerate(rows)}

    return Program(function, count)


@settings(max_examples=examples(40))
@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.data())
def test_whatever_is_offered_the_outputs_are_right(rows: list[int], data: st.DataObject) -> None:
    program = program_of(tuple(rows))
    for _ in range(3):
        wanted = data.draw(st.lists(st.sampled_from(sorted(program.right)), unique=True))
        places = {
            name: Place(program.memory.sizes[name], data.draw(st.sampled_from([0, 0, 64, 16])))
            for name in wanted
            if name in program.memory.offerable
        }
        outputs = program.run(places)
        for name, place in places.items():
            assert lies_at(outputs[name], place) == (place.start % 64 == 0)
            assert place.surroundings_untouched
            assert place.untouched or lies_at(outputs[name], place)
        del outputs
        assert all(given_up(place.address, place.view) for place in places.values())
