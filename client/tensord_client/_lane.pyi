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
    known: list[Any],
    prepared: Callable[[int, tuple[OutputTensor, ...], dict[str, Any], bool], Any],
    /,
) -> list[Any]:
    """Decodes the array of records in ``content[at:end]``.

    Returns answers, and of other records tuples of the tag and the numbers in it; for a prepared answer ("C+", number).

    Args:
      known: the prepared answers that the worker has sent, by number, ``MAX_NUMBERS`` of them; None: none yet. Those that come
        are put there.
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

class Lock:
    """A lock of a lane, like that of ``threading``; whoever holds that of the readers polls for a datagram before it sleeps."""

    #: 1: somebody holds it.
    held: int
    #: The receive timeout that the socket has, in milliseconds; 0: none.
    timeout_ms: int
    def __init__(self, limit_ns: int = 0, /) -> None: ...
    def acquire(self, blocking: bool = True, /) -> bool: ...
    def release(self) -> None: ...
    def __enter__(self) -> bool: ...
    def __exit__(self, *raised: object) -> None: ...
    def receive(
        self, fd: int, memory: bytearray, flags: int, /
    ) -> tuple[int, list[tuple[int, int, bytes]], int] | None:
        """Receives a datagram as ``recvmsg_into`` does; polls before it sleeps, where that is worth it.

        Returns its size (0: the peer has ended), ancillary data and flags; None: nothing has come. ``flags``: 0, or MSG_DONTWAIT.
        """

    def begin(self, now_ns: int) -> int:
        """Begins a wait at a time. Returns until when ``receive`` would poll; 0: it would not."""

    def end(self, now_ns: int) -> None:
        """Ends a wait at a time."""

class Placed(tuple[Any, ...]):
    """A request whose inputs the worker can read: the fields to send, and what to keep until it is answered; made of a tuple."""

    #: The encoded prepared request.
    prepared: bytes
    #: The bytes of the inputs that travel inside the request, in their order.
    contents: list[bytes]
    #: The segments that must be announced to the worker before the request.
    segments: tuple[int, ...]
    #: Memory with copies of inputs, a ``Slot``; None: no input was copied.
    slot: Any
    #: Whatever has the memory that the request names, such as its arrays.
    hold: Any
    #: Of a request that is sent many times, a list for its last ``Answer`` if the outputs all lie in the caller's places; the
    #: next of that kind is the same object with new times.
    kept: list[Any] | None

class Exchange:
    """Sends requests of threads that wait, and receives answers, on one lane."""

    #: True: the lane has ended, and nothing is sent any more.
    ended: bool

    def __init__(
        self, lane: Any, prepared: type[Any], answer: type[Answer], fd: int, most: int, most_held: int, /
    ) -> None:
        """Takes what it needs of a ``ClientLane`` from the lane's attributes.

        Args:
          prepared: the class PreparedAnswer.
          fd: the lane's socket.
          most: the most requests that the worker takes at a time.
          most_held: the most answers that the process may hold.
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

    def ask(self, sender: Any, call: Any, placed: Placed, own: bytes, until: float | None, /) -> Any:
        """Sends a request and waits for its answer.

        Returns the ``Answer``; None: nothing was done; or a ``Pending``, if no answer or one that Python reads has come.

        Args:
          sender: its ``begun`` makes that object of (``call``, ``placed``, the lane, the request's id).
          own: the request's other fields, encoded by ``own_fields``; the deadline in it is replaced by ``until``.
          until: seconds of ``time.monotonic()``; None: without limit.
        """

class Repeated:
    """A request that is sent many times. A call of it is ``Exchange.ask`` as long as what ``keep`` was given still holds.

    Otherwise it calls its method ``ask_slowly``; and ``wait_for`` with the ``Pending`` that ``ask`` returns.
    """

    #: Seconds that a call waits for its answer; None: without limit.
    timeout: float | None

    def keep(
        self,
        exchange: Exchange,
        sender: Any,
        call: Any,
        placed: Placed,
        own: bytes,
        opened: list[object],
        now: object,
        lock: Lock,
        /,
    ) -> None:
        """Stores what calls are made with, as long as ``opened`` has the item ``now`` and no call needs Python.

        The caller holds ``lock``, which each call takes. ``exchange`` is asked with ``sender``, ``call``, ``placed`` and ``own``.
        """

    def __call__(self, timeout: float | None = None) -> Answer: ...
