"""Pages of other origins that may ask from within a browser (``http.cors_origins``).

What Starlette answers, preflights among it, its own middleware completes; answers to inference requests go another way, and get
their lines here. Source: the Fetch standard, "HTTP-CORS protocol".
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

_EXPOSED = "Inference-Header-Content-Length"


class CrossOrigin:
    """Adds the CORS header lines to a front's answers."""

    def __init__(self, origins: Sequence[str]) -> None:
        """Begins with ``origins``, as browsers say them, ``https://example.org``; ``*`` is all."""
        self._origins = tuple(origins)
        self._any = "*" in origins
        self._known = frozenset(origin.encode() for origin in origins)

    def around(self, application: ASGIApp) -> ASGIApp:
        """Wraps the application, so that its answers tell browsers who may read them."""
        return CORSMiddleware(
            application,
            allow_origins=self._origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=(_EXPOSED,),
        )

    def lines(self, fields: Sequence[tuple[bytes, bytes]]) -> bytes:
        """Returns the header lines of the answer to an inference request with those fields; empty where no browser asks."""
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
