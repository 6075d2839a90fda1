"""Makes the inputs of requests to a model's derivatives, such as gradients, and renames the outputs in the answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .derivatives import FLOATING, PARAMETER_GRADIENT, PULL_BACK, PUSH_FORWARD, VALUE_AND_GRADIENT, Names
from .errors import InvalidArgument
from .results import Answer, Array
from .tensors import Tensors, array, arrays, flat


class DerivativeCall:
    """Makes the inputs for calls of a model's derivative, such as ``pull_back``, and renames the outputs of the answers."""

    def __init__(self, model: str, kind: str, max_batch_size: int, inputs: Tensors, outputs: Tensors) -> None:
        """Takes the derivative's ``kind``, such as "pull_back". All other arguments describe the model, not the derivative."""
        names = Names(model)
        self._inputs = {tensor.name: tensor.datatype for tensor in inputs}
        of = inputs if kind == PUSH_FORWARD else () if kind == VALUE_AND_GRADIENT else outputs
        #: The tensors of which tangents or cotangents are given, and how the names of these begin.
        self._of = {tensor.name: tensor.datatype for tensor in of if tensor.datatype in FLOATING}
        self._prefix = names.tangent if kind == PUSH_FORWARD else names.cotangent
        self._made = {PULL_BACK: names.cotangent, PUSH_FORWARD: names.tangent, VALUE_AND_GRADIENT: names.gradient}.get(
            kind, ""
        )
        #: True if the derivative has rows, and the model has not.
        self._lifts = not max_batch_size and kind != PARAMETER_GRADIENT

    def arrays(self, inputs: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Array]:
        """Returns the inputs of the derivative by name: the model's ``inputs``, and the tangents or cotangents in ``more``.

        For ``push_forward``, ``more`` has a tangent by the name of each floating input. "x" becomes "tangent.x" in the result.
        For ``pull_back`` and ``parameter_gradient``, ``more`` has a cotangent by the name of each floating output. "y" becomes
        "cotangent.y". If the model is itself a derivative, the prefixes are "tangent2." and "cotangent2.". If the derivative
        has a batch dimension that the model lacks, each array gets a first dimension of 1.

        Raises InvalidArgument if a value cannot be an array, or if a name in ``more`` is missing or unknown.
        """
        found = arrays(inputs, self._inputs)
        if self._of or more:
            what = self._prefix.rstrip("2.")
            values = flat(more, self._of, what)
            if wrong := sorted(values.keys() ^ self._of.keys()):
                fault = "missing" if wrong[0] in self._of else "not known"
                raise InvalidArgument(f"the {what} of '{wrong[0]}' is {fault}: those of {[*self._of]} are expected")
            for name, datatype in self._of.items():
                found[self._prefix + name] = array(self._prefix + name, values[name], datatype)
        return {name: array[None] for name, array in found.items()} if self._lifts else found

    def result(self, answer: Answer) -> Answer:
        """Returns a derivative's answer with the model's tensor names, such as "x" for "cotangent.x". Copies no array."""
        return self.parts(answer)[1]

    def parts(self, answer: Answer) -> tuple[Answer, Answer]:
        """Splits the answer of a ``value_and_gradient`` into the model's outputs and the gradients, and returns both."""
        values, gradients, begin = Answer(), Answer(), len(self._made)
        for name, output in answer.items():
            part, own = (gradients, name[begin:]) if name.startswith(self._made) else (values, name)
            part[own] = output.reshape(output.shape[1:]) if self._lifts else output
        vars(values).update(vars(answer))
        vars(gradients).update(vars(answer))
        return values, gradients
