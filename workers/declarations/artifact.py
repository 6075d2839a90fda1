"""Builds the Python module of a version folder without a model.py, from programs and parameters that other tools wrote.

    *.jaxexport, *.stablehlo, *.mlir    one program, or one for each shape or platform
    params.*                            arguments, put on the device once

Tensors are as the programs have them; sizes that vary become axes, with the buckets that config.pbtxt gives them.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from tensord.config import artifact_files
from tensord.config.model_config import ModelConfig
from tensord.config.model_folder import regular
from tensord.parameter_files import flat, load
from tensord.shm.arrays import datatype_of
from tensord.shm.errors import InvalidArgument
from tensord.workers.declarations.program_file import ProgramArray, ProgramFile

_log = logging.getLogger(__name__)
#: Names of the batch's size in a program whose sizes vary.
_BATCH = ("b", "batch")
#: A name of numbers alone: 0, or 1.0 in a tuple of tuples.
_NUMBERED = re.compile(r"\d+(\.\d+)*")
#: max_batch_size of a model that has a batch dimension and does not bound it.
_DEFAULT_BATCH = 32


def is_artifact(folder: Path, file: str) -> bool:
    """Returns whether a version folder has files of exported programs to serve, and no file named ``file`` (its model.py)."""
    return not (folder / file).exists() and bool(artifact_files.programs(folder))


def digest(folder: Path) -> bytes:
    """Returns a digest of the contents of all program files in a version folder."""
    found = hashlib.sha256()
    for path in artifact_files.programs(folder):
        with open(path, "rb", opener=regular) as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.digest()


def module(folder: Path, message: ModelConfig, platform: str) -> ModuleType:
    """Builds a Python module from a folder's programs, with ``inputs``, ``outputs``, ``create`` and so on like a model.py.

    Args:
      folder: the version's folder.
      message: the model's configuration.
      platform: the platform of the worker's device, as ``jax.Device`` names it.

    Raises: InvalidArgument: a file cannot be read, or the files do not belong together; the message names the file.
    """
    return _Artifact(folder, message, platform).module()


class _Artifact:
    """The programs and the path of the parameters of one version; the programs have been read and checked against each other."""

    def __init__(self, folder: Path, message: ModelConfig, platform: str) -> None:
        self._message = message
        self._parameters = artifact_files.parameters(folder)
        if len(self._parameters) > 1:
            names = ", ".join(path.name for path in self._parameters)
            raise InvalidArgument(f"model '{message.name}': it has parameters in {names}; one of them is expected")
        every = [ProgramFile(path, bool(self._parameters)) for path in artifact_files.programs(folder)]
        self._programs = [program for program in every if program.runs_on(platform)]
        if not self._programs:
            named = "; ".join(f"{program.path.name} is for {', '.join(program.platforms)}" for program in every)
            raise InvalidArgument(
                f"model '{message.name}': none of its programs runs on {platform}: {named}. Export it with "
                "jax.export.export(function, platforms=('cpu', 'cuda'))"
            )
        first = self._programs[0]
        self._names = self._renamed(first)
        for program in self._programs[1:]:
            self._agree(first, program)
        self._batches = self._has_batch()

    def module(self) -> ModuleType:
        made = ModuleType(f"artifact of {self._message.name}")
        values = vars(made)
        values["inputs"] = self._declared([program.inputs for program in self._programs])
        values["outputs"] = self._declared([program.outputs for program in self._programs])
        values["create"] = self.create
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
        """Returns the function that runs the programs, and its parameters, as ``create`` of a model.py does.

        The arguments are not used.

        Raises InvalidArgument: the file of parameters does not fit the program.
        """
        return self._apply, self._loaded()

    def _apply(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        given = {self._names.get(leaf.name, leaf.name): leaf for leaf in self._programs[0].inputs}
        arrays = {leaf.name: inputs[name] for name, leaf in given.items()}
        for program in self._programs:
            if all(leaf.fits(arrays[leaf.name].shape) for leaf in program.inputs):
                made = program.call({**params, **arrays})
                return {self._names.get(name, name): array for name, array in made.items()}
        shapes = ", ".join(f"'{name}' {list(array.shape)}" for name, array in inputs.items())
        raise ValueError(f"no program of this model takes {shapes}")

    def _renamed(self, program: ProgramFile) -> dict[str, str]:
        """Maps a program's names to the configuration's names, for inputs or outputs that the program only numbers.

        Empty: the program names them, or the configuration does not name them all.
        """
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
        """Raises InvalidArgument if two programs differ in the names, datatypes or ranks of their tensors."""
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
        """Returns whether the first dim of every tensor is the batch: the configuration says so, or the dim's name does.

        No other varying dim is taken for the batch: along it rows may depend on each other, and those of other clients would
        change the results.
        """
        if self._message.max_batch_size > 0:
            return True
        leaves = [leaf for program in self._programs for leaf in (*program.inputs, *program.outputs)]
        return (
            all(leaf.dims and leaf.dims[0] in _BATCH for leaf in leaves) and len({leaf.dims[0] for leaf in leaves}) == 1
        )

    def _batch_sizes(self) -> tuple[int, ...]:
        """Returns the batch sizes that there are programs for, ascending; empty if a program takes any batch size.

        Raises: InvalidArgument: a tensor has no batch dimension, or the tensors of one program differ in batch size.
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
        """Returns declarations of tensors as in a model.py: name -> datatype and sizes, such as "FP32[-1, 4]".

        ``groups``: the same tensors in each program.
        """
        found: dict[str, str] = {}
        by_name = [{leaf.name: leaf for leaf in group} for group in groups]
        for leaf in groups[0]:
            columns = zip(*(leaves[leaf.name].dims for leaves in by_name), strict=True)
            dims = [column[0] if len(set(column)) == 1 else -1 for column in columns]
            text = ", ".join(map(str, dims[int(self._batches) :]))
            found[self._names.get(leaf.name, leaf.name)] = f"{leaf.datatype}[{text}]"
        return found

    def _loaded(self) -> dict[str, Any]:
        """Returns the parameters by their names as arguments. Raises InvalidArgument if they do not fit the program."""
        wanted = {leaf.name.removeprefix("params/"): leaf for leaf in self._programs[0].parameters}
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
                given = f"{datatype_of(array.dtype) or array.dtype}{list(array.shape)}"
                raise InvalidArgument(f"{what}: '{name}' is {given}, {self._programs[0].path.name} takes {leaf}")
        unused = sorted(found.keys() - wanted.keys())
        if unused:
            _log.warning(
                "%s has %d arrays that the program does not take: %s", what, len(unused), ", ".join(unused[:5])
            )
        return {leaf.name: found[name] for name, leaf in wanted.items()}
