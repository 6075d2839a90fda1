"""What ``create`` of a model.py returned: a function, its parameters and, of a model with state, where sequences begin."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from shm.errors import InvalidArgument
from workers.models.request_inputs import RequestInputs
from workers.tensors.signature import StateSpec


def created(
    model: str, returned: object, states: Sequence[StateSpec], asked: RequestInputs | None
) -> tuple[Callable[..., Any], Any, object]:
    """Function, parameters and beginning; None where that is not given. Raises InvalidArgument: it is something else.

    ``asked``: what the function is told of requests, if anything; here it takes that among its inputs.
    """
    if not isinstance(returned, tuple) or not 2 <= len(returned) <= 3 or not callable(returned[0]):
        raise InvalidArgument(f"model '{model}': create() must return a function and its parameters")
    if len(returned) == 3 and not states:
        raise InvalidArgument(
            f"model '{model}': create() returned where state begins beside a function and its parameters, but none is declared"
        )
    apply, parameters, *first = returned
    names = ["params", "inputs"]
    names += ["state"] if states else []
    names += ["request"] if asked is not None else []
    _check_arguments(model, apply, names)
    return apply if asked is None else asked.telling(apply), parameters, first[0] if first else None


def _check_arguments(model: str, apply: Callable[..., Any], names: Sequence[str]) -> None:
    """Raises InvalidArgument: the function cannot be called with so many arguments."""
    try:
        taken = inspect.signature(apply)
    except (TypeError, ValueError):  # one that does not say what it takes
        return
    try:
        taken.bind(*names)
    except TypeError:
        raise InvalidArgument(
            f"model '{model}': the function of create() takes {taken}, it is called with ({', '.join(names)})"
        ) from None
