"""Makes the requests of Python code to the derivatives of a model, and reads their answers, with numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .derivatives import PARAMETER_GRADIENT, PULL_BACK, PUSH_FORWARD, VALUE_AND_GRADIENT, Names, named
from .results import Answer, Array
from .tensors import Tensors, arrays


class DerivativeCall:
    """Converts a call of a derivative, such as ``M.pull_back``: makes its inputs, and names its outputs for the caller."""

    def __init__(self, model: str, kind: str, max_batch_size: int, inputs: Tensors, outputs: Tensors) -> None:
        """Prepares calls of a model's derivative ``kind``, such as "pull_back". The other arguments are the model's."""
        names = Names(model)
        self._inputs = inputs
        #: The tensors that are given besides the inputs, and the prefix of their names.
        self._more, self._prefix = (inputs, names.tangent) if kind == PUSH_FORWARD else (outputs, names.cotangent)
        self._made = {PULL_BACK: names.cotangent, PUSH_FORWARD: names.tangent, VALUE_AND_GRADIENT: names.gradient}.get(
            kind, ""
        )
        #: True if the derivative has rows, and the model has not.
        self._lifts = not max_batch_size and kind != PARAMETER_GRADIENT

    def arrays(self, inputs: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Array]:
        """Returns the derivative's inputs. ``more`` are cotangents by output name, or tangents by input name.

        Raises InvalidArgument if a value cannot be an array.
        """
        found = arrays(inputs, {tensor.name: tensor.datatype for tensor in self._inputs})
        found.update(named(self._prefix, arrays(more, {tensor.name: tensor.datatype for tensor in self._more})))
        return {name: array[None] for name, array in found.items()} if self._lifts else found

    def result(self, answer: Answer) -> Answer:
        """Returns the outputs in ``answer``, a derivative's answer, by the names of the model's tensors, without a copy."""
        return self._part(answer, lambda name: True, self._made)

    def parts(self, answer: Answer) -> tuple[Answer, Answer]:
        """Returns the values and the gradients in the answer of a ``value_and_gradient``."""
        prefix = self._made
        return (
            self._part(answer, lambda name: not name.startswith(prefix), ""),
            self._part(answer, lambda name: name.startswith(prefix), prefix),
        )

    def _part(self, answer: Answer, chosen: Callable[[str], bool], prefix: str) -> Answer:
        part = Answer(
            (name[len(prefix) :], array.reshape(array.shape[1:]) if self._lifts else array)
            for name, array in answer.items()
            if chosen(name)
        )
        part.version, part.parameters, part.times, part.lease = (
            answer.version,
            answer.parameters,
            answer.times,
            answer.lease,
        )
        return part
