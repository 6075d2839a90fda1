"""Finds, by their names, the files in a version folder that make up a model without a model.py.

*.jaxexport             a program that jax.export wrote: the bytes of Exported.serialize()
*.stablehlo, *.mlir     a module of StableHLO: text, bytecode, or a portable artifact
params.safetensors, params.npz, params.msgpack, params/ (Orbax)     the program's parameters, one of these
"""

from __future__ import annotations

from pathlib import Path

from tensord.config.model_folder import is_passed_over

EXPORTED = ".jaxexport"
STABLEHLO = (".stablehlo", ".mlir")
_PARAMETERS = ("params.safetensors", "params.npz", "params.msgpack", "params")


def programs(folder: Path) -> list[Path]:
    """Returns the program files in a version's folder, sorted by name; an empty list if the folder does not exist."""
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix in (EXPORTED, *STABLEHLO) and path.is_file() and not is_passed_over(path.name)
    )


def parameters(folder: Path) -> list[Path]:
    """Returns the parameter files in a version's folder, all that are there: a valid model has at most one."""
    return [path for name in _PARAMETERS if (path := folder / name).exists()]
