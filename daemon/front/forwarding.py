"""Forwards the request headers that match the operator's pattern to models, as parameters of the request.

A header replaces the parameter of the same name in the request's body. A header is refused if Triton reserves its name for a
parameter of the server. Source: Triton's --http-header-forward-pattern and --grpc-header-forward-pattern, and a real Triton.
"""

from __future__ import annotations

import functools
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
    """Selects the request headers that models get as parameters of the request.

    ``pattern``: a regular expression. A header is selected if a part of its name matches.
    """

    def __init__(self, pattern: str) -> None:
        search = header_pattern.compiled(pattern).search
        #: Returns whether models get the header with this name. Upper and lower case are the same.
        self.wants = functools.lru_cache(_REMEMBERED)(lambda name: search(name) is not None)

    def parameters(self, headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
        """Returns the request headers that the operator chose to forward to models, as parameters: header name -> value.

        Raises InvalidArgument if such a header has a name that Triton reserves for its own parameters.
        """
        found: dict[str, str] = {}
        for name, value in headers:
            if self.wants(name):
                text = _text(name)
                if text in _RESERVED or text.startswith("triton_"):
                    raise InvalidArgument(f"Header '{text}' is reserved for Triton usage and cannot be forwarded.")
                # RFC 9110 has them belong to no value; a protocol's parser may have left them.
                found[text] = _text(value.strip(b" \t"))
        return found


def _text(content: bytes) -> str:
    """Decodes ``content`` as UTF-8, or as Latin-1 if it is not UTF-8. HTTP once prescribed Latin-1."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return content.decode("latin-1")
