"""The derivatives of a model: models that a server makes of its function, with names, inputs and outputs of their own.

    M.pull_back            inputs, cotangent.Y of each floating output Y    ->  cotangent.X of each floating input X
    M.push_forward         inputs, tangent.X of each floating input X       ->  tangent.Y of each floating output Y
    M.value_and_gradient   inputs                                           ->  outputs, gradient.X of each floating input X
    M.parameter_gradient   inputs, cotangent.Y                              ->  P, the gradient of each floating parameter P

The third is there if exactly one output is floating and has one element in each row. A row of the first three depends on the
same row of the inputs alone. Where M has no batch dimension, these three have one: each row is one set of inputs. The fourth
sums over all rows; it has no batch dimension, and rows of M are an ordinary first axis there.

Derivatives of a derivative are named alike, with ``cotangent2.``, ``tangent2.`` and ``gradient2.``: M.push_forward.push_forward
takes the inputs, tangent.X, and tangent2.X and tangent2.tangent.X.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from .errors import InvalidArgument

T = TypeVar("T")
PULL_BACK, PUSH_FORWARD, VALUE_AND_GRADIENT = "pull_back", "push_forward", "value_and_gradient"
PARAMETER_GRADIENT = "parameter_gradient"
KINDS = (PULL_BACK, PUSH_FORWARD, VALUE_AND_GRADIENT, PARAMETER_GRADIENT)
#: The most orders of derivatives that a model may have.
MAX_ORDER = 2
#: The datatypes that have derivatives.
FLOATING = frozenset({"FP16", "BF16", "FP32", "FP64"})


def of_model(name: str) -> tuple[str, str]:
    """Splits the name of a derivative: "M.pull_back" gives ("M", "pull_back"). The name of a model gives ("", "")."""
    model, _, kind = name.rpartition(".")
    return (model, kind) if model and kind in KINDS else ("", "")


def original(name: str) -> tuple[str, int]:
    """Returns the name of a derivative's model, and the derivative's order, 1 or 2. Any other name has the order 0."""
    order = 0
    while (model := of_model(name)[0]) != "":
        name, order = model, order + 1
    return name, order


def check_not_derivative(name: str) -> None:
    """Raises InvalidArgument if ``name`` names a derivative of a model, as ``M.pull_back`` does for a model ``M``."""
    model, order = original(name)
    if order:
        raise InvalidArgument(
            f"'{name}' is a derivative of model '{model}' (a model's folder needs another name), and shares everything with it: "
            "ask for that"
        )


class Names:
    """The prefixes of the names of cotangents, tangents and gradients, for the derivatives of one model."""

    def __init__(self, model: str) -> None:
        order = original(model)[1]
        number = str(order + 1) if order else ""
        self.cotangent, self.tangent, self.gradient = (
            f"{word}{number}." for word in ("cotangent", "tangent", "gradient")
        )


def named(prefix: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``arrays`` with ``prefix`` in front of each name."""
    return {prefix + name: array for name, array in arrays.items()}


def chosen(prefix: str, names: Iterable[str], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the array ``prefix + name`` under ``name``, for each name in ``names``."""
    return {name: arrays[prefix + name] for name in names}


def lacks(model: str, kind: str, lacking: Mapping[str, str]) -> str:
    """Returns the error message for a client that asks for a derivative (a gradient, for example) that the model lacks.

    ``kind``: such as ``pull_back``. ``lacking``: a derivative's full name, such as ``m.pull_back`` -> why the model lacks it.
    """
    name, order = original(model)
    if kind not in KINDS:
        why = f"the kinds of derivatives are {', '.join(KINDS)}"
    elif order >= MAX_ORDER:
        why = f"a model has at most {MAX_ORDER} orders of derivatives"
    elif order and PARAMETER_GRADIENT in (kind, of_model(model)[1]):
        why = "gradients by the parameters are of models alone, and have no derivatives"
    else:
        said = f"the model.py of '{name}' has to say derivatives = {order + 1 if order else True}"
        exported = f"{said}, or its program to be exported with --derivatives {order + 1}"
        why = lacking.get(f"{model}.{kind}", exported)
    return f"model '{model}' has no {kind}: {why}"


def described(name: str, own: T, derivatives: Mapping[str, T], lacking: Mapping[str, str]) -> T:
    """Returns ``own`` if ``name`` is the model's name, or the entry in ``derivatives`` if ``name`` is a derivative's name.

    Raises InvalidArgument if ``name`` is a derivative that the model lacks. ``lacking``: the reason for each derivative that the
    model lacks, for the error's text.
    """
    if of_model(name)[1] and name not in derivatives:
        raise InvalidArgument(lacks(*of_model(name), lacking))
    return derivatives.get(name, own)
