"""Tensors and datatypes of Triton Python-backend models (see ``interface``). Source: the README of Triton's python_backend."""

from __future__ import annotations

from typing import Any

import numpy as np

from tensord.shm.arrays import DTYPES, Array, datatype_of
from tensord.shm.datatypes import to_model_config
from tensord.workers.calls.asking import snapshot
from tensord.workers.python_backend.errors import TritonModelException

TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    **{to_model_config(name): dtype.type for name, dtype in DTYPES.items()},
    "TYPE_BOOL": bool,
}


class Tensor:
    """A named tensor that has a numpy array.

    The array of a BYTES tensor is an object array of ``bytes``. The array of a BF16 tensor has the dtype bfloat16 of ml_dtypes.
    """

    def __init__(self, name: str | bytes, numpy_array: Array) -> None:
        if isinstance(name, bytes):  # as Triton, which takes what is read out of a BYTES tensor
            name = name.decode()
        if not isinstance(name, str):
            raise TypeError(f"the name of a tensor is a str, not {type(name).__name__}")
        if not isinstance(numpy_array, np.ndarray):
            raise TypeError(f"tensor '{name}': a numpy array is expected, not {type(numpy_array).__name__}")
        if datatype_of(numpy_array.dtype) is None:
            raise TritonModelException(f"tensor '{name}': dtype {numpy_array.dtype} has no name in the protocol")
        self._name = name
        self._array = numpy_array
        self._borrowed = False
        #: True if nobody writes to the array, and it stays valid as long as anybody has it.
        self._shared = False

    @classmethod
    def borrowed(cls, name: str, content: Array) -> Tensor:
        """Makes a tensor of shared memory to which a model must not write. ``as_numpy`` returns a copy."""
        tensor = cls(name, content)
        tensor._borrowed = True
        return tensor

    @classmethod
    def shared(cls, name: str, content: Array) -> Tensor:
        """Makes a tensor of another model's output. Nobody writes to ``content``, so it may be passed on without a copy."""
        tensor = cls.borrowed(name, content)
        tensor._shared = True
        return tensor

    def for_call(self) -> Array:
        """Returns the array for a request to another model. It is a copy, unless nobody writes to the array."""
        return self._array if self._shared else snapshot(self._array)

    @property
    def content(self) -> Array:
        """The array itself, without a copy. The caller must not write to it."""
        return self._array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        """Returns the tensor's array, to which the model may write. Shared memory is replaced by a copy first."""
        if self._borrowed:
            self._array = np.array(self._array)
            self._borrowed = self._shared = False
        return self._array

    def triton_dtype(self) -> int:
        """Returns the datatype's number in the enumeration DataType of Triton's ModelConfig."""
        name = to_model_config(str(datatype_of(self._array.dtype)))
        return list(TRITON_STRING_TO_NUMPY).index(name) + 1

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        return True

    def to_dlpack(self) -> Any:
        """Returns the tensor as a DLPack capsule."""
        content = self.as_numpy()
        if not content.flags.writeable:  # numpy exports nothing that is read-only
            content = np.array(content)
        # BF16 by jax, because numpy cannot export it.
        return _exporter(content).__dlpack__()

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """Makes a tensor from a DLPack capsule, or from an object of torch, jax, numpy or cupy that exports DLPack.

        Raises TritonModelException: ``tensor`` is neither a capsule nor such an object.
        """
        if not hasattr(tensor, "__dlpack__") and type(tensor).__name__ != "PyCapsule":
            raise TritonModelException(
                f"tensor '{name}': an object with __dlpack__ is expected, not {type(tensor).__name__}"
            )
        return Tensor(name, _imported(tensor))

    def __repr__(self) -> str:
        return f"<Tensor {self._name!r} {self._array.dtype}{list(self._array.shape)}>"


class _Capsule:
    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def _exporter(array: Array) -> Any:
    # numpy exports its own dtypes alone, and not those that a package has added (2).
    if array.dtype.isbuiltin != 2:
        return array
    import jax.numpy as jnp

    return jnp.array(array)


def _imported(tensor: Any) -> Array:
    source = tensor if hasattr(tensor, "__dlpack_device__") else _Capsule(tensor)
    if isinstance(source, np.ndarray):
        return source
    # jax reads every datatype of the protocol, BF16 included; its array is read-only and keeps the source alive.
    import jax

    with jax.enable_x64(True):
        return np.asarray(jax.dlpack.from_dlpack(source))


def triton_to_numpy_type(data_type: int) -> Any:
    """Returns the numpy type for a number of the enumeration DataType of Triton's ModelConfig."""
    return list(TRITON_STRING_TO_NUMPY.values())[data_type - 1]


def numpy_to_triton_type(data_type: Any) -> int:
    """Returns the number in the enumeration DataType of Triton's ModelConfig for a numpy type."""
    name = to_model_config(np_to_triton_dtype(data_type))
    return list(TRITON_STRING_TO_NUMPY).index(name) + 1


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Returns the numpy type for a name of ModelConfig's DataType: ``TYPE_FP32`` -> float32."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def np_to_triton_dtype(np_dtype: Any) -> str:
    """Returns the protocol's datatype for a numpy dtype: ``numpy.float32`` -> ``FP32``.

    Raises TritonModelException: the protocol has no datatype for it.
    """
    name = datatype_of(np.dtype(np_dtype))
    if name is None:
        raise TritonModelException(f"dtype {np_dtype} has no name in the protocol")
    return name


def triton_to_np_dtype(dtype: str) -> Any:
    """Returns the numpy type for a datatype of the protocol: ``FP32`` -> ``numpy.float32``."""
    return TRITON_STRING_TO_NUMPY[to_model_config(dtype)]
