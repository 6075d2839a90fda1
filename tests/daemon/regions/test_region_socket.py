"""Memory handed over by descriptor: what is accepted, whose it is, and that no descriptor is left behind."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tensord.config.options import RegionsOptions
from tensord.daemon.regions.region_registry import RegionRegistry
from tensord.daemon.regions.region_socket import RegionSocket
from tensord.shm.operations import Operation, RegionStatus, RegisterSystemRegion
from tests.daemon.regions.test_region_registry import FakeHolder

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Holder(FakeHolder):
    async def call(self, operation: Operation, *fds: int) -> tuple[bytes, list[int]]:
        if isinstance(operation, RegisterSystemRegion):
            assert operation.access == "sealed"
            assert len(fds) == 1
        return await super().call(operation, *fds)


@pytest.fixture(autouse=True)
def no_descriptor_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= before


async def settled() -> None:
    """There are no fronts."""


def registry_of(holder: Holder, options: RegionsOptions) -> RegionRegistry:
    """A registry with that worker, and no fronts."""
    workers: Any = SimpleNamespace(ready=lambda: [holder], devices=["cpu:0"])
    fronts: Any = SimpleNamespace(publish=lambda place: None)
    return RegionRegistry(options, workers, fronts)


@pytest.fixture
async def registry(tmp_path: Path) -> AsyncIterator[RegionRegistry]:
    holder = Holder(1, -1)
    registry = registry_of(holder, RegionsOptions(max_owner_count=2))
    served = RegionSocket(RegionsOptions(socket=str(tmp_path / "s")), {}, registry, settled)
    served.open()
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o660
    yield registry
    served.close()
    served.close()
    await asyncio.sleep(0)
    registry.close()
    assert not (tmp_path / "s").exists()


def memory(byte_size: int, seals: int = SEALS) -> int:
    fd = os.memfd_create("tensord-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, byte_size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


async def ask(path: Path, *questions: tuple[Any, list[int]]) -> list[dict[str, str]]:
    """The answers, over one connection; the descriptors are closed."""

    def talk() -> list[dict[str, str]]:
        answers = []
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(str(path))
            for question, fds in questions:
                content = question if isinstance(question, bytes) else json.dumps(question).encode()
                socket.send_fds(sock, [content], fds)
                for fd in fds:
                    os.close(fd)
                answers.append(json.loads(sock.recv(1 << 16)))
        return answers

    return await asyncio.to_thread(talk)


def register(name: str, byte_size: int, offset: int = 0) -> dict[str, Any]:
    return {"register": {"name": name, "byte_size": byte_size, "offset": offset}}


async def test_sealed_memory_is_registered_and_is_its_owners(registry: RegionRegistry, tmp_path: Path) -> None:
    answers = await ask(
        tmp_path / "s", (register("a", 4096), [memory(4096)]), (register("b", 4096, 4096), [memory(8192)])
    )
    assert answers == [{}, {}]
    records = json.loads(await registry.records(""))
    assert [(r["name"], r["access"], r["owner"], r["pid"]) for r in records] == [
        (name, "sealed", f"uid {os.getuid()}", os.getpid()) for name in "ab"
    ]
    (refused,) = await ask(tmp_path / "s", (register("c", 4096), [memory(4096)]))
    assert "2 regions are registered by this client's user or host, at most 2 are allowed" in refused["error"]
    assert await ask(tmp_path / "s", ({"unregister": {"name": "a"}}, []), ({"unregister": {"name": ""}}, [])) == [
        {},
        {},
    ]
    assert registry.status(RegionStatus("system", "")) == b"[]"


@pytest.mark.parametrize(
    ("question", "make", "words"),
    [
        (register("r", 64), lambda: [memory(64, fcntl.F_SEAL_SHRINK)], "lacks the seals F_SEAL_GROW, F_SEAL_SEAL"),
        (register("r", 64), lambda: [os.open("/dev/null", os.O_RDWR)], "is not a memfd"),
        (register("r", 64), lambda: [os.open("/etc/passwd", os.O_RDONLY)], "is not a memfd"),
        (register("r", 64), list, "0 descriptors came with the request, 1 is expected"),
        (register("r", 64), lambda: [memory(64), memory(64)], "2 descriptors came"),
        (register("r", 0), lambda: [memory(64)], "byte_size 0 must be at least 1"),
        (register("r", 64, -4096), lambda: [memory(64)], "offset -4096"),
        (register("r", 1 << 63), lambda: [memory(64)], "Integer overflow|malformed"),
        (register("", 64), lambda: [memory(64)], "1 to 255 characters"),
        ({}, list, "'register' or 'unregister'"),
        ({"register": {"name": "r"}}, list, "malformed request"),
        ({"register": {"name": "r", "byte_size": 1, "path": "/etc"}}, list, "malformed request"),
        (b"\xff\xfe", lambda: [memory(64)], "malformed request"),
    ],
)
async def test_what_is_refused(registry: RegionRegistry, tmp_path: Path, question: Any, make: Any, words: str) -> None:
    (answer,) = await ask(tmp_path / "s", (question, make()))
    assert any(word in answer["error"] for word in words.split("|")), answer
    assert registry.status(RegionStatus("system", "")) == b"[]"


async def test_memory_goes_with_the_connection_that_handed_it_over(tmp_path: Path) -> None:
    """Two clients; each region goes when its own connection is closed, where ``regions.reclaim`` says so."""
    options = RegionsOptions(socket=str(tmp_path / "s"), reclaim="connection")
    holder = Holder(1, -1)
    registry = registry_of(holder, options)
    served = RegionSocket(options, {}, registry, settled)
    served.open()

    def hand_over(name: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(str(tmp_path / "s"))
        fd = memory(4096)
        socket.send_fds(sock, [json.dumps(register(name, 4096)).encode()], [fd])
        os.close(fd)
        assert sock.recv(4096) == b"{}"
        return sock

    first, second = await asyncio.to_thread(hand_over, "a"), await asyncio.to_thread(hand_over, "b")
    assert set(holder.regions) == {"a", "b"}
    first.close()
    while "a" in holder.regions:
        await asyncio.sleep(0.001)
    assert set(holder.regions) == {"b"}
    second.close()
    while holder.regions or registry.statistics():
        await asyncio.sleep(0.001)
    served.close()
    await asyncio.sleep(0)
    registry.close()
