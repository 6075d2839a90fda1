from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from tensord_client.common.results import Answer, Array
from tensord_client.common.scheduling import Scheduling

# What other modules define stands here by its form: these modules import this one.
_Place = tuple[int | str, int, int]
_Tensor = tuple[str, str, tuple[int, ...], _Place | None]

SOURCE: int
WIRE_VERSION: int
MAX_DATAGRAM: int
#: The most bytes of encoded records in one datagram.
ROOM: int
#: Each record of a client must have fewer bytes.
MAX_RECORD: int
#: The most prepared requests that have a number at the same time.
MAX_NUMBERS: int
#: The most leases in one release record, so that it fits into a datagram however large its integers are.
MAX_RELEASES: int

# ---------------------------------------------------------------------------------------------------------------- writing

def datagram(records: Iterable[bytes]) -> bytes:
    """Puts encoded records into one datagram. The caller makes sure that they fit (``ROOM`` bytes together)."""

def datagrams(record: bytes) -> list[bytes]:
    """Splits one encoded record into as many datagrams as it needs."""

def integer(value: int) -> bytes:
    """Encodes an integer, such as a prepared request's number. Raises OverflowError: it needs more than 64 bits."""

def record(tag: str, /, *fields: int | str) -> bytes:
    """Encodes a record of numbers and texts behind its tag, such as "T", "X" or "E" (tensord_wire.h lists them).

    Raises: ValueError, TypeError, OverflowError: a field has no encoding.
    """

def prepared_request(
    model: str,
    version: int,
    inputs: Sequence[_Tensor],
    outputs: Sequence[tuple[str, _Place | None]],
    parameters: dict[str, Any],
    /,
) -> bytes:
    """Encodes a prepared request: the constant part of many requests, which is sent once and then named by a number.

    Args:
      version: the model's version; 0: the newest.
      inputs: (name, datatype, shape, place) of each input; place None: its bytes come with each request.
      outputs: (name, place) of each output that is to be returned, place None: it comes with the answer; empty: all outputs.

    Raises: ValueError, TypeError, OverflowError: a value has no encoding.
    """

def prepare(number: int, prepared: bytes, /) -> bytes:
    """Encodes the record that makes ``number`` stand for ``prepared``, the encoded constant part of requests, from now on."""

def request(request_id: int, prepared: bytes, contents: list[bytes], own: bytes, /) -> bytes:
    """Encodes the record of one request.

    Args:
      request_id: an id that is unused on this connection. It takes nine bytes.
      prepared: the encoded number of a prepared request, or the encoded prepared request itself.
      contents: the bytes of each input without a place, in order.
      own: the request's other fields, such as its deadline and priority, encoded by ``own_fields``.
    """

def own_fields(client_id: str, deadline_ns: int, scheduling: Scheduling, /) -> bytes:
    """Encodes the fields of a request that follow its contents. The deadline, behind the client's id, always takes nine bytes.

    Args:
      client_id: the id that the caller gave the request; "": none.
      deadline_ns: nanoseconds of the monotonic clock; 0: none.

    Raises: ValueError, TypeError, OverflowError: a value has no encoding.
    """

def release(leases: list[tuple[int, int, int]], /) -> bytes:
    """Encodes the record that gives memory of answers back to the worker: (segment, offset, generation) of each lease."""

# ---------------------------------------------------------------------------------------------------------------- reading

class OutputTensor(NamedTuple):
    """Describes one output of an answer. ``placed``: whether the worker wrote it to the place that the request named."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    placed: bool

class AnswerRecord(NamedTuple):
    """One answer: the outputs' contents, or an error (``code`` and ``message``)."""

    request_id: int
    #: A ``PreparedAnswer``.
    prepared: Any
    #: The contents of the outputs that lie in no place of the request's: bytes, or (segment, offset, byte size) of the worker's
    #: memory.
    contents: tuple[Any, ...]
    lease: tuple[int, int, int] | None
    code: str
    message: str
    timing: tuple[int, int, int] | None
    #: How many bytes this response counts in the worker's limit of responses that the client has not acknowledged.
    byte_size: int

def records(
    content: bytes | bytearray,
    at: int,
    end: int,
    known: dict[int, Any],
    prepared: Callable[[int, tuple[OutputTensor, ...], dict[str, Any], bool], Any],
    /,
) -> list[Any]:
    """Decodes the array of records in ``content[at:end]``.

    Returns answers, and of other records tuples of the tag and the numbers in it; for a prepared answer ("C+", number).

    Args:
      known: number -> prepared answer that the worker has sent; those that come are added.
      prepared: makes a prepared answer of version, outputs, parameters and whether it is the last.

    Raises: ValueError: the bytes are no records of a worker, or an answer names a number that is not known.
    """

# ----------------------------------------------------------------------------------------------------------------- arrays

def small_inputs(inputs: dict[str, Array], limit: int, room: int, /) -> tuple[tuple[Any, ...], list[bytes]] | None:
    """Returns (name, dtype and shape of each input in turn) and the inputs' bytes, if all of them can travel inside the request.

    Returns None: an input is too large, or may lie in shared memory because it is a view of something that is no plain array.

    Args:
      limit: the most bytes of an input.
      room: the most bytes of all together.
    """

def arrays(
    answer: dict[str, Array],
    outputs: tuple[tuple[str, tuple[int, ...], Any, int], ...],
    contents: tuple[Any, ...],
    places: dict[str, Any],
    /,
) -> bool:
    """Adds an array for each output to an answer. Returns False if one is neither in the record nor in its place; else True.

    Args:
      outputs: (name, shape, dtype, byte size) of each output; byte size -1: the worker has written it to its place.
      contents: for each other output its bytes in the answer's record, or their place in the worker's memory.
      places: output name -> the caller's array for it.
    """

class Spin:
    def __init__(self, limit_ns: int) -> None: ...
    def before(self, fd: int) -> None: ...
    def after(self) -> None: ...
    def begin(self, now_ns: int) -> int: ...
    def end(self, now_ns: int) -> None: ...

class Exchange:
    """Sends requests of threads that wait, and receives answers, on one lane."""

    def __init__(self, lane: Any, prepared: type[Any], answer: type[Answer], fd: int, most: int, /) -> None:
        """Takes what it needs of a ``ClientLane`` from the lane's attributes.

        Args:
          prepared: the class PreparedAnswer.
          fd: the lane's socket.
          most: the most requests that the worker takes at a time.
        """

    def submit(self, request: Any, loop: Any, /) -> int | None:
        """Sends a request, or keeps it in the lane's ``_outgoing``; returns the request's id. None: nothing was done.

        ``loop``: the event loop that runs in this thread; None: none. A small request that it submits while others are in flight
        is kept, and the loop's next iteration calls the lane's ``flush``.
        """

    def records(self, size: int, /) -> list[Any]:
        """Decodes the records in the datagram of ``size`` bytes that the lane has received.

        Makes the ``Answer`` of each request's last answer that has all of its outputs in the record or in the caller's places,
        and gives it to the request's ``finish``, once all records were read. Returns the others, as ``_lane.records`` does.

        Raises: ValueError: the bytes are no records of a worker, or an answer names a number that is not known.
        """

    def ask(
        self, sender: Any, call: Any, placed: Any, own: bytes, until: float | None, /
    ) -> Answer | tuple[Any, tuple[int, list[tuple[int, int, bytes]], int] | None] | None:
        """Sends a request and waits for its answer.

        Returns the answer; None: nothing was done; or, with the lock ``reading`` held, (the request, what ``recvmsg_into``
        returned), whose second is None where nothing came in time.

        Args:
          sender: its ``begun`` makes the request of (``call``, ``placed``, the lane, the request's id), where Python goes on.
          own: the request's other fields, encoded by ``own_fields``; the deadline in it is replaced by ``until``.
          until: seconds of ``time.monotonic()``; None: without limit.
        """
