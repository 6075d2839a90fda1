"""Reads a file with a program, of jax.export or of StableHLO, as a function of named arrays.

Names come from the pytree of the program's arguments and results (``tensord.workers.tensors.tensor_trees``). If there is only one
positional argument, names do not begin with its number.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.extend.mlir.dialects.stablehlo as stablehlo
import numpy as np
from jax import export
from jax.extend.mlir import ir

from tensord.config.artifact_files import EXPORTED
from tensord.config.model_folder import regular
from tensord.shm.arrays import DTYPES, datatype_of
from tensord.shm.errors import FileTooLarge, InvalidArgument
from tensord.workers.tensors.tensor_trees import name_of, parameter_name

_MAX_BYTE_SIZE = 2 << 30
_MAX_SAID = 300
#: First bytes of MLIR's bytecode and of portable artifacts.
_BYTECODE = b"ML\xefR"
_PORTABLE = _BYTECODE + b"\rStableHLO"
#: MLIR's names of the protocol's datatypes.
_ELEMENTS = {"i1": np.dtype(np.bool_), "bf16": DTYPES["BF16"]}
_ELEMENTS |= {f"f{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)}
_ELEMENTS |= {f"{sign}i{bits}": np.dtype(f"{sign}int{bits}") for bits in (8, 16, 32, 64) for sign in ("", "u")}
#: ``jax.Device``'s name of a platform -> jax.export's.
_PLATFORMS = {"gpu": "cuda"}


@dataclass(frozen=True, slots=True)
class ProgramArray:
    """Name, dtype and sizes of an array that a program takes or returns."""

    name: str
    #: A dtype of numpy, or of JAX alone, such as a random key's.
    dtype: Any
    #: Sizes; a varying one is a name, or -1 where it has no simple one.
    dims: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.datatype or self.dtype}[{', '.join(map(str, self.dims))}]"

    @property
    def datatype(self) -> str | None:
        """The protocol's name of the array's dtype; None: the protocol does not have this dtype."""
        return datatype_of(self.dtype) if isinstance(self.dtype, np.dtype) else None

    def fits(self, shape: Sequence[int]) -> bool:
        """Returns whether an array of ``shape`` may be passed for the array that this object describes."""
        return len(shape) == len(self.dims) and all(
            isinstance(dim, str) or dim in (-1, size) for dim, size in zip(self.dims, shape, strict=True)
        )


class ProgramFile:
    """A program that was read from a file of jax.export or StableHLO, to be called with named arrays while JAX traces."""

    def __init__(self, path: Path, has_parameters: bool) -> None:
        """Reads the file. Raises InvalidArgument, with the file's name and the reason, if it cannot be read or served.

        ``has_parameters``: whether there is a file of parameters, which are then the first argument of a program of jax.export.
        """
        self.path = path
        try:
            with open(path, "rb", opener=regular) as file:
                size = os.fstat(file.fileno()).st_size
                if size > _MAX_BYTE_SIZE:
                    raise FileTooLarge(path.name, size, _MAX_BYTE_SIZE)
                content = file.read()
            read = _exported if path.suffix == EXPORTED else _of_stablehlo
            self._exported = read(path.name, content)
            self.arguments, self._first = self._named_arguments(has_parameters)
            self.outputs = self._named(self._exported.out_tree, self._exported.out_avals, "output")
        except (InvalidArgument, MemoryError):
            raise
        except OSError as error:
            raise InvalidArgument(f"{path.name} cannot be read: {error.strerror}") from error
        except Exception as error:  # a damaged file fails wherever its bytes lead
            raise InvalidArgument(f"{path.name} cannot be read as a program: {_said(error)}") from error
        self._check()

    @property
    def parameters(self) -> tuple[ProgramArray, ...]:
        """The arrays of the program's first argument, if this argument is the parameters; otherwise empty."""
        return self.arguments[: self._first]

    @property
    def inputs(self) -> tuple[ProgramArray, ...]:
        """The arrays of the program's arguments other than parameters."""
        return self.arguments[self._first :]

    def runs_on(self, platform: str) -> bool:
        """Returns whether the program was exported for a platform, named as ``jax.Device`` does."""
        return _PLATFORMS.get(platform, platform) in self.platforms

    @property
    def platforms(self) -> tuple[str, ...]:
        """The platforms that the program was exported for."""
        return tuple(self._exported.platforms)

    def call(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Calls the program while a function is traced. Returns the results by name. ``arrays``: all arguments by name."""
        leaves = [arrays[leaf.name] for leaf in self.arguments]
        positional, keywords = jax.tree.unflatten(self._exported.in_tree, leaves)
        made = jax.tree.leaves(self._exported.call(*positional, **keywords))
        return {leaf.name: array for leaf, array in zip(self.outputs, made, strict=True)}

    def _named_arguments(self, has_parameters: bool) -> tuple[tuple[ProgramArray, ...], int]:
        tree: Any = self._exported.in_tree
        avals = self._exported.in_avals
        positional, _ = jax.tree.unflatten(tree, range(tree.num_leaves))
        if not has_parameters or self.path.suffix != EXPORTED:
            return self._named(tree, avals, "input"), 0
        if not positional:
            raise InvalidArgument(f"{self.path.name} takes no first argument, which parameters beside it would be")
        first: Any = jax.tree.structure(positional[0])
        count = first.num_leaves
        rest = jax.tree.structure((positional[1:], jax.tree.unflatten(tree, range(tree.num_leaves))[1]))
        inputs = self._named(rest, avals[count:], "input")
        parameters = _leaves(jax.tree.unflatten(first, range(count)), avals[:count], parameter_name)
        # Two names for one place would be two meanings: those of parameters are kept apart.
        apart = tuple(ProgramArray(f"params/{leaf.name}", leaf.dtype, leaf.dims) for leaf in parameters)
        return (*apart, *inputs), count

    def _named(self, tree: Any, avals: Sequence[Any], kind: str) -> tuple[ProgramArray, ...]:
        whole = jax.tree.unflatten(tree, range(tree.num_leaves))
        if kind == "input":
            positional, keywords = whole
            whole = positional[0] if len(positional) == 1 and not keywords else (*positional,)
            if keywords:
                whole = {**{f"input_{number}": value for number, value in enumerate(positional)}, **keywords}
        leaves = _leaves(whole, avals, lambda keys: name_of(keys, kind))
        names = [leaf.name for leaf in leaves]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidArgument(f"{self.path.name}: two {kind}s would be called '{twice}'")
        return leaves

    def _check(self) -> None:
        """Raises InvalidArgument if the program cannot be served, for instance because it has side effects such as printing."""
        name, exported = self.path.name, self._exported
        oldest = export.minimum_supported_calling_convention_version
        newest = export.maximum_supported_calling_convention_version
        if not oldest <= (version := exported.calling_convention_version) <= newest:
            age = "newer" if version > newest else "older"
            raise InvalidArgument(
                f"{name} was written by a much {age} JAX: its calling convention is {version}, JAX {jax.__version__} "
                f"takes {oldest} to {newest}; export it again with the JAX that serves it"
            )
        if exported.nr_devices > 1:
            raise InvalidArgument(f"{name} is a program for {exported.nr_devices} devices, a worker has one")
        if exported.ordered_effects or exported.unordered_effects:
            raise InvalidArgument(
                f"{name} has effects besides its results, such as printing; only pure programs are served"
            )
        for kind, leaves in (("input", self.inputs), ("output", self.outputs)):
            if not leaves:
                raise InvalidArgument(f"{name} has no {kind}s")
            for leaf in leaves:
                if leaf.datatype is None:
                    raise InvalidArgument(
                        f"{name}: {kind} '{leaf.name}' is {leaf}, which the protocol has no datatype for"
                    )

    def __repr__(self) -> str:
        return f"<ProgramFile {self.path.name}>"


def _leaves(tree: Any, avals: Sequence[Any], name: Callable[[Any], str]) -> tuple[ProgramArray, ...]:
    found = []
    for (keys, _), aval in zip(jax.tree_util.tree_leaves_with_path(tree), avals, strict=True):
        found.append(ProgramArray(name(keys), aval.dtype, tuple(map(_dim, aval.shape))))
    return tuple(found)


def _dim(dim: Any) -> int | str:
    if isinstance(dim, int):
        return dim
    text = str(dim)
    return text if text.isidentifier() else -1


def _exported(name: str, content: bytes) -> export.Exported:
    try:
        return export.deserialize(bytearray(content))
    except Exception as error:
        raise InvalidArgument(
            f"{name} is damaged, or a JAX wrote it that JAX {jax.__version__} cannot read: {_said(error)}"
        ) from error


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if text else ''}{text[:_MAX_SAID]}"


def _of_stablehlo(name: str, content: bytes) -> export.Exported:
    """Reads a StableHLO module and returns its function ``main`` as an exported program with positional arguments and a tuple of
    results.

    ``name``: the file's, for errors. Raises InvalidArgument: the module has no ``main``, or one that cannot be served.
    """
    # A lowered function has a context with all of JAX's dialects; no public function makes one.
    lowered: Any = jax.jit(lambda: ()).lower().compiler_ir("stablehlo")
    context = lowered.context
    with context, ir.Location.unknown():
        if content.startswith(_PORTABLE):
            module = stablehlo.deserialize_portable_artifact(context, content)
        else:
            module = ir.Module.parse(content if content.startswith(_BYTECODE) else content.decode())
        functions = [op for op in module.body.operations if op.operation.name == "func.func"]
        main = next((op for op in functions if ir.StringAttr(op.attributes["sym_name"]).value == "main"), None)
        if main is None:
            raise InvalidArgument(f"{name} has no function 'main'")
        kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
        taken, given = ([_aval(name, tensor) for tensor in tensors] for tensors in (kind.inputs, kind.results))
        serialized = stablehlo.serialize_portable_artifact_str(str(module), stablehlo.get_current_version())
    fields: dict[str, Any] = {
        "fun_name": name,
        "in_tree": jax.tree.structure((tuple(range(len(taken))), {})),
        "in_avals": tuple(taken),
        "out_tree": jax.tree.structure(tuple(range(len(given)))),
        "out_avals": tuple(given),
        "nr_devices": 1,
        # A module does not name its platform: what only another one can do fails when it is compiled.
        "platforms": (_PLATFORMS.get(jax.default_backend(), jax.default_backend()),),
        "ordered_effects": (),
        "unordered_effects": (),
        "disabled_safety_checks": (),
        "mlir_module_serialized": serialized,
        "calling_convention_version": export.maximum_supported_calling_convention_version,
        "module_kept_var_idx": tuple(range(len(taken))),
        "uses_global_constants": False,
        "_has_named_shardings": False,
        "_get_vjp": None,
    }
    for side, avals in (("in", taken), ("out", given)):
        fields |= {f"_{side}_named_shardings": (None,) * len(avals), f"{side}_shardings_hlo": (None,) * len(avals)}
    # Versions of JAX have more or fewer of these fields.
    known = {field.name for field in dataclasses.fields(export.Exported)}
    return export.Exported(**{name: value for name, value in fields.items() if name in known})


def _aval(name: str, tensor: Any) -> jax.core.ShapedArray:
    if not isinstance(tensor, ir.RankedTensorType) or not tensor.has_static_shape:
        raise InvalidArgument(
            f"{name}: main takes or gives a {tensor}; every size must be a number (jax.export writes programs of varying sizes)"
        )
    if (dtype := _ELEMENTS.get(str(tensor.element_type))) is None:
        raise InvalidArgument(f"{name}: main takes or gives a {tensor}, which the protocol has no datatype for")
    return jax.core.ShapedArray(tuple(tensor.shape), dtype)
