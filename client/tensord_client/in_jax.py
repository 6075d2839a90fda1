"""Calls a served model from inside a program that JAX compiles: the program calls back to the host, which sends the requests.

    jitted program ─▶ jax.pure_callback ─▶ Model.submit, once or often ─▶ outputs of the shapes in the model's metadata

Axes that ``vmap`` adds go into the batch of a model with a batch dimension; without one each element is sent as a request.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tensord_client.common.arrays import datatype_of
from tensord_client.common.model import Model
from tensord_client.common.results import Array, Tensor
from tensord_client.common.tensors import cast, flat
from tensord_client.errors import InvalidArgument

if TYPE_CHECKING:
    import jax as jax_library


def jax(
    model: Model, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> Callable[[Mapping[str, Any]], dict[str, jax_library.Array]]:
    """Makes a function of a served model that may be called inside ``jax.jit``, ``vmap`` and ``scan``. It has no derivative.

    Args:
      shapes: output name -> the output's shape, without axes that ``vmap`` adds. It is needed for an output that is BYTES, or
        that has a variable size other than the batch's in the model's metadata.
    Returns: a function from inputs by name to outputs by name. While JAX traces it, it raises InvalidArgument if an output's
      shape is not known. When the compiled program runs, it raises the server's errors.
    """
    import jax as library

    inputs = {tensor.name: tensor for tensor in model.inputs}
    batched = model.max_batch_size > 0

    def ask(given: dict[str, Array]) -> dict[str, Array]:
        given = {name: in_datatype(name, np.asarray(array)) for name, array in given.items()}
        added = {array.shape[: array.ndim - len(inputs[name].shape)] for name, array in given.items() if name in inputs}
        (outer,) = added or {()}
        if not outer:
            return dict(model(given))
        return _many(model, given, outer, batched)

    def in_datatype(name: str, value: Any) -> Any:
        if name not in inputs or getattr(value, "dtype", None) == inputs[name].dtype:
            return value
        return cast(name, value, inputs[name].datatype)

    def traced(name: str, value: Any) -> jax_library.Array:
        if any(isinstance(leaf, library.Array) for leaf in library.tree_util.tree_leaves(value)):
            # Perhaps only the running program knows its values: it is cast to the input's datatype on the host.
            return library.numpy.asarray(value)
        value = in_datatype(name, value)
        made = library.numpy.asarray(value)
        # Without jax_enable_x64 64 bits have become 32.
        cast(name, value, datatype_of(made.dtype))
        return made

    def call(given: Mapping[str, Any]) -> dict[str, jax_library.Array]:
        arrays = {
            name: traced(name, value)
            for name, value in flat(given, {tensor.name: tensor.datatype for tensor in model.inputs}).items()
        }
        rows = next((array.shape[0] for array in arrays.values() if array.ndim), 1) if batched else 0
        wanted = {
            tensor.name: library.ShapeDtypeStruct(_shape(tensor, rows, shapes or {}), tensor.dtype)
            for tensor in model.outputs
        }
        found: dict[str, jax_library.Array] = library.pure_callback(ask, wanted, arrays, vmap_method="broadcast_all")
        return found

    return call


def _shape(tensor: Tensor, rows: int, known: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Returns an output's shape. ``rows`` is 0 if the model has no batch dimension."""
    if tensor.name in known:
        return tuple(known[tensor.name])
    shape = (rows, *tensor.shape[1:]) if rows else tensor.shape
    if -1 in shape or tensor.datatype == "BYTES":
        raise InvalidArgument(
            f"output '{tensor.name}' is {tensor.datatype}{list(tensor.shape)}: a program needs its shape, give it by shapes="
        )
    return shape


def _many(model: Model, inputs: dict[str, Array], sizes: tuple[int, ...], batched: bool) -> dict[str, Array]:
    """Calls the model for every element of the axes that ``vmap`` added, and joins the answers to arrays with these axes.

    ``inputs``: the added axes come first. ``sizes``: the added axes' sizes.
    ``batched``: True: the model has a batch dimension, so that several elements can be joined to one request.
    """
    count = int(np.prod(sizes))
    flattened = {name: array.reshape(count, *array.shape[len(sizes) :]) for name, array in inputs.items()}
    if batched:
        rows = next(iter(flattened.values())).shape[1]
        joined = {name: array.reshape(-1, *array.shape[2:]) for name, array in flattened.items()}
        size = model.max_batch_size
        parts = [slice(start, start + size) for start in range(0, count * rows, size)]
        answers = [model.submit({name: array[part] for name, array in joined.items()}) for part in parts]
        found = _gathered([answer.result() for answer in answers], np.concatenate)
        return {name: array.reshape(*sizes, rows, *array.shape[1:]) for name, array in found.items()}
    answers = [model.submit({name: array[i] for name, array in flattened.items()}) for i in range(count)]
    found = _gathered([answer.result() for answer in answers], np.stack)
    return {name: array.reshape(*sizes, *array.shape[1:]) for name, array in found.items()}


def _gathered(answers: list[Any], gather: Callable[[list[Array]], Array]) -> dict[str, Array]:
    names = list(dict.fromkeys(itertools.chain.from_iterable(answers)))
    return {name: gather([answer[name] for answer in answers]) for name in names}


def leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields the name and value of each leaf of a pytree. A name is the keys to the leaf, joined by dots.

    If the tree is a single leaf, its name is "array".
    """
    from jax import tree_util

    for path, leaf in tree_util.tree_leaves_with_path(tree):
        yield tree_util.keystr(path, simple=True, separator=".") or "array", leaf
