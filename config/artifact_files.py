"""Finds the files in a version folder that make a model without a model.py, by name.

*.jaxexport             what jax.export wrote: the bytes of Exported.serialize()
*.stablehlo, *.mlir     a module of StableHLO: text, bytecode, or a portable artifact
params.safetensors, params.npz, params.msgpack, params/ (Orbax)     its parameters, one of these
"""

from __future__ import annotations

from pathlib import Path

EXPORTED = ".jaxexport"
STABLEHLO = (".stablehlo", ".mlir")
_PARAMETERS = ("params.safetensors", "params.npz", "params.msgpack", "params")


def programs(folder: Path) -> list[Path]:
    """Returns the program files of a version, sorted by name; none if it has no folder."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix in (EXPORTED, *STABLEHLO) and path.is_file())


def parameters(folder: Path) -> list[Path]:
    """Returns the parameter files: a model may have one."""
    return [path for name in _PARAMETERS if (path := folder / name).exists()]
