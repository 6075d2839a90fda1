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
    """Puts encoded records into one datagram. They may have at most ``ROOM`` bytes together."""

def integer(value: int) -> bytes:
    """Encodes an integer, such as a prepared request's number. Raises OverflowError if it needs more than 64 bits."""

def record(tag: str, /, *fields: int | str) -> bytes:
    """Encodes a record of a tag, such as "T", and fields. tensord_wire.h lists the tags.

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
    """Encodes a prepared request, the constant part of many requests.

    Args:
      version: the model's version, or 0 for the newest.
      inputs: (name, datatype, shape, place) of each input. The place is None if the input's bytes come with each request.
      outputs: (name, place) of each output to return, or none for all outputs. The place is None if the output comes with the
        answer.

    Raises: ValueError, TypeError, OverflowError: a value has no encoding.
    """

def prepare(number: int, prepared: bytes, /) -> bytes:
    """Encodes the record that assigns ``number`` to an encoded prepared request."""

def request(request_id: int, prepared: bytes, contents: list[bytes], own: bytes, /) -> bytes:
    """Encodes the record of one request.

    Args:
      request_id: an id that is unused on this connection. Its encoding has nine bytes.
      prepared: the encoded number of a prepared request, or the encoded prepared request itself.
      contents: the bytes of each input without a place, in order.
      own: the request's other fields, such as its deadline and priority, encoded by ``own_fields``.
    """

def own_fields(client_id: str, deadline_ns: int, scheduling: Scheduling, /) -> bytes:
    """Encodes the fields of a request that follow its contents. The deadline's encoding always has nine bytes.

    Args:
      client_id: the id that the caller gave the request, or "".
      deadline_ns: nanoseconds of the monotonic clock, or 0 for no deadline.

    Raises: ValueError, TypeError, OverflowError: a value has no encoding.
    """

def release(leases: list[tuple[int, int, int]], /) -> bytes:
    """Encodes the record that gives leases back to the worker. A lease is (segment, offset, generation)."""

# ---------------------------------------------------------------------------------------------------------------- reading

class OutputTensor(NamedTuple):
    """One output of an answer. ``placed`` says whether the worker wrote it to the request's place for it."""

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

    Returns an ``AnswerRecord`` for each answer. Any other record becomes a tuple of its tag and numbers, such as ("C+", number)
    for a prepared answer.

    Args:
      known: ``MAX_NUMBERS`` items: the prepared answers by number, or None. New prepared answers are stored there.
      prepared: makes a prepared answer of version, outputs, parameters and whether it is the last.

    Raises: ValueError: the bytes are no records of a worker, or an answer names an unknown number.
    """

# ----------------------------------------------------------------------------------------------------------------- arrays

def small_inputs(inputs: dict[str, Array], most: int, /) -> tuple[tuple[Any, ...], list[bytes]] | None:
    """Returns the names, dtypes and shapes of the inputs in one tuple, and the inputs' bytes.

    Returns None if the inputs have together more than ``most`` bytes, or if an input may lie in shared memory because it is a
    view of anything but a plain array.
    """

def arrays(
    answer: dict[str, Array],
    outputs: tuple[tuple[str, tuple[int, ...], Any, int], ...],
    contents: tuple[Any, ...],
    places: dict[str, Any],
    /,
) -> bool:
    """Adds an array for each output to an answer. Returns False if an output is neither in the record nor in its place.

    Args:
      outputs: (name, shape, dtype, byte size) of each output. The byte size is -1 if the worker has written the output to its
        place.
      contents: the bytes of each other output, or their place in the worker's memory.
      places: output name -> the caller's array for the output.
    """

class Lock:
    """A lock like ``threading.Lock``, whose owner can poll for a datagram before it sleeps."""

    #: 1: somebody holds it.
    held: int
    #: For how long ``receive`` may poll.
    limit_ns: int
    def __init__(self, limit_ns: int = 0, /) -> None: ...
    def acquire(self, blocking: bool = True, /) -> bool: ...
    def release(self) -> None: ...
    def __enter__(self) -> bool: ...
    def __exit__(self, *raised: object) -> None: ...
    def receive(
        self, fd: int, memory: bytearray, flags: int, left_ns: int, /
    ) -> tuple[int, list[tuple[int, int, bytes]], int] | None:
        """Receives a datagram into ``memory``, and may poll before it sleeps. ``flags`` is 0 or MSG_DONTWAIT.

        With flags 0 it waits for ``left_ns`` or less, or without limit if that is 0.
        Returns the datagram's size, ancillary data and flags, or None if nothing has come. The size is 0 if the other end is
        closed.
        """

class Placed(tuple[Any, ...]):
    """A request whose inputs the worker can read: the fields to send, and what to keep until the answer comes."""

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
    """Sends the requests of waiting threads on one lane, and receives the answers."""

    #: True: the lane has ended, and nothing is sent any more.
    ended: bool

    def __init__(
        self, lane: Any, prepared: type[Any], answer: type[Answer], fd: int, most: int, most_held: int, /
    ) -> None:
        """Reads the attributes of ``lane``, a ``ClientLane``.

        Args:
          prepared: the class PreparedAnswer.
          fd: the lane's socket.
          most: the most requests that the worker takes at a time.
          most_held: the most answers that the process may use.
        """

    def submit(self, request: Any, loop: Any, /) -> int | None:
        """Sends a request, or stores it in the lane's ``_outgoing``. Returns the request's id, or None if nothing was done.

        ``loop`` is the event loop that runs in this thread, or None. A small request of a loop is stored if others are in flight,
        and the loop's next iteration calls the lane's ``flush``.
        """

    def records(self, size: int, /) -> list[Any]:
        """Decodes the records in the datagram of ``size`` bytes that the lane has received.

        If the outputs of a request's last answer are all in the record or in the caller's places, the request's ``finish`` gets
        an ``Answer``, once all records are read. The other records are returned as ``records`` of this module returns them.

        Raises: ValueError: the bytes are no records of a worker, or an answer names an unknown number.
        """

    def ask(self, sender: Any, call: Any, placed: Placed, own: bytes, until: float | None, /) -> Any:
        """Sends a request and waits for its answer.

        Returns the ``Answer``, or None if nothing was done. Returns a ``Pending`` if no answer has come, or if Python has to read
        the answer.

        Args:
          sender: ``sender.begun(call, placed, lane, request_id)`` makes the ``Pending``.
          own: the request's other fields, encoded by ``own_fields``. ``until`` replaces the deadline in them.
          until: a time of ``time.monotonic()`` in seconds, or None for no limit.
        """

class Repeated:
    """A request that is sent many times. Its calls use ``Exchange.ask`` as long as the arguments of ``keep`` are valid.

    Otherwise they call the method ``ask_slowly``. The method ``wait_for`` gets the ``Pending`` that ``ask`` returns.
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
        """Stores the arguments of ``exchange.ask`` for later calls. They are valid while ``opened[0]`` is ``now``.

        The caller has ``lock``, which each call takes.
        """

    def __call__(self, timeout: float | None = None) -> Answer: ...
