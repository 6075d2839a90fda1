"""Receives pushed parameters: JSON, and behind it the parameters themselves, which go into sealed memory as they arrive.

body   | JSON (Inference-Header-Content-Length bytes; without that header: all of it) | safetensors' layout |
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import AsyncIterator

from starlette.requests import Request

from tensord.daemon.front.status import BodyTooLarge
from tensord.shm import descriptors
from tensord.shm.errors import InvalidArgument, Unavailable, Unsupported

#: The most bytes of the JSON.
MAX_TEXT = 1 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class ArrivingParameters:
    """Bounds what arrives at a front."""

    def __init__(self) -> None:
        #: Bytes of memory that are taken, or promised by a Content-Length, now.
        self.byte_size = 0

    @contextlib.asynccontextmanager
    async def receive(self, request: Request, limit: int) -> AsyncIterator[tuple[bytes, int]]:
        """Receives a body. Yields its JSON, and sealed memory, open inside the block; -1: there was nothing behind the JSON.

        ``limit``: bytes of parameters of one push, and of all that arrive at a time.

        Raises: InvalidArgument, Unsupported, BodyTooLarge.  Unavailable: others take all the room.  ClientDisconnect.
        """
        text_size, length = _sizes(request)
        if text_size is None or length == text_size:
            yield await self._text(request), -1
            return
        if text_size > MAX_TEXT:
            raise BodyTooLarge(f"has {text_size} bytes of JSON", MAX_TEXT)
        pushed = _Pushed(self, limit)
        try:
            if length is not None:
                pushed.reserve(length - text_size)
            text = bytearray()
            async for piece in request.stream():
                missing = text_size - len(text)
                text += piece[:missing]
                if len(piece) > missing:
                    pushed.write(memoryview(piece)[missing:])
            if len(text) < text_size:
                raise InvalidArgument(f"the body has {len(text)} bytes, its JSON should have {text_size}")
            yield bytes(text), pushed.sealed()
        finally:
            pushed.close()

    async def _text(self, request: Request) -> bytes:
        text = bytearray()
        async for piece in request.stream():
            text += piece
            if len(text) > MAX_TEXT:
                raise BodyTooLarge(f"has more than {MAX_TEXT} bytes of JSON", MAX_TEXT)
        return bytes(text)

    def take(self, whole: int, more: int, limit: int) -> None:
        """Takes ``more`` bytes for a push that has ``whole`` with them. Raises BodyTooLarge, Unavailable: nothing is taken."""
        if whole > limit:
            raise BodyTooLarge(f"has {whole} bytes of parameters or more", limit)
        if self.byte_size + more > limit:
            raise Unavailable(
                f"{self.byte_size} bytes of parameters are arriving, {more} more are beyond the {limit} that are allowed "
                "(workers.max_parameter_byte_size)"
            )
        self.byte_size += more


class _Pushed:
    """The memory of one push while it arrives."""

    def __init__(self, arriving: ArrivingParameters, limit: int) -> None:
        self._arriving = arriving
        self._limit = limit
        self._memory = -1
        self._taken = self._written = 0

    def reserve(self, byte_size: int) -> None:
        """Takes the room for all of it."""
        self._arriving.take(byte_size, byte_size, self._limit)
        self._taken = byte_size

    def write(self, piece: memoryview) -> None:
        """Writes what came. Raises Unavailable: the host has no memory, or this process no descriptor."""
        end = self._written + len(piece)
        if end > self._taken:
            self._arriving.take(end, end - self._taken, self._limit)
            self._taken = end
        try:
            if self._memory < 0:
                with descriptors.needed("pushed parameters"):
                    self._memory = os.memfd_create("tensord-parameters", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                descriptors.check_reserve(self._memory, "pushed parameters")
            while piece:
                piece = piece[os.write(self._memory, piece) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise Unavailable(f"the host has no memory for {end} bytes of parameters: {error.strerror}") from None
        self._written = end

    def sealed(self) -> int:
        """Seals the memory, which stays this object's; -1: nothing came."""
        if self._memory >= 0:
            fcntl.fcntl(self._memory, fcntl.F_ADD_SEALS, _SEALS)
        return self._memory

    def close(self) -> None:
        """Gives memory and room back."""
        self._arriving.byte_size -= self._taken
        self._taken = 0
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1


def _sizes(request: Request) -> tuple[int | None, int | None]:
    """Returns the bytes of the JSON (None: all are) and of the body (None: it does not say).

    Raises: InvalidArgument, Unsupported.
    """
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Unsupported("Unsupported compression type")
    length = request.headers.get("content-length")
    given = request.headers.getlist("inference-header-content-length")
    if not given:
        return None, None if length is None else int(length)
    if len(given) > 1 or not given[0].isascii() or not given[0].isdigit() or len(given[0]) > 18:
        raise InvalidArgument("Inference-Header-Content-Length should be an unsigned integer, given once")
    text_size = int(given[0])
    if length is not None and text_size > int(length):
        raise InvalidArgument(f"the body has {length} bytes, its JSON should have {text_size}")
    return text_size, None if length is None else int(length)
