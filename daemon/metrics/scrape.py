"""Serves one scrape, or the page for browsers, from request to answer. Imported once the daemon has started."""

from __future__ import annotations

import asyncio
import gzip
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from typing import Any

from tensord.daemon.metrics import exposition, page
from tensord.daemon.metrics.exchange import BadRequest, ScrapeAnswer, ScrapeExchange, ScrapeRequest, refusal
from tensord.daemon.metrics.snapshot import MetricsSnapshot
from tensord.shm.errors import DEFECT

_log = logging.getLogger(__name__)
_PATH, _PAGE = b"/metrics", b"/"
#: The level of gzip: the text is so repetitive that a higher one only takes longer.
_LEVEL = 1

#: Takes whether traced requests are wanted as exemplars.
TakeSnapshot = Callable[[bool], Awaitable[MetricsSnapshot]]
Describe = Callable[[], Awaitable[Mapping[str, Any]]]


async def serve(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    snapshot: TakeSnapshot,
    thread: Executor,
    describe: Describe | None = None,
) -> None:
    """Reads one HTTP request and answers it with the metrics (/metrics), the status page (/), or an error.

    Returns when the answer is written, or if the client sent no request. The caller closes the connection.

    Args:
      snapshot: called once the request has been read.
      thread: the executor in which the text is written.
      describe: returns what the status page shows; None: there is no such page, and / is answered with 404.

    Raises OSError: the client closed the connection.
    """
    exchange = ScrapeExchange()
    try:
        request = await exchange.request(reader)
    except BadRequest as error:
        answer = refusal(error.status, "Bad Request")
    else:
        if request is None:
            return
        answer = await _answer(request, snapshot, thread, describe)
    writer.write(exchange.answered(answer))
    await writer.drain()


async def _answer(
    request: ScrapeRequest, snapshot: TakeSnapshot, thread: Executor, describe: Describe | None
) -> ScrapeAnswer:
    if request.path != _PATH and not (request.path == _PAGE and describe is not None):
        return refusal(404, "Not Found")
    if request.method not in (b"GET", b"HEAD"):
        return refusal(405, "Method Not Allowed", ("Allow", "GET, HEAD"))
    loop = asyncio.get_running_loop()
    try:
        if request.path == _PAGE and describe is not None:
            text = await loop.run_in_executor(thread, page.render, await describe())
            return ScrapeAnswer(200, text, page.HEADERS)
        taken = await snapshot(exposition.wants_openmetrics(request.accept))
        body, content_type = await loop.run_in_executor(thread, _rendered, taken, request)
    except Exception:
        _log.exception("a scrape of the metrics failed")
        return refusal(500, DEFECT)
    coding = (("Content-Encoding", "gzip"),) if request.gzip else ()
    return ScrapeAnswer(200, body, (("Content-Type", content_type), *coding, ("Vary", "Accept, Accept-Encoding")))


def _rendered(taken: MetricsSnapshot, request: ScrapeRequest) -> tuple[bytes, str]:
    """Returns the metrics as text, in gzip if the request accepts it, and the content type. Runs in the executor's thread."""
    text, content_type = exposition.render(taken, request.accept)
    return gzip.compress(text, _LEVEL, mtime=0) if request.gzip else text, content_type
