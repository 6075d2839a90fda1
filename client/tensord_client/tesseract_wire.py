"""Reads and writes ``tesseract-core``'s JSON, and gives all inputs of a request the same number of rows. Does no I/O.

``tensord_client.tesseract`` says how arrays and rows are sent.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tensord_client import gateway
from tensord_client.common.arrays import DTYPES, Array
from tensord_client.common.derivatives import FLOATING
from tensord_client.common.tensors import Tensor, cast
from tensord_client.errors import InvalidArgument

#: The most values and containers in a request besides what is base64.
MAX_VALUES = 1 << 18
#: What an Accept header has to have, and may not.
_ACCEPTED = re.compile(r"\*/\*|application/(\*|json\+base64)")
_REFUSED = re.compile(r'(transport|compression)="?(?!none)')
_DTYPES = {dtype.name: dtype for dtype in DTYPES.values()}


def is_accepted(header: str) -> bool:
    """Returns whether an Accept header allows JSON with arrays in base64, which is the only form that the server sends."""
    return _ACCEPTED.search(header) is not None and _REFUSED.search(header) is None


def parsed(content: bytearray) -> dict[str, Any]:
    """Parses the content of a request. Arrays are not decoded yet: an ``_Encoded`` object stands for each.

    Raises InvalidArgument if the content is no JSON object or has too many values.
    """
    body = None
    # Each value and each container but the first has one of these before it; base64 has none.
    gateway.bound("the request has", sum(map(content.count, (b",", b"[", b"{"))), "values besides base64", MAX_VALUES)
    with contextlib.suppress(ValueError, RecursionError):
        body = json.loads(content, object_hook=_with_arrays)
    if not isinstance(body, dict):
        raise InvalidArgument("the request is no object in JSON, or too deep")
    return body


def read(path: str, came: Any, tensor: Tensor, abstract: int = 0) -> Array:
    """Converts ``came``, a value in a parsed request, to an array of the datatype of ``tensor``.

    ``path``: the value's name in error messages. ``abstract``: if not 0, ``came`` may be a shape and a dtype without data, for
    an array of zeros of at most ``abstract`` bytes. Raises InvalidArgument if ``came`` is larger or cannot be converted.
    """
    if not isinstance(came, _Encoded):  # texts, numbers, lists of them
        made = cast(path, came, tensor.datatype)
        return made if made.ndim else made.reshape((1,) * len(tensor.shape))
    shape, name, data, dtype, own = came.shape, came.name, came.data, came.dtype, dtype_for(tensor)
    if dtype is None:
        raise InvalidArgument(f"'{path}' has the dtype {reprlib.repr(name)}, it may be one of {', '.join(_DTYPES)}")
    if own.kind == "O" or not (np.can_cast(dtype, own, "same_kind") or {dtype.kind, own.kind} <= {"i", "u"}):
        raise InvalidArgument(f"'{path}' is {name}, the model takes {tensor.datatype}")
    if abstract and data is None:
        gateway.bound(f"'{path}' has", gateway.byte_size(f"'{path}'", dtype, shape), "bytes", abstract)
        return np.broadcast_to(np.zeros((), tensor.dtype), shape)
    encoding = [data.get("encoding"), data.get("compression")] if isinstance(data, dict) else data
    if not isinstance(data, dict) or encoding != ["base64", None]:
        what = "as base64, not compressed, and neither as files nor in memory of CUDA"
        raise InvalidArgument(f"'{path}' comes as {reprlib.repr(encoding)}, this server reads arrays {what}")
    try:
        content = binascii.a2b_base64(data["buffer"])
    except (LookupError, TypeError, ValueError) as error:
        raise InvalidArgument(f"'{path}' is no base64: {error}") from None
    made = gateway.array(f"'{path}' of {name}", dtype, shape, content)
    return made if dtype == tensor.dtype else cast(path, made, tensor.datatype)


def dtype_for(tensor: Tensor) -> np.dtype[Any]:
    """Returns the dtype that clients use for the arrays of ``tensor``: float32 for BF16, else the tensor's own dtype."""
    return DTYPES["FP32"] if tensor.datatype == "BF16" else tensor.dtype


class _Encoded:
    def __init__(self, given: Mapping[str, Any]) -> None:
        self.shape, self.name, self.data = given["shape"], given["dtype"], given.get("data")
        self.dtype = _DTYPES.get(self.name)


def _with_arrays(node: dict[str, Any]) -> Any:
    # A model's inputs or outputs may have these names.
    is_array = isinstance(node.get("shape"), list) and isinstance(node.get("dtype"), str)
    return _Encoded(node) if is_array else node


def floating(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of floating datatypes, which can have derivatives."""
    return {name: each for name, each in tensors.items() if each.datatype in FLOATING}


def paths(name: str) -> Iterator[str]:
    """Yields all texts by which clients may name a tensor: for the ``name`` "a/0" these are "a/0", "a.0" and "a.[0]"."""
    parts = name.replace("/", ".").split(".")
    yield from (name, ".".join(parts), ".".join(f"[{part}]" if part.isdigit() else part for part in parts))


def by_name(values: Any, tensors: Mapping[str, Tensor], field: str) -> dict[str, Any]:
    """Returns the items of the dict ``values`` with the model's names of tensors as keys.

    A client may write the name "a/0" of a tensor as "a/0", "a.0" or "a.[0]". Each key of ``values`` is written in such a way.
    If ``values`` is a list of such names, the result has each item of the list as the value of the tensor that the item names.
    ``tensors``: the tensors that the client may name. ``field``: the name of ``values`` in error messages.
    Raises InvalidArgument if ``values`` is empty or neither a dict nor a list, if a name is unknown, or a tensor comes twice.
    """
    names = {path: name for name in tensors for path in paths(name)}
    if not isinstance(values, (dict, list)) or not values or not all(map(names.__contains__, map(str, values))):
        raise InvalidArgument(f"{field} is {reprlib.repr(values)}, of the model it may name {sorted(tensors)}")
    found = {names[path]: values[path] if isinstance(values, dict) else path for path in map(str, values)}
    if len(found) < len(values):
        raise InvalidArgument(f"{field} names one twice: {reprlib.repr(values)}")
    return found


class Point:
    """The inputs of one request: ``arrays`` by name. The first axis of each array has ``rows`` rows."""

    def __init__(
        self, values: Mapping[str, Any], tensors: Mapping[str, Tensor], batched: bool, most: int, abstract: bool
    ) -> None:
        """Decodes the inputs of a request from JSON values.

        Args:
          values: the parsed JSON value of each input, by the input's name.
          tensors: the model's inputs by name.
          batched: whether inputs may have an additional first axis, which counts rows.
          most: how many bytes all inputs may have together.
          abstract: whether a value may be only a shape and a dtype.
        Raises InvalidArgument if a value does not fit its input.
        """
        given = {name: read(name, each, tensors[name], most if abstract else 0) for name, each in values.items()}
        #: The shape in which each input came, and the dtype.
        self.shapes = {name: each.shape for name, each in given.items()}
        self._dtypes = {name: getattr(each, "dtype", dtype_for(tensors[name])) for name, each in values.items()}
        counts = list[int]()
        for name, array in given.items():
            row = tensors[name].shape
            if array.ndim not in (len(row), len(row) + batched):
                raise InvalidArgument(f"'{name}' has the shape {[*array.shape]}, a row is {[*row]}")
            counts += array.shape[: array.ndim - len(row)]
        #: True if inputs have a batch dimension for the client, and outputs too.
        self.has_rows = bool(counts)
        self.rows = next((count for count in counts if count != 1), 1)
        self.arrays = {name: self.in_rows(name, array, len(tensors[name].shape)) for name, array in given.items()}
        gateway.bound("the rows of inputs have", sum(each.nbytes for each in self.arrays.values()), "bytes", most)

    def in_rows(self, name: str, array: Array, dimensions: int) -> Array:
        """Returns ``array`` with ``self.rows`` rows, as many as the other inputs have. If ``array`` has one row, it is repeated.

        ``dimensions``: the number of dimensions of one row. An array with only these dimensions counts as one row.
        Raises InvalidArgument if ``array`` has neither one row nor ``self.rows`` rows.
        """
        array = array if array.ndim > dimensions else array[None]
        if array.shape[0] not in (1, self.rows):
            raise InvalidArgument(f"'{name}' has {array.shape[0]} rows, and another input {self.rows}")
        return np.broadcast_to(array, (self.rows, *array.shape[1:]))

    def output(self, rows: Array) -> Array:
        """Converts an output for the client: returns ``rows``, or ``rows[0]`` if the client sent no input with a batch axis."""
        return rows if self.has_rows else rows[0, ...]

    def gradient(self, name: str, rows: Array) -> Array:
        """Converts the gradient of the input ``name`` to the shape and dtype in which the client sent the input.

        ``rows``: the gradient for each row. The rows are added up if the client sent one value of the input for all rows.
        """
        shape = self.shapes[name]
        rows = rows if rows.shape == shape else rows[0] if self.rows == 1 else rows.sum(0)
        return rows.reshape(shape).astype(self._dtypes[name], copy=False)

    def block(self, name: str, rows: Array) -> Array:
        """Joins the Jacobians of all rows of a request into the array that the client gets as the Jacobian.

        ``rows[i]``: the Jacobian of row i of an output by row i of the input ``name``. The result has the axes of the output
        first, and then the axes of the input as the client sent the input. Elements for two different rows are 0.
        """
        shape, at = self.shapes[name], rows.ndim - self.arrays[name].ndim + 1
        if not self.has_rows:
            return rows[0, ...]
        if self.arrays[name].shape != shape:  # all rows depend on one
            return rows.reshape(*rows.shape[:at], *shape)
        made, each = np.zeros((*rows.shape[:at], *shape), rows.dtype), np.arange(self.rows)
        np.moveaxis(made, at, 1)[each, each] = rows
        return made


def slices(arrays: Mapping[str, Array]) -> Callable[[Any], dict[str, Array]]:
    """Returns a function of an index, such as ``slice(0, 2)``, that returns these rows of ``arrays``."""
    return lambda at: {name: each[at, ...] for name, each in arrays.items()}


def described(shape: Sequence[int], tensor: Tensor) -> dict[str, Any]:
    """Returns a JSON object with "shape", which is ``shape``, and "dtype", the dtype that clients use for ``tensor``."""
    return {"shape": shape, "dtype": dtype_for(tensor).name}


def written(array: Any) -> Any:
    """Encodes an array for JSON: numbers as an object with shape, dtype and base64 data, strings as a flat list without shape."""
    if array.dtype.kind == "O":
        return [each.decode(errors="replace") for each in array.ravel()]
    data = {"buffer": base64.b64encode(array.tobytes()).decode(), "encoding": "base64"}
    return {"object_type": "array", "shape": array.shape, "dtype": array.dtype.name, "data": data}


def openapi(
    title: Mapping[str, str], endpoints: Sequence[str], inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Returns the OpenAPI document of a model. ``title``: the "title" and "version" of the document.

    ``endpoints``: the names of the endpoints, such as "apply". The shapes of ``inputs`` and ``outputs`` lack the batch dimension.
    """
    schemas, text, array = dict[str, Any](), {"type": "string"}, {"type": "object", "array_flags": []}
    for side, tensors in (("Input", inputs), ("Output", outputs)):
        properties = {name: text if each.datatype == "BYTES" else array for name, each in tensors.items()}
        differentiable = floating(tensors) if "jacobian" in endpoints else {}
        # Without a shape, auto_experimental would send rows, and sum gradients by inputs that vmap does not map.
        arrays = {path: described(each.shape, each) for name, each in differentiable.items() for path in paths(name)}
        schemas[f"Apply_{side}Schema"] = {"type": "object", "properties": properties}
        schemas[f"Apply{side}Schema"] = {"differentiable_arrays": arrays}
    answered = {"responses": {"200": {"description": "OK"}}}
    return {
        "openapi": "3.1.0",
        "info": title,
        "paths": {**{f"/{name}": {"post": answered} for name in endpoints}, "/health": {"get": answered}},
        "components": {"schemas": schemas},
        "x-supported-output-formats": ["json+base64"],
        "x-supported-gpu-transports": ["none"],
        "x-supported-compressions": ["none"],
    }
