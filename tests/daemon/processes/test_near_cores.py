"""Which cores are near a PCI slot, by a made-up /sys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tensord.config.core_list import describe
from tensord.daemon.processes.near_cores import near

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
