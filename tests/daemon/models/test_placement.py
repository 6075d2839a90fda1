"""Tests which workers load a model."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tensord.config.model_config import parse_pbtxt
from tensord.config.options import Options, RateLimit
from tensord.daemon import check
from tensord.daemon.models import placement
from tensord.daemon.models.placement import place, say_kinds
from tensord.daemon.models.repository import FoundModel
from tensord.daemon.processes.devices import Device
from tensord.shm.device_names import gpu_of
from tensord.shm.errors import InvalidArgument

CPUS = ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
GPUS = ("cuda:0", "cuda:1", "cuda:2")
LIMITED = "rate_limiter { resources { name: 'R' count: 1 } }"
GLOBAL = "rate_limiter { resources { name: 'R' global: true count: 1 } }"


def placed(text: str, devices: tuple[str, ...] = CPUS, name: str = "m", rate_limited: bool = True) -> tuple[str, ...]:
    message = parse_pbtxt(text, name)
    message.name = name
    return place(message, devices, rate_limited)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "dynamic_batching { }",
        "instance_group { count: 4 kind: KIND_CPU }",
        # Enough for each of four workers.
        "dynamic_batching { default_queue_policy { max_queue_size: 16 } }",
    ],
)
def test_every_worker_unless_something_speaks_against_it(text: str) -> None:
    assert placed(text) == CPUS


@pytest.mark.parametrize(
    "text",
    [
        "dynamic_batching { preserve_ordering: true }",
        "sequence_batching { oldest { preserve_ordering: true } }",
        "dynamic_batching { default_queue_policy { max_queue_size: 11 } }",
        "dynamic_batching { default_queue_policy { max_queue_size: 100 } priority_levels: 2 default_priority_level: 1 "
        "priority_queue_policy { key: 2 value { max_queue_size: 3 } } }",
    ],
)
def test_promises_that_only_one_worker_can_keep(text: str) -> None:
    (device,) = placed(text)
    assert placed(text) == (device,)
    # Another model is elsewhere, and a device that goes moves nobody else.
    assert len({placed(text, name=f"m{number}") for number in range(100)}) == len(CPUS)
    for gone in set(CPUS) - {device}:
        assert placed(text, tuple(each for each in CPUS if each != gone)) == (device,)


def test_models_that_are_to_be_together_are() -> None:
    named = "parameters {{ key: 'tensord_together' value {{ string_value: '{}' }} }}"
    kinds = ["", "dynamic_batching { preserve_ordering: true }", "instance_group { count: 4 }"]
    found = {placed(kind + named.format("router"), name=f"m{number}") for kind in kinds for number in range(10)}
    assert len(found) == 1
    assert len({placed(named.format(f"group {number}")) for number in range(100)}) == len(CPUS)
    assert placed(named.format("router"), CPUS[:1]) == CPUS[:1]
    groups = "instance_group { kind: KIND_GPU gpus: [ 1 ] }"
    assert placed(groups + named.format("router"), GPUS) == ("cuda:1",)


def test_two_reasons_for_one_worker_are_two_workers() -> None:
    named = "parameters { key: 'tensord_together' value { string_value: 'router' } }"
    limited = f"instance_group {{ kind: KIND_CPU {GLOBAL} }}" + named
    with pytest.raises(InvalidArgument) as caught:
        placed(limited)
    assert caught.value.message == (
        "model 'm' is to be on the worker of 'router' (tensord_together) and on the one with the resources that it shares with "
        "others (rate_limiter)"
    )
    assert placed(limited, CPUS[:1]) == CPUS[:1]


def test_models_that_share_resources_over_the_host_are_together() -> None:
    groups = [f"instance_group {{ kind: KIND_CPU {each} }}" for each in (LIMITED, GLOBAL)]
    found = {placed(group, name=f"m{number}") for group in groups for number in range(20)}
    assert len(found) == 1
    # Each GPU has its own, unless they are global.
    assert placed(f"instance_group {{ {LIMITED} }}", GPUS) == GPUS
    assert len(placed(f"instance_group {{ {GLOBAL} }}", GPUS)) == 1
    assert placed(groups[1], rate_limited=False) == CPUS


def test_gpus_that_are_named() -> None:
    assert placed("instance_group { kind: KIND_GPU gpus: [ 2, 0 ] }", GPUS) == ("cuda:0", "cuda:2")
    assert placed("instance_group [ { gpus: [ 1 ] }, { gpus: [ 2 ] count: 3 } ]", GPUS) == ("cuda:1", "cuda:2")
    assert placed("instance_group [ { gpus: [ 1 ] }, { kind: KIND_GPU } ]", GPUS) == GPUS
    assert placed("instance_group { gpus: [ 1 ] }") == CPUS
    words = "instance group m_0 of model m has kind KIND_GPU but specifies invalid or unsupported gpu id 3"
    with pytest.raises(InvalidArgument, match=words):
        placed("instance_group { kind: KIND_GPU gpus: [ 3 ] }", GPUS)


BOTH = ("cuda:0", "cuda:1", "cpu:0", "cpu:1")


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("", GPUS[:2]),
        ("instance_group { count: 2 }", GPUS[:2]),
        ("instance_group { kind: KIND_CPU }", CPUS[:2]),
        ("instance_group { kind: KIND_GPU }", GPUS[:2]),
        ("instance_group [ { kind: KIND_CPU }, { kind: KIND_GPU } ]", BOTH),
        ("instance_group [ { kind: KIND_CPU }, { gpus: [ 1 ] } ]", ("cuda:1", "cpu:0", "cpu:1")),
        ("instance_group [ { kind: KIND_CPU }, { kind: KIND_MODEL } ]", BOTH),
        (f"instance_group [ {{ kind: KIND_CPU {LIMITED} }} ]", ("cpu:0",)),
        (f"instance_group [ {{ kind: KIND_CPU }}, {{ {LIMITED} }} ]", ("cuda:0", "cuda:1", "cpu:0")),
    ],
)
def test_cpu_workers_beside_gpu_workers(groups: str, expected: tuple[str, ...]) -> None:
    assert placed(groups, BOTH) == expected


def test_kinds_that_are_not_there() -> None:
    assert placed("instance_group { kind: KIND_CPU }", GPUS) == GPUS
    for groups in ("instance_group { kind: KIND_GPU }", "instance_group [ { kind: KIND_CPU }, { kind: KIND_GPU } ]"):
        with pytest.raises(InvalidArgument, match=r"of model m has kind KIND_GPU but no GPUs are available$"):
            placed(groups)
        # What is only read is placed nowhere.
        assert placed(groups, ()) == ()


def test_kinds_that_are_left_open_are_said_where_there_are_both() -> None:
    message = parse_pbtxt("instance_group [ { }, { kind: KIND_CPU }, { kind: KIND_MODEL } ]", "m")
    assert not say_kinds(message, CPUS)
    assert not say_kinds(message, GPUS)
    assert say_kinds(message, BOTH)
    kinds = type(message.instance_group[0])
    assert [group.kind for group in message.instance_group] == [kinds.KIND_GPU, kinds.KIND_CPU, kinds.KIND_GPU]
    assert not say_kinds(message, BOTH)


def test_several_workers_of_a_gpu() -> None:
    devices = ("cuda:0", "cuda:1", "cuda:0/1", "cuda:1/1")
    assert placed("", devices) == devices
    assert placed("instance_group { gpus: [ 1 ] }", devices) == ("cuda:1", "cuda:1/1")
    with pytest.raises(InvalidArgument, match=r"gpu id 2\. GPUs that models run on are: 0, 1$"):
        placed("instance_group { gpus: [ 2 ] }", devices)
    # What a GPU has of a resource is counted once.
    limited = {placed(f"instance_group {{ {LIMITED} }}", devices, name=f"m{number}") for number in range(20)}
    assert len(limited) == 1
    assert {gpu_of(device) for device in limited.pop()} == {"cuda:0", "cuda:1"}
    assert len(placed(f"instance_group {{ {GLOBAL} }}", devices)) == 1


def test_workers_of_several_gpus() -> None:
    """A worker's device is the first of its GPUs."""

    def placed(gpus: str) -> tuple[str, ...]:
        return place(parse_pbtxt(f"instance_group {{ gpus: [ {gpus} ] }}", "m"), ("cuda:0", "cuda:2"), False, 2)

    assert [placed("0, 1"), placed("3"), placed("1, 2")] == [("cuda:0",), ("cuda:2",), ("cuda:0", "cuda:2")]
    with pytest.raises(
        InvalidArgument, match=r"invalid or unsupported gpu id 4\. GPUs that models run on are: 0-1, 2-3"
    ):
        placed("4")


def test_an_isolated_model_has_workers_of_its_own_beside_those_where_it_would_be() -> None:
    alone = "parameters { key: 'isolated' value { string_value: 'true' } }"
    assert placed(alone, CPUS[:1]) == ("cpu:0#m",)
    assert {placed(alone, name=f"m{number}")[0].partition("#")[0] for number in range(100)} == {*CPUS}
    assert placed(alone, GPUS) == ("cuda:0#m", "cuda:1#m", "cuda:2#m")
    assert placed("instance_group { gpus: [ 1 ] }" + alone, ("cuda:0", "cuda:1", "cuda:0/1", "cuda:1/1")) == (
        "cuda:1#m",
    )
    assert placed("instance_group { kind: KIND_CPU }" + alone, (*GPUS, "cpu:0")) == ("cpu:0#m",)
    assert len(placed("dynamic_batching { preserve_ordering: true }" + alone, GPUS)) == 1
    assert {gpu_of(device) for device in placed(alone, GPUS)} == {*GPUS}
    limited = f"instance_group {{ kind: KIND_CPU {LIMITED} }}" + alone
    with pytest.raises(
        InvalidArgument, match=r"nobody counts the resources that it shares with others \(rate_limiter\)"
    ):
        placed(limited)
    assert len(placed(limited, rate_limited=False)) == 1


def test_a_name_that_goes_moves_what_was_its_own_and_nothing_else() -> None:
    names = [f"cpu:{number}" for number in range(4)]
    before = {number: placement.choose(number, names) for number in range(200)}
    assert set(before.values()) == set(names)
    after = {number: placement.choose(number, reversed(names[:-1])) for number in before}
    assert all(after[number] == name for number, name in before.items() if name != names[-1])


def test_a_resource_is_global_in_all_models_or_in_none() -> None:
    """So says ``tensord check``, too. Without a rate limiter nobody counts, and a model may differ from what it was."""
    texts = {"a": LIMITED, "b": GLOBAL, "c": GLOBAL.replace("R", "Q"), "d": LIMITED.replace("R", "r"), "e": ""}
    found = []
    for name, text in texts.items():
        message = parse_pbtxt(f"instance_group {{ kind: KIND_CPU {text} }}", name)
        found.append(FoundModel(name, Path(name), message.SerializeToString(), (1,), (1,)))
    refused = (
        'Resource "r" is present as both global and device-specific resource in the model configuration: it is global in model '
        "'b', one of each device in model 'a'"
    )
    options, devices = Options(), [Device("cpu:0")]
    assert not any(model.error for model in check.placed(found, devices, options))
    options = msgspec.structs.replace(options, rate_limit=RateLimit(mode="execution_count"))
    assert {model.name: model.error for model in check.placed(found, devices, options) if model.error} == {"b": refused}
    known = {"b": placement.resources(parse_pbtxt(f"instance_group {{ {GLOBAL} }}", "b"), ("cpu:0",))}
    assert known == {"b": {"r": "cpu:0"}}
    placement.check_resources("b", {"r": None}, known)


def test_a_global_resource_is_counted_by_one_worker() -> None:
    """Models whose GPUs or kinds keep them apart cannot share it; where they may be together, they are."""
    texts = {"a": "gpus: [ 0 ]", "b": "gpus: [ 1 ]", "c": "kind: KIND_CPU", "d": "gpus: [ 0, 0 ]"}
    found = []
    for name, text in texts.items():
        message = parse_pbtxt(f"instance_group {{ {text} {GLOBAL} }}", name)
        found.append(FoundModel(name, Path(name), message.SerializeToString(), (1,), (1,)))
    options = msgspec.structs.replace(Options(), rate_limit=RateLimit(mode="execution_count"))
    devices = [Device("cuda:0"), Device("cuda:1"), Device("cpu:0")]
    assert {model.name: model.error for model in check.placed(found, devices, options) if model.error} == {
        name: f"global resource 'r' is counted by one worker: model '{name}' would be on {place}, and model 'a' is on cuda:0 "
        "(instance_group: gpus, kind)"
        for name, place in (("b", "cuda:1"), ("c", "cpu:0"))
    }
    # What is only read is placed nowhere.
    assert not any(model.error for model in check.placed(found, (), options))
