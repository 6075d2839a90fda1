"""Tests which devices get a worker, on hosts with and without GPUs."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import pytest

from tensord.config.core_list import describe
from tensord.config.options import Workers
from tensord.daemon.processes.devices import MissingDevice, find_devices, near
from tests.cuda_stub.library import CudaStub


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> CudaStub:
    return CudaStub(tmp_path_factory.mktemp("cuda"), devices=4)


@pytest.fixture
def plugin(stub: CudaStub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes JAX's plugin installed."""
    monkeypatch.syspath_prepend(stub.library.parent / "plugins")


def host(tmp_path: Path, gpus: int) -> Path:
    for name in [*(f"nvidia{i}" for i in range(gpus)), *(("nvidiactl", "nvidia-uvm") if gpus else ())]:
        (tmp_path / name).touch()
    return tmp_path


CPU = [("cpu:0", None), ("cpu:1", None)]


def devices(environment: dict[str, str], device: str, folder: Path) -> list[tuple[str, str | None]]:
    found = find_devices(Workers(device=device, cpu=2), environment, folder)  # type: ignore[arg-type]
    return [(one.name, one.environment.get("CUDA_VISIBLE_DEVICES")) for one in found]


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("each", "expected"),
    [
        (2, [("cuda:0", "0,1"), ("cuda:2", "2,3")]),
        (3, [("cuda:0", "0,1,2"), ("cuda:3", "3")]),
        (8, [("cuda:0", "0,1,2,3")]),
    ],
)
def test_several_gpus_of_a_worker(stub: CudaStub, tmp_path: Path, each: int, expected: list[tuple[str, str]]) -> None:
    found = find_devices(Workers(devices_per_worker=each), stub.environment, host(tmp_path, 4))
    assert [(one.name, one.environment["CUDA_VISIBLE_DEVICES"]) for one in found] == expected


@pytest.mark.usefixtures("plugin")
def test_several_workers_of_a_gpu_and_cpu_workers_beside(stub: CudaStub, tmp_path: Path) -> None:
    options = Workers(per_gpu=2, cpu_beside_gpus=True, cpu=2)
    found = find_devices(options, stub.environment | {"CUDA_VISIBLE_DEVICES": "2,0"}, host(tmp_path, 4))
    assert [(one.name, one.environment.get("CUDA_VISIBLE_DEVICES")) for one in found] == [
        ("cuda:0", "2"),
        ("cuda:1", "0"),
        ("cuda:0/1", "2"),
        ("cuda:1/1", "0"),
        *CPU,
    ]


@pytest.mark.parametrize(
    ("device", "variable", "expected"),
    [
        ("auto", None, [("cuda:0", "0"), ("cuda:1", "1"), ("cuda:2", "2"), ("cuda:3", "3")]),
        ("auto", "2,3", [("cuda:0", "2"), ("cuda:1", "3")]),
        ("auto", f"{CudaStub.uuid(3)}, {CudaStub.uuid(1)}"[:40], [("cuda:0", CudaStub.uuid(3))]),
        (
            "auto",
            f"{CudaStub.uuid(3)},{CudaStub.uuid(1)}",
            [("cuda:0", CudaStub.uuid(3)), ("cuda:1", CudaStub.uuid(1))],
        ),
        ("auto", "", CPU),
        ("auto", "-1", CPU),
        # As CUDA reads it: what follows a GPU that does not exist is hidden.
        ("auto", "1,9,2", [("cuda:0", "1")]),
        ("cpu", None, CPU),
        ("cuda", "1", [("cuda:0", "1")]),
    ],
)
def test_devices(
    stub: CudaStub,
    plugin: None,
    tmp_path: Path,
    device: str,
    variable: str | None,
    expected: list[tuple[str, str | None]],
) -> None:
    environment = stub.environment | ({} if variable is None else {"CUDA_VISIBLE_DEVICES": variable})
    assert devices(environment, device, tmp_path) == expected


@pytest.mark.parametrize(
    ("driver", "nodes", "variable", "reason"),
    [
        (False, 0, None, ""),
        (False, 0, "0,1", ""),
        (False, 2, None, "exists, but there is no libcuda.so.1"),
        (True, 2, None, "there are 4 GPUs, but JAX's plugin for CUDA is not installed"),
        (True, 0, "1", "there is a GPU, but JAX's plugin for CUDA is not installed"),
        (True, 2, "17", "the CUDA driver shows no GPU for CUDA_VISIBLE_DEVICES=17"),
    ],
)
def test_gpus_that_cannot_be_used_are_said(
    stub: CudaStub,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    driver: bool,
    nodes: int,
    variable: str | None,
    reason: str,
) -> None:
    """Nobody is told of what nobody would expect: a host without driver and device nodes."""
    environment = (stub.environment if driver else {}) | (
        {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    )
    with caplog.at_level(logging.WARNING):
        assert devices(environment, "auto", host(tmp_path, nodes)) == CPU
    assert len(caplog.messages) == bool(reason)
    if reason:
        assert caplog.messages[0].startswith("models run on the CPU: ")
        assert reason in caplog.messages[0]
    with pytest.raises(
        MissingDevice, match=f'workers.device is "cuda", but .*{re.escape(reason or "no GPU is visible")}'
    ):
        devices(environment, "cuda", tmp_path)


def test_a_driver_that_fails_is_named(stub: CudaStub, plugin: None, tmp_path: Path) -> None:
    stub.fail("cuInit", 100 + 1)
    with pytest.raises(MissingDevice, match=r"nvidia0 exists, but the CUDA driver cannot be used \(CUDA_ERROR_101\)"):
        devices(stub.environment, "cuda", host(tmp_path, 1))


def test_cores_that_are_not_ours_are_named_with_those_that_are(tmp_path: Path) -> None:
    ours = sorted(os.sched_getaffinity(0))
    cores = (str(ours[0]), f"{ours[0]},8190-8191")
    with pytest.raises(MissingDevice) as caught:
        find_devices(Workers(device="cpu", cpu=2, cores=cores), {}, tmp_path)
    text = str(caught.value)
    assert f"worker 1 is to run on cores {ours[0]},8190-8191, but of those 8190-8191 cannot be used" in text
    assert text.endswith(f"this process may use {describe(ours)}")
    assert len(find_devices(Workers(device="cpu", cpu=2, cores=cores[:1] * 2), {}, tmp_path)) == 2


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("pin", [True, False])
def test_each_worker_runs_near_its_gpu(stub: CudaStub, tmp_path: Path, pin: bool) -> None:
    """The stub's devices 0 to 3 are on buses 18 to 1b; the last two are at a node none of whose cores is ours."""
    ours = describe(os.sched_getaffinity(0))
    made(tmp_path, {0: ours, 1: "8000"}, {f"0000:{0x18 + number:x}:00.0": number // 2 for number in range(4)})
    environment = stub.environment | {"CUDA_VISIBLE_DEVICES": "3,1"}
    found = find_devices(Workers(device="cuda", pin=pin), environment, tmp_path, tmp_path)
    assert [(one.name, one.cores) for one in found] == [("cuda:0", ""), ("cuda:1", ours if pin else "")]


OURS = sorted(os.sched_getaffinity(0))


def made(folder: Path, nodes: dict[int, str], slots: dict[str, int]) -> Path:
    for number, cores in nodes.items():
        at = folder / "devices/system/node" / f"node{number}"
        at.mkdir(parents=True)
        (at / "cpulist").write_text(cores + "\n")
    for address, node in slots.items():
        at = folder / "bus/pci/devices" / address
        at.mkdir(parents=True)
        (at / "numa_node").write_text(f"{node}\n")
    return folder


SLOTS = {"0000:18:00.0": 0, "0000:9a:00.0": 1, "0000:3b:00.0": -1}


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["0000:18:00.0"], describe(OURS)),
        # As the driver writes it; of these cores none is ours.
        (["0000:9A:00.0"], ""),
        (["0000:3B:00.0"], ""),
        (["0000:77:00.0"], ""),
        ([""], ""),
        # A worker with GPUs at each node may run anywhere.
        (["0000:18:00.0", "0000:9A:00.0"], ""),
        (["0000:18:00.0", "0000:3B:00.0"], ""),
    ],
)
def test_cores_of_two_nodes(tmp_path: Path, addresses: list[str], expected: str) -> None:
    assert near(addresses, made(tmp_path, {0: f"{describe(OURS)},8190", 1: "8000-8100"}, SLOTS)) == expected


def test_one_node_is_near_everything(tmp_path: Path) -> None:
    assert near(["0000:18:00.0"], made(tmp_path, {0: describe(OURS)}, SLOTS)) == ""


def test_a_host_without_any(tmp_path: Path) -> None:
    assert near(["0000:18:00.0"], tmp_path) == ""
