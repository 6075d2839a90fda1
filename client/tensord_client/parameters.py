"""Pushes new parameters into a model while the model is served: ``Model.parameters``.

    model.parameters.update(tree, version=17)        requests that begin after this call use the new parameters

A tree is nested mappings and sequences of arrays, such as ``{"dense": {"kernel": array}}``. The name of this array's parameter
is ``dense.kernel``. The client sends a tree in the safetensors format.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Union

import numpy as np

from tensord_client.common.call import seconds
from tensord_client.common.datatypes import FILE_TYPES
from tensord_client.common.derivatives import PARAMETER_GRADIENT
from tensord_client.common.results import Array
from tensord_client.common.tensors import bfloat16_of_torch, leaves
from tensord_client.errors import InvalidArgument, Unavailable

#: numpy's names of dtypes -> those in files.
_NAMES = {dtype: name for name, dtype in FILE_TYPES.items()}
#: The tensors begin behind the header, at a multiple of so many bytes.
_ALIGNMENT = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
Buffer = Union[bytes, memoryview]


class ModelParameters:
    """Lists, changes and drops the parameter sets of one model. Requests name the set to use. Thread-safe."""

    def __init__(self, manage: Callable[..., dict[str, Any]], model: str, version: int) -> None:
        """Makes an object for the parameter sets of one model. Sends nothing.

        ``manage``: the method ``manage`` of the connection to the server. ``version``: the model's version. If it is 0,
        ``list`` lists the sets of all versions, and ``update``, ``drop`` and ``roll_back`` change those of the newest version.
        """
        self._manage = manage
        self._model = model
        self._version = version
        #: The model itself, which is asked for gradients.
        self.of: Any = None

    def gradient(self, inputs: Mapping[str, Any], cotangents: Mapping[str, Any], **own: Any) -> Any:
        """Computes the product of ``cotangents`` and the model's derivative by its parameters, summed over all rows.

        The parameters are those of the set that the model was looked up with.

        Args:
          inputs: the inputs of the model, as in a call of the model.
          cotangents: output name -> array of the output's datatype and shape, for each floating output.
          own: further fields of the request, such as ``priority``.
        Returns: the gradients of all floating parameters. The gradient of the parameter ``dense.kernel`` is
          ``result["dense"]["kernel"]``. If the model's parameters are a single array, the result is an array. ``update`` takes
          a tree of this form. Over a lane, the arrays can occupy the worker's memory until they are garbage-collected.
        Raises: InvalidArgument: the model has no derivatives, or an argument does not fit the model.  ServingError: any other
          error of the server.
        """
        asked = self.of._asked(PARAMETER_GRADIENT)
        answer = asked.result(self.of.derivative(PARAMETER_GRADIENT)(asked.arrays(inputs, cotangents), **own))
        tree: dict[str, Any] = {}
        for name, array in answer.items():
            *path, last = name.split(".")
            node = tree
            for key in path:
                node = node.setdefault(key, {})
            node[last] = array
        return tree["array"] if [*tree] == ["array"] else tree

    def update(
        self,
        parameters: Any,
        *,
        version: int = 0,
        set: str = "main",
        partial: bool = False,
        check_finite: bool = False,
        move_sequences: bool = False,
        timeout: float | None = None,
    ) -> int:
        """Pushes parameters into a parameter set of the model.

        Requests for the set that begin after this method has returned use the new parameters.

        Args:
          parameters: a tree of arrays, or the name of a file in the model's folder on the server, such as
            "params-17.safetensors". A tree is nested mappings and sequences, or any pytree of JAX. It has the names, shapes and
            dtypes of the model's own parameters.
          version: the number that identifies this push. It must be higher than the numbers of all earlier pushes into the set.
            0 stands for the highest of these numbers plus one.
          set: the name of the parameter set. A set that does not exist is made.
          partial: whether ``parameters`` may lack leaves of the model. Such leaves keep their values. In a new set they have
            the values of ``main``.
          check_finite: whether the server refuses values that are infinite or not a number.
          move_sequences: whether open sequences of requests, and requests that run step by step, go on with the new
            parameters. If False, each of them keeps the parameters that it began with.
          timeout: the seconds to wait for the server's answer, or None for no limit.

        Returns: the number that identifies this push.

        Raises: Replaced: a push with this number or a higher one was made, or is under way.  InvalidArgument: the names,
          shapes, dtypes or values do not fit the model.  Unavailable, DeadlineExceeded: no answer came in time; the push may
          still be made.  ServingError: any other error of the server, which has changed nothing.
        """
        said: dict[str, Any] = {"number": version}
        flags = {"partial": partial, "check_finite": check_finite, "move_sequences": move_sequences}
        said.update({name: True for name, flag in flags.items() if flag})
        pieces: list[Buffer] = []
        if isinstance(parameters, str):
            said["file"] = parameters
        else:
            pieces = list(layout(parameters, partial))
        answer = self._manage("push", self._model, self._version, set, said, pieces, seconds(timeout))
        return int(answer["number"])

    def list(self) -> list[dict[str, Any]]:
        """Returns a dictionary for each parameter set that the model has.

        "model" and "version" say to which version the set belongs, and "set" is the set's name. "number" is the number of the
        push that brought the set's values, or 0 if the values come from the model's folder. "kept" says from where a new worker
        gets the values: "repository", "memory", "file" or "none". If a push brought the values, "byte_size", "pushed_at"
        (seconds since 1970) and "pushed_by" (a client) describe the push. "number_before", if given, is the number of the
        values that ``roll_back`` brings back.
        """
        found: list[dict[str, Any]] = self._manage("parameters", self._model, self._version)["parameters"]
        return found

    def drop(self, set: str) -> None:
        """Drops the parameter set named ``set``. Later requests that name it fail.

        Raises: NotFound: there is no such parameter set.  InvalidArgument: ``set`` is ``main``, which cannot be dropped.
        """
        self._manage("drop", self._model, self._version, set)

    def roll_back(self, set: str = "main") -> int:
        """Undoes the newest push into a parameter set. Requests then use the set's previous parameters again.

        Returns the number of the push of the previous parameters, or 0 if they are those in the model's folder.

        Raises: NotFound: nothing was pushed into the set, or the server does not have the set's previous parameters.
        """
        return int(self._manage("revert", self._model, self._version, set)["number"])

    def __repr__(self) -> str:
        return f"<ModelParameters of {self._model}>"


def layout(parameters: Any, partial: bool = False) -> Iterator[Buffer]:
    """Yields the tree ``parameters`` of arrays in the safetensors format: first the header, then each array's bytes.

    A leaf that safetensors cannot store is left out, such as a function, a text or a random key of JAX. The served model then
    keeps the value with which this leaf was loaded.
    Raises InvalidArgument if safetensors can store no leaf, or if ``partial`` is True and safetensors cannot store a leaf.
    """
    leaves: dict[str, tuple[str, Array]] = {}
    for name, leaf in _leaves(parameters):
        found = _array(leaf)
        if found is not None:
            leaves[name] = found
        elif partial:
            kind = getattr(leaf, "dtype", type(leaf).__name__)
            raise InvalidArgument(f"parameter '{name}' is of {kind}, which safetensors' layout does not have")
    if not leaves:
        raise InvalidArgument("a tree without arrays is no parameters")
    header: dict[str, Any] = {}
    end = 0
    # What is aligned to more comes first, so that all of it is aligned.
    ordered = sorted(leaves.items(), key=lambda leaf: -leaf[1][1].dtype.itemsize)
    for name, (kind, array) in ordered:
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for _, (_, array) in ordered:
        if array.nbytes:
            yield array.reshape(-1).view(np.uint8).data


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields the name and value of each leaf of a tree, such as ``dense.0.kernel``."""
    if "jax" in sys.modules:
        from tensord_client import in_jax

        yield from in_jax.leaves(tree)
    else:
        yield from leaves(tree)


def _array(leaf: Any) -> tuple[str, Array] | None:
    """Returns a parameter's safetensors type and its little-endian array, or None if safetensors cannot store ``leaf``."""
    bits = bfloat16_of_torch(leaf)
    try:
        array = np.ascontiguousarray(leaf if bits is None else bits)
    except (TypeError, ValueError, RuntimeError):
        return None
    kind = _NAMES.get(array.dtype.name) if bits is None else "BF16"
    if kind is None:
        return None
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    # ``ascontiguousarray`` makes a scalar an array of one.
    return kind, array.reshape(np.shape(leaf))


def sealed(pieces: Sequence[Buffer]) -> int:
    """Writes pieces of bytes one after the other into a new memfd, which nobody can change afterwards.

    Returns the memfd's file descriptor, which the caller must close.

    Raises: Unavailable: the host has no memory left for the pieces, or this process has no file descriptor left.
    """
    byte_size = sum(map(len, pieces))
    try:
        fd = os.memfd_create("tensord-parameters", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise Unavailable(f"no descriptor is left for {byte_size} bytes of parameters: {error.strerror}") from error
    try:
        # Nothing is allocated before: the kernel would clear those pages first.
        for piece in pieces:
            rest = memoryview(piece)
            while len(rest):
                rest = rest[os.write(fd, rest) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise Unavailable(f"the host has no {byte_size} bytes of memory for parameters") from error
        raise
    return fd
