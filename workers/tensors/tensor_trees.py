"""Gives names to the arrays in pytrees of inputs and outputs, and builds the pytrees again from the named arrays.

    {"image": a, "text": {"ids": b, "mask": c}}    image, text.ids, text.mask
    (a, (b, c))                                    input_0, 1.0, 1.1

An array's name is the path of keys to the array, joined by dots. If the path is only one number, the name begins with
``input_`` or ``output_``. If a model declares a dict with one tensor for each key, the keys are the names.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import jax

from tensord.shm.errors import Internal, InvalidArgument

#: Has JAX see None as a leaf, so that it can be refused as a declaration.
_IS_NONE = functools.partial(operator.is_, None)


def name_of(keys: Any, kind: str) -> str:
    """Returns the name of an array in a pytree: the keys on the path to the array, joined by dots.

    ``kind``: "input" or "output". For "input", a path of only the key 3 gives ``input_3``, and an empty path gives ``input_0``.
    """
    name = jax.tree_util.keystr(keys, simple=True, separator=".")
    return f"{kind}_{name or 0}" if re.fullmatch(r"\d*", name) else name


def parameter_name(keys: Any) -> str:
    """Joins ``keys``, the path to a parameter in a pytree, with dots. Returns this name, or "array" if the path is empty."""
    return jax.tree_util.keystr(keys, simple=True, separator=".") or "array"


def declarations(what: str, declared: object, kind: str) -> dict[str, object]:
    """Returns a dict: tensor name -> declaration. ``declared``: a pytree with the declaration of a tensor in each leaf.

    ``what``: the model's name in error messages. ``kind``: "input" or "output".
    Raises InvalidArgument if two tensors have the same name, or if a leaf of a nested ``declared`` is a dataclass object.
    """
    if _is_flat(declared):
        assert isinstance(declared, Mapping)
        return {str(name): text for name, text in declared.items()}
    return dict(zip(*_leaves(what, declared, kind)[:2], strict=True))


def is_tree(module: ModuleType) -> bool:
    """Returns True if the ``inputs`` or ``outputs`` of a model.py is a nested dict, a list or any other tree of tensors.

    Returns False if both are flat dicts, which have one tensor's declaration for each name.
    """
    return not all(_is_flat(getattr(module, kind, {})) for kind in ("inputs", "outputs"))


def taking_trees(
    what: str,
    apply: Callable[..., Any],
    inputs: object,
    outputs: object,
    added: Iterable[str] = (),
    stateful: bool = False,
) -> Callable[..., Any]:
    """Returns a function that calls ``apply`` with pytrees, but itself takes and returns dicts of named arrays.

    Args:
      what: the model's name in errors.
      inputs, outputs: the declared trees. If ``outputs`` is None, each output is named by its place in the returned tree.
      added: names of inputs that the worker adds to the function's dict of inputs.
      stateful: whether ``apply`` also returns state, which the new function returns unchanged.
    Raises InvalidArgument if the worker adds inputs, but the declared tree of inputs is no dict.
    """
    flat = _is_flat(inputs)
    names, _, structure = ([], [], None) if flat else _leaves(what, inputs, "input")
    others = [] if flat else sorted(set(added).difference(names))
    if others and not isinstance(inputs, dict):
        raise InvalidArgument(
            f"{what}: inputs are declared as a {type(inputs).__name__}, which has no place for '{others[0]}', which the "
            "server adds; a dict has"
        )
    named_outputs = outputs is None or not _is_flat(outputs)

    @functools.wraps(apply)
    def of_names(parameters: Any, given: dict[str, Any], *more: Any) -> Any:
        if not flat:
            tree = jax.tree.unflatten(structure, [given.get(name) for name in names])
            given = {**tree, **{name: given[name] for name in others if name in given}} if others else tree
        made = apply(parameters, given, *more)
        if not named_outputs:
            return made
        if stateful:
            # What is no pair is refused where state is taken.
            return (_named(what, made[0]), *made[1:]) if isinstance(made, tuple) and made else made
        return _named(what, made)

    return of_names


def _is_flat(declared: object) -> bool:
    return isinstance(declared, Mapping) and jax.tree_util.all_leaves(declared.values(), is_leaf=_IS_NONE)


def _leaves(what: str, declared: object, kind: str) -> tuple[list[str], list[object], Any]:
    found, structure = jax.tree_util.tree_flatten_with_path(declared, is_leaf=_IS_NONE)
    names = [name_of(keys, kind) for keys, _ in found]
    for name, (_, leaf) in zip(names, found, strict=True):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            raise InvalidArgument(
                f"{what}: {kind} '{name}' is declared as a {type(leaf).__name__}, which is no pytree: "
                "jax.tree_util.register_dataclass makes it one"
            )
    if twice := next((name for number, name in enumerate(names) if name in names[:number]), ""):
        raise InvalidArgument(f"{what}: two {kind}s are called '{twice}'")
    return names, [leaf for _, leaf in found], structure


def _named(what: str, tree: object) -> dict[str, Any]:
    found = jax.tree_util.tree_leaves_with_path(tree)
    arrays = {name_of(keys, "output"): array for keys, array in found}
    if len(arrays) < len(found):
        raise Internal(f"{what}: two of its outputs have one name")
    return arrays
