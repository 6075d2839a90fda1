"""Puts the inputs of requests where workers can read them.

    an array in memory that the client shares with workers   is not copied
    arrays that have at most 16 KiB together                 are sent inside the request
    any other array                                          is copied to shared memory

The shared memory for copies is used again for later requests with the same model, parameters and outputs, if the inputs have
the same names, datatypes and shapes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

from tensord_client.common.arrays import datatype_of, encode_strings
from tensord_client.common.call import Call
from tensord_client.errors import InvalidArgument, Unavailable
from tensord_client.memory import Memory, Place
from tensord_client.native import wire
from tensord_client.worker_lane import ClientLane, OpenedModel

#: The most bytes of all arrays together that travel inside one request.
INLINE = 16 << 10
#: The most kinds of requests that are cached.
_MAX_KINDS = 256
#: Free slots have together at most this part of the memory that the daemon allows.
_FREE_PART = 2
#: The place of a tensor that lies in a slot, in the key of a kind.
_IN_SLOT = (-1, 0, 0)


class Slot:
    """Shared memory for a request's inputs, and the encoded request that names this memory. Later requests reuse both."""

    __slots__ = ("_slots", "arrays", "byte_size", "kind", "prepared", "segments")

    def __init__(
        self, slots: Slots, kind: Any, arrays: dict[str, np.ndarray], prepared: bytes, segments: tuple[int, ...]
    ) -> None:
        self._slots = slots
        #: The kind of the requests that it can be used for.
        self.kind = kind
        self.arrays = arrays
        self.byte_size = sum([array.nbytes for array in arrays.values()])
        self.prepared = prepared
        self.segments = segments

    def give_back(self) -> None:
        """Lets later requests use this memory. Call it when the request that uses the memory has been answered."""
        self._slots.add(self)


class Slots:
    """Keeps the shared memory of answered requests for later requests of the same kind. Thread-safe.

    Requests of the same kind have the same model, outputs and request parameters, and inputs of the same names, datatypes,
    shapes and places. If too much memory or too many kinds are kept, memory of the kind that was used longest ago is freed.
    """

    def __init__(self, memory: Memory) -> None:
        """Starts empty. The slots may have half of the bytes that the daemon allows for the client's shared ``memory``."""
        self._memory = memory
        self._lock = threading.Lock()
        #: Free slots by kind, the kind used last at the end; no list is empty.
        self._free: OrderedDict[Any, list[Slot]] = OrderedDict()
        self._byte_size = 0

    def take(self, kind: Any) -> Slot | None:
        """Removes and returns a slot whose ``kind`` equals ``kind``. Returns None if no such slot is kept."""
        with self._lock:
            free = self._free.get(kind)
            if free is None:
                return None
            slot = free.pop()
            self._byte_size -= slot.byte_size
            if not free:
                del self._free[kind]
            return slot

    def add(self, slot: Slot) -> None:
        """Keeps ``slot``, the shared memory of an answered request, for a later request with an equal ``slot.kind``."""
        with self._lock:
            self._free.setdefault(slot.kind, []).append(slot)
            self._free.move_to_end(slot.kind)
            self._byte_size += slot.byte_size
            limit = self._memory.max_byte_size
            most = slot.byte_size if limit is None else max(slot.byte_size, limit // _FREE_PART)
            while self._byte_size > most or len(self._free) > _MAX_KINDS:
                kind, free = next(iter(self._free.items()))
                self._byte_size -= free.pop(0).byte_size
                if not free:
                    del self._free[kind]

    def clear(self) -> None:
        """Frees all shared memory that this object keeps for later requests."""
        with self._lock:
            self._free.clear()
            self._byte_size = 0

    def forget(self) -> None:
        """Empties this object in a child process after a fork. The parent process keeps its shared memory."""
        # The old lock may be locked for ever.
        self._lock = threading.Lock()
        self.clear()


#: A tensor of a call: name, datatype, shape, and its place; None: inside the request.
Tensor = tuple[str, str, tuple[int, ...], Optional[Place]]


class Layout:
    """Says how each input of a call reaches the worker: in place in shared memory, copied there, or inside the request.

    A layout may be used again for a request with the same arrays, unless one of the arrays has strings.
    """

    def __init__(self, call: Call, model: OpenedModel) -> None:
        #: The model as it was opened; the process, or the daemon, may have another one later.
        self.model = model
        self.tensors: list[Tensor] = []
        #: Arrays that travel inside the request, and strings, encoded.
        self.inline: list[np.ndarray | bytes] = []
        #: Arrays that are copied into a slot, by name.
        self.copied: list[tuple[str, np.ndarray]] = []
        #: The segments that the arrays lie in.
        self.segments: set[int] = set()
        self.outputs: tuple[tuple[str, Place | None], ...] = ()
        #: The kind that the request is of.
        self.kind: Any = None
        #: The encoded prepared request; empty: it names a slot, which has it.
        self.prepared = b""
        #: True: an input is BYTES, which are encoded when the layout is made.
        self.has_strings = False
        self.hold = [*call.inputs.values(), *call.places.values()]
        #: The placement that is sent each time, if all inputs are used in place; None: some are copied, or travel inside the
        #: request.
        self.placed: wire.Placed | None = None
        #: The other fields of the request, encoded, for a call that is sent many times.
        self.own = b""
        #: The lane that each such request goes on, with ``placed``; None: that is found for each.
        self.lane: ClientLane | None = None


class Placement:
    """Puts inputs where workers can read them: in the connection's shared memory or in the request. Thread-safe."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._prepared: dict[Any, bytes] = {}
        self.slots = Slots(memory)

    def place(self, call: Call, model: OpenedModel) -> wire.Placed:
        """Puts the inputs of a request where the worker can read them. Returns what a lane needs to send the request.

        Raises: InvalidArgument: an input or parameter cannot be encoded, an input is larger than the daemon allows, or an array
          for an output does not fit the output.  Unavailable: there is no room in shared memory now.
        """
        kind: tuple[Any, ...] | None = None
        if not (call.outputs or call.places or call.parameters):
            small = wire.small_inputs(call.inputs, INLINE)
            if small is not None:
                kind, contents = small
                prepared = model.small.get(kind)
                if prepared is not None:
                    return wire.Placed((prepared, contents, (), None, None, None))
        layout = self.lay_out(call, model)
        if kind is not None and not layout.has_strings:
            if len(model.small) >= _MAX_KINDS:
                model.small.clear()
            model.small[kind] = layout.prepared
        return self.fill(call, layout)

    def place_again(self, call: Call, model: OpenedModel) -> wire.Placed:
        """Does what ``place`` does, for a call that is sent many times: where its arrays go is decided once."""
        layout = call.layout
        if layout is None or layout.model is not model or layout.has_strings:
            layout = self.keep_layout(call, model)
        return layout.placed or self.fill(call, layout)

    def keep_layout(self, call: Call, model: OpenedModel) -> Layout:
        """Decides where each input and output of a call goes. Stores the layout in the call, and returns it.

        Raises InvalidArgument if an array for an input or output cannot be used.
        """
        layout = call.layout = self.lay_out(call, model)
        layout.own = own_fields(call)
        return layout

    def lay_out(self, call: Call, model: OpenedModel) -> Layout:
        """Decides for each input of ``call`` whether to send it inside the request or in shared memory. Copies nothing yet.

        Raises InvalidArgument if an input or parameter cannot be encoded, or if the caller's array for an output does not fit.
        """
        layout = Layout(call, model)
        room = INLINE
        for name, array in call.inputs.items():
            datatype = datatype_of(array.dtype, model.datatypes.get(name, ""))
            if datatype is None:  # of an array on a GPU
                raise InvalidArgument(f"input '{name}': arrays of {array.dtype} have no datatype in the protocol")
            place: Place | None = None
            if datatype == "BYTES":
                layout.has_strings = True
                content = encode_strings(array)
                if len(content) <= room:
                    room -= len(content)
                    layout.inline.append(content)
                else:
                    layout.copied.append((name, np.frombuffer(content, np.uint8)))
                    place = (-1, 0, len(content))
            else:
                place = self.memory.locate(array)
                if place is not None:
                    note_segment(layout.segments, place)
                elif array.nbytes <= room:
                    room -= array.nbytes
                    layout.inline.append(array)
                else:
                    layout.copied.append((name, array))
                    place = _IN_SLOT
            layout.tensors.append((name, datatype, array.shape, place))
        layout.outputs = self.outputs(call, model)
        for _, wanted in layout.outputs:
            note_segment(layout.segments, wanted)
        kind = layout.kind = (call.model, call.version, tuple(layout.tensors), layout.outputs, _parameters(call))
        if not layout.copied:
            prepared = self._prepared.get(kind)
            if prepared is None:
                prepared = encode(call, layout.tensors, layout.outputs)
                if len(self._prepared) >= _MAX_KINDS:
                    self._prepared.clear()
                self._prepared[kind] = prepared
            layout.prepared = prepared
            if not layout.inline:
                layout.placed = wire.Placed((prepared, [], tuple(layout.segments), None, layout.hold, []))
        return layout

    def fill(self, call: Call, layout: Layout) -> wire.Placed:
        """Copies the inputs into the request or to shared memory, as ``layout`` says. Returns the fields to send.

        Raises: InvalidArgument: an input is larger than the daemon allows, or a parameter cannot be encoded.  Unavailable:
          there is no room in shared memory now.
        """
        contents = [each if isinstance(each, bytes) else each.tobytes() for each in layout.inline]
        if not layout.copied:
            return wire.Placed((layout.prepared, contents, tuple(layout.segments), None, layout.hold, None))
        slot = self._slot(layout, call)
        for name, array in layout.copied:
            np.copyto(slot.arrays[name], array)
        segments = tuple(layout.segments.union(slot.segments))
        return wire.Placed((slot.prepared, contents, segments, slot, layout.hold, None))

    def outputs(self, call: Call, model: OpenedModel) -> tuple[tuple[str, Place | None], ...]:
        """Returns the name of each requested output, with the place in shared memory where the worker writes the output.

        If the place is None, the output comes with the answer. ``call.places`` has the caller's arrays for outputs, by output
        name. If ``call.outputs`` and ``call.places`` are empty, the result is empty: the request asks for all outputs.

        Raises: InvalidArgument: an array in ``call.places`` has a wrong datatype, or is for an output that is not requested.
        """
        if not call.places:
            return tuple([(name, None) for name in call.outputs])
        wanted: dict[str, Place | None] = dict.fromkeys(call.outputs or model.outputs)
        for name, array in call.places.items():
            place = self.memory.locate(array)
            if name not in wanted:
                raise InvalidArgument(f"output '{name}' has a place, and is none of {', '.join(wanted)}")
            declared = model.outputs.get(name)
            if declared is not None and datatype_of(array.dtype, declared) != declared:
                raise InvalidArgument(
                    f"output '{name}' is {declared}, and its place is {array.dtype}{list(array.shape)}"
                )
            wanted[name] = place
        return tuple(wanted.items())

    def room(self, array: np.ndarray) -> np.ndarray:
        """Allocates shared memory for a copy of ``array``, as an array with the same shape. Copies nothing.

        Raises: InvalidArgument: the array is larger than the daemon allows.  Unavailable: there is no room now.
        """
        try:
            return self.memory.empty(array.shape, array.dtype)
        except Unavailable:
            self.slots.clear()
            return self.memory.empty(array.shape, array.dtype)

    def _slot(self, layout: Layout, call: Call) -> Slot:
        slot = self.slots.take(layout.kind)
        if slot is not None:
            return slot
        arrays = {name: self.room(array) for name, array in layout.copied}
        places = {name: self.memory.locate(array) for name, array in arrays.items()}
        placed = [(name, datatype, shape, places.get(name, place)) for name, datatype, shape, place in layout.tensors]
        segments: set[int] = set()
        for place in places.values():
            note_segment(segments, place)
        return Slot(self.slots, layout.kind, arrays, encode(call, placed, layout.outputs), tuple(segments))


def _parameters(call: Call) -> tuple[Any, ...]:
    if not call.parameters:
        return ()
    # 1, 1.0 and True are equal, and are three parameters.
    return tuple([(name, type(value), value) for name, value in call.parameters.items()])


def note_segment(segments: set[int], place: Place | None) -> None:
    """Adds the number of the segment that ``place`` lies in to ``segments``, unless ``place`` is None or on a GPU."""
    if place is not None and isinstance(place[0], int):
        segments.add(place[0])


def encode(call: Call, tensors: Sequence[Tensor], outputs: Sequence[tuple[str, Place | None]]) -> bytes:
    """Encodes the constant part of a call's request: model, tensors, outputs, parameters.

    Args:
      tensors: (name, datatype, shape, place) of each input. The place is None if the input travels inside the request.
      outputs: (name, place) of each output to return. The place is None if the output comes with the answer.

    Raises: InvalidArgument: a value cannot be encoded.
    """
    try:
        return wire.prepared_request(call.model, call.version, tensors, outputs, dict(call.parameters))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"the request to model '{call.model}' cannot be sent: {error}") from None


def own_fields(call: Call) -> bytes:
    """Encodes the fields of a call that differ from request to request: id, deadline, scheduling.

    Raises InvalidArgument if a value cannot be encoded.
    """
    deadline_ns = 0 if call.deadline is None else max(1, int(call.deadline * 1e9))
    try:
        return wire.own_fields(call.request_id, deadline_ns, call.scheduling)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"the request to model '{call.model}' cannot be sent: {error}") from None
