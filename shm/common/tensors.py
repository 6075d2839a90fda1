"""Describes the tensors of models, and converts callers' values, such as lists and other libraries' arrays, to numpy arrays."""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .arrays import DTYPES, NATIVE, Array, bfloat16_bits, datatype_of, dtype_of, encode_strings
from .errors import InvalidArgument

#: Kinds of DLPack devices whose memory the processor reads: the processor, and memory that is page-locked for CUDA or ROCm.
_HOST = (1, 3, 11)
_ndarray = np.ndarray


class Tensor(NamedTuple):
    """An input or output of a model: its name, its datatype in the protocol (such as "FP32") and its shape."""

    name: str
    datatype: str
    #: The shape that clients see: with the batch dimension, -1 where the size varies.
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Returns the numpy dtype of the tensor's arrays. For BYTES it is object."""
        return dtype_of(self.datatype)


class Tensors(tuple[Tensor, ...]):
    """The inputs or the outputs of a model, in the model's order. Index them by position or by name: ``inputs["image"]``."""

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        for tensor in self:
            if tensor.name == key:
                return tensor
        raise KeyError(key)


class Timing(NamedTuple):
    """How long a request was queued and executed in the server, in ns, and how many bytes were copied for it."""

    queue_ns: int
    compute_ns: int
    copied_bytes: int


def tensors(described: Sequence[Mapping[str, Any]]) -> Tensors:
    """Converts "inputs" or "outputs" of a model's metadata in the Open Inference Protocol to ``Tensors``."""
    return Tensors(Tensor(each["name"], each["datatype"], tuple(map(int, each["shape"]))) for each in described)


def check_place(name: str, shape: tuple[int, ...], dtype: np.dtype[Any], place: Any) -> None:
    """Raises InvalidArgument unless ``place``, the caller's array for an output, has the output's shape and dtype.

    ``name`` is the output's name, for the error.
    """
    if place.shape != shape or place.dtype != dtype:
        given = f"{place.dtype}{list(place.shape)}"
        raise InvalidArgument(f"output '{name}' is {dtype}{list(shape)}, and its place is {given}")


def arrays(inputs: Mapping[str, Any], datatypes: Mapping[str, str]) -> dict[str, Array]:
    """Converts each input of a request to a C-contiguous array, if possible without a copy. Returns the arrays by input name.

    Args:
      inputs: values by input name. ``flat`` flattens nested values and joins their keys to input names.
      datatypes: the datatype of each input of the model, by name.
    Raises: InvalidArgument: ``inputs`` is no mapping, a value cannot be an array, or two values get the same input name.
    """
    if type(inputs) is dict:
        for name, value in inputs.items():
            if type(value) is not _ndarray or type(name) is not str:
                break
            if value.dtype not in NATIVE or not value.flags.c_contiguous:
                break
        else:  # Mostly there is nothing to flatten, and nothing to convert.
            return inputs.copy()
    return {name: array(name, value, datatypes.get(name)) for name, value in flat(inputs, datatypes).items()}


def copied(inputs: Mapping[str, Any], made: Mapping[str, Array], known: Collection[str]) -> dict[str, Any]:
    """Returns the inputs of a request that ``made``, the result of ``arrays``, has copies of. Their memory may change later.

    These are arrays of numpy and of libraries with DLPack, by input name. ``known`` are the names of the model's inputs.
    """
    found = {name: value for name, value in flat(inputs, known).items() if value is not made[name]}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, np.ndarray)
        or (hasattr(value, "__dlpack__") and not np.may_share_memory(made[name], _foreign(name, value)))
    }


def flat(inputs: Any, known: Collection[str], what: str = "input") -> dict[str, Any]:
    """Flattens nested mappings, lists and tuples of inputs. Returns the values by input name.

    An input's name is the keys, field names and indices that lead to its value, joined by "/". If ``known``, the names of the
    model's inputs, has only the same name joined by ".", that name is used. A list or tuple is flattened only if a name in
    ``known`` begins with the name of the list or tuple, followed by "/" or ".". ``what`` is the word for an input in errors.
    Raises: InvalidArgument: two values have the same name, or ``inputs`` is no mapping.
    """
    found: dict[str, Any] = {}
    if not isinstance(inputs, Mapping):
        raise InvalidArgument(f"{what}s are {type(inputs).__name__}, a mapping of names to arrays is expected")
    for path, value in _given(inputs.items(), (), known):
        name = "/".join(path)
        if len(path) > 1 and name not in known and ".".join(path) in known:
            name = ".".join(path)
        if name in found:
            raise InvalidArgument(f"{what} '{name}' is given twice")
        found[name] = value
    return found


def _given(node: Any, path: tuple[str, ...], known: Collection[str]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in node:
        inner = (*path, str(key))
        below = ("/".join(inner) + "/", ".".join(inner) + ".")
        if isinstance(value, Mapping):
            yield from _given(value.items(), inner, known)
        elif isinstance(value, (tuple, list)) and any(name.startswith(below) for name in known):
            yield from _given(zip(getattr(value, "_fields", range(len(value))), value), inner, known)
        else:
            yield inner, value


def array(name: str, value: Any, datatype: str | None) -> Array:
    """Makes a C-contiguous array of one input's value, if possible without a copy.

    Args:
      name: the input's name, for errors.
      value: a numpy array, an object with ``__array__``, or an object on the host with ``__dlpack__``. Its datatype is kept.
        A GPU array that ``Client.empty`` made is returned unchanged. A list, a number or a string is converted by ``cast``.
      datatype: the datatype for ``cast``, from the model's metadata, or None if the model has no input of this name.
    Raises: InvalidArgument: the value cannot be an array, or has a dtype that the protocol lacks.
    """
    if isinstance(value, np.ndarray):
        made = value
    elif getattr(value, "place", None) is not None:
        return value  # type: ignore[no-any-return]  # of this client's memory on a GPU
    elif hasattr(value, "__array__") or hasattr(value, "__dlpack__"):
        made = _foreign(name, value)
    else:
        made = cast(name, value, datatype)
    if made.dtype.kind == "T":  # numpy's strings of any length
        made = made.astype(object)
    if datatype_of(made.dtype) is None:
        raise InvalidArgument(f"input '{name}': arrays of {made.dtype} have no datatype in the protocol")
    if not made.dtype.isnative:
        made = made.astype(made.dtype.newbyteorder("="))
    return made if made.flags.c_contiguous else np.ascontiguousarray(made)


def cast(name: str, value: Any, datatype: str | None) -> Array:
    """Converts an array or a list to an array of ``datatype``. If ``datatype`` is None, numpy chooses the dtype.

    Raises InvalidArgument if the conversion would fail or change a value. Only float datatypes may round. For example, INT32
    refuses 0.5, NaN, "1" and 2**31. ``name``: the input's name in errors.
    """
    dtype = None if datatype is None else dtype_of(datatype)
    if datatype == "BF16" and dtype == DTYPES["UINT16"]:
        return bfloat16_bits(cast(name, value, "FP32"))
    try:
        made = given = np.array(value, dtype if datatype == "BYTES" else None)
        if dtype is None:
            return made
        with np.errstate(all="ignore"):
            # Of integers and floats in one list numpy makes floats, which large integers are rounded to.
            is_direct = given.dtype.kind in "biu" or given.dtype.kind == dtype.kind
            made = given.astype(dtype, copy=False) if is_direct else np.array(value, dtype)
    except (ValueError, TypeError, OverflowError) as error:
        of = "" if datatype is None else f" of {datatype}"
        raise InvalidArgument(f"input '{name}' cannot be an array{of}: {error}") from None
    if datatype == "BYTES":
        for each in made.flat:
            if not isinstance(each, (str, bytes)):
                raise InvalidArgument(f"an element of a BYTES tensor is {reprlib.repr(each)}, bytes or str is expected")
        return made
    is_float = dtype.kind not in "biu"
    if given.dtype.kind in "biufV":
        same = np.isfinite(made) >= np.isfinite(given) if is_float else made == given
        if same.all():
            return made
    for each, became in zip(np.array(value, object).flat, made.ravel().tolist()):
        if not _is_kept(each, became, is_float):
            change = "is no value" if each is None else f"would become {became}"
            raise InvalidArgument(f"input '{name}' cannot be an array of {datatype}: {reprlib.repr(each)} {change}")
    return made


def _is_kept(value: Any, converted: Any, is_float: bool) -> bool:
    """Returns whether the conversion of ``value`` to ``converted`` lost nothing. If ``is_float``, rounding is not a loss."""
    if not is_float or isinstance(value, (str, bytes, complex, type(None))):
        return bool(value == converted)
    return math.isfinite(converted) or not math.isfinite(value)


def _foreign(name: str, value: Any) -> Array:
    """Converts another library's array to a numpy array, if possible without a copy. ``name`` is the input's name in errors."""
    try:
        if (bits := bfloat16_of_torch(value)) is not None:
            return bits.view(dtype_of("BF16"))
        if hasattr(value, "__array__"):
            return np.asarray(value)
        where = int(value.__dlpack_device__()[0])
        if where not in _HOST:
            raise InvalidArgument(f"input '{name}' lies on a device (DLPack type {where}): bring it to the host first")
        # numpy 1.22 has it under another name.
        view = getattr(np, "from_dlpack", None) or np._from_dlpack  # type: ignore[attr-defined]
        made: Array = view(value)
        return made
    except InvalidArgument:
        raise
    except Exception as error:
        raise InvalidArgument(f"input '{name}': {type(value).__name__} gives no array: {error}") from None


def bfloat16_of_torch(value: Any) -> Array | None:
    """Returns the bits (uint16) of PyTorch's bfloat16 tensor, or None if ``value`` is not such a tensor."""
    # Another thread may just import it, which then has made no tensor yet.
    torch = sys.modules.get("torch")
    kind = getattr(torch, "Tensor", None)
    if torch is None or kind is None or not isinstance(value, kind) or value.dtype is not torch.bfloat16:
        return None
    return np.asarray(value.detach().view(torch.int16)).view(np.uint16)


def content(values: Array) -> bytes | memoryview:
    """Returns an array's elements as the bytes of an HTTP request. Do not change the array while the result is in use.

    Raises: InvalidArgument: the array is on a GPU, or an element of the datatype BYTES cannot be encoded.
    """
    if not isinstance(values, np.ndarray):
        raise InvalidArgument(f"{values!r} is of another connection: bring it to the host")
    if values.dtype.kind in "SUO":
        return encode_strings(values)
    return values.reshape(-1).view(np.uint8).data


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the name and the value of each leaf of nested mappings, lists and tuples. None is not a leaf.

    A leaf's name is ``name``, unless it is "", and the keys, fields and indices that lead to the leaf. Dots join them, as in
    ``dense.0.kernel``. A leaf whose name would be empty is named "array".
    """
    inside: list[tuple[Any, Any]]
    if isinstance(tree, Mapping):
        inside = [*tree.items()]
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        inside = [*zip(tree._fields, tree)]
    elif isinstance(tree, (list, tuple)):
        inside = [*enumerate(tree)]
    elif tree is None:
        return
    else:
        yield name or "array", tree
        return
    for key, value in inside:
        yield from leaves(value, f"{name}.{key}" if name else str(key))
