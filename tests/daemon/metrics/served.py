"""Provides a metrics endpoint on a free port, over a snapshot that may wait or fail."""

from __future__ import annotations

import asyncio

from tensord.config.options import Metrics
from tensord.daemon.metrics.endpoint import Endpoint
from tensord.daemon.metrics.snapshot import MetricsSnapshot
from tests.daemon.metrics.test_exposition import SNAPSHOT

GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


class Served:
    """An endpoint, and its snapshot, which may wait or fail."""

    def __init__(self) -> None:
        self.endpoint = Endpoint(Metrics(port=0, page=False), self.snapshot, self.describe)
        self.asked = 0
        self.waits = asyncio.Event()
        self.waits.set()
        self.fails = False

    async def describe(self) -> dict[str, object]:
        return {}

    async def snapshot(self, exemplars: bool) -> MetricsSnapshot:
        self.asked += 1
        await self.waits.wait()
        if self.fails:
            raise RuntimeError("no")
        return SNAPSHOT

    @property
    def address(self) -> tuple[str, int]:
        assert self.endpoint.url is not None
        host, port = self.endpoint.url.removeprefix("http://").removesuffix("/metrics").split(":")
        return host, int(port)

    async def send(self, content: bytes, end: bool = False) -> bytes:
        """Sends bytes on a new connection; returns all that comes back until it ends."""
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(content)
        if end:
            writer.write_eof()
        answer = await reader.read()
        writer.close()
        return answer


def status(answer: bytes) -> int:
    return int(answer.split()[1])
