"""Holds the input tensors of one request: the class ``RequestTensors``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, cast

import numpy as np

from tensord.shm.arrays import DTYPES, Array
from tensord.shm.messages import PreparedRequest
from tensord.workers.scheduling.sequence import Sequenced

if TYPE_CHECKING:
    from tensord.workers.devices.late_tensor import LateTensor

#: No inputs.
NOTHING: Mapping[str, Array] = {}


class RequestTensors(Sequenced):
    """The base class of ``Request``. It gives access to the input tensors of a request."""

    __slots__ = ("_added", "_arrays", "contents", "copied_byte_size", "prepared")

    #: The part that the request has in common with others, such as the names of its model and inputs.
    prepared: PreparedRequest
    _arrays: dict[str, Array] | None
    #: Inputs that are not of the client.
    _added: Mapping[str, Array]
    #: Input name -> its bytes, where they say it all.
    contents: Mapping[str, bytes | memoryview | LateTensor] | None
    #: Bytes of its tensors that were copied for it alone: before they are gathered, and when the outputs are placed.
    copied_byte_size: int

    @property
    def arrays(self) -> dict[str, Array]:
        """The request's input arrays by name, in the shapes that the model gets. Nobody may write to them.

        An input in a region may be a ``LateTensor``, whose values are copied from the region only when they are needed.
        """
        if self._arrays is None:
            # Made only for who asks: what is gathered into a batch goes there as bytes.
            assert self.contents is not None
            self._arrays = {
                tensor.name: _array(self.contents[tensor.name], tensor.datatype, tensor.shape)
                for tensor in self.prepared.inputs
            }
            self._arrays.update(self._added)
        return self._arrays

    def keep(self, arrays: dict[str, Array]) -> None:
        """Replaces the request's inputs by ``arrays``: input name -> array, in the shape that the model gets."""
        self._arrays, self.contents = arrays, None

    def add(self, inputs: Mapping[str, Array]) -> None:
        """Adds inputs that the server makes, such as sequence controls, by name."""
        if self.contents is None or any(array.dtype == np.object_ for array in inputs.values()):
            self._arrays, self.contents = {**self.arrays, **inputs}, None
            return
        # What is gathered goes as bytes; the arrays are made if somebody asks for them.
        self._arrays, self._added = None, {**self._added, **inputs}
        self.contents = {**self.contents, **{name: array.tobytes() for name, array in inputs.items()}}

    @property
    def small(self) -> bool:
        """True if all input tensors came inside the request's record."""
        return self.contents is not None and not [one for one in self.contents.values() if type(one) is not bytes]

    @property
    def label(self) -> str:
        """The beginning of Triton's error messages. It contains the client's id of the request."""
        return label(self.client_id)

    @property
    def stays(self) -> bool:
        """Returns whether the request's outputs should stay on the GPU, for another model or a client's region of GPU memory."""
        return False


def _array(content: bytes | memoryview | LateTensor, datatype: str, shape: tuple[int, ...]) -> Array:
    if isinstance(content, (bytes, memoryview)):
        return np.frombuffer(content, DTYPES[datatype]).reshape(shape)
    return cast(Array, content)


def label(client_id: str) -> str:
    """Returns ``[request id: X] ``, the beginning of Triton's error messages. ``client_id``: the client's id of the request."""
    return f"[request id: {client_id or '<id_unknown>'}] "


def by_rows(arrays: Mapping[str, Array], requests: Iterable[RequestTensors]) -> Iterator[dict[str, Array]]:
    """Yields the rows of each request of a batch, by name. ``arrays``: the rows of all requests, one request after another."""
    at = 0
    for request in requests:
        yield {name: array[at : at + request.rows] for name, array in arrays.items()}
        at += request.rows
