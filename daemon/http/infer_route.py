"""Which requests take the short way: POST /v2/models/{model}[/versions/{version}]/infer."""

from __future__ import annotations

import re
import urllib.parse
from dataclasses import dataclass

from tensord.daemon.submit.model_table import parse_version
from tensord.shm.errors import ServingError

_PATH = re.compile(rb"/v2/models/([^/]+)(?:/versions/([0-9]+))?/infer")
_AUTHORITY = re.compile(rb"https?://[^/]*", re.IGNORECASE)
#: Request targets remembered; more than a client of many models and versions uses.
_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class InferRoute:
    """The model and version a target names; 0: the newest. ``error``: what is wrong with the version."""

    model: str
    version: int
    error: ServingError | None = None


class InferRoutes:
    """Recognises targets; the same ones come again and again, so each is parsed once."""

    def __init__(self) -> None:
        self._known: dict[bytes, InferRoute | None] = {}

    def find(self, target: bytes) -> InferRoute | None:
        """None: not an infer path."""
        try:
            return self._known[target]
        except KeyError:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            route = self._known[target] = parse(target)
            return route


def parse(target: bytes) -> InferRoute | None:
    """Splits a request target, absolute or not, with or without a query."""
    path = _AUTHORITY.sub(b"", target, count=1).partition(b"?")[0]
    match = _PATH.fullmatch(path)
    if match is None:
        return None
    model = urllib.parse.unquote_to_bytes(match[1]).replace(b"/", b"%2F").decode("utf-8", "replace")
    if match[2] is None:
        return InferRoute(model, 0)
    try:
        return InferRoute(model, parse_version(model, match[2].decode()))
    except ServingError as error:
        return InferRoute(model, 0, error)
