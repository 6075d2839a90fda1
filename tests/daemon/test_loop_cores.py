"""On which core each loop is kept: always one it may use, and those of fronts and workers apart where that can be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.options import Lanes, Options, Workers
from daemon.devices import Device
from daemon.loop_cores import FEW, LoopCores, arguments, choose, of_daemon

APART = Lanes(apart=True)
CORES = st.sets(st.integers(0, 300), min_size=1, max_size=6)


@given(CORES, st.data())
def test_always_a_core_that_may_be_used_and_apart_if_that_can_be(usable: set[int], data: st.DataObject) -> None:
    masks = data.draw(st.lists(st.sets(st.sampled_from(sorted(usable)), min_size=1), min_size=1, max_size=8))
    cores = choose(usable, masks)
    if cores == LoopCores():
        assert cores.of_worker(0) is cores.of_front(0) is None
        # With one worker that has them all, nothing is left where the kernel puts it but where there are not few cores.
        assert len(usable) not in FEW or len(masks) > 1
        return
    assert len(usable) in FEW
    workers = [cores.of_worker(number) for number in range(len(masks))]
    fronts = [cores.of_front(row) for row in range(20)]
    assert all(core in mask for core, mask in zip(workers, masks, strict=True))
    # They spread over all cores, and again in the same order.
    assert set(fronts[: len(usable)]) == usable
    assert fronts[len(usable) :] == fronts[: -len(usable)]
    assert fronts[0] not in workers


@given(st.sets(st.integers(0, 300), min_size=2, max_size=2), st.integers(0, 20))
def test_two_cores_and_one_worker(usable: set[int], row: int) -> None:
    cores = choose(usable, [usable])
    assert (cores.of_worker(0), cores.of_front(0)) == (max(usable), min(usable))
    assert cores.of_front(row) == sorted(usable)[row % 2]


@pytest.mark.parametrize(
    ("usable", "masks", "workers", "fronts"),
    [
        ([0, 1, 2], [[0, 1, 2]], (2,), (0, 1, 2)),
        ([0, 1, 2], [[0, 1, 2]] * 2, (2, 1), (0, 1, 2)),
        # Each of three cores has a worker's loop: no front can be kept off them.
        ([0, 1, 2], [[0, 1, 2]] * 3, (), ()),
        ([0, 1], [[0], [1]], (), ()),
        # A worker stays on its own cores, and fronts go where it is not.
        ([0, 1], [[0]], (0,), (1, 0)),
        ([0, 1, 2], [[0], [1, 2]], (0, 2), (1, 0, 2)),
        ([4, 9, 17], [[4, 9], [4, 9]], (9, 4), (17, 4, 9)),
        # Neither one core nor many.
        ([5], [[5]], (), ()),
        ([0, 1, 2, 3], [[0, 1, 2, 3]], (), ()),
    ],
)
def test_places(usable: list[int], masks: list[list[int]], workers: tuple[int, ...], fronts: tuple[int, ...]) -> None:
    assert choose(usable, masks) == LoopCores(workers, fronts)


@pytest.mark.parametrize(
    ("options", "devices", "workers", "fronts"),
    [
        (Options(), ["cpu:0"], (), ()),
        (Options(lanes=APART), ["cpu:0"], (2,), (0, 1, 2)),
        (Options(lanes=APART, workers=Workers(pin=False)), ["cpu:0"], (), ()),
        # The shares that the workers themselves take.
        (Options(lanes=APART, workers=Workers(cpu=2)), ["cpu:0", "cpu:1"], (0, 2), (1, 0, 2)),
        (Options(lanes=APART, workers=Workers(cores=("0",))), ["cpu:0"], (0,), (1, 2, 0)),
        (Options(lanes=APART, workers=Workers(cpu=2, cores=("0-1", "1-2"))), ["cpu:0", "cpu:1"], (1, 2), (0, 1, 2)),
        # GPU workers have neither shares nor entries.
        (Options(lanes=APART, workers=Workers(cpu=2, cores=("0", "0"))), ["cuda:0", "cuda:1"], (2, 1), (0, 1, 2)),
    ],
)
def test_what_the_operator_says_holds(
    options: Options, devices: list[str], workers: tuple[int, ...], fronts: tuple[int, ...]
) -> None:
    assert of_daemon(options, [Device(name) for name in devices], {0, 1, 2}) == LoopCores(workers, fronts)


def test_on_the_command_line() -> None:
    assert (arguments(None), arguments(0)) == ([], ["--loop-core", "0"])
