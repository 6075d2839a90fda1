"""Receives the model parameters that clients push over HTTP, and writes them to a sealed (read-only) memfd.

The body of a push is JSON, followed by the parameters in safetensors format. The HTTP header Inference-Header-Content-Length
has the size of the JSON in bytes. A push without this header has no parameters in its body: the whole body is JSON.
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
    """Receives the model parameters that clients push to a front, and limits how many bytes arrive at the same time."""

    def __init__(self) -> None:
        #: Bytes of memory that are taken, or promised by a Content-Length, now.
        self.byte_size = 0

    @contextlib.asynccontextmanager
    async def receive(self, request: Request, limit: int) -> AsyncIterator[tuple[bytes, int]]:
        """Receives the push in ``request``, and yields its JSON and a descriptor of memory with the parameters.

        The memory is read-only, and the descriptor is open inside the ``with`` block only. The descriptor is -1 if no parameters
        follow the JSON.
        Args:
          limit: the most bytes of parameters of all pushes that arrive at the same time.
        Raises InvalidArgument if the sizes in the headers are wrong, or if the body is too short.
        Raises Unsupported if the body is compressed. Raises BodyTooLarge if the JSON or the parameters are too large.
        Raises Unavailable if ``limit`` is exceeded, or if the host has no memory or descriptors left.
        Raises ClientDisconnect if the client has disconnected.
        """
        text_size, length = _sizes(request)
        if text_size is None or length == text_size:
            yield await whole_body(request, MAX_TEXT, " of JSON"), -1
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


class _Pushed:
    def __init__(self, arriving: ArrivingParameters, limit: int) -> None:
        self._arriving = arriving
        self._limit = limit
        self._memory = -1
        self._taken = self._written = 0

    def reserve(self, whole: int) -> None:
        more, taken = whole - self._taken, self._arriving.byte_size
        if whole > self._limit:
            raise BodyTooLarge(f"has {whole} bytes of parameters or more", self._limit)
        if taken + more > self._limit:
            raise Unavailable(
                f"{taken} bytes of parameters are arriving, {more} more are beyond the {self._limit} that are allowed "
                "(workers.max_parameter_byte_size)"
            )
        self._arriving.byte_size += more
        self._taken = whole

    def write(self, piece: memoryview) -> None:
        """Writes ``piece``, the next bytes of the parameters, to memory."""
        end = self._written + len(piece)
        if end > self._taken:
            self.reserve(end)
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
        if self._memory >= 0:
            fcntl.fcntl(self._memory, fcntl.F_ADD_SEALS, _SEALS)
        return self._memory

    def close(self) -> None:
        self._arriving.byte_size -= self._taken
        self._taken = 0
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1


async def whole_body(request: Request, limit: int, of: str = "") -> bytes:
    """Returns the whole body of a request. Raises BodyTooLarge if it has more than ``limit`` bytes.

    ``of``: what these are for the error's text, such as " of JSON".
    """
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise BodyTooLarge(f"has more than {limit} bytes{of}", limit)
    return bytes(body)


def _sizes(request: Request) -> tuple[int | None, int | None]:
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
