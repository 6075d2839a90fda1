"""Builds a Python module for a model that has no model.py, from files with programs and parameters that other tools wrote.

    *.jaxexport, *.stablehlo, *.mlir    a program: one file, or one file for each shape or platform
    params.*                            the parameters, which are the first argument of each jax.export program

Tensors have the datatypes and shapes of the program. config.pbtxt may give buckets for sizes that vary in the program.
Tensors are named as in ``tensord.workers.tensors.tensor_trees``. If the only argument, apart from parameters, is positional,
its number is not part of the names.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.extend.mlir.dialects.stablehlo as stablehlo
import numpy as np
from jax import export
from jax.extend.mlir import ir

from tensord.config import model_folder
from tensord.config.model_config import ModelConfig
from tensord.config.model_folder import EXPORTED, regular
from tensord.parameter_files import flat, load
from tensord.shm.arrays import DTYPES, datatype_of, described
from tensord.shm.common.derivatives import MAX_ORDER
from tensord.shm.errors import FileTooLarge, InvalidArgument
from tensord.workers.tensors.signature import WIDE
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
    """The name, dtype and dimensions of an array that a program takes or returns."""

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
        """Returns whether the program accepts an array of this shape."""
        return len(shape) == len(self.dims) and all(
            isinstance(dim, str) or dim in (-1, size) for dim, size in zip(self.dims, shape, strict=True)
        )


class ProgramFile:
    """A program from a jax.export or StableHLO file, which JAX can trace as a function of named arrays."""

    def __init__(self, path: Path, has_parameters: bool) -> None:
        """Reads and checks a program. ``has_parameters``: True if the first argument of a jax.export program is parameters.

        Raises InvalidArgument: the file cannot be read, or the program cannot be served.
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
            #: The platforms that it was exported for.
            self.platforms = tuple(self._exported.platforms)
            #: How many orders of derivatives it carries, in reverse.
            self.order, of = 0, self._exported
            while of.has_vjp():
                self.order, of = self.order + 1, of.vjp()
            #: The arrays of its first argument, if that is the parameters, and those of the others.
            self.parameters, self.inputs = self._named_arguments(has_parameters)
            self.outputs = self._named(self._exported.out_tree, self._exported.out_avals, "output")
        except (InvalidArgument, MemoryError):
            raise
        except OSError as error:
            raise InvalidArgument(f"{path.name} cannot be read: {error.strerror}") from error
        except Exception as error:  # a damaged file fails wherever its bytes lead
            raise InvalidArgument(f"{path.name} cannot be read as a program: {_said(error)}") from error
        self._check()

    def call(self, parameters: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Calls the exported program with arrays or JAX tracers, and returns the program's outputs by name."""
        leaves = [*(parameters[leaf.name] for leaf in self.parameters), *(inputs[leaf.name] for leaf in self.inputs)]
        positional, keywords = jax.tree.unflatten(self._exported.in_tree, leaves)
        made = jax.tree.leaves(self._exported.call(*positional, **keywords))
        return {leaf.name: array for leaf, array in zip(self.outputs, made, strict=True)}

    def _named_arguments(self, has_parameters: bool) -> tuple[tuple[ProgramArray, ...], tuple[ProgramArray, ...]]:
        tree: Any = self._exported.in_tree
        avals = self._exported.in_avals
        positional, _ = jax.tree.unflatten(tree, range(tree.num_leaves))
        if not has_parameters or self.path.suffix != EXPORTED:
            return (), self._named(tree, avals, "input")
        if not positional:
            raise InvalidArgument(f"{self.path.name} takes no first argument, which parameters beside it would be")
        first: Any = jax.tree.structure(positional[0])
        count = first.num_leaves
        rest = jax.tree.structure((positional[1:], jax.tree.unflatten(tree, range(tree.num_leaves))[1]))
        inputs = self._named(rest, avals[count:], "input")
        return _leaves(jax.tree.unflatten(first, range(count)), avals[:count], parameter_name), inputs

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
    pairs = zip(jax.tree_util.tree_leaves_with_path(tree), avals, strict=True)
    return tuple(ProgramArray(name(keys), aval.dtype, tuple(map(_dim, aval.shape))) for (keys, _), aval in pairs)


def _dim(dim: Any) -> int | str:
    return dim if isinstance(dim, int) else str(dim) if str(dim).isidentifier() else -1


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


_log = logging.getLogger(__name__)
#: Names of the batch's size in a program whose sizes vary.
_BATCH = ("b", "batch")
#: A name of numbers alone: 0, or 1.0 in a tuple of tuples.
_NUMBERED = re.compile(r"\d+(\.\d+)*")
#: max_batch_size of a model that has a batch dimension and does not bound it.
_DEFAULT_BATCH = 32


def is_artifact(folder: Path, file: str) -> bool:
    """Returns whether a version's folder has exported programs but not the Python file ``file``."""
    return not (folder / file).exists() and bool(model_folder.programs(folder))


def digest(folder: Path) -> bytes:
    """Returns a digest of the contents of all jax.export and StableHLO files in ``folder``, the folder of a model version."""
    found = hashlib.sha256()
    for path in model_folder.programs(folder):
        with open(path, "rb", opener=regular) as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.digest()


def module(folder: Path, config: ModelConfig, platform: str) -> ModuleType:
    """Returns a Python module that stands in for model.py, made from the exported programs in a version's folder.

    ``platform``: as ``jax.Device`` names it. Raises InvalidArgument, with the file's name, if a file cannot be used.
    """
    return _Artifact(folder, config, platform).module()


class _Artifact:
    def __init__(self, folder: Path, config: ModelConfig, platform: str) -> None:
        self._message = config
        self._parameters = model_folder.parameters(folder)
        if len(self._parameters) > 1:
            names = ", ".join(path.name for path in self._parameters)
            raise InvalidArgument(f"model '{config.name}': it has parameters in {names}; one of them is expected")
        every = [ProgramFile(path, bool(self._parameters)) for path in model_folder.programs(folder)]
        # Exported for the platform, which ``jax.Device`` and jax.export name differently.
        self._programs = [each for each in every if _PLATFORMS.get(platform, platform) in each.platforms]
        if not self._programs:
            named = "; ".join(f"{program.path.name} is for {', '.join(program.platforms)}" for program in every)
            raise InvalidArgument(
                f"model '{config.name}': none of its programs runs on {platform}: {named}. Export it with "
                "jax.export.export(function, platforms=('cpu', 'cuda'))"
            )
        first = self._programs[0]
        self._names = self._renamed(first)
        for program in self._programs[1:]:
            self._agree(first, program)
        self._batches = self._has_batch()
        if optional := next((tensor.name for tensor in config.input if tensor.optional), ""):
            raise InvalidArgument(
                f"model '{config.name}': a program takes all of its inputs, and '{optional}' is optional"
            )

    def module(self) -> ModuleType:
        made = ModuleType(f"artifact of {self._message.name}")
        values = vars(made)
        values["inputs"] = self._declared([program.inputs for program in self._programs])
        values["outputs"] = self._declared([program.outputs for program in self._programs])
        values["create"] = self.create
        values["vjp_order"] = min(MAX_ORDER, *(program.order for program in self._programs))
        #: Where errors say that something is declared.
        values["source"] = " and ".join(program.path.name for program in self._programs[:2])
        if self._batches:
            sizes = self._batch_sizes()
            values["max_batch_size"] = sizes[-1] if sizes else _DEFAULT_BATCH
            if sizes:
                values["batch_buckets"] = sizes
        return made

    def create(
        self, path: Path, config: Mapping[str, Any], device: jax.Device
    ) -> tuple[Callable[..., dict[str, Any]], dict[str, Any]]:
        if any(leaf.datatype in WIDE for leaf in self._programs[0].parameters):
            jax.config.update("jax_enable_x64", True)  # for this model alone (``OwnFlags``)
        return self._apply, self._loaded()

    def _apply(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        given = {self._names.get(leaf.name, leaf.name): leaf for leaf in self._programs[0].inputs}
        arrays = {leaf.name: inputs[name] for name, leaf in given.items()}
        for program in self._programs:
            if all(leaf.fits(arrays[leaf.name].shape) for leaf in program.inputs):
                made = program.call(params, arrays)
                return {self._names.get(name, name): array for name, array in made.items()}
        shapes = ", ".join(f"'{name}' {list(array.shape)}" for name, array in inputs.items())
        raise ValueError(f"no program of this model takes {shapes}")

    def _renamed(self, program: ProgramFile) -> dict[str, str]:
        found: dict[str, str] = {}
        for kind, leaves, names in (
            ("input", program.inputs, [field.name for field in self._message.input]),
            ("output", program.outputs, [field.name for field in self._message.output]),
        ):
            numbered = all(_NUMBERED.fullmatch(leaf.name.removeprefix(f"{kind}_")) for leaf in leaves)
            if numbered and names and len(names) == len(leaves):
                found |= {leaf.name: name for leaf, name in zip(leaves, names, strict=True)}
        return found

    def _agree(self, first: ProgramFile, other: ProgramFile) -> None:
        """Raises InvalidArgument if an input, output or parameter of the two programs differs in name, datatype or rank."""
        for kind in ("inputs", "outputs", "parameters"):
            a, b = (
                {leaf.name: (leaf.dtype, len(leaf.dims)) for leaf in getattr(each, kind)} for each in (first, other)
            )
            if a != b:
                name = next((name for name in [*a, *b] if a.get(name) != b.get(name)), "")
                raise InvalidArgument(
                    f"model '{self._message.name}': {first.path.name} and {other.path.name} differ in {kind[:-1]} '{name}': "
                    "programs of one version take and give the same, in other shapes or for other platforms"
                )

    def _has_batch(self) -> bool:
        """Returns whether the first dim of every tensor is the batch dimension."""
        if self._message.max_batch_size > 0:
            return True
        leaves = [leaf for program in self._programs for leaf in (*program.inputs, *program.outputs)]
        # Any other dim that varies must not be used to batch: rows along it may depend on each other.
        return (
            all(leaf.dims and leaf.dims[0] in _BATCH for leaf in leaves) and len({leaf.dims[0] for leaf in leaves}) == 1
        )

    def _batch_sizes(self) -> tuple[int, ...]:
        """Returns the batch sizes of this model's programs, ascending, or () if the first program takes any batch size.

        Raises InvalidArgument: a tensor has no batch dimension, or the tensors of one program have different batch sizes.
        """
        sizes: set[int] = set()
        for program in self._programs:
            for leaf in (*program.inputs, *program.outputs):
                if not leaf.dims or leaf.dims[0] == -1:
                    raise InvalidArgument(
                        f"model '{self._message.name}': max_batch_size is {self._message.max_batch_size}, but '{leaf.name}' "
                        f"of {program.path.name} is {leaf}: its first dim is no batch"
                    )
            found = {leaf.dims[0] for leaf in (*program.inputs, *program.outputs)}
            if len(found) > 1:
                raise InvalidArgument(
                    f"model '{self._message.name}': the tensors of {program.path.name} have first dims "
                    f"{', '.join(map(str, sorted(map(str, found))))}; with a batch dimension they are one"
                )
            sizes |= {size for size in found if isinstance(size, int)}
            if not sizes:
                return ()
        return tuple(sorted(sizes))

    def _declared(self, groups: Sequence[Sequence[ProgramArray]]) -> dict[str, str]:
        found: dict[str, str] = {}
        by_name = [{leaf.name: leaf for leaf in group} for group in groups]
        for leaf in groups[0]:
            # The programs' arrays differ in dims only.
            columns = zip(*(leaves[leaf.name].dims for leaves in by_name), strict=True)
            dims = [column[0] if len(set(column)) == 1 else -1 for column in columns]
            text = ", ".join(map(str, dims[int(self._batches) :]))
            found[self._names.get(leaf.name, leaf.name)] = f"{leaf.datatype}[{text}]"
        return found

    def _loaded(self) -> dict[str, Any]:
        wanted = {leaf.name: leaf for leaf in self._programs[0].parameters}
        if not self._parameters:
            return {}
        file = self._parameters[0]
        found = {name: np.asarray(array) for name, array in flat(load(file)).items()}
        what = f"model '{self._message.name}': {file.name}"
        for name, leaf in wanted.items():
            array = found.get(name)
            if array is None:
                raise InvalidArgument(f"{what} has no '{name}', which {self._programs[0].path.name} takes as {leaf}")
            if array.dtype != leaf.dtype or not leaf.fits(array.shape):
                given = described(array.dtype, array.shape)
                raise InvalidArgument(f"{what}: '{name}' is {given}, {self._programs[0].path.name} takes {leaf}")
        unused = sorted(found.keys() - wanted.keys())
        if unused:
            _log.warning(
                "%s has %d arrays that the program does not take: %s", what, len(unused), ", ".join(unused[:5])
            )
        return {name: found[name] for name in wanted}
