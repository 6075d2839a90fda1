"""Checks the header fields and trailers of HTTP/2 requests. A request that breaks a rule is malformed: its stream is reset.

Source: RFC 9113, sections 8.1 to 8.3; names and values are the bytes that HPACK gave. As in every gRPC library, metadata may be
what programs write there: blanks around a value, ``host``, and names of HTTP/1.1 connection headers break no rule (``metadata``).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from tensord.daemon.grpc.hpack_decoder import Field

#: Controls, blanks, upper case, DEL and beyond, and a colon: one in front has a pseudo-header, which is unknown, or out of place.
_BAD_NAME = re.compile(rb"[\x00-\x20:A-Z\x7f-\xff]|^$", re.DOTALL)
_bad_value = re.compile(rb"[\x00\r\n]").search
_REQUIRED = (b":method", b":scheme", b":path")
#: They are about one connection of HTTP/1.1, or about what ``:authority`` says.
_IGNORED = frozenset({b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"host"})


class Malformed(Exception):
    """Raised when the headers of a request break HTTP/2; its stream is reset with PROTOCOL_ERROR, other streams go on."""


def check_common(fields: Iterable[Field]) -> None:
    """Checks the header fields that many calls share (path, content-type, ...). Raises Malformed: they break a rule of HTTP/2."""
    pseudo: dict[bytes, bytes] = {}
    regular = False
    for name, value in fields:
        if name[:1] == b":":
            if regular or name in pseudo:
                raise Malformed(f"{_shown(name)} comes twice, or after an ordinary field")
            pseudo[name] = value
        else:
            regular = True
            if name == b"te" and value.strip(b" \t").lower() != b"trailers":
                raise Malformed("te is something else than trailers")
        if _bad_value(value):
            _refuse_value(name)
    _check_pseudo(pseudo)


def check_own(fields: Iterable[Field]) -> int | None:
    """Checks the header fields of a single call (metadata, content-length, ...). Returns the content-length, or None without one.

    Raises Malformed: a field is invalid.
    """
    length: bytes | None = None
    for name, value in fields:
        _check_name(name)
        if name == b"content-length":
            if not value.isdigit() or len(value) > 18 or (length is not None and int(length) != int(value)):
                raise Malformed("content-length is no number, or given twice")
            length = value
        if _bad_value(value):
            _refuse_value(name)
    return None if length is None else int(length)


def check_trailers(fields: Iterable[Field]) -> None:
    """Checks the trailers of a request. Raises Malformed: a name or value is invalid."""
    for name, value in fields:
        _check_name(name)
        if _bad_value(value):
            _refuse_value(name)


def metadata(fields: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Returns checked header fields as text, without blanks around values.

    Left out are ``host`` and the fields of HTTP/1.1 connections (``keep-alive``, ...), which mean nothing in gRPC.
    """
    return [
        (name.decode("latin-1"), value.strip(b" \t").decode("latin-1"))
        for name, value in fields
        if name not in _IGNORED
    ]


def _check_pseudo(pseudo: dict[bytes, bytes]) -> None:
    if pseudo.get(b":method") == b"CONNECT":
        if b":scheme" in pseudo or b":path" in pseudo or not pseudo.get(b":authority"):
            raise Malformed("CONNECT names an authority, no scheme and no path")
        return
    for name in _REQUIRED:
        if not pseudo.get(name):
            raise Malformed(f"{_shown(name)} is missing")


# Clients have few names, and send them with every call that says anything new.
@functools.lru_cache(256)
def _check_name(name: bytes) -> None:
    if _BAD_NAME.search(name):
        raise Malformed(f"a field's name is {_shown(name)}")


def _refuse_value(name: bytes) -> None:
    raise Malformed(f"the value of {_shown(name)} has NUL or a line's end")


def _shown(name: bytes) -> str:
    return repr(name[:100])[1:]
