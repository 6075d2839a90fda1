"""Adds CORS headers to answers, so that web pages of the origins in ``http.cors_origins`` may use this server.

Starlette's middleware adds them to what Starlette answers, preflight requests included. Answers to inference requests do not go
through Starlette, and get their header lines here. Source: the Fetch standard, "HTTP-CORS protocol".
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

_EXPOSED = "Inference-Header-Content-Length"


class CrossOrigin:
    """Adds the CORS header lines to the answers of an HTTP front."""

    def __init__(self, origins: Sequence[str]) -> None:
        """Allows requests from ``origins``, written as browsers send them, such as ``https://example.org``; ``*`` allows all."""
        self._origins = tuple(origins)
        self._any = "*" in origins
        self._known = frozenset(origin.encode() for origin in origins)

    def around(self, application: ASGIApp) -> ASGIApp:
        """Wraps the ASGI application, so that its answers have CORS headers, which tell browsers which pages may read them."""
        return CORSMiddleware(
            application,
            allow_origins=self._origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=(_EXPOSED,),
        )

    def lines(self, fields: Sequence[tuple[bytes, bytes]]) -> bytes:
        """Returns the CORS header lines of the answer to an inference request; empty if the request has no Origin header.

        Args:
          fields: the header fields of the request, their names in lower case.
        """
        origin = next((value for name, value in fields if name == b"origin"), None)
        if origin is None:
            return b""
        allowed = b"*" if self._any else origin if origin in self._known else b""
        # Whoever keeps answers must not give another page what this one got.
        vary = b"" if self._any else b"Vary: Origin\r\n"
        if not allowed:
            return vary
        return b"Access-Control-Allow-Origin: %b\r\nAccess-Control-Expose-Headers: %b\r\n%b" % (
            allowed,
            _EXPOSED.encode(),
            vary,
        )
