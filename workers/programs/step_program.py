"""Wraps the three functions that the author of a stepped model wrote, so that the worker can compile and run them.

A stepped model works on many requests at once. Each of these requests has a numbered slot.

    init     (parameters)                         ->        carry     makes the first carry
    insert   (parameters, inputs, slots, carry)   -> rows,  carry     begins new requests: ``slots`` has the slot of each
    step     (parameters, unmasked, carry)        -> rows,  carry     computes one step of the requests in the first n slots

    unmasked BOOL[n]: for each of the first n slots, whether its request takes part in the step
    carry    the model's arrays, with one row for each slot, and a BOOL for each slot: whether it has an unfinished request
    rows     UINT8[n, size]: for each new request or each of the first n slots, the bytes of the outputs, then a byte with flags

``insert`` and ``step`` reuse the memory of the ``carry`` that they are given. A finished request takes no part in later steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tensord.shm.arrays import Array, described
from tensord.shm.errors import Internal
from tensord.workers.programs.packed_outputs import as_bytes
from tensord.workers.scheduling.step_batcher import EMITS, FINISHED
from tensord.workers.tensors.signature import Signature, TensorSpec

#: Index of the carry among the arguments of insert and step.
INSERT_CARRY, STEP_CARRY = 3, 2


class StepFunctions(NamedTuple):
    """The functions of a stepped model: they make its state, insert a request into it, and compute the next step."""

    init: Callable[..., Any]
    insert: Callable[..., Any]
    step: Callable[..., Any]


class Rows:
    """Describes a row of bytes that holds all outputs of one step of a model for one request.

    The last byte says whether these outputs are sent to the client, and whether the request ends after the step.
    """

    def __init__(self, signature: Signature) -> None:
        self._specs = list(signature.outputs.values())
        #: Name, datatype and shape of each output.
        self.described = tuple([(spec.name, spec.datatype, spec.dims) for spec in self._specs])
        self.slices: list[slice] = []
        at = 0
        for spec in self._specs:
            start, at = at, at + spec.dtype.itemsize * math.prod(spec.model_dims)
            self.slices.append(slice(start, at))
        #: Offset of the flags, which are the last byte.
        self.says = at
        self.byte_size = at + 1

    def pack(self, outputs: dict[str, Any], emits: Any, finished: Any) -> Any:
        """Packs outputs and flags into rows of results, UINT8[rows, size], while JAX traces. The outputs' first axis counts rows.

        ``emits``, ``finished``: BOOL[rows], whether a row's outputs are sent to the client, and whether its request ends.
        """
        says = (emits * jnp.uint8(EMITS) | finished * jnp.uint8(FINISHED)).astype(jnp.uint8)
        arrays = [outputs[spec.name] for spec in self._specs]
        return jnp.concatenate([*(as_bytes(each).reshape(len(each), -1) for each in arrays), says[:, None]], axis=1)

    def cut(self, row: Array) -> dict[str, Array]:
        """Returns the outputs in ``row`` by name, in the shapes that clients get. The outputs are views of ``row``."""
        parts = zip(self._specs, self.slices, strict=True)
        return {spec.name: row[part].view(spec.dtype).reshape(spec.dims) for spec, part in parts}


class StepPrograms:
    """The compiled functions of a model that works on many requests at once, one step at a time.

    Each function calls a function that the model's author wrote. It raises Internal if the author's function returns other
    arrays than declared.
    """

    def __init__(
        self, functions: StepFunctions, signature: Signature, slots: int, rows: Rows, insert_rows: int
    ) -> None:
        """Stores the ``functions`` that the model's author wrote. ``slots``: for how many requests the model's state has room.

        ``rows``: the layout of a step's outputs. ``insert_rows``: how many requests one call of ``insert`` adds. If it is 0, a
        call adds one request, whose arrays have no axis for requests.
        """
        self._functions = functions
        self._signature = signature
        self._slots = slots
        self._rows = rows
        self._insert_rows = insert_rows

    def init(self, parameters: Any) -> Any:
        """Calls the author's ``init``. Returns the carry: the state of all slots, and for each slot whether it is in use.

        Raises Internal: an array of the state does not have one row for each slot.
        """
        own = self._functions.init(parameters, self._slots)
        for path, leaf in jax.tree_util.tree_leaves_with_path(own):
            shape = jnp.shape(leaf)
            if not shape or shape[0] != self._slots:
                raise Internal(
                    f"model '{self._signature.model}': init made {_named(path)} as {_kind(leaf)}, its first dimension must be "
                    f"the {self._slots} slots"
                )
        return jax.tree.map(_strong, own), jnp.zeros(self._slots, jnp.bool_)

    def insert(self, parameters: Any, inputs: dict[str, Any], slots: Any, carry: Any) -> Any:
        """Calls the model's function ``insert`` for new requests. Returns the packed outputs and the next ``carry``.

        The packed outputs are UINT8[n, size], one row for each new request. ``inputs``: the inputs of the new requests.
        ``slots``: each new request's row in the arrays of ``carry``. ``carry``: the state of all requests.
        """
        own, live = carry
        returned = self._functions.insert(parameters, own, slots, inputs)
        if not isinstance(returned, tuple) or len(returned) not in (2, 4):
            raise self._wrong("insert", returned, "(carry, outputs) or (carry, outputs, emit, finished) is")
        kept, outputs = returned[:2]
        lead = () if self._insert_rows == 0 else (self._insert_rows,)
        emits, finished = returned[2:] if len(returned) == 4 else (jnp.full(lead, bool(outputs)), jnp.zeros(lead, bool))
        self._check_carry("insert", own, kept)
        if not outputs and len(returned) == 2:
            outputs = {name: jnp.zeros((*lead, *spec.model_dims), spec.dtype) for name, spec in self._outputs}
        outputs = self._checked("insert", outputs, lead)
        emits, finished = (self._flags("insert", *each, lead) for each in (("emit", emits), ("finished", finished)))
        live = live.at[slots].set(~finished, mode="drop")
        if not lead:
            outputs, emits, finished = jax.tree.map(lambda array: array[None], (outputs, emits, finished))
        return self._rows.pack(outputs, emits, finished), (jax.tree.map(_strong, kept), live)

    def step(self, parameters: Any, unmasked: Any, carry: Any) -> Any:
        """Computes one step of the requests in the first n rows of ``carry``. Returns the packed outputs and the next ``carry``.

        The packed outputs are UINT8[n, size], one row for each of these requests. ``carry``: the state of all requests.
        ``unmasked``: BOOL[n], whether each of these requests takes part in the step.
        """
        own, live = carry
        count = unmasked.shape[0]
        first = live[:count]
        active = first & unmasked
        returned = self._functions.step(parameters, own, active)
        if not isinstance(returned, tuple) or len(returned) != 4:
            raise self._wrong("step", returned, "(carry, outputs, emit, finished) is")
        kept, outputs, emits, finished = returned
        self._check_carry("step", own, kept)
        lead = (count,)
        outputs = self._checked("step", outputs, lead)
        emits, finished = (
            self._flags("step", *each, lead) & active for each in (("emit", emits), ("finished", finished))
        )
        return self._rows.pack(outputs, emits, finished), (
            jax.tree.map(_strong, kept),
            live.at[:count].set(first & ~finished),
        )

    @property
    def _outputs(self) -> list[tuple[str, TensorSpec]]:
        return list(self._signature.outputs.items())

    def _wrong(self, function: str, returned: object, expected: str) -> Internal:
        what = f"{len(returned)} things" if isinstance(returned, tuple) else type(returned).__name__
        return Internal(f"model '{self._signature.model}': {function} returned {what}, {expected} expected")

    def _check_carry(self, function: str, given: Any, made: Any) -> None:
        """Raises Internal if ``function`` got state ``given`` and returned ``made`` of another structure, shape or dtype."""
        what = f"model '{self._signature.model}': {function} returned"
        before, after = jax.tree_util.tree_leaves_with_path(given), jax.tree_util.tree_leaves_with_path(made)
        structures: list[Any] = [jax.tree.structure(given), jax.tree.structure(made)]
        if structures[0] != structures[1]:
            named, known = {_named(path) for path, _ in after}, {_named(path) for path, _ in before}
            lost, new = sorted(known - named), sorted(named - known)
            found = f" without {lost[0]}" if lost else f" with {new[0]}" if new else ""
            raise Internal(f"{what} a carry of another structure than init made{found}")
        for (path, old), (_, new_leaf) in zip(before, after, strict=True):
            if _kind(old) != _kind(new_leaf):
                raise Internal(f"{what} {_named(path)} as {_kind(new_leaf)}, init made it as {_kind(old)}")

    def _checked(self, function: str, outputs: Any, lead: tuple[int, ...]) -> dict[str, Any]:
        what = f"model '{self._signature.model}': {function} returned"
        if not isinstance(outputs, dict):
            raise Internal(f"{what} {type(outputs).__name__} as its outputs, a dict of arrays is expected")
        if unknown := sorted(outputs.keys() - self._signature.outputs.keys(), key=str):
            raise Internal(f"{what} output {unknown[0]!r}, which is not declared")
        made: dict[str, Any] = {}
        for name, spec in self._outputs:
            if name not in outputs:
                raise Internal(f"{what} no output '{name}', which is declared")
            array = made[name] = jnp.asarray(outputs[name])
            if array.shape != (*lead, *spec.model_dims) or array.dtype != spec.dtype:
                raise Internal(
                    f"{what} output '{name}' as {_kind(array)}, {spec.datatype}{[*lead, *spec.model_dims]} is expected"
                )
        return made

    def _flags(self, function: str, name: str, flags: Any, lead: tuple[int, ...]) -> Any:
        array = jnp.asarray(flags)
        if array.shape != lead or array.dtype != jnp.bool_:
            raise Internal(
                f"model '{self._signature.model}': {function} returned '{name}' as {_kind(array)}, BOOL{list(lead)} is expected"
            )
        return array


def _strong(leaf: Any) -> Any:
    """Returns a value as an array of a fixed dtype, without JAX's weak type."""
    array = jnp.asarray(leaf)
    return jax.lax.convert_element_type(array, array.dtype) if isinstance(array.dtype, np.dtype) else array


def _kind(leaf: Any) -> str:
    array = jnp.asarray(leaf)
    return described(array.dtype, array.shape)


def _named(path: Any) -> str:
    return f"carry{jax.tree_util.keystr(path)}"
