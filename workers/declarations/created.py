"""Calls ``create`` of a model.py and checks what it returns: a function, its parameters and, if declared, its initial state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tensord.shm.errors import InvalidArgument
from tensord.workers.declarations.request_inputs import RequestInputs
from tensord.workers.tensors.signature import Signature
from tensord.workers.tensors.tensor_trees import is_tree, taking_trees

#: Argument of a model's function -> what to declare, so that the worker gives it.
_GIVEN_WITH = {
    "state": 'state = {"h": "FP32[8]"} in model.py, and sequence_batching { } in config.pbtxt',
    "request": 'request = {"seed": "INT64"} in model.py',
}
#: The values that ``create`` of a model.py returned: a function, its parameters, and the initial state or None.
Created = tuple[Callable[..., Any], Any, object]


def created(
    module: ModuleType, described: Signature, returned: object, asked: RequestInputs | None, indexed: bool = False
) -> Created:
    """Checks the tuple that ``create`` of model.py returned, and returns the tuple's parts.

    The parts are a function that takes and returns dicts of named arrays, the parameters, and a new sequence's state or None.
    Args:
      module: the imported model.py.
      described: the model's signature.
      returned: the result of ``create``.
      asked: the properties of requests (id, priority, ...) that the function gets as inputs, or None if it gets none.
      indexed: whether the function has an argument ``index``, which is the index of each row's parameter set.
    Raises InvalidArgument if ``returned`` has another form, or if the function does not take the expected arguments.
    """
    model, states = described.model, described.states
    if not isinstance(returned, tuple) or not 2 <= len(returned) <= 3 or not callable(returned[0]):
        stepped = isinstance(returned, tuple) and returned and isinstance(returned[0], tuple)
        more = "; several functions are a stepped model's, which says slots = 64 in model.py" if stepped else ""
        raise InvalidArgument(f"model '{model}': create() must return a function and its parameters{more}")
    if len(returned) == 3 and not states:
        raise InvalidArgument(
            f"model '{model}': create() returned where state begins beside a function and its parameters, but none is declared; "
            f"it takes {_GIVEN_WITH['state']}"
        )
    apply, parameters, *first = returned
    if inspect.iscoroutinefunction(apply) or inspect.isasyncgenfunction(apply):
        raise InvalidArgument(
            f"model '{model}': create() returned an async function; a plain one is expected, or a generator function"
        )
    names = ["params", "inputs"]
    names += ["state"] if states else []
    names += ["index"] if indexed else []
    names += ["request"] if asked is not None else []
    check_arguments(model, "the function of create()", apply, names)
    if is_tree(module):
        if is_generator(returned):
            raise InvalidArgument(
                f"model '{model}': create() returned a generator function, whose inputs and outputs are dicts of names to arrays"
            )
        added = described.inputs.keys() - (asked.specs if asked is not None else {})
        apply = taking_trees(
            f"model '{model}'",
            apply,
            getattr(module, "inputs", {}),
            getattr(module, "outputs", None),
            added,
            bool(states),
        )
    return apply if asked is None else asked.telling(apply), parameters, first[0] if first else None


def create(model: str, module: ModuleType, path: Path, config: dict[str, Any], device: Any) -> object:
    """Calls ``create`` of model.py and returns its result. Errors of ``create`` are raised unchanged.

    Raises InvalidArgument if ``create`` does not take the arguments path, config and device.
    """
    check_arguments(model, "create()", module.create, ["path", "config", "device"])
    return module.create(path, config, device)


def is_generator(returned: object) -> bool:
    """Returns whether ``returned``, the result of model.py's ``create``, is a tuple that begins with a generator function."""
    apply = returned[0] if isinstance(returned, tuple) and returned else None
    return inspect.isgeneratorfunction(apply) or inspect.isgeneratorfunction(getattr(apply, "__call__", None))  # noqa: B004


def check_arguments(model: str, what: str, apply: Callable[..., Any], names: Sequence[str]) -> None:
    """Raises InvalidArgument if ``apply`` cannot be called with the arguments ``names`` in this order.

    ``what``: the name of ``apply`` in the error's text.
    """
    try:
        taken = inspect.signature(apply)
    except (TypeError, ValueError):  # one that does not say what it takes
        return
    try:
        taken.bind(*names)
    except TypeError:
        given = next((f"; '{name}' takes {how}" for name, how in _GIVEN_WITH.items() if name in taken.parameters), "")
        raise InvalidArgument(
            f"model '{model}': {what} takes {taken}, it is called with ({', '.join(names)}){given}"
        ) from None
    if [*taken.parameters][:2] == [names[1], names[0]]:
        raise InvalidArgument(
            f"model '{model}': {what} takes {taken}, it is called with ({', '.join(names)}), in this order"
        )
