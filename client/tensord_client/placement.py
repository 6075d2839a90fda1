"""Puts the inputs of requests where workers can read them.

    an array in this connection's shared memory   is used where it lies
    an array of at most 4 KiB                     travels inside the request
    any other array                               is copied once, into a slot that the next request of the same kind uses again

Requests of one kind have the same model, names, datatypes, shapes, places, outputs and parameters, so one prepared request.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

from tensord_client import wire
from tensord_client.call import Call
from tensord_client.datatypes import datatype_of, encode_strings
from tensord_client.errors import InvalidArgument, Unavailable
from tensord_client.memory import Memory
from tensord_client.opened_model import OpenedModel
from tensord_client.wire import Place

#: The most bytes of an array that travels inside its request, and of all such arrays of one request together.
INLINE, _ALL_INLINE = 4096, 32 << 10
#: The most kinds of requests that are cached, and the most free slots of each kind.
_MAX_KINDS, _MAX_FREE = 256, 8
#: The place of a tensor that lies in a slot, in the key of a kind.
_IN_SLOT = (-1, 0, 0)


class Slot:
    """Shared memory for copies of one request's inputs, and the encoded prepared request that names this memory."""

    __slots__ = ("arrays", "free", "prepared", "segments")

    def __init__(
        self, arrays: dict[str, np.ndarray], prepared: bytes, segments: tuple[int, ...], free: list[Slot]
    ) -> None:
        self.arrays = arrays
        self.prepared = prepared
        self.segments = segments
        #: The list of free slots that this slot goes to when the request is answered.
        self.free = free

    def give_back(self) -> None:
        """Returns the slot to the free slots of its kind, so that a later request uses it again."""
        if len(self.free) < _MAX_FREE:
            self.free.append(self)


class Placed:
    """A request whose inputs are in place: the fields of its record, and what must live until it is answered."""

    __slots__ = ("contents", "hold", "prepared", "segments", "slot")

    def __init__(
        self,
        prepared: bytes,
        contents: list[bytes],
        segments: tuple[int, ...],
        slot: Slot | None,
        hold: Sequence[np.ndarray],
    ) -> None:
        #: The encoded prepared request.
        self.prepared = prepared
        #: The bytes of the inputs that travel inside the request, in their order.
        self.contents = contents
        #: The segments that must be announced to the worker before the request.
        self.segments = segments
        self.slot = slot
        self.hold = hold


#: A tensor of a call: name, datatype, shape, and its place; None: inside the request.
Tensor = tuple[str, str, tuple[int, ...], Optional[Place]]


class Placement:
    """Puts the inputs of requests in place, in the shared memory of one connection. Thread-safe."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._lock = threading.Lock()
        self._prepared: dict[Any, bytes] = {}
        #: Free slots by kind, the kind used last at the end.
        self._free: OrderedDict[Any, list[Slot]] = OrderedDict()

    def place(self, call: Call, model: OpenedModel) -> Placed:
        """Puts the inputs of a request in place, copying those that must be copied.

        Raises: InvalidArgument: the request cannot be sent.  Unavailable: there is no room in shared memory now.
        """
        tensors: list[Tensor] = []
        contents: list[bytes] = []
        copied: list[tuple[str, np.ndarray]] = []
        segments: set[int] = set()
        room = _ALL_INLINE
        for name, array in call.inputs.items():
            datatype = input_datatype(name, array, model)
            shape = array.shape
            place: Place | None = None
            if datatype == "BYTES":
                content = encode_strings(array)
                if len(content) <= min(INLINE, room):
                    room -= len(content)
                    contents.append(content)
                else:
                    copied.append((name, np.frombuffer(content, np.uint8)))
                    place = (-1, 0, len(content))
            else:
                place = self.memory.locate(array)
                if place is not None:
                    note_segment(segments, place)
                elif (byte_size := array.nbytes) <= INLINE and byte_size <= room:
                    room -= byte_size
                    contents.append(native(array).tobytes())
                else:
                    copied.append((name, array))
                    place = _IN_SLOT
            tensors.append((name, datatype, shape, place))
        outputs = self.outputs(call, model)
        if call.places:
            for _, wanted in outputs:
                note_segment(segments, wanted)
        hold = [*call.inputs.values(), *call.places.values()]
        key = (call.model, call.version, tuple(tensors), outputs, _parameters(call))
        if copied:
            slot = self._slot(key, call, tensors, copied, outputs)
            for name, array in copied:
                np.copyto(slot.arrays[name], array)
            return Placed(slot.prepared, contents, tuple(segments.union(slot.segments)), slot, hold)
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = encode(call, tensors, outputs)
            if len(self._prepared) >= _MAX_KINDS:
                self._prepared.clear()
            self._prepared[key] = prepared
        return Placed(prepared, contents, tuple(segments), None, hold)

    def outputs(self, call: Call, model: OpenedModel) -> tuple[tuple[str, Place | None], ...]:
        """Returns (name, place) of each output that the request wants; place None: the output comes with the answer.

        The result is empty if the request wants all outputs, without places.

        Raises: InvalidArgument: the array for an output was not made by ``empty``, is not contiguous, or belongs to no wanted
          output.
        """
        if not call.places:
            return tuple([(name, None) for name in call.outputs])
        wanted: dict[str, Place | None] = dict.fromkeys(call.outputs or model.output_names)
        for name, array in call.places.items():
            place = self.memory.locate(array)
            if place is None:
                raise InvalidArgument(
                    f"the place of output '{name}' is no contiguous array that empty() of this connection made in this process"
                )
            if name not in wanted:
                raise InvalidArgument(f"output '{name}' has a place, and is none of {', '.join(wanted)}")
            wanted[name] = place
        return tuple(wanted.items())

    def room(self, array: np.ndarray) -> np.ndarray:
        """Returns an array in shared memory for a copy of ``array``. If there is no room, the free slots are given up first.

        Raises: InvalidArgument: the copy is larger than the daemon allows.  Unavailable: there is no room now.
        """
        try:
            return self.memory.empty(array.shape, array.dtype.newbyteorder("="))
        except Unavailable:
            self.forget()
            return self.memory.empty(array.shape, array.dtype.newbyteorder("="))

    def forget(self) -> None:
        """Gives up all free slots, so that their memory can be used for other arrays."""
        with self._lock:
            for free in self._free.values():
                free.clear()

    def _slot(
        self,
        key: Any,
        call: Call,
        tensors: list[Tensor],
        copied: list[tuple[str, np.ndarray]],
        outputs: tuple[tuple[str, Place | None], ...],
    ) -> Slot:
        with self._lock:
            free = self._free.get(key)
            if free is None:
                if len(self._free) >= _MAX_KINDS:
                    self._free.popitem(last=False)[1].clear()
                free = self._free[key] = []
            else:
                self._free.move_to_end(key)
        try:
            return free.pop()
        except IndexError:
            pass
        arrays = {name: self.room(array) for name, array in copied}
        places: dict[str, Place] = {}
        for name, array in arrays.items():
            place = self.memory.locate(array)
            assert place is not None
            places[name] = place
        placed = [(name, datatype, shape, places.get(name, place)) for name, datatype, shape, place in tensors]
        segments: set[int] = set()
        for lies in places.values():
            note_segment(segments, lies)
        return Slot(arrays, encode(call, placed, outputs), tuple(segments), free)


def _parameters(call: Call) -> tuple[Any, ...]:
    if not call.parameters:
        return ()
    # 1, 1.0 and True are equal, and are three parameters.
    return tuple([(name, type(value), value) for name, value in call.parameters.items()])


def note_segment(segments: set[int], place: Place | None) -> None:
    """Adds the segment of a place to a set; does nothing for None or a place on a GPU, which lies in a region."""
    if place is not None and isinstance(place[0], int):
        segments.add(place[0])


def input_datatype(name: str, array: np.ndarray, model: OpenedModel) -> str:
    """Returns the protocol's datatype for an input's array. Raises InvalidArgument: the array's dtype has none."""
    datatype = datatype_of(array.dtype, model.datatypes.get(name, ""))
    if datatype is None:
        raise InvalidArgument(f"input '{name}': arrays of {array.dtype} have no datatype in the protocol")
    return datatype


def native(array: np.ndarray) -> np.ndarray:
    """Returns the array, or a copy in this host's byte order if it has another one."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def encode(call: Call, tensors: Sequence[Tensor], outputs: Sequence[tuple[str, Place | None]]) -> bytes:
    """Encodes a call's prepared request. Raises InvalidArgument: a number or a text in it has no encoding."""
    try:
        return wire.prepared_request(call.model, call.version, tensors, outputs, call.parameters)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"the request to model '{call.model}' cannot be sent: {error}") from None


def own_fields(call: Call) -> bytes:
    """Encodes a call's id, deadline, priority, queue timeout, sequence and replace key.

    Raises: InvalidArgument: one has no encoding.
    """
    deadline_ns = 0 if call.deadline is None else max(1, int(call.deadline * 1e9))
    try:
        return wire.own_fields(
            call.request_id,
            deadline_ns,
            call.priority,
            call.timeout_us,
            call.sequence_id,
            call.sequence_start,
            call.sequence_end,
            call.replace_key,
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"the request to model '{call.model}' cannot be sent: {error}") from None
