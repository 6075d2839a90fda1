"""Names and error texts of a model's derivatives. A server offers each derivative as a model of its own.

    of a model M             inputs                                       outputs
    M.pull_back              M's inputs, cotangent.Y for each output Y    cotangent.X for each input X
    M.push_forward           M's inputs, tangent.X for each input X       tangent.Y for each output Y
    M.value_and_gradient     M's inputs                                   M's outputs, gradient.X for each input X
    M.parameter_gradient     M's inputs, cotangent.Y for each output Y    P, the gradient of each parameter P

X, Y and P stand only for inputs, outputs and parameters of floating datatypes. M.value_and_gradient exists only if M has
exactly one floating output, with one element in each row. M.parameter_gradient sums the gradients of all rows and has no batch
dimension. Each other derivative has a batch dimension, and computes each row from the same row of its inputs. If M has no
batch dimension, a row of the derivative's inputs is a whole set of M's inputs.

A derivative of a derivative has the prefixes ``cotangent2.``, ``tangent2.`` and ``gradient2.``. For example, the inputs of
M.push_forward.push_forward are the inputs of M.push_forward, tangent2.X and tangent2.tangent.X.
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
    """Returns the model in a derivative's name, and the derivative's order: ("M", 1) for "M.pull_back", ("M", 0) for "M"."""
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
    """The prefixes that the input and output names of a model's derivatives have, such as "cotangent." in "cotangent.x"."""

    def __init__(self, model: str) -> None:
        order = original(model)[1]
        number = str(order + 1) if order else ""
        self.cotangent, self.tangent, self.gradient = (
            f"{word}{number}." for word in ("cotangent", "tangent", "gradient")
        )


def named(prefix: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a dict of the same arrays, with ``prefix`` in front of each name."""
    return {prefix + name: array for name, array in arrays.items()}


def chosen(prefix: str, names: Iterable[str], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a dict of ``name`` -> ``arrays[prefix + name]`` for each of ``names``."""
    return {name: arrays[prefix + name] for name in names}


def lacks(model: str, kind: str, lacking: Mapping[str, str]) -> str:
    """Returns the error message for a client that asks for a derivative that a model does not have.

    ``kind`` is, for example, "pull_back". ``lacking`` maps a derivative's full name, such as "m.pull_back", to the reason why
    the model lacks it.
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
    """Returns the description of the model or derivative named ``name``, such as "m" or "m.pull_back".

    ``own`` is the model's description. ``derivatives`` has the descriptions of the model's derivatives by name. Raises
    InvalidArgument if ``name`` is a derivative that is not in ``derivatives``. ``lacking`` maps names of derivatives to
    reasons, which the error's text gives.
    """
    if of_model(name)[1] and name not in derivatives:
        raise InvalidArgument(lacks(*of_model(name), lacking))
    return derivatives.get(name, own)
