"""A channel sends and receives records over a non-blocking SEQPACKET socket.

Each datagram has this form:

    datagram   | kind u8 | bytes |
    kind 0x01  the bytes are a whole msgpack array of records
    kind 0x02  the bytes are a part of a msgpack array, but not its last part
    kind 0x03  the bytes are the last part of a msgpack array

A record that is too large for one datagram is sent in parts, as an array of one record. No other datagram is sent between
these parts. A record with file descriptors never shares a datagram with another record. ``put`` only queues a record.
``flush`` sends the queued records, with as many records in each datagram as fit.

If the receiving process has reached its limit of open files, the kernel delivers a record without its file descriptors.
``receive`` then raises ``DescriptorsLost``, whose attribute ``records`` has the record.
"""

from __future__ import annotations

import array
import errno
import os
import socket
from collections import deque
from typing import Any

import msgspec

from tensord.shm import descriptors
from tensord.shm.common.descriptors import descriptors_in
from tensord.shm.errors import InvalidArgument
from tensord.shm.record import Record, encoder

MAX_DATAGRAM = 64 << 10
#: Bytes of a datagram that are left for records.
_ROOM = MAX_DATAGRAM - 8
#: The receiver refuses records of this size and larger ones, or has a lower limit.
MAX_RECORD = 256 << 20
MAX_FDS = 4
_WHOLE = b"\x01"
_WHOLE_KIND = _WHOLE[0]
_PART = b"\x02"
_LAST_PART = b"\x03"
#: Raised by the decoder for bytes that are no record: text that is not UTF-8 has an error of its own.
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError)
#: Errors of a host that is short of something for a moment: what could not be sent may go later.
_SHORTAGES = frozenset((errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS))
#: The beginning of a datagram with one record.
_ONE = _WHOLE + b"\x91"
_ANCILLARY = socket.CMSG_SPACE(MAX_FDS * 4)
# Plain integers: the socket module's flags are enums, whose every operation is a Python call.
_TRUNCATED = int(socket.MSG_TRUNC)
_DESCRIPTORS_LOST = int(socket.MSG_CTRUNC)
_INCOMPLETE = _TRUNCATED | _DESCRIPTORS_LOST
_CLOEXEC = int(socket.MSG_CMSG_CLOEXEC)
_encode = encoder.encode


class ChannelClosed(Exception):
    """Raised when the process at the other end has closed its end of the channel or has exited."""


class DescriptorsLost(Exception):
    """Raised when records arrived without their file descriptors, because this process has reached its limit of open files."""

    def __init__(self, records: list[Any]) -> None:
        super().__init__(f"descriptors of {', '.join(type(record).__name__ for record in records)} were lost")
        self.records = records


def pair() -> tuple[socket.socket, socket.socket]:
    """Creates the two ends of a channel: a pair of connected Unix sockets of type SEQPACKET, close-on-exec."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def new_buffer() -> bytearray:
    """Makes a buffer in which channels receive datagrams."""
    return bytearray(MAX_DATAGRAM + 1)


class Channel:
    """One end of a connection between two processes. It sends and receives records and file descriptors."""

    def __init__(
        self,
        sock: socket.socket,
        incoming: msgspec.msgpack.Decoder[Any],
        max_record: int = MAX_RECORD,
        buffer: bytearray | None = None,
    ) -> None:
        """Takes ownership of the socket and makes it non-blocking.

        Args:
          incoming: decodes a received datagram, which is a list of records.
          max_record: the most bytes that a received record may have.
          buffer: a buffer from ``new_buffer`` that several channels of one thread share, or None for a new one.
        """
        sock.setblocking(False)
        self._sock = sock
        self._incoming = incoming
        #: Waiting in order: encoded records, and whole datagrams with their descriptors for records that travel alone.
        self._queue: deque[bytes | tuple[bytes, tuple[int, ...]]] = deque()
        #: The number of whole datagrams in the queue.
        self._alone = 0
        #: A packed datagram that the socket would not take yet.
        self._unsent: tuple[bytes, tuple[int, ...]] | None = None
        self._max_record = max_record
        # One buffer is kept: allocating a datagram's worth of memory each time costs more than most records.
        self._received = buffer or new_buffer()
        #: The parts received so far of a record that is larger than a datagram, and how many such records were whole.
        self._parts = bytearray()
        self.whole = 0

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def waiting(self) -> int:
        """Returns how many records are not sent yet. A datagram that is already encoded counts as one record."""
        return len(self._queue) + (self._unsent is not None)

    @property
    def waiting_byte_size(self) -> int:
        """Returns how many bytes all records that are not sent yet have together."""
        queued = sum([len(each[0]) if isinstance(each, tuple) else len(each) for each in self._queue])
        return queued + (0 if self._unsent is None else len(self._unsent[0]))

    @property
    def half_byte_size(self) -> int:
        """Returns how many bytes have been received of a large record that is not complete yet."""
        return len(self._parts)

    def put(self, record: Record, *fds: int) -> None:
        """Encodes and queues a record, with duplicates of the file descriptors ``fds``. The caller still has to close ``fds``.

        Raises InvalidArgument if the record is too large, or OSError if this process has no descriptor left. The record is
        then not queued.
        """
        encoded = _encode(record)
        if fds or len(encoded) > _ROOM:
            if len(encoded) >= MAX_RECORD:
                raise InvalidArgument(f"a record of {len(encoded)} bytes, at most {MAX_RECORD - 1} can be sent")
            self._put_alone(encoded, _duplicated(fds))
        else:
            self._queue.append(encoded)

    def put_apart(self, *records: Record) -> None:
        """Queues records as one datagram without other records. If they do not fit into one datagram, queues each by itself."""
        encoded = [_encode(record) for record in records]
        if sum(map(len, encoded)) > _ROOM:
            for record in records:
                self.put(record)
            return
        self._queue.append((b"".join((_WHOLE, _array_head(len(encoded)), *encoded)), ()))
        self._alone += 1

    def put_encoded(self, records: list[bytes]) -> None:
        """Queues records that are already encoded and have no descriptors. Each must fit into one datagram."""
        self._queue.extend(records)

    def _put_alone(self, encoded: bytes, fds: tuple[int, ...]) -> None:
        whole = _ONE + encoded
        if len(encoded) <= _ROOM:
            datagrams = [whole]
        else:
            content = memoryview(whole)[1:]
            datagrams = [b"".join((_PART, content[at : at + _ROOM])) for at in range(0, len(content), _ROOM)]
            datagrams[-1] = _LAST_PART + datagrams[-1][1:]
        self._queue.extend((datagram, ()) for datagram in datagrams[:-1])
        self._queue.append((datagrams[-1], fds))
        self._alone += len(datagrams)

    def send(self, record: Record) -> bool:
        """Queues a record, then sends all queued records. Returns True if all are sent.

        If it returns False, call ``flush`` when the socket is writable. Raises InvalidArgument if the record is too large.
        """
        return self.send_alone(record) or self.flush()

    def send_alone(self, record: Record) -> bool:
        """Sends a record at once in its own datagram, or queues it if that is not possible. Returns False if it was queued.

        If the other end is gone, drops the record and returns True.
        """
        if not self._queue and self._unsent is None:
            encoded = _encode(record)
            if len(encoded) <= _ROOM:
                # Common case: nothing is queued, so the record is sent as a datagram of its own.
                try:
                    self._sock.send(_ONE + encoded)
                except OSError as error:
                    if not _is_shortage(error):
                        self._discard()
                        return True
                    self._unsent = _ONE + encoded, ()
                    return False
                return True
        self.put(record)
        return False

    def flush(self) -> bool:
        """Sends queued records until the socket has no room. Returns True if all are sent.

        If it returns False, call it again when the socket is writable. If the other end is gone, the records are dropped and
        True is returned. ``receive`` then raises ChannelClosed.
        """
        while True:
            if self._unsent is None:
                if not self._queue:
                    return True
                self._unsent = self._pack()
            content, fds = self._unsent
            try:
                if fds:
                    self._sock.sendmsg([content], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
                else:
                    self._sock.send(content)
            except OSError as error:
                if _is_shortage(error):
                    return False
                self._discard()
                return True
            self._unsent = None
            if fds:
                descriptors.close(fds)

    def adopt(self, datagram: bytes) -> None:
        """Queues a datagram that C code has encoded but could not send. Call it only while the queue is empty."""
        assert not self.waiting
        self._unsent = (datagram, ())

    def receive(self) -> tuple[list[Any], list[int]] | None:
        """Receives a datagram. Returns its records and its file descriptors, which the caller must close.

        Returns None if no datagram is waiting. The list of records is empty if the datagram has a part of a large record, but
        not the last part.

        Raises: ChannelClosed: the other end is gone.  InvalidArgument: the datagram is malformed; its descriptors are closed.
          DescriptorsLost: the datagram came without its descriptors, because this process has too many open files.
        """
        try:
            try:
                size, ancillary, flags, _ = self._sock.recvmsg_into((self._received,), _ANCILLARY, _CLOEXEC)
            except ConnectionResetError:
                # A peer that ended with records unread causes this error once, before anything else. What it sent is still there.
                size, ancillary, flags, _ = self._sock.recvmsg_into((self._received,), _ANCILLARY, _CLOEXEC)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ChannelClosed from error
        received = self._received
        # The datagram is copied: the next one overwrites the buffer, and records may refer to what they were decoded from.
        if size and received[0] == _WHOLE_KIND and not (ancillary or self._parts or flags & _INCOMPLETE):
            try:
                return self._incoming.decode(received[1:size]), []
            except _MALFORMED:
                pass  # ``read`` says what is wrong
        return self.read(bytes(received[:size]), descriptors_in(ancillary) if ancillary else [], flags)

    def read(self, content: bytes, fds: list[int], flags: int) -> tuple[list[Any], list[int]]:
        """Decodes a datagram that the caller has received. Returns its records and descriptors, and raises, as ``receive``.

        Args:
          fds: the descriptors that came with the datagram. They are closed if this raises.
          flags: the flags that ``recvmsg`` returned.
        """
        if not content:
            descriptors.close(fds)
            raise ChannelClosed
        try:
            lost = flags & _DESCRIPTORS_LOST
            if flags & _TRUNCATED or (lost and len(fds) == MAX_FDS):
                raise InvalidArgument(f"malformed datagram: more than {MAX_DATAGRAM} bytes or {MAX_FDS} descriptors")
            body: bytes | memoryview
            kind = content[:1]
            if kind == _WHOLE and not self._parts:
                body = memoryview(content)[1:]
            elif kind == _PART and not fds:
                self._keep_part(content)
                return [], []
            elif kind == _LAST_PART:
                self._keep_part(content)
                body, self._parts = bytes(self._parts), bytearray()
                self.whole += 1
            else:
                raise InvalidArgument(f"malformed datagram: kind {content[0]}, {len(self._parts)} bytes into a record")
            records: list[Any] = self._incoming.decode(body)
        except _MALFORMED as error:
            descriptors.close(fds)
            raise InvalidArgument(f"malformed record: {error}") from error
        except InvalidArgument:
            descriptors.close(fds)
            raise
        if lost:
            descriptors.close(fds)
            raise DescriptorsLost(records)
        return records, fds

    def _keep_part(self, content: bytes) -> None:
        self._parts += memoryview(content)[1:]
        if len(self._parts) > self._max_record:
            raise InvalidArgument(
                f"malformed datagram: a record of over {len(self._parts)} bytes, at most {self._max_record} are allowed"
            )

    def close(self) -> None:
        """Closes the socket. Records that are not sent yet are dropped. Idempotent."""
        self._discard()
        self._sock.close()

    def _pack(self) -> tuple[bytes, tuple[int, ...]]:
        queue = self._queue
        if not self._alone and len(queue) <= 0xFFFF and sum(map(len, queue)) <= _ROOM:
            # Common case: all queued records fit into one datagram.
            packed = b"".join((_WHOLE, _array_head(len(queue)), *queue))  # type: ignore[arg-type]
            queue.clear()
            return packed, ()
        records: list[bytes] = []
        room = _ROOM
        while queue and len(records) < 0xFFFF:
            record = queue[0]
            if not isinstance(record, bytes):
                if records:
                    break
                queue.popleft()
                self._alone -= 1
                return record
            if len(record) > room:
                break
            queue.popleft()
            records.append(record)
            room -= len(record)
        return b"".join((_WHOLE, _array_head(len(records)), *records)), ()

    def _discard(self) -> None:
        for record in self._queue:
            if not isinstance(record, bytes):
                descriptors.close(record[1])
        self._queue.clear()
        self._alone = 0
        if self._unsent is not None:
            descriptors.close(self._unsent[1])
            self._unsent = None

    def __repr__(self) -> str:
        return f"<Channel fd={self._sock.fileno()} waiting={self.waiting}>"


def _is_shortage(error: OSError) -> bool:
    """Returns whether a send that failed with ``error`` may succeed later, for example because the socket's buffer is full."""
    return isinstance(error, BlockingIOError) or error.errno in _SHORTAGES


def _array_head(count: int) -> bytes:
    """Encodes the header of a msgpack array of ``count`` items."""
    return bytes((0x90 | count,)) if count < 16 else b"\xdc" + count.to_bytes(2, "big")


def _duplicated(fds: tuple[int, ...]) -> tuple[int, ...]:
    """Duplicates all of ``fds``, or raises OSError and keeps no duplicate."""
    made: list[int] = []
    try:
        for fd in fds:
            made.append(os.dup(fd))
    except OSError:
        descriptors.close(made)
        raise
    return tuple(made)
