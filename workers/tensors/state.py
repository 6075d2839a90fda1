"""Describes the state of a sequence: the arrays that a JAX model keeps from one request of the sequence to the next.

The name, datatype and dims of each array are declared in the file config.pbtxt as ``sequence_batching.state``, in the file
model.py as ``state = {"h": "FP32[256]"}``, or in both files. An initial value comes from config.pbtxt or from the function
``create`` of model.py. Without an initial value, an array begins as zeros.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from tensord.config.model_config import ModelConfig, data_type_name
from tensord.config.model_folder import regular
from tensord.shm import datatypes
from tensord.shm.arrays import DTYPES, Array, array, described
from tensord.shm.errors import InvalidArgument, Unsupported
from tensord.workers.tensors.signature import StateSpec, agree, parse_declaration


def declare_state(config: ModelConfig, module: ModuleType) -> dict[str, tuple[str | None, ...]]:
    """Extends a model's configuration by the sequence state that model.py declares. Returns the names of each state's axes.

    Raises InvalidArgument if model.py and the configuration contradict each other, or if the model has no sequences.
    """
    declared = getattr(module, "state", {})
    what = f"model '{config.name}': state"
    if not isinstance(declared, Mapping):
        raise InvalidArgument(f"{what} of model.py must be a dict of names to declarations")
    axes: dict[str, tuple[str | None, ...]] = {}
    if not declared:
        return axes
    if not config.HasField("sequence_batching"):
        raise InvalidArgument(
            f"{what} '{next(iter(declared))}' is declared in model.py, but config.pbtxt has no sequence_batching, "
            "and only sequences have state"
        )
    fields = config.sequence_batching.state
    known = {field.input_name: field for field in fields}
    for name, text in declared.items():
        tensor = parse_declaration(f"{what} '{name}'", text)
        field = known.get(str(name))
        if field is None:
            if known:
                raise InvalidArgument(f"{what} '{name}' is declared in model.py and missing in config.pbtxt")
            # Here one name stands for what goes in and what comes out.
            field = fields.add(input_name=str(name), output_name=str(name), dims=tensor.dims)
        agree(f"{what} '{name}'", field, tensor)
        axes[field.input_name] = tensor.axes
    return axes


def state_specs(config: ModelConfig, axes: Mapping[str, tuple[str | None, ...]]) -> tuple[StateSpec, ...]:
    """Returns a ``StateSpec`` for each state of sequences that a model's configuration declares.

    ``axes``: input name of a state -> a name for each dim, or None for a dim without a name. Dims of -1 that have the same name
    have the same size.
    Raises Unsupported if a state is BYTES.
    """
    made: list[StateSpec] = []
    for field in config.sequence_batching.state:
        datatype, what = datatypes.from_model_config(data_type_name(field)), _name(config, field)
        if datatype == "BYTES":
            raise Unsupported(f"{what} is BYTES, which a jitted function cannot keep")
        dims = tuple(field.dims)
        names = axes.get(field.input_name, (None,) * len(dims))
        # A name stands for a size that varies.
        named = tuple(name if dim == -1 else None for name, dim in zip(names, dims, strict=True))
        dtype = DTYPES[datatype]
        made.append(StateSpec(field.input_name, datatype, dtype, dims, dims, named, output=field.output_name))
    return tuple(made)


def initial_state(config: ModelConfig, specs: tuple[StateSpec, ...], created: object, folder: Path) -> dict[str, Array]:
    """Returns state name -> initial array, without batch dimension. States not in the result begin as zeros.

    ``created``: the initial state that the model's ``create`` returned: arrays by name, or None. ``folder``: the model's folder.
    Raises InvalidArgument: an initial state does not fit its declaration, cannot be read, or is given twice.
    """
    values: dict[str, Array] = {}
    for field, spec in zip(config.sequence_batching.state, specs, strict=True):
        for given in field.initial_state:
            if given.WhichOneof("state_data") == "data_file":
                values[spec.name] = _file(_name(config, field), spec, tuple(given.dims), folder, given.data_file)
            else:
                values[spec.name] = np.zeros(tuple(given.dims), spec.dtype)
    if created is None:
        return values
    if not isinstance(created, Mapping):
        raise InvalidArgument(
            f"model '{config.name}': the third that create() returns is {type(created).__name__}, "
            "a dict of the state that sequences begin with is expected"
        )
    by_name = {spec.name: spec for spec in specs}
    for name, value in created.items():
        known = by_name.get(name)
        if known is None:
            raise InvalidArgument(f"model '{config.name}': create() returned state {name!r}, which is not declared")
        if name in values:
            raise InvalidArgument(
                f"model '{config.name}': state '{name}' begins as config.pbtxt says, and create() says it too"
            )
        values[name] = _fitting(f"model '{config.name}': state '{name}'", known, value)
    return values


def _fitting(what: str, spec: StateSpec, value: Any) -> Array:
    made = given = np.asarray(value)
    if given.dtype.kind in "biuf" and (given.ndim == 0 or not hasattr(value, "dtype")):
        # Numbers have no datatype of their own.
        with np.errstate(all="ignore"):
            made = given.astype(spec.dtype)
        kept = made == given if spec.dtype.kind in "biu" else np.isfinite(made) >= np.isfinite(given)
        made = made if np.all(kept) else given
    if given.ndim == 0 and -1 not in spec.dims:
        made = np.full(spec.dims, made)
    if made.dtype != spec.dtype or not (spec.fits(made.shape) or made.ndim == 0):
        raise InvalidArgument(
            f"{what} begins as {described(given.dtype, given.shape)} from create(), "
            f"declared is {described(spec.dtype, spec.dims)}"
        )
    return made


def _file(what: str, spec: StateSpec, dims: tuple[int, ...], folder: Path, name: str) -> Array:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise InvalidArgument(f"{what}: data_file must be a file name, without folders")
    needed = math.prod(dims) * spec.dtype.itemsize
    try:
        with open(folder / "initial_state" / name, "rb", opener=regular) as file:
            content = file.read(needed + 1)
            size = len(content) + len(file.read(1 << 30))
    except OSError as error:
        raise InvalidArgument(f"{what}: file '{name}' of its initial_state cannot be read: {error.strerror}") from error
    if size != needed:
        raise InvalidArgument(
            f"initial_state setting expects {needed} bytes, but the data provided from {name} has {size} bytes."
        )
    return array(content, spec.datatype, dims, what)


def _name(config: ModelConfig, field: Any) -> str:
    return f"model '{config.name}': state '{field.input_name}'"
