"""Reads model parameters from the file formats that JAX users keep them in.

.safetensors    dict of names to arrays
.npz            dict of names to arrays
.msgpack        as Flax writes it: nested dicts of arrays
a folder        an Orbax checkpoint: the tree that was saved
"""

from __future__ import annotations

import importlib
import itertools
import stat
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from tensord.config import model_folder
from tensord.shm.common.tensors import leaves

#: The codes by which Flax's msgpack marks an array, a complex number and a number of numpy.
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
_CHUNKED = "__msgpack_chunked_array__"
_MAX_RANK = 32


def load(path: str | Path, sharding: Any = None, nested: bool = False) -> Any:
    """Reads the parameters in a file or folder.

    Args:
      path: a file that ends with .safetensors, .npz or .msgpack, or the folder of an Orbax checkpoint.
      sharding: where the arrays go. A ``jax.sharding.Sharding`` holds for all arrays. A function of name and shape returns a
        sharding for each array. Each device then gets only its part of an array. If it is None, the result has numpy arrays.
      nested: whether to return nested dicts for a safetensors or npz file. Names are split at dots, or at slashes if they have
        slashes, so that ``params.Dense_0.kernel`` becomes ``["params"]["Dense_0"]["kernel"]``, as for Flax Linen's ``apply``.

    Returns:
      A pytree of arrays. For a safetensors or npz file it is a dict by name, else the tree that was saved.

    Raises:
      FileNotFoundError: the path does not exist.
      ValueError: the file is damaged, or of another kind; the message names it.
      ModuleNotFoundError: the package that reads the file is not installed; the message names the package.
    """
    tree = _load(Path(path), sharding)
    return _nested(tree) if nested else tree


def _load(path: Path, sharding: Any) -> Any:
    if not path.exists():
        raise FileNotFoundError(f"there are no parameters at {path}")
    if path.is_dir():
        _check_folder(path)
        return _placed(_orbax(path), sharding)
    readers: Mapping[str, Callable[[Path, IO[bytes]], Any]] = {".npz": _npz, ".msgpack": _msgpack}
    if path.suffix not in (".safetensors", *readers):
        raise ValueError(
            f"{path.name} is none of .safetensors, .npz and .msgpack, nor a folder with an Orbax checkpoint"
        )
    try:
        with open(path, "rb", opener=model_folder.regular) as file:
            if path.suffix == ".safetensors":
                return _safetensors(path, sharding)
            return _placed(readers[path.suffix](path, file), sharding)
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror or error}") from error


def _check_folder(path: Path) -> None:
    """Raises ValueError if a checkpoint's folder contains anything but files and folders."""
    for name, status in itertools.islice(model_folder.walk(path), model_folder.MAX_ENTRIES):
        if status is not None and not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            raise ValueError(f"{path.name} is no Orbax checkpoint: '{name}' in it is no regular file")


def flat(tree: Any) -> dict[str, Any]:
    """Returns the leaves of nested mappings and sequences as a flat dict, without leaves that are None.

    A name is the leaf's keys, joined by dots, such as ``layers.0.w``. Raises ValueError if two leaves have the same name.
    """
    found: dict[str, Any] = {}
    for name, leaf in leaves(tree):
        if name in found:
            raise ValueError(f"two parameters are called '{name}'")
        found[name] = leaf
    return found


def _nested(tree: Any) -> Any:
    """Turns {"a.b": x} or {"a/b": x} into {"a": {"b": x}}. Raises ValueError if ``tree`` has both names "a" and "a.b"."""
    if not isinstance(tree, Mapping):
        return tree
    separator = "/" if any("/" in str(name) for name in tree) else "."
    found: dict[str, Any] = {}
    for name, leaf in tree.items():
        *way, last = str(name).split(separator)
        node = found
        for key in way:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or last in node:
            raise ValueError(f"the name '{name}' begins with, or begins, that of another array: they cannot be nested")
        node[last] = leaf
    return found


def _placed(tree: Any, sharding: Any) -> Any:
    if sharding is None:
        return tree
    import jax

    def place(keys: Any, leaf: Any) -> Any:
        array = np.asarray(leaf)
        name = jax.tree_util.keystr(keys, simple=True, separator=".")
        return jax.device_put(array, _sharding_of(sharding, name, array.shape))

    return jax.tree_util.tree_map_with_path(place, tree)


def _sharding_of(sharding: Any, name: str, shape: tuple[int, ...]) -> Any:
    return sharding(name, shape) if callable(sharding) else sharding


def _safetensors(path: Path, sharding: Any) -> dict[str, Any]:
    safetensors = _library("safetensors", path)
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            if sharding is None:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return {name: _sharded(file.get_slice(name), name, sharding) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path.name} is damaged: {error}") from error


def _sharded(part: Any, name: str, sharding: Any) -> Any:
    import jax

    shape = tuple(part.get_shape())
    where = _sharding_of(sharding, name, shape)
    return jax.make_array_from_callback(shape, where, lambda index: part[index] if index else part[...])


def _npz(path: Path, file: IO[bytes]) -> dict[str, Any]:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return dict(arrays.items())
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path.name} is damaged, or holds objects and not arrays: {error}") from error


def _msgpack(path: Path, file: IO[bytes]) -> Any:
    try:
        return _joined(msgspec.msgpack.decode(file.read(), ext_hook=_extension))
    except (msgspec.DecodeError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path.name} is damaged, or not what flax.serialization wrote: {error}") from error


def _extension(code: int, content: memoryview) -> Any:
    if code not in (_ARRAY, _SCALAR, _COMPLEX):
        raise ValueError(f"it has a value of kind {code}")
    if code == _COMPLEX:
        return complex(*msgspec.msgpack.decode(content, type=tuple[float, float]))
    shape, dtype, values = msgspec.msgpack.decode(content, type=tuple[tuple[int, ...], str, bytes])
    if len(shape) > _MAX_RANK:
        raise ValueError(f"an array has {len(shape)} dims")
    kind = np.dtype("bool" if dtype == "bool" else _dtype(dtype))
    array = np.frombuffer(values, kind).reshape(shape)
    return array[()] if code == _SCALAR else array


def _dtype(name: str) -> Any:
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, name, name))
    if kind.hasobject:
        raise ValueError(f"an array has elements of {name}")
    return kind


def _joined(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    if _CHUNKED in node:
        chunks = node["chunks"]
        shape = [node["shape"][str(number)] for number in range(len(node["shape"]))]
        return np.concatenate([chunks[str(number)] for number in range(len(chunks))]).reshape(shape)
    return {key: _joined(value) for key, value in node.items()}


def _orbax(path: Path) -> Any:
    orbax = _library("orbax.checkpoint", path)
    import jax

    try:
        with orbax.PyTreeCheckpointer() as reader:
            tree = reader.metadata(path).item_metadata.tree
            # Arrays are restored as numpy's, wherever the devices were that saved them.
            how = jax.tree.map(lambda _: orbax.RestoreArgs(restore_type=np.ndarray), tree)
            return reader.restore(path, restore_args=how)
    except Exception as error:  # what a damaged one raises is of many kinds
        raise ValueError(f"{path.name} is no Orbax checkpoint, or is damaged: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _library(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = {"orbax.checkpoint": "orbax-checkpoint"}.get(name, name)
        raise ModuleNotFoundError(f"{path.name} needs a package to be read: pip install {package}") from error
