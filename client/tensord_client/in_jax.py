"""Calls a served model from inside a program that JAX compiles: the program calls back to the host, which sends the requests.

If the model has a batch dimension, the axes that ``vmap`` adds become rows. If not, one request is sent for each index into
these axes. JAX can differentiate the call if the server has derivatives of the model (``tensord_client.common.derivatives``):
forward mode needs the derivative push_forward or value_and_gradient, and reverse mode needs pull_back or value_and_gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensord_client.common.arrays import datatype_of
from tensord_client.common.derivatives import (
    FLOATING,
    PULL_BACK,
    PUSH_FORWARD,
    VALUE_AND_GRADIENT,
    Names,
)
from tensord_client.common.model import Model
from tensord_client.common.results import Array, Tensor
from tensord_client.common.tensors import cast, flat
from tensord_client.errors import InvalidArgument

if TYPE_CHECKING:
    import jax as jax_library


def jax(
    model: Model, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> Callable[[Mapping[str, Any]], dict[str, jax_library.Array]]:
    """Makes a function of a served model that may be called inside ``jax.jit``, ``vmap`` and ``scan``.

    JAX can differentiate the function if the server has derivatives of the model.

    Args:
      shapes: the shapes of outputs by output name, without axes that ``vmap`` adds. Give the shape of each output that has an
        axis of variable size besides the batch axis.
    Returns: a function from inputs by name to outputs by name. While JAX traces or compiles the function, it raises
      InvalidArgument if an output's shape is not known, if an input or output is BYTES, or if JAX needs a derivative that the
      server does not have.
      If the server answers with an error while the compiled program runs, JAX raises JaxRuntimeError or ValueError.
    """
    import jax as library

    inputs = {tensor.name: tensor for tensor in model.inputs}
    served, primitive = _ServedModel(model), _primitive()

    def traced(name: str, value: Any) -> jax_library.Array:
        if any(isinstance(leaf, library.Array) for leaf in library.tree_util.tree_leaves(value)):
            # Perhaps only the running program knows its values: it is cast to the input's datatype on the host.
            return library.numpy.asarray(value)
        if name in inputs:
            _check_held("input", inputs[name])
        value = _in_datatype(inputs.get(name), value)
        made = library.numpy.asarray(value)
        # Without jax_enable_x64 64 bits have become 32.
        cast(name, value, datatype_of(made.dtype))
        return made

    def call(given: Mapping[str, Any]) -> dict[str, jax_library.Array]:
        arrays = {
            name: traced(name, value)
            for name, value in flat(given, {tensor.name: tensor.datatype for tensor in model.inputs}).items()
        }
        rows = next((array.shape[0] for array in arrays.values() if array.ndim), 1) if model.max_batch_size else 0
        wanted = tuple(
            _Output(
                tensor.name, _shape(tensor, rows, shapes or {}), library.dtypes.canonicalize_dtype(tensor.dtype).name
            )
            for tensor in model.outputs
        )
        made = primitive.bind(
            *arrays.values(), asked=served, names=tuple(arrays), linear=(), gradients=(), wanted=wanted, outer=()
        )
        return {output.name: array for output, array in zip(wanted, made)}

    return call


def _shape(tensor: Tensor, rows: int, known: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the shape of the output ``tensor``. If ``known`` has a shape for the output's name, that shape is returned.

    If not, ``tensor.shape`` is returned. If ``rows`` is not 0, its first size is replaced by ``rows``, the batch size.
    Raises InvalidArgument if a size is not known (-1), or if the output is BYTES.
    """
    _check_held("output", tensor)
    if tensor.name in known:
        return tuple(known[tensor.name])
    shape = (rows, *tensor.shape[1:]) if rows else tensor.shape
    if -1 in shape:
        raise InvalidArgument(
            f"output '{tensor.name}' is {tensor.datatype}{list(tensor.shape)}: a program needs its shape, give it by shapes="
        )
    return shape


def _check_held(what: str, tensor: Tensor) -> None:
    if tensor.datatype == "BYTES":
        raise InvalidArgument(f"{what} '{tensor.name}' is BYTES, of which JAX has no arrays")


class _Output(NamedTuple):
    name: str
    #: Without the axes that ``vmap`` adds.
    shape: tuple[int, ...]
    dtype: str


class _ServedModel:
    """A model on a server that JAX programs can call. It may be a derivative of another model, such as ``M.pull_back``."""

    def __init__(self, model: Model | None, of: _ServedModel | None = None, kind: str = "") -> None:
        self._model = model  # None: a derivative, such as "pull_back" (kind), looked up at its first use
        self.of = of
        self.kind = kind
        self._derivatives: dict[str, _ServedModel] = {}
        #: True if it takes rows, and the model that it is a derivative of takes none.
        self.lifted: bool = of is not None and (of.lifted or not of.model.max_batch_size)

    @property
    def model(self) -> Model:
        """Returns the model, which is looked up at its first use."""
        if self._model is None:
            assert self.of is not None
            self._model = self.of.model.derivative(self.kind)
        return self._model

    @property
    def names(self) -> Names:
        return Names(self.model.name)

    def derivative(self, kind: str) -> _ServedModel:
        """Returns this model's derivative ``kind``, such as "pull_back". Calls with the same ``kind`` return one object."""
        return self._derivatives.setdefault(kind, _ServedModel(None, self, kind))

    def has(self, kind: str) -> bool:
        return self.model.has_derivative(kind)

    def rows(self, outer: tuple[int, ...]) -> int:
        return len(outer) + bool(self.model.max_batch_size and not self.lifted)


class _Asking:
    """A function that a compiled JAX program calls with input arrays. The function returns a served model's outputs."""

    def __init__(
        self, served: _ServedModel, given: Sequence[str], wanted: Sequence[_Output], outer: tuple[int, ...]
    ) -> None:
        """Looks up the model. Sends nothing.

        Args:
          given: the inputs' names, in the order of the arrays in a call.
          wanted: the outputs that a call returns, in this order.
          outer: the sizes of the axes that ``vmap`` added.
        """
        self._model = model = served.model
        known = {tensor.name: tensor for tensor in model.inputs}
        self._given = [(name, known.get(name)) for name in given]
        self._wanted = [(output.name, np.dtype(output.dtype)) for output in wanted]
        names = [output.name for output in wanted]
        # A request for all outputs is the one that costs least.
        self._outputs = () if {*names} == {tensor.name for tensor in model.outputs} else names
        self._outer = outer
        self._lead = served.rows(outer)

    def __call__(self, *arrays: Array) -> list[Array]:
        """Calls the model. Returns the outputs, which may be views of the server's memory. Does not keep ``arrays``."""
        outer, inputs = self._outer, dict[str, Array]()
        for (name, tensor), array in zip(self._given, arrays):
            array = np.asarray(array)
            if array.shape[: len(outer)] != outer:
                array = np.broadcast_to(array, (*outer, *array.shape[len(outer) :]))
            inputs[name] = _in_datatype(tensor, array)
        model, size = self._model, self._model.max_batch_size
        parts = self._lead != bool(size)
        found: Mapping[str, Array] = self._in_parts(inputs) if parts else model(inputs, outputs=self._outputs)
        return [np.asarray(found[name]).astype(dtype, copy=False) for name, dtype in self._wanted]

    def _in_parts(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Calls the model in several requests of at most ``max_batch_size`` rows each. Returns the joined outputs.

        If the model has no batch dimension, each request is for one index into the axes that ``vmap`` added.
        """
        model, size, lead, outputs = self._model, self._model.max_batch_size, self._lead, self._outputs
        shape = next(iter(inputs.values())).shape[:lead]
        count = math.prod(shape)
        flattened = {name: array.reshape((count, *array.shape[lead:])) for name, array in inputs.items()}
        parts: list[Any] = [slice(at, at + size) for at in range(0, count, size)] if size else [*range(count)]
        *others, own = [{name: array[part] for name, array in flattened.items()} for part in parts]
        sent = [model.submit(each, outputs=outputs) for each in others]
        # This thread reads the answer to its own request, which costs less than a future.
        found: Mapping[str, Array] = model(own, outputs=outputs)
        if sent or not size:
            answers = [*(each.result() for each in sent), found]
            found = {name: (np.concatenate if size else np.stack)([each[name] for each in answers]) for name in found}
        return {name: array.reshape((*shape, *array.shape[1:])) for name, array in found.items()}


def _in_datatype(tensor: Tensor | None, value: Any) -> Any:
    if tensor is None or getattr(value, "dtype", None) == tensor.dtype:
        return value
    return cast(tensor.name, value, tensor.datatype)


def _varies(value: Any) -> bool:
    """Returns whether the JAX type of ``value`` says that the devices of a ``jax.shard_map`` may have different values."""
    aval = getattr(value, "aval", None)
    # ``vma`` is of JAX before 0.10.
    return bool(getattr(aval, "vma", None) or getattr(getattr(aval, "mat", None), "varying", None))


@functools.cache
def _primitive() -> Any:
    import jax as library
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir

    # Its arguments are the inputs ``names``, then the inputs ``linear``, on which the outputs depend linearly, and then gradients
    # of some of these (``gradients``), which are for transposing alone. ``asked``: the model. ``wanted``: the outputs.
    # ``outer``: the sizes of the axes that ``vmap`` added, the first ones of each array; 1 where an array is not mapped.
    served = Primitive("served")
    served.multiple_results = True
    lax = library.numpy

    def lowered(
        ctx: Any, *arrays: Any, asked: _ServedModel, names: Any, linear: Any, gradients: Any, wanted: Any, outer: Any
    ) -> Any:
        given = (*names, *linear)
        ask, arrays, avals = _Asking(asked, given, wanted, outer), arrays[: len(given)], ctx.avals_in[: len(given)]
        ctx, devices = ctx.replace(avals_in=avals), ctx.module_context.axis_context
        if isinstance(devices, mlir.ShardingContext) and devices.num_devices == 1:
            # pure_callback does the same, but makes arrays of JAX of all inputs, which takes longer than a request.
            return mlir.emit_python_callback(ctx, ask, None, arrays, avals, ctx.avals_out, has_side_effect=False)[0]

        def placed(*arrays: Any) -> Any:
            # pure_callback knows on which of the devices to ask. Its outputs are on that device alone, and JAX cannot use what a
            # program returns so. Behind the barrier they are on all devices.
            return library.lax.optimization_barrier(library.pure_callback(ask, ctx.avals_out, *arrays))

        return mlir.lower_fun(placed, multiple_results=True)(ctx, *arrays)

    compiled = library.jit(served.bind, static_argnames=("asked", "names", "linear", "gradients", "wanted", "outer"))

    def run(*arrays: Any, **others: Any) -> Any:
        # Outside of jax.jit: compiled by itself, once.
        with library.disable_jit(False):
            return compiled(*arrays, **others)

    def shaped(*_: Any, wanted: Any, outer: Any, **others: Any) -> Any:
        return [library.core.ShapedArray((*outer, *output.shape), np.dtype(output.dtype)) for output in wanted]

    def batched(arrays: Any, axes: Any, *, outer: Any, **others: Any) -> Any:
        size = next(array.shape[axis] for array, axis in zip(arrays, axes) if axis is not None)
        # The host repeats what is not mapped: a program with copies would hand parts of itself to other threads.
        moved = [array[None] if axis is None else lax.moveaxis(array, axis, 0) for array, axis in zip(arrays, axes)]
        made = served.bind(*moved, outer=(size, *outer), **others)
        return made, [0] * len(made)

    def differentiated(primals: Any, tangents: Any, *, asked: _ServedModel, **others: Any) -> Any:
        names, linear, wanted, outer = (others[name] for name in ("names", "linear", "wanted", "outer"))
        if any(map(_varies, primals)):
            raise InvalidArgument("inside of jax.shard_map a served model is differentiated only with check_vma=False")
        every, prefix = (*names, *linear), asked.names.tangent
        known = {tensor.name for tensor in asked.model.inputs if tensor.datatype in FLOATING}
        floating = [at for at, name in enumerate(every) if name in known]
        chosen = [at for at in floating if type(tangents[at]) is not ad.Zero]
        out = [output for output in wanted if lax.issubdtype(np.dtype(output.dtype), lax.floating)]
        values, moved = None, dict[_Output, Any]()
        given = [lax.zeros_like(primals[at]) if at not in chosen else tangents[at] for at in floating]
        if chosen and not any(at < len(names) for at in chosen):
            # It is linear in what changes.
            fixed, gradients = primals[: len(names)], primals[len(every) :]
            made = served.bind(*fixed, *given[-len(linear) :], *gradients, asked=asked, **others)
            moved = dict(zip(out, made))
        elif chosen:
            arrays, gradients = primals[: len(every)], []
            own = {"names": every, "linear": (), "gradients": (), "outer": outer}
            if asked.has(VALUE_AND_GRADIENT):
                asks = [
                    _Output(asked.names.gradient + every[at], primals[at].shape[len(outer) :], primals[at].dtype.name)
                    for at in chosen
                ]
                of_both = {**own, "wanted": (*wanted, *asks)}
                values = served.bind(*arrays, asked=asked.derivative(VALUE_AND_GRADIENT), **of_both)
                gradients = values[len(wanted) :]
            elif not asked.has(PUSH_FORWARD):
                bool(asked.derivative(PULL_BACK).model)
            if gradients and not asked.has(PUSH_FORWARD):
                # It was exported, or has a rule for the reverse alone.
                lead = asked.rows(outer)
                products = zip(gradients, (tangents[at] for at in chosen))
                dot = sum(lax.sum(one * other, axis=tuple(range(lead, one.ndim))) for one, other in products)
                moved = {out[0]: lax.reshape(dot, (*outer, *out[0].shape)).astype(out[0].dtype)}
            else:
                own["linear"] = tuple(prefix + every[at] for at in floating)
                own["gradients"] = tuple(prefix + every[at] for at in chosen) if gradients else ()
                own["wanted"] = tuple(output._replace(name=prefix + output.name) for output in out)
                pushed = asked.derivative(PUSH_FORWARD)
                moved = dict(zip(out, served.bind(*arrays, *given, *gradients, asked=pushed, **own)))
        values = served.bind(*primals, asked=asked, **others) if values is None else values[: len(wanted)]
        nothing = [
            library.core.ShapedArray(each.shape, each.dtype if output in out else library.dtypes.float0)
            for output, each in zip(wanted, values)
        ]
        return values, [moved.get(output, ad.Zero(aval)) for output, aval in zip(wanted, nothing)]

    def transposed(
        cotangents: Any,
        *arrays: Any,
        asked: _ServedModel,
        names: Any,
        linear: Any,
        gradients: Any,
        wanted: Any,
        outer: Any,
    ) -> Any:
        forward, of, every = asked.kind == PUSH_FORWARD, asked.of, len(names) + len(linear)
        assert of is not None
        ours, theirs = (of.names.tangent, of.names.cotangent)[:: 1 if forward else -1]
        fixed, moving = arrays[: len(names)], arrays[len(names) : every]
        given = [ad.instantiate_zeros(each) for each in cotangents]
        back = {
            name: _Output(theirs + name[len(ours) :], each.aval.shape[len(outer) :], each.aval.dtype.name)
            for name, each in zip(linear, moving)
            if ad.is_undefined_primal(each)
        }
        if gradients:
            # One element in each row has a cotangent.
            rows, by = given[0].shape[: of.rows(outer)], dict(zip(gradients, arrays[every:]))
            made = {
                name: by[name] * lax.reshape(given[0], (*rows, *[1] * (by[name].ndim - len(rows)))).astype(each.dtype)
                for name, each in back.items()
            }
        else:
            opposite = of.derivative(PULL_BACK if forward else PUSH_FORWARD)
            bool(opposite.model)
            changed = tuple(theirs + output.name[len(ours) :] for output in wanted)
            if forward and of.of is not None and of.kind in (PULL_BACK, VALUE_AND_GRADIENT):
                # Each output has a cotangent, also one by an input that the program does not differentiate by.
                before = of.of.names.cotangent if of.kind == PULL_BACK else of.of.names.gradient
                outputs = {
                    theirs + tensor.name: tensor.name for tensor in of.model.outputs if tensor.datatype in FLOATING
                }
                inputs = {
                    name: fixed[names.index(output[len(before) :])]
                    for name, output in outputs.items()
                    if name not in changed
                }
                changed, given = (*changed, *inputs), [*given, *map(lax.zeros_like, inputs.values())]
            own = {"names": names, "linear": changed, "gradients": (), "wanted": tuple(back.values()), "outer": outer}
            made = dict(zip(back, served.bind(*fixed, *given, asked=opposite, **own)))
        for name, each in zip(linear, moving):
            if name in made and (repeated := tuple(at for at in range(len(outer)) if each.aval.shape[at] < outer[at])):
                made[name] = lax.sum(made[name], repeated, keepdims=True)
        return [None] * len(fixed) + [made.get(name) for name in linear] + [None] * len(gradients)

    served.def_impl(run)
    served.def_abstract_eval(shaped)
    mlir.register_lowering(served, lowered)
    batching.primitive_batchers[served] = batched
    ad.primitive_jvps[served] = differentiated
    ad.primitive_transposes[served] = transposed
    return served


def leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields the name and value of each leaf of a pytree. A name is the keys to the leaf, joined by dots.

    If the tree is a single leaf, its name is "array".
    """
    from jax import tree_util

    for path, leaf in tree_util.tree_leaves_with_path(tree):
        yield tree_util.keystr(path, simple=True, separator=".") or "array", leaf
