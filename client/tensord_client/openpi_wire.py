"""Reads and writes the messages of ``openpi-client``, and makes a model's tensors of observations. Does no I/O.

{b"__ndarray__": True, b"data": bytes, b"dtype": "<f4", b"shape": [3]}     an array, in msgpack
{b"__npgeneric__": True, b"data": 1.5, b"dtype": "<f4"}                    a scalar of numpy
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import numpy as np

from tensord_client.asynchronous import AsyncModel
from tensord_client.common.arrays import datatype_of
from tensord_client.common.results import Array, Tensor
from tensord_client.common.tensors import cast, flat
from tensord_client.errors import InvalidArgument, ServingError

#: The most arrays of an observation, dimensions of an array, maps and lists in each other, and values of all maps and lists.
MAX_ARRAYS, MAX_DIMENSIONS, MAX_DEPTH, MAX_VALUES = 256, 8, 16, 1 << 16
#: The most values of one map or list, for which msgpack makes room before it reads them; the largest dimension of an array.
MAX_LENGTH, MAX_SIZE = 1 << 12, 1 << 31
#: The parameter in a model's configuration whose text, a JSON object, is told to robots as metadata.
METADATA = "openpi_metadata"
_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248]|[SU][1-9]\d{0,8})")
#: Kinds of dtypes, within which values are cast; V is BF16.
_KINDS = {
    "i": "integer",
    "u": "integer",
    "f": "float",
    "V": "float",
    "S": "text",
    "U": "text",
    "O": "text",
    "b": "bool",
}
#: What may be a path: errors of connections name sockets, and those of models files.
_PATH = re.compile(r"(?<![\w.\]/])(?:unix:)?/[^\s;,:'\")]+")


class NotThisWire(Exception):
    """The message is no map in msgpack: whoever sent it speaks another protocol."""


def read(message: bytes) -> dict[str, Any]:
    """Reads an observation: a map of arrays, which are views of what was read, texts, numbers, lists and further maps.

    Raises: NotThisWire: the message is no map in msgpack.  InvalidArgument: it exceeds a bound, or has no such values.
    """
    own = _Hooks()
    hooks = {"object_hook": own.map, "list_hook": own.list, "ext_hook": own.extension}
    try:
        found = msgpack.unpackb(message, max_array_len=MAX_LENGTH, max_map_len=MAX_LENGTH, **hooks)
        if not isinstance(found, dict):
            raise ValueError(f"{type(found).__name__} came")
    except (msgpack.exceptions.StackError, RecursionError):
        raise InvalidArgument(
            f"the observation has over 500 maps and lists in each other, {MAX_DEPTH} may be"
        ) from None
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        kind = InvalidArgument if "exceeds max_" in str(error) else NotThisWire
        raise kind(f"an observation is a map in msgpack: {error}") from None
    _check(found, 1)
    return found


def _check(node: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise InvalidArgument(f"the observation has {depth} maps and lists in each other, at most {MAX_DEPTH} may be")
    for each in node.values() if isinstance(node, dict) else node:
        if isinstance(each, (dict, list)):
            _check(each, depth + 1)


class _Hooks:
    """Makes arrays of the maps of one message, and counts what the message has."""

    def __init__(self) -> None:
        self._counts = {"arrays": 0, "values": 0}

    def _count(self, what: str, number: int, most: int) -> None:
        self._counts[what] += number
        if self._counts[what] > most:
            raise InvalidArgument(f"the observation has {self._counts[what]} {what}, at most {most} may be")

    def list(self, found: list[Any]) -> list[Any]:
        self._count("values", len(found), MAX_VALUES)
        return found

    def extension(self, code: int, content: bytes) -> Any:
        raise InvalidArgument(f"extension type {code} of msgpack came, and arrays, texts and numbers are expected")

    def map(self, found: dict[Any, Any]) -> Any:
        self._count("values", len(found), MAX_VALUES)
        if b"__npgeneric__" in found:
            return cast("a scalar", found.get(b"data"), datatype_of(_dtype(found)))
        if b"__ndarray__" not in found:
            return found
        self._count("arrays", 1, MAX_ARRAYS)
        dtype, content, shape = _dtype(found), found.get(b"data"), found.get(b"shape")
        if not isinstance(content, bytes):
            raise InvalidArgument(f"the data of an array are {type(content).__name__}, and bytes are expected")
        if not isinstance(shape, list) or not all(type(size) is int and 0 <= size <= MAX_SIZE for size in shape):
            raise InvalidArgument(
                f"an array has the shape {reprlib.repr(shape)}, sizes of 0 to {MAX_SIZE} are expected"
            )
        if len(shape) > MAX_DIMENSIONS:
            raise InvalidArgument(f"an array has {len(shape)} dimensions, at most {MAX_DIMENSIONS} may be")
        size = math.prod(shape) * dtype.itemsize
        if len(content) != size:
            raise InvalidArgument(f"an array {dtype.str}{shape} takes {size} bytes, and {len(content)} came")
        self._count("values", math.prod(shape) if dtype.kind in "SU" else 0, MAX_VALUES)
        return np.frombuffer(content, dtype).reshape(shape)


def _dtype(found: dict[Any, Any]) -> np.dtype[Any]:
    name = found.get(b"dtype")
    if not isinstance(name, str) or _DTYPE.fullmatch(name) is None:
        raise InvalidArgument(f"{reprlib.repr(name)} came as a dtype, and one of bools, numbers or texts is expected")
    return np.dtype(name)


def written(content: Mapping[str, Any]) -> bytes:
    """Writes a message: a map of arrays, texts, numbers, lists and maps."""
    message: bytes = msgpack.packb(content, default=_packed)
    return message


def _packed(value: Array) -> dict[bytes, Any]:
    return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}


def sentence(error: ServingError) -> str:
    """Returns what a robot is told of an error: its sentence, without paths of the server's host."""
    return _PATH.sub("(a path)", error.message)


class Policy:
    """A model as robots see it: observations in, actions out, and metadata. They have no batch axis."""

    def __init__(self, model: AsyncModel, config: Mapping[str, Any], ignored: Sequence[str]) -> None:
        """Makes the policy of a model that was just looked up.

        ``config``: the model's configuration; empty: the server gives none. ``ignored``: patterns of names that an observation
        may have and the model does not get. Raises InvalidArgument: the metadata in ``config`` are no JSON object.
        """
        self.model = model
        self._ignored = ignored
        self._batched = model.max_batch_size > 0
        inputs, outputs = (
            {each.name: each._replace(shape=each.shape[self._batched :]) for each in tensors}
            for tensors in (model.inputs, model.outputs)
        )
        self._inputs, self._datatypes = inputs, {name: each.datatype for name, each in {**outputs, **inputs}.items()}
        optional = {each["name"] for each in config.get("input", ()) if each.get("optional")}
        self._needed = [name for name in inputs if name not in optional]
        own: Any = None
        with contextlib.suppress(ValueError):
            own = json.loads(config.get("parameters", {}).get(METADATA, {}).get("string_value") or "{}")
        if not isinstance(own, dict):
            raise InvalidArgument(f"parameter '{METADATA}' of model '{model.name}' is no JSON object")
        described = {
            key: {name: {"datatype": each.datatype, "shape": each.shape} for name, each in tensors.items()}
            for key, tensors in (("inputs", inputs), ("outputs", outputs))
        }
        #: What a robot is told when it connects.
        self.metadata = {**own, "tensord": {"model": model.name, "version": model.version, **described}}

    def inputs(self, observation: Mapping[str, Any]) -> dict[str, Array]:
        """Makes the model's tensors of an observation, by name; names of nested maps are joined by "/".

        Raises InvalidArgument: a value is not what the model takes, the model has no such input, or one is lacking.
        """
        made: dict[str, Array] = {}
        for key, value in flat(observation, self._datatypes).items():
            # Trees of a JAX model have their names joined by dots.
            name = key if key in self._inputs else key.replace("/", ".")
            if name in made:
                raise InvalidArgument(f"'{key}' is in the observation twice")
            if name in self._inputs:
                made[name] = self._fitting(key, value, self._inputs[name])
            elif not any(fnmatch.fnmatchcase(key, pattern) for pattern in self._ignored):
                raise InvalidArgument(
                    f"the observation has {reprlib.repr(key)}, the model takes {sorted(self._inputs)}"
                )
        for name in self._needed:
            if name not in made:
                raise InvalidArgument(f"the observation lacks '{name}', {_taken(self._inputs[name])}")
        return made

    def _fitting(self, key: str, value: Any, tensor: Tensor) -> Array:
        is_array = isinstance(value, np.ndarray)
        came = f"{value.dtype}{list(value.shape)}" if is_array else reprlib.repr(value)
        wrong = InvalidArgument(f"'{key}' is {came}, and {_taken(tensor)}")
        if is_array and _KINDS[value.dtype.kind] != _KINDS["V" if tensor.datatype == "BF16" else tensor.dtype.kind]:
            raise wrong
        try:
            made = value if is_array and value.dtype == tensor.dtype else cast(key, value, tensor.datatype)
        except InvalidArgument as error:
            raise InvalidArgument(f"{wrong.message}: {error.message}") from None
        if not made.shape:
            made = made.reshape((1,) * len(tensor.shape))
        if len(made.shape) != len(tensor.shape) or any(a not in (-1, b) for a, b in zip(tensor.shape, made.shape)):
            raise wrong
        return made[np.newaxis] if self._batched else made

    def actions(self, answer: Mapping[str, Array]) -> dict[str, Any]:
        """Makes what a robot gets of a model's answer: arrays and texts, which are this process's own."""
        return {name: self._told(name, value[0] if self._batched else value) for name, value in answer.items()}

    def _told(self, name: str, value: Array) -> Any:
        if self._datatypes.get(name) == "BYTES":
            with contextlib.suppress(UnicodeDecodeError):
                value = np.array([each.decode() for each in value.ravel()], object).reshape(value.shape)
            return value.item() if value.shape in ((), (1,)) else value.tolist()
        if self._datatypes.get(name) == "BF16":
            # openpi-client has no such dtype; float32 has all of its values.
            return (np.ascontiguousarray(value).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return np.array(value)


def _taken(tensor: Tensor) -> str:
    return f"the model takes {tensor.datatype}{list(tensor.shape)}"
