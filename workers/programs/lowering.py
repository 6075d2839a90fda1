"""Lowers a model version's function for given shapes, and checks that the function's outputs are as declared.

program of a model without state    (parameters, inputs)                  -> outputs
program of a model with state       (parameters, inputs, rows, carry)     -> outputs, carry

``rows``: where the state of each row's sequence lies in ``carry``, and whether the sequence begins (``rows_argument``).
``carry``: the state of all sequences.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tensord.shm.arrays import DTYPES, described
from tensord.shm.errors import Internal
from tensord.workers.jax_internals.wide import precision
from tensord.workers.programs.carry import CARRY, carry_specs, rows_argument, stepping
from tensord.workers.programs.executable import Wanted, arguments_of
from tensord.workers.programs.packed_outputs import PACKED, packing
from tensord.workers.programs.placement import Placement
from tensord.workers.tensors.buckets import Shapes
from tensord.workers.tensors.signature import Signature, TensorSpec

#: What an error says of an output that is computed with more bits than it is declared with.
_WIDE = "; with 64-bit tensors, such as seeds, JAX computes in FP64 by default"
_log = logging.getLogger(__name__)


class Lowering:
    """Lowers the function of one model version to programs for given shapes. Any thread may use it."""

    def __init__(self, signature: Signature, apply: Callable[..., Any], pack: bool = False) -> None:
        """Stores the model's function ``apply``. ``pack``: wrap it with ``packing``, which may add an output."""
        self._signature = signature
        if signature.states:
            apply = stepping(apply, signature)
        if pack:
            apply = packing(apply, signature)
        self._apply = apply
        #: Functions of models are traced by one thread at a time.
        self._tracing = threading.Lock()
        #: What is traced of the programs for which there is a list.
        self.traced: dict[Wanted, list[jax.stages.Traced]] = {}

    def lower(self, rows: int, shapes: Shapes, placement: Placement) -> jax.stages.Lowered:
        """Traces and lowers the model's function for ``rows`` rows, on the device of ``placement``.

        ``shapes`` have no axis for rows. If the function raises KeyError for a name, LookupError is raised.
        Other errors are raised unchanged.
        """
        arguments: tuple[Any, ...] = (self.zeros(rows, shapes),)
        if self._signature.states:
            arguments = (*arguments, rows_argument(self._signature, rows, ()), carry_specs(self._signature))
        specs = jax.tree.map(lambda array: placement.spec(array.shape, array.dtype), arguments)
        try:
            with precision(self._signature.wide), self._tracing:
                # The carry is donated; it comes after the parameters, which are the first argument.
                donated = 1 + CARRY if self._signature.states else ()
                traced = traced_anew(self._apply, donated, placement.parameter_specs(rows), *specs)
                self.traced.get(Wanted(rows, shapes), []).append(traced)
                lowered: jax.stages.Lowered = traced.lower()
                return lowered
        except KeyError as error:
            if not error.args or not isinstance(error.args[0], str):
                raise
            names = ", ".join(f"'{name}'" for name in self._signature.inputs) or "none"
            said = f"apply failed with {error!r}; the inputs of the model are: {names}"
            parameters: Any = placement.parameter_specs(rows)
            if error.args[0] in {*self._signature.inputs, *(parameters if isinstance(parameters, dict) else ())}:
                said += "; it is called with (params, inputs), in this order"
            raise LookupError(said).with_traceback(error.__traceback__) from error

    def zeros(self, rows: int, shapes: Shapes) -> dict[str, Any]:
        """Returns zeros as the inputs of a test run, by input name. ``shapes``: the inputs' shapes without an axis for rows."""
        wanted = arguments_of(self._signature, Wanted(rows, shapes))
        return {name: np.zeros(shape, dtype) for name, dtype, shape in wanted}

    def check(self, rows: int, shapes: Shapes, lowered: jax.stages.Lowered) -> None:
        """Raises Internal if the outputs of a lowered program are not as declared."""
        made = lowered.out_info[0] if self._signature.states else lowered.out_info
        name = self._signature.model
        if not isinstance(made, dict):
            raise Internal(
                f"model '{name}': apply returned {_kind(made)}, a dict of arrays is expected: {self._example()}"
            )
        for spec in self._signature.outputs.values():
            if spec.name not in made:
                raise Internal(f"model '{name}': output '{spec.name}' is declared but not computed")
            found = made[spec.name]
            if not hasattr(found, "shape"):
                raise Internal(f"model '{name}': output '{spec.name}' is {_kind(found)}, an array is expected")
            if spec.cut_like:
                shape = shapes[list(self._signature.inputs).index(spec.cut_like)]
                check_cut(name, spec, math.prod(shape or ()), found.shape, found.dtype)
            else:
                hint = _WIDE if found.dtype == np.float64 else ""
                check_output(name, spec, self._signature.batches, rows, found.shape, found.dtype, hint)

    def _example(self) -> str:
        return "{" + ", ".join(f"'{name}': ..." for name in self._signature.outputs) + "}"

    def __repr__(self) -> str:
        return f"<Lowering of {self._signature.model!r}>"


def traced_anew(function: Callable[..., Any], donated: int | tuple[()], *arguments: Any) -> jax.stages.Traced:
    """Traces ``function`` with JAX, also if it was traced before. ``donated``: the index of the argument to donate, if any."""
    # JAX traces a wrapper that it has not seen. It is not kept, because JAX holds megabytes for it (measured).
    jitted: Any = jax.jit(functools.wraps(function)(lambda *each: function(*each)), donate_argnums=donated)
    traced: jax.stages.Traced = jitted.trace(*arguments)
    return traced


def _kind(value: Any) -> str:
    return "an array" if hasattr(value, "shape") and hasattr(value, "dtype") else f"a {type(value).__name__}"


def warn_of_undeclared(signature: Signature, made: Any) -> None:
    """Logs a warning if ``made``, the outputs that a model's function returned, has a name that ``signature`` lacks."""
    unknown = [*made.keys() - signature.outputs.keys() - {PACKED}] if isinstance(made, dict) else []
    if unknown:
        said = "model '%s': its function computes %s, which no client gets: outputs of model.py do not declare it"
        _log.warning(said, signature.model, ", ".join(sorted(map(repr, unknown))))


def check_output(
    model: str, spec: TensorSpec, batches: bool, rows: int, shape: tuple[int, ...], dtype: np.dtype[Any], hint: str = ""
) -> None:
    """Raises Internal if a computed output has another datatype or shape than its declaration ``spec``.

    ``batches``: whether ``shape`` must begin with a batch dimension of size ``rows``. ``hint``: the end of the error message.
    """
    inner = shape[1:] if batches else shape
    fits = spec.fits_model(inner) and (not batches or (len(shape) > 0 and shape[0] == rows))
    if dtype == spec.dtype and fits:
        return
    declared = described(spec.dtype, (rows, *spec.model_dims) if batches else spec.model_dims)
    # The commonest mistake: as many dims as are declared, where there is one more.
    why = "; the model has max_batch_size, so the batch is the first dimension of every tensor, before those declared"
    forgotten = batches and spec.fits_model(shape)
    raise Internal(
        f"model '{model}': output '{spec.name}' is computed as {described(dtype, shape)}, "
        f"declared as {declared}{why if forgotten else hint}"
    )


def check_cut(model: str, spec: TensorSpec, elements: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raises Internal unless an output's ``shape`` has ``elements`` elements and its ``dtype`` is the datatype of ``spec``."""
    if dtype == spec.dtype and math.prod(shape) == elements:
        return
    raise Internal(
        f"model '{model}': output '{spec.name}' is computed as {described(dtype, shape)}; declared are {elements} elements of "
        f"{spec.datatype}, as many as input '{spec.cut_like}' has"
    )


def is_numeric(spec: TensorSpec) -> bool:
    """Returns whether a jitted function can take and return the tensor, which is False only for BYTES."""
    return DTYPES[spec.datatype].kind != "O"
