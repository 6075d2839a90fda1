"""The cores near a GPU: those of the NUMA node at which its PCI slot is, as the kernel tells.

A worker that runs there has its memory there as well, as the kernel gives a page where it is touched first: what is page-locked
crosses no link between sockets on its way to the GPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from tensord.config import core_list


def near(addresses: Sequence[str], system: Path = Path("/sys")) -> str:
    """The cores that this process may use at the nodes of these PCI addresses, as Linux lists them.

    "": there is one node only, or one of them is not known, or none of its cores is ours.
    """
    nodes = {_node(address, system) for address in addresses}
    others = [path for path in (system / "devices/system/node").glob("node[0-9]*") if path.name not in nodes]
    if not others or "" in nodes:
        return ""
    cores: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        for node in nodes:
            cores |= set(core_list.parse((system / "devices/system/node" / node / "cpulist").read_text().strip()))
    return core_list.describe(cores & os.sched_getaffinity(0))


def _node(address: str, system: Path) -> str:
    """The name of its folder; "": the kernel does not say."""
    with contextlib.suppress(OSError, ValueError):
        number = int((system / "bus/pci/devices" / address.lower() / "numa_node").read_text())
        return f"node{number}" if number >= 0 else ""
    return ""
