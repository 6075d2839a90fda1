"""Sends encoded spans to a collector over HTTP, in a thread of its own, one message after the other.

If the collector cannot take a message now (429, 502 to 504, or no connection), it is sent again a few times, at growing
intervals or when the collector says. A message that is refused for another reason is dropped. Source: the specifications of
OTLP and of the environment variables of OTLP exporters.
"""

from __future__ import annotations

import gzip
import logging
import os
import queue
import threading
import zlib
from collections.abc import Callable, Mapping

import requests
from opentelemetry.util.re import parse_env_headers
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from tensord.shm.seldom import Seldom

_log = logging.getLogger(__name__)
_TIMEOUT_SECONDS = 10.0
_TRY_AGAIN = frozenset((429, 502, 503, 504))
_ATTEMPTS = 4
_COMPRESSIONS: Mapping[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}


class SpanSender:
    """Sends messages of spans to a collector, one after the other, in a thread.

    ``url``: the address of the collector. ``done``: called in that thread after each message, with the number of its spans
    and whether the collector has accepted it.
    """

    def __init__(self, url: str, done: Callable[[int, bool], None]) -> None:
        self._done = done
        self._seldom = Seldom()
        self._timeout = _seconds(_variable("TIMEOUT"))
        coding = _variable("COMPRESSION").strip().lower()
        self._compress = _COMPRESSIONS.get(coding)
        headers = {"content-type": "application/x-protobuf", "user-agent": "tensord"}
        if self._compress is not None:
            headers["content-encoding"] = coding
        headers |= parse_env_headers(_variable("HEADERS"), liberal=True)
        self._session = requests.Session()
        again = Retry(
            _ATTEMPTS - 1, status_forcelist=_TRY_AGAIN, allowed_methods=None, backoff_factor=1, raise_on_status=False
        )
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(max_retries=again))
        # What is the same for all messages is looked for once: the library looks at the whole environment for it.
        self._request = self._session.prepare_request(requests.Request("POST", url, headers))
        certificate, key = _variable("CLIENT_CERTIFICATE"), _variable("CLIENT_KEY")
        own = (certificate, key) if certificate and key else certificate or None
        self._settings = self._session.merge_environment_settings(url, {}, False, _variable("CERTIFICATE") or True, own)
        self._waiting: queue.SimpleQueue[tuple[Callable[[], bytes], int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def send(self, encode: Callable[[], bytes], spans: int) -> None:
        """Queues a message with ``spans`` spans.

        ``encode`` returns the bytes of the message. It is called later, in the thread of this ``SpanSender``.
        """
        self._waiting.put((encode, spans))

    def _run(self) -> None:
        for encode, spans in iter(self._waiting.get, None):
            try:
                refused = self._post(encode())
            except Exception as error:  # no connection, no such certificate, ...: the next message may find it mended
                refused = str(error) or type(error).__name__
            self._done(spans, not refused)
            if refused and self._seldom.is_due():
                _log.warning("the collector did not take %d spans: %s", spans, refused)

    def _post(self, message: bytes) -> str:
        request = self._request.copy()
        request.prepare_body(message if self._compress is None else self._compress(message), None)
        answer = self._session.send(request, timeout=self._timeout, **self._settings)
        return "" if answer.ok else f"{answer.status_code} {answer.reason}"

    def close(self, seconds: float) -> None:
        """Waits, for at most ``seconds``, until all queued messages are sent. Messages queued after this call may be lost."""
        self._waiting.put(None)
        self._thread.join(seconds)


def _variable(name: str) -> str:
    """Returns OTEL_EXPORTER_OTLP_TRACES_``name`` of the environment, else OTEL_EXPORTER_OTLP_``name``, else ""."""
    return os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}") or ""


def _seconds(text: str) -> float:
    try:
        return float(text or _TIMEOUT_SECONDS)
    except ValueError:
        _log.warning("OTEL_EXPORTER_OTLP_TIMEOUT is no number of seconds: '%s'", text)
        return _TIMEOUT_SECONDS
