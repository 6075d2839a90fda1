"""What ``create`` of a model.py returned: a function, its parameters and, of a model with state, where sequences begin."""

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


def created(
    module: ModuleType, described: Signature, returned: object, asked: RequestInputs | None
) -> tuple[Callable[..., Any], Any, object]:
    """Function, parameters and beginning; None where that is not given.

    Args:
      module: model.py; where it declares trees, the function takes and gives dicts of named arrays here.
      asked: what the function is told of requests, if anything; here it takes that among its inputs.
    Raises: InvalidArgument: it is something else.
    """
    model, states = described.model, described.states
    if not isinstance(returned, tuple) or not 2 <= len(returned) <= 3 or not callable(returned[0]):
        raise InvalidArgument(f"model '{model}': create() must return a function and its parameters")
    if len(returned) == 3 and not states:
        raise InvalidArgument(
            f"model '{model}': create() returned where state begins beside a function and its parameters, but none is declared"
        )
    apply, parameters, *first = returned
    if inspect.iscoroutinefunction(apply) or inspect.isasyncgenfunction(apply):
        raise InvalidArgument(
            f"model '{model}': create() returned an async function; a plain one is expected, or a generator function"
        )
    names = ["params", "inputs"]
    names += ["state"] if states else []
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
    """What ``create`` of model.py returns. Raises InvalidArgument: it takes other arguments; or whatever it raises."""
    check_arguments(model, "create()", module.create, ["path", "config", "device"])
    return module.create(path, config, device)


def is_generator(returned: object) -> bool:
    """Whether its function is one that yields: the model answers a request with any number of responses."""
    apply = returned[0] if isinstance(returned, tuple) and returned else None
    return inspect.isgeneratorfunction(apply) or inspect.isgeneratorfunction(getattr(apply, "__call__", None))  # noqa: B004


def check_arguments(model: str, what: str, apply: Callable[..., Any], names: Sequence[str]) -> None:
    """``what``: how the function is called. Raises InvalidArgument: it cannot be called with so many arguments."""
    try:
        taken = inspect.signature(apply)
    except (TypeError, ValueError):  # one that does not say what it takes
        return
    try:
        taken.bind(*names)
    except TypeError:
        raise InvalidArgument(
            f"model '{model}': {what} takes {taken}, it is called with ({', '.join(names)})"
        ) from None
