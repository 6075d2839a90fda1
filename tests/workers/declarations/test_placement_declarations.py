"""On which of its worker's devices a model runs."""

from __future__ import annotations

from types import ModuleType

import jax
import pytest

from tensord.config import model_config
from tensord.shm.errors import InvalidArgument, Unsupported
from tensord.workers.declarations.placement_declarations import chosen_devices, device_count, given_devices

#: Only their number and order count.
DEVICES = ("a", "b", "c", "d")


def message(text: str = "") -> model_config.ModelConfig:
    return model_config.parse_pbtxt(f'name: "m" {text}', "m")


def module(**declared: object) -> ModuleType:
    made = ModuleType("model")
    vars(made).update(declared)
    return made


def parameter(value: str) -> str:
    return f'parameters {{ key: "devices" value {{ string_value: "{value}" }} }}'


def test_how_many_it_says() -> None:
    assert [device_count(message(), module()), device_count(message(), module(devices=4))] == [0, 4]
    assert device_count(message(parameter("2")), module(devices=4)) == 2
    for given in (0, -1, True, "4", 2.0):
        with pytest.raises(InvalidArgument, match="a number of devices from 1 is expected"):
            device_count(message(), module(devices=given))
    for text in ("all", "9" * 5000):
        with pytest.raises(InvalidArgument, match=f"parameter 'devices' is '{text}'"):
            device_count(message(parameter(text)), module())


@pytest.mark.parametrize(
    ("gpus", "count", "first", "expected"),
    [
        ("", 0, None, "a"),
        ("", 3, None, "abc"),
        ("", 4, 8, "abcd"),
        ("gpus: [ 10, 11 ]", 2, 8, "cd"),
        ("gpus: [ 11, 9, 10 ]", 2, 8, "bc"),
        # Those of other workers are theirs.
        ("gpus: [ 0, 1, 10, 11 ]", 0, 8, "c"),
    ],
)
def test_which_it_gets(gpus: str, count: int, first: int | None, expected: str) -> None:
    chosen = chosen_devices(message(f"instance_group {{ {gpus} }}"), count, DEVICES, first)  # type: ignore[arg-type]
    assert "".join(chosen) == expected  # type: ignore[arg-type]


def test_more_than_there_are() -> None:
    with pytest.raises(InvalidArgument, match="runs on 5 devices, and its worker has 4 "):
        chosen_devices(message(), 5, DEVICES, None)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="runs on 3 devices, and instance_group names 2 "):
        chosen_devices(message("instance_group { gpus: [ 0, 1 ] }"), 3, DEVICES, 0)  # type: ignore[arg-type]


def test_what_is_elsewhere_than_its_worker() -> None:
    (device, *_) = jax.devices()
    assert given_devices(message(), module(), (device,), None, keeps_state=True) == (device, None)
    assert given_devices(message(), module(devices=1), (device,), None, keeps_state=True) == ((device,), None)
    group = message("instance_group { gpus: [ 1 ] }")
    given, spread = given_devices(group, module(), (DEVICES[0], device), 0, keeps_state=False)  # type: ignore[arg-type]
    assert (given, spread is not None and spread.devices) == (device, (device,))
    with pytest.raises(Unsupported, match="state is kept on one device"):
        given_devices(group, module(), (DEVICES[0], device), 0, keeps_state=True)  # type: ignore[arg-type]
