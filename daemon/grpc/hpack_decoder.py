"""Decodes HPACK header blocks, and separates the fields that many calls share (``COMMON``) from all other fields. Sans-I/O.

    | :method POST | :path /... | te trailers | grpc-timeout 5S | user-agent ... | traceparent 00-... |
         shared        shared       shared          other             shared             other

The shared fields become one bytes object, which can be a cache's key. ``_hpack.c`` does the same, and is used if it is built.
Source: RFC 7541.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

from tensord.shm.extensions import check

Field = tuple[bytes, bytes]
Fields = list[Field]

#: The fields that calls have in common: HTTP/2's, and what clients say of themselves.
COMMON = frozenset(
    (
        *(b":method", b":scheme", b":path", b":authority", b"te", b"content-type"),
        *(b"user-agent", b"host", b"grpc-encoding", b"grpc-accept-encoding"),
    )
)
#: The sizes of a field's name and of its value, which stand before the field.
_SIZES = struct.Struct("=II")


def parted(decoded: Iterable[Field]) -> tuple[bytes, Fields]:
    """Splits header fields into two groups. The first group has the fields whose names are in the set ``COMMON``.

    A pseudo-header, such as ``:path``, that follows a field of the second group is in the second group.
    Returns the first group as bytes that the function ``fields`` unpacks, and the second group as pairs (name, value).
    """
    common: list[bytes] = []
    own: Fields = []
    for name, value in decoded:
        if name in COMMON and not (own and name[:1] == b":"):
            common += (_SIZES.pack(len(name), len(value)), name, value)
        else:
            own.append((name, value))
    return b"".join(common), own


def fields(common: bytes) -> Fields:
    """Unpacks ``common``, the first group of header fields that ``decode`` returns, into pairs (name, value)."""
    found, at = [], 0
    while at < len(common):
        name_size, value_size = _SIZES.unpack_from(common, at)
        begin = at + _SIZES.size + name_size
        at = begin + value_size
        found.append((common[begin - name_size : begin], common[begin:at]))
    return found


class LibraryDecoder:
    """Decodes the header blocks of one connection with the Python library hpack."""

    def __init__(self, max_list_size: int) -> None:
        # Imported where it is needed: mostly it is not.
        import hpack

        self._decoder = hpack.Decoder(max_list_size)
        self._error, self._too_large = hpack.HPACKError, hpack.OversizedHeaderListError

    def decode(self, block: bytes, /) -> tuple[bytes, Fields]:
        """Decodes an HPACK block into the two groups that ``parted`` returns. Call it for each block of the connection, in order.

        Raises ValueError if ``block`` is malformed. Raises OverflowError if the block's header fields exceed the size limit.
        """
        try:
            return parted([(bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)])
        except self._too_large as error:
            raise OverflowError(str(error)) from error
        except self._error as error:
            raise ValueError(str(error)) from error


#: Makes a connection's decoder. Its argument: the most bytes of a block's fields, counted as in RFC 9113, section 6.5.2.
decoder: Callable[[int], LibraryDecoder | _hpack.Decoder]
try:
    from tensord.daemon.grpc import _hpack

    check(_hpack)
except ImportError:  # not built, or not from these sources
    decoder = LibraryDecoder
else:
    decoder = _hpack.Decoder
