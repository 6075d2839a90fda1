"""Serves the metrics port: /metrics for Prometheus and, unless ``metrics.page`` is false, a status page for browsers at /.

A connection is closed after one request. A request is refused if its head is too large. A connection that lasts too long is
closed early. If a client connects while the number of connections is at its limit, the oldest connection is closed. Clients
need no authentication, and no request changes anything in the daemon.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tensord.config.options import Metrics
from tensord.daemon.metrics.snapshot import MetricsSnapshot
from tensord.daemon.processes import listening
from tensord.daemon.processes.listening import Listener

_log = logging.getLogger(__name__)
PATH = "/metrics"
#: Imported in the thread, once the daemon has started or for the first connection: neither its start nor its loop waits for that.
_SCRAPE = "tensord.daemon.metrics.scrape"
#: The most connections; the oldest one is closed for a new one.
MAX_CONNECTIONS = 32
#: Bytes of a connection that wait to be read.
_MAX_WAITING = 16 << 10
#: Seconds for all of a connection. Prometheus gives up after ten.
_TIMEOUT = 20.0


class Endpoint:
    """Serves the metrics at /metrics, and the status page for browsers at /, on a listening socket.

    Args:
      snapshot: gathers what the metrics show. Its argument says whether to gather traced requests too, for exemplars.
      describe: gathers what the status page shows.
    """

    def __init__(
        self,
        options: Metrics,
        snapshot: Callable[[bool], Awaitable[MetricsSnapshot]],
        describe: Callable[[], Awaitable[Mapping[str, Any]]],
    ) -> None:
        self._options = options
        self._describe = describe if options.page else None
        self._snapshot = snapshot
        self._listener: Listener | None = None
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], None] = {}
        #: One thread writes the texts one after the other, and takes none from those who read files.
        self._thread = ThreadPoolExecutor(1, "metrics")
        #: Done once the libraries of a scrape are imported; None: that has not begun.
        self._importing: asyncio.Future[Any] | None = None

    def listen(self) -> None:
        """Binds the port, if metrics are enabled. Raises ListenError if the port cannot be bound."""
        if self._options.enabled:
            with listening.named("metrics"):
                self._listener = listening.listen(self._options.address, self._options.port, "http")

    async def open(self) -> None:
        """Begins to serve on the running event loop, if the port is bound."""
        if self._listener is None:
            return
        self._server = await asyncio.start_server(self._serve, sock=self._listener.socket, limit=_MAX_WAITING)
        _log.info("serving metrics on %s", self.url)

    @property
    def url(self) -> str | None:
        """Returns the URL that Prometheus scrapes, or None if metrics are not served."""
        return None if self._listener is None or self._listener.url is None else self._listener.url + PATH

    def close(self) -> None:
        """Closes the listening socket and all connections. May be called again."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        if self._listener is not None:
            self._listener.close()
        self._thread.shutdown(wait=False)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= MAX_CONNECTIONS:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.cancel()
        self._connections[task] = None
        try:
            async with asyncio.timeout(_TIMEOUT):
                await self._scrape(reader, writer)
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass  # it went away, took too long, or had to make room
        finally:
            self._connections.pop(task, None)
            # What the client has not received by now is thrown away.
            writer.transport.abort()

    def prepare(self) -> asyncio.Future[Any] | None:
        """Begins to import the modules that a scrape needs, before an upgrade of tensord can replace their files.

        Returns a future that is done when they are imported, or None if metrics are not served.
        """
        if self._importing is None and self._server is not None:
            loop = asyncio.get_running_loop()
            self._importing = loop.run_in_executor(self._thread, importlib.import_module, _SCRAPE)
        return self._importing

    async def _scrape(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        importing = self.prepare()
        assert importing is not None
        # One that goes away does not stop it for the others.
        await asyncio.shield(importing)
        from tensord.daemon.metrics import scrape

        await scrape.serve(reader, writer, self._snapshot, self._thread, self._describe)
