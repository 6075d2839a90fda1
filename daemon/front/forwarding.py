"""Forwards headers as parameters of a request, for models that want to see them. The operator's pattern says which.

A header beats a parameter of the body with the same name. Names that mean something to the server are refused.
Source: Triton's --http-header-forward-pattern and --grpc-header-forward-pattern; behaviour as recorded.
"""

from __future__ import annotations

from collections.abc import Iterable

from tensord.config import header_pattern
from tensord.shm.errors import InvalidArgument

#: Parameters that the server uses itself, and that cannot be headers therefore.
_RESERVED = frozenset(
    {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"}
)
#: The most names that are cached; more than the clients of a server use.
_REMEMBERED = 1024


class Forwarding:
    """Forwards headers by one pattern, which matches anywhere in a header's name, in any case."""

    def __init__(self, pattern: str) -> None:
        self._pattern = header_pattern.compiled(pattern)
        self._known: dict[bytes, bool] = {}

    def wants(self, name: bytes) -> bool:
        """Returns whether a header of that name is forwarded."""
        known = self._known.get(name)
        if known is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            known = self._known[name] = self._pattern.search(name) is not None
        return known

    def parameters(self, headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
        """Returns the forwarded headers, named as they were sent. Raises InvalidArgument: a reserved name."""
        found: dict[str, str] = {}
        for name, value in headers:
            if self.wants(name):
                text = _text(name)
                if text in _RESERVED or text.startswith("triton_"):
                    raise InvalidArgument(f"Header '{text}' is reserved for Triton usage and cannot be forwarded.")
                found[text] = _text(value)
        return found


def _text(content: bytes) -> str:
    """Decodes a header's name or value: most are ASCII, some UTF-8, and the rest is Latin-1, as HTTP once had it."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return content.decode("latin-1")
