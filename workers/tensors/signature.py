"""Describes the inputs and outputs of a model version: names, datatypes and dims without the batch dimension.

Inputs and outputs are declared in the file config.pbtxt, in the file model.py, or in both files. A declaration in model.py,
such as ``inputs = {"input_ids": "INT64[sequence]"}``, can also name an axis: here "sequence". Such an axis varies in
size, unless config.pbtxt gives the size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from tensord.config.model_config import ModelConfig, data_type_name
from tensord.protocol import model_config_pb2
from tensord.shm import datatypes
from tensord.shm.arrays import DTYPES, Array, datatype_of, in_slices
from tensord.shm.common.datatypes import DATATYPES
from tensord.shm.errors import InvalidArgument

_DECLARATION = re.compile(r"([A-Z0-9_]+)\[([^\[\]]*)\]")
#: A declaration with other brackets, an open one or none.
_NEARLY = re.compile(r"(\w+)([\[({<]?)([^\[\](){}<>]*)[\])}>]?")
#: Datatypes by their names elsewhere: in Triton's configurations, in files of parameters, in C. numpy knows its own.
_ELSEWHERE = {
    **{datatypes.to_model_config(name): name for name in datatypes.ELEMENT_SIZES},
    **{each.file: name for name, each in DATATYPES.items() if each.file},
} | {"STRING": "BYTES", "FLOAT": "FP32", "DOUBLE": "FP64", "BFLOAT16": "BF16", "INT": "INT32", "LONG": "INT64"}
#: 64-bit datatypes need JAX's x64 mode, which otherwise wraps them in silence.
WIDE = {name for name, byte_size in datatypes.ELEMENT_SIZES.items() if byte_size == 8}


@dataclass(frozen=True, slots=True)
class BatchInput:
    """Describes a batch input: an array that the worker computes from a batch's ragged input, such as element counts."""

    #: A kind of Triton's ``BatchInput``, or ``SEGMENT_IDS``.
    kind: str
    #: The ragged input that it describes.
    source: str


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Describes one input or output of a model: name, datatype and dims, without the batch dimension.

    If the configuration reshapes a tensor, the shape that clients see (``dims``) differs from the model's (``model_dims``).
    """

    name: str
    datatype: str
    dtype: np.dtype[Any]
    #: The client's dims; -1 where any size goes.
    dims: tuple[int, ...]
    #: The model's dims.
    model_dims: tuple[int, ...]
    #: Names of the model's axes as model.py declares them, None where they have none.
    axes: tuple[str | None, ...]
    optional: bool = False
    #: Lines of an output's label file.
    labels: tuple[str, ...] = ()
    #: True of an input whose requests lie one behind the other in a batch, whatever their lengths (``ragged.py``).
    ragged: bool = False
    #: The description of a batch that the worker makes this input of; None: clients send it.
    of_batch: BatchInput | None = None
    #: The ragged input that an output is cut like; "": it is cut by rows.
    cut_like: str = ""
    #: True if the model's dims differ from the client's.
    reshaped: bool = field(init=False)
    #: True if the tensor's bytes on the wire are the array as the model takes it.
    plain: bool = field(init=False)
    #: True if its shape in a program is that of the whole batch, and not of a row.
    whole: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "whole", self.ragged or self.of_batch is not None)
        object.__setattr__(self, "reshaped", self.dims != self.model_dims)
        object.__setattr__(self, "plain", not self.reshaped and self.datatype not in ("BYTES", "BOOL"))

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Returns whether a client's tensor may have this shape. ``shape`` is without the batch dimension."""
        return _fits(shape, self.dims)

    def fits_model(self, shape: tuple[int, ...]) -> bool:
        """Returns whether the model's function may take or return the tensor in this shape, without the batch dimension."""
        return _fits(shape, self.model_dims)

    def to_model(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Converts the tensor's shape as clients see it to its shape in the model. Both are without the batch dimension."""
        return _refill(shape, self.dims, self.model_dims) if self.reshaped else shape

    def to_client(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Converts the tensor's shape in the model to its shape as clients see it. Both are without the batch dimension."""
        return _refill(shape, self.model_dims, self.dims) if self.reshaped else shape

    def as_objects(self, array: Array) -> Array:
        """Returns an output of strings as an object array of ``bytes``, and any other output unchanged."""
        strings = self.datatype == "BYTES" and datatype_of(array.dtype) == "BYTES"
        return in_slices(array) if strings else array

    def for_client(self, array: Array, batches: bool) -> Array:
        """Returns a model's tensor in the shape that clients see. If ``batches`` is True, the first axis is a batch and stays."""
        if not self.reshaped:
            return array
        lead = array.shape[:1] if batches else ()
        return array.reshape(lead + self.to_client(array.shape[len(lead) :]))


def _fits(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    if shape == dims:
        return -1 not in dims  # what a client may not say is "any size"
    if len(shape) != len(dims):
        return False
    return all(size >= 0 if dim == -1 else size == dim for size, dim in zip(shape, dims, strict=True))


def _refill(shape: tuple[int, ...], given: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    varying = iter([size for size, dim in zip(shape, given, strict=True) if dim == -1])
    return tuple(next(varying) if dim == -1 else dim for dim in wanted)


@dataclass(frozen=True, slots=True)
class StateSpec(TensorSpec):
    """Describes one array of state that a model keeps for each sequence. ``name``: its name where it goes into the function."""

    #: Its name where the function returns it, and for clients where it is an output as well.
    output: str = ""


@dataclass(frozen=True, slots=True)
class Signature:
    """Describes all inputs, outputs and states of a model version, by name and in the order of its configuration."""

    model: str
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    #: 0: no batch dimension; every request runs alone.
    max_batch_size: int
    #: State that a jitted model keeps of each sequence.
    states: tuple[StateSpec, ...] = ()
    #: Sequences that have a row of state at a time, in each instance.
    slots: int = 0
    #: True if the model's code computes with 64-bit types, whatever its tensors are.
    doubles: bool = field(default=False, repr=False)
    batches: bool = field(init=False)
    #: True if requests of different lengths share a batch.
    ragged: bool = field(init=False)
    #: True if the model is traced and run with 64-bit types: any tensor has such elements, or its code asks for them.
    wide: bool = field(init=False)
    #: True if state has dims that vary.
    free: bool = field(init=False)

    def __post_init__(self) -> None:
        # Asked for with every request, so decided once.
        object.__setattr__(self, "batches", self.max_batch_size > 0)
        object.__setattr__(self, "ragged", any(spec.ragged for spec in self.inputs.values()))
        specs = [*self.inputs.values(), *self.outputs.values(), *self.states]
        object.__setattr__(self, "free", any(-1 in spec.dims for spec in self.states))
        object.__setattr__(self, "wide", self.doubles or any(spec.datatype in WIDE for spec in specs))

    @property
    def required(self) -> int:
        return sum(not spec.optional for spec in self.inputs.values())


@dataclass(frozen=True, slots=True)
class Declared:
    """A tensor as model.py declares it, such as ``"INT64[sequence]"``."""

    datatype: str
    dims: tuple[int, ...]
    axes: tuple[str | None, ...]


def meant_datatype(name: str) -> str | None:
    """Returns the protocol's datatype for a name that other libraries use, such as "float32" or "F32", or None if unknown."""
    if name.upper() in datatypes.ELEMENT_SIZES:
        return name.upper()
    try:
        # To numpy U8 is a text of eight characters.
        return _ELSEWHERE.get(name) or datatype_of(np.dtype(getattr(ml_dtypes, name, name)))
    except (TypeError, ValueError):
        return _ELSEWHERE.get(name.upper())


def _guess(text: str) -> str:
    found = _NEARLY.fullmatch(text.replace(" ", ""))
    if found is None or (datatype := meant_datatype(found[1])) is None:
        return "; tensors have no floats of 8 bits, but of 16: FP16, BF16" if re.match("(?i)(FP?|FLOAT)8", text) else ""
    if not found[2]:
        return f"; did you mean '{datatype}[4]', or '{datatype}[]' for a single number?"
    return f"; did you mean '{datatype}[{found[3]}]'?"


def parse_declaration(what: str, text: object) -> Declared:
    """Parses a declaration ``DATATYPE[dims]``. Each dim is a number, a name or -1.

    Raises InvalidArgument: the declaration is malformed. ``what`` names the tensor in the error.
    """
    match = _DECLARATION.fullmatch(text.replace(" ", "")) if isinstance(text, str) else None
    if match is None or match[1] not in datatypes.ELEMENT_SIZES:
        meant = _guess(text) if isinstance(text, str) else ""
        raise InvalidArgument(
            f"{what}: declared as {text!r}; expected a datatype with dims, such as 'FP32[8, n]'{meant}"
        )
    dims: list[int] = []
    axes: list[str | None] = []
    for dim in match[2].split(",") if match[2] else ():
        if dim.isascii() and dim.isdigit() and len(dim) < 19 and int(dim) > 0:
            dims.append(int(dim))
            axes.append(None)
        elif dim == "-1" or dim.isidentifier():
            dims.append(-1)
            axes.append(None if dim == "-1" else dim)
        else:
            raise InvalidArgument(f"{what}: dim '{dim}' is no positive number of at most 18 digits, no name and not -1")
    return Declared(match[1], tuple(dims), tuple(axes))


def declare(
    config: ModelConfig, inputs: Mapping[str, Declared], outputs: Mapping[str, Declared], where: str = "model.py"
) -> None:
    """Adds the inputs and outputs that the file ``where`` declares to ``config``, the model's configuration.

    Raises InvalidArgument if the file and the configuration contradict each other.
    """
    for kind, fields, declared in (("input", config.input, inputs), ("output", config.output, outputs)):
        known = {field.name: field for field in fields}
        for name, tensor in declared.items():
            field = known.get(name)
            if field is None:
                if known:
                    raise InvalidArgument(
                        f"model '{config.name}': {kind} '{name}' is declared in {where} and missing in config.pbtxt"
                    )
                field = fields.add(name=name, dims=tensor.dims)
            agree(f"model '{config.name}': {kind} '{name}'", field, tensor, where)


def agree(what: str, field: Any, declared: Declared, where: str = "model.py") -> None:
    """Completes a tensor's missing datatype and dims in a model's configuration from the tensor's declaration.

    Args:
      what: the words for the tensor in errors.
      field: the tensor in the configuration, which is changed.
      declared: the declaration.
      where: the file with the declaration, for errors.
    Raises InvalidArgument if the declaration and the configuration contradict each other.
    """
    if not field.data_type:
        field.data_type = model_config_pb2.DataType.Value(datatypes.to_model_config(declared.datatype))
    given = datatypes.from_model_config(data_type_name(field))
    if given != declared.datatype:
        raise InvalidArgument(f"{what}: {declared.datatype} in {where}, {given} in config.pbtxt")
    reshaped = "reshape" in field.DESCRIPTOR.fields_by_name and field.HasField("reshape")
    dims = tuple(field.reshape.shape) if reshaped else tuple(field.dims)
    if not dims and not reshaped:
        field.dims.extend(declared.dims)
    elif len(dims) != len(declared.dims) or any(
        a != b and -1 not in (a, b) for a, b in zip(dims, declared.dims, strict=True)
    ):
        raise InvalidArgument(f"{what}: dims {list(declared.dims)} in {where}, {list(dims)} in config.pbtxt")


def signature(
    config: ModelConfig, declared_axes: Mapping[str, tuple[str | None, ...]], labels: Mapping[str, tuple[str, ...]]
) -> Signature:
    """Returns the signature of a model with this completed and checked configuration.

    ``declared_axes``: tensor name -> names of its axes in the model. ``labels``: output name -> the lines of its label file.
    """
    inputs = {field.name: _spec(field, declared_axes, ()) for field in config.input}
    outputs = {field.name: _spec(field, declared_axes, labels.get(field.name, ())) for field in config.output}
    if config.max_batch_size > 0:
        ragged = {field.name for field in config.input if field.allow_ragged_batch}
        inputs = {name: replace(spec, ragged=name in ragged) for name, spec in inputs.items()}
    return Signature(config.name, inputs, outputs, config.max_batch_size)


def _spec(field: Any, declared_axes: Mapping[str, tuple[str | None, ...]], labels: tuple[str, ...]) -> TensorSpec:
    datatype = datatypes.from_model_config(data_type_name(field))
    dims = tuple(field.dims)
    model_dims = tuple(field.reshape.shape) if field.HasField("reshape") else dims
    names = declared_axes.get(field.name, (None,) * len(model_dims))
    # A name stands for a size that varies; where the configuration fixes it there is nothing to pad.
    axes = tuple(name if dim == -1 else None for name, dim in zip(names, model_dims, strict=True))
    return TensorSpec(
        field.name, datatype, DTYPES[datatype], dims, model_dims, axes, bool(getattr(field, "optional", False)), labels
    )
