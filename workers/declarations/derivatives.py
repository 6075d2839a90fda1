"""Makes models that compute derivatives of another model's function, such as the model ``M.pull_back`` for the model ``M``.

The model.py of ``M``, or the parameter "derivatives" in its config.pbtxt, says which ones are made:
    derivatives = True                    derivatives of the function
    derivatives = 2                       also derivatives of these derivatives, such as ``M.pull_back.push_forward``

By default, a model of exported programs has the derivatives with which they were exported. Any other model has none.
A derivative's program is compiled at load if ``model_warmup`` has a request for the derivative, otherwise at the first request.
``tensord.shm.common.derivatives`` describes the inputs and outputs.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tensord.config.model_checks import ROWS_MAY_MIX
from tensord.config.model_config import ModelConfig, empty, wants
from tensord.protocol import model_config_pb2
from tensord.shm import datatypes
from tensord.shm.arrays import datatype_of
from tensord.shm.common.derivatives import (
    FLOATING,
    KINDS,
    MAX_ORDER,
    PARAMETER_GRADIENT,
    PULL_BACK,
    PUSH_FORWARD,
    VALUE_AND_GRADIENT,
    Names,
    chosen,
    lacks,
    named,
    of_model,
)
from tensord.shm.errors import InvalidArgument, Unsupported
from tensord.workers.tensors.signature import Signature, TensorSpec
from tensord.workers.tensors.tensor_trees import parameter_name

_log = logging.getLogger(__name__)
#: The most rows in a batch of derivatives of a model without a batch dimension.
_MAX_ROWS = 64
_ORDERS = {"true": 1, "1": 1, "2": 2, "false": 0, "0": 0}
#: How names of cotangents, tangents and gradients begin.
_OF_DERIVATIVES = re.compile(rf"(cotangent|tangent|gradient)[2-{MAX_ORDER}]?\.")
_KEPT = ("buckets", "request", "strict_parameters", "devices", "memory_policy", "vjp_order")
Apply = Callable[..., dict[str, Any]]


def declared_order(config: ModelConfig, module: ModuleType, described: Signature) -> int:
    """Returns how many orders of derivatives a model gets: the declared number, else as many as it was exported with, else 0.

    ``described``: the model's inputs and outputs.
    Raises InvalidArgument if the declared number is malformed, or larger than the number that the model was exported with.
    Raises Unsupported if derivatives are declared for a model that cannot have them.
    """
    # Exported programs carry theirs whether they are asked for or not.
    carried: int | None = getattr(module, "vjp_order", None)
    given, where = getattr(module, "derivatives", carried or 0), "derivatives of model.py"
    asked = "derivatives" in config.parameters
    if asked:
        given, where = config.parameters["derivatives"].string_value, "parameter 'derivatives'"
        given = _ORDERS.get(given.lower(), given)
    if type(given) not in (int, bool) or not 0 <= given <= MAX_ORDER:
        raise InvalidArgument(
            f"model '{config.name}': {where} is {given!r}; True, False, or a number of orders up to {MAX_ORDER} is expected"
        )
    if carried is not None and given > carried:
        raise InvalidArgument(
            f"model '{config.name}': {where} is {given}, {module.source} carries {carried} orders of them: export it "
            f"again with tensord export --derivatives {given}, or serialize(vjp_order={given})"
        )
    why = _why_none(config, module, described) if given else ""
    if why and (asked or carried is None):
        raise Unsupported(f"model '{config.name}': derivatives are for jitted functions of one request; {why}")
    return 0 if why else int(given)


def _why_none(config: ModelConfig, module: ModuleType, described: Signature) -> str:
    why = ""
    if config.backend == "python":
        why = "a Triton Python model is no function of JAX"
    elif getattr(module, "host", False):
        why = "a host model is not compiled"
    elif hasattr(module, "slots"):
        why = "a stepped model answers in steps"
    elif config.HasField("sequence_batching") or described.states:
        why = "a model with sequences or state answers by what came before"
    elif config.model_transaction_policy.decoupled:
        why = "a decoupled model has any number of answers"
    elif described.ragged or any(spec.of_batch for spec in described.inputs.values()):
        why = "ragged inputs and batch inputs are of a whole batch"
    elif wants(config, ROWS_MAY_MIX):
        why = "rows that mix have derivatives by each other: as an axis of a model without max_batch_size they may"
    elif hasattr(module, "batch_sets") or "batch_sets" in config.parameters:
        why = "a batch with several parameter sets (batch_sets) has none"
    elif optional := next((spec.name for spec in described.inputs.values() if spec.optional), ""):
        why = f"input '{optional}' may be left out"
    elif not _floating(described.inputs) or not _floating(described.outputs):
        kind = "input" if _floating(described.outputs) else "output"
        why = f"no {kind} has a floating datatype"
    elif alike := next(filter(_OF_DERIVATIVES.match, (*described.inputs, *described.outputs)), ""):
        why = f"the name '{alike}' begins as those of tensors of derivatives do"
    return why


@dataclass(frozen=True, slots=True)
class DeclaredDerivative:
    """A model whose function ``apply`` computes a derivative of another model's function, such as the gradient."""

    kind: str
    config: ModelConfig
    module: ModuleType
    apply: Apply


def derivatives(
    config: ModelConfig,
    module: ModuleType,
    described: Signature,
    apply: Apply,
    parameters: Any,
    max_byte_size: int,
    whole: bool,
) -> tuple[list[DeclaredDerivative], dict[str, str]]:
    """Returns a model's derivatives, and a dict: each missing kind of derivative, such as "push_forward" -> why it is missing.

    Args:
      config: the model's complete configuration.
      module: the model's model.py.
      described: the tensors that clients send and get.
      apply: the model's function: takes the parameters and a dict of input arrays, and returns a dict of output arrays.
      parameters: the model's parameters.
      max_byte_size: if the model has no batch dimension, the most bytes of inputs and outputs in a derivative's batch.
      whole: whether to include the gradient with respect to the parameters.
    """
    own, names, exported = _Declarations(config, module, described), Names(config.name), hasattr(module, "vjp_order")
    found, lacking = list[DeclaredDerivative](), dict[str, str]()
    into, out = _floating(described.inputs), _floating(described.outputs)
    given = [*described.inputs.values()]
    cotangents = _tensors(names.cotangent, out)
    kinds: list[tuple[str, _Kind, list[TensorSpec], list[TensorSpec]]] = [
        (PULL_BACK, _pull_back, [*given, *cotangents], _tensors(names.cotangent, into)),
        (PUSH_FORWARD, _push_forward, [*given, *_tensors(names.tangent, into)], _tensors(names.tangent, out)),
    ]
    if exported:
        del kinds[1]
        lacking[PUSH_FORWARD] = "its program was exported, and JAX exports derivatives in reverse alone"
    if len(out) == 1 and all(dim == 1 for dim in out[0].model_dims):
        returned = [*described.outputs.values(), *_tensors(names.gradient, into)]
        kinds.append((VALUE_AND_GRADIENT, _value_and_gradient, given, returned))
    else:
        lacking[VALUE_AND_GRADIENT] = "it takes exactly one floating output, of one element in each row"
    lists = ([*described.inputs], [spec.name for spec in into], [spec.name for spec in out], [*described.outputs])
    function = _ModelFunction(apply, names, *lists)
    for kind, derivative, taken, returned in kinds:
        rows = described.max_batch_size or _fitting([*taken, *returned], max_byte_size)
        applied = function.applied(derivative, not described.batches, exported)
        found.append(own.derivative(kind, taken, returned, applied, rows))
    leaves = _leaves(parameters) if whole else {}
    if leaves:
        gradients = [_spec(name, leaf) for name, leaf in leaves.items()]
        by_leaves = function.by_parameters([*leaves], described.max_batch_size)
        taken, rows_lead = [*given, *cotangents], described.batches
        found.append(own.derivative(PARAMETER_GRADIENT, taken, gradients, by_leaves, 0, rows_lead))
    else:
        lacking[PARAMETER_GRADIENT] = "it has no floating parameters, or one of a type that requests cannot have"
    return found, lacking


def named_lacking(config: ModelConfig, lacking: Mapping[str, str], failed: Mapping[str, str]) -> dict[str, str]:
    """Returns the full name ("M.pull_back") of each derivative in ``lacking`` and ``failed`` -> the reason. Logs ``failed``.

    ``lacking``: kind of a derivative ("pull_back") -> why the model cannot have it. ``failed``: kind -> why creating it failed.
    Raises InvalidArgument if a request in ``model_warmup`` calls one of these derivatives, or if ``failed`` has "pull_back" and
    "push_forward" and the model is not itself a derivative.
    """
    said = "; ".join(f"it has no {kind}: {why}" for kind, why in failed.items())
    if not of_model(config.name)[0] and {PULL_BACK, PUSH_FORWARD} <= failed.keys():
        raise InvalidArgument(f"model '{config.name}': derivatives is declared, and {said}")
    if said:
        _log.warning("model '%s': %s", config.name, said)
    found = named(f"{config.name}.", {**lacking, **failed})
    check_samples(config, found)
    return found


def check_samples(config: ModelConfig, lacking: Mapping[str, str] | None) -> None:
    """Raises InvalidArgument if a warmup request in ``config.model_warmup`` calls a derivative that the model does not have.

    ``lacking``: the full name of each missing derivative ("M.pull_back") -> why it is missing. If None, all are missing.
    """
    for sample in config.model_warmup:
        kind = sample.name.partition(".")[0]
        if kind in KINDS and (lacking is None or f"{config.name}.{kind}" in lacking):
            raise InvalidArgument(f"model_warmup '{sample.name}': {lacks(config.name, kind, lacking or {})}")


def _floating(specs: Mapping[str, TensorSpec]) -> list[TensorSpec]:
    return [spec for spec in specs.values() if spec.datatype in FLOATING]


def _tensors(prefix: str, specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    return [replace(spec, name=prefix + spec.name) for spec in specs]


# ------------------------------------------------------------------------------------------------------------- declarations


def _add(fields: Any, spec: TensorSpec, lead: tuple[int, ...] = ()) -> None:
    data_type = model_config_pb2.DataType.Value(datatypes.to_model_config(spec.datatype))
    field = fields.add(name=spec.name, data_type=data_type, dims=(*lead, *spec.dims))
    if spec.reshaped:
        field.reshape.shape.extend((*lead, *spec.model_dims))


def _declared(spec: TensorSpec, lead: tuple[str, ...] = ()) -> str:
    """Returns a tensor's declaration as in a model.py, such as ``FP32[n, 3]``. ``lead``: dimensions to put before its own."""
    axes = zip(spec.axes, spec.model_dims, strict=True)
    return f"{spec.datatype}[{', '.join([*lead, *(str(dim if axis is None else axis) for axis, dim in axes)])}]"


class _Declarations:
    def __init__(self, config: ModelConfig, module: ModuleType, described: Signature) -> None:
        self._config = config
        self._module = module
        axes = {axis for spec in described.inputs.values() for axis in spec.axes}
        #: The name of the axis that rows of a batch become.
        self._rows = next(name for name in ("rows", "batch_rows", "rows_of_batch") if name not in axes)

    def derivative(
        self,
        kind: str,
        taken: list[TensorSpec],
        returned: list[TensorSpec],
        apply: Apply,
        rows: int,
        rows_lead: bool = False,
    ) -> DeclaredDerivative:
        config, module = empty(), ModuleType(f"{kind} of {self._config.name}")
        config.CopyFrom(self._config)
        config.name = f"{self._config.name}.{kind}"
        config.max_batch_size = rows
        for name in ("input", "output", "model_warmup", "response_cache"):
            config.ClearField(name)
        for sample in self._config.model_warmup:
            of, _, rest = sample.name.partition(".")
            if of == kind:
                config.model_warmup.add().CopyFrom(sample)
                config.model_warmup[-1].name = rest or f"of {kind}"
        values, batches = vars(module), rows and self._config.max_batch_size
        kept = (*_KEPT, "batch_buckets") if batches else _KEPT
        values.update({name: value for name, value in vars(self._module).items() if name in kept})
        if not batches:
            if "batch_buckets" in config.parameters:
                del config.parameters["batch_buckets"]
            if config.HasField("dynamic_batching"):
                del config.dynamic_batching.preferred_batch_size[:]
        for spec in taken:
            _add(config.input, spec, (-1,) if rows_lead else ())
        for spec in returned:
            _add(config.output, spec)
        values["inputs"] = {spec.name: _declared(spec, (self._rows,) if rows_lead else ()) for spec in taken}
        values["outputs"] = {spec.name: _declared(spec) for spec in returned}
        # Where errors say that something is declared; what is created is known already.
        values["source"], values["create"] = f"the {kind} of a model", lambda path, config, device: None
        return DeclaredDerivative(kind, config, module, apply)


def _fitting(tensors: list[TensorSpec], max_byte_size: int) -> int:
    """Returns how many rows of ``tensors`` fit in ``max_byte_size``: a power of two, at least 1 and at most 64."""
    row = sum(spec.dtype.itemsize * math.prod(size for size in spec.model_dims if size != -1) for spec in tensors)
    rows = _MAX_ROWS
    while rows > 1 and rows * row > max_byte_size:
        rows //= 2
    return rows


def _leaves(parameters: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(parameters)
    arrays = [
        (parameter_name(keys), leaf) for keys, leaf in leaves if isinstance(leaf, (jax.Array, np.ndarray, np.generic))
    ]
    found = {name: leaf for name, leaf in arrays if jnp.issubdtype(leaf.dtype, jnp.floating)}
    return found if all(datatype_of(leaf.dtype) for leaf in found.values()) else {}


def _spec(name: str, leaf: Any) -> TensorSpec:
    datatype, shape = datatype_of(leaf.dtype), tuple(leaf.shape)
    assert datatype is not None
    return TensorSpec(name, datatype, leaf.dtype, shape, shape, (None,) * len(shape))


# ---------------------------------------------------------------------------------------------------------------- functions


@dataclass(frozen=True, slots=True)
class _ModelFunction:
    apply: Apply
    names: Names
    inputs: list[str]
    #: The floating inputs and outputs.
    into: list[str]
    out: list[str]
    outputs: list[str]

    def applied(self, derivative: _Kind, lifted: bool, exported: bool) -> Apply:
        def of_names(parameters: Any, given: dict[str, Any]) -> dict[str, Any]:
            return derivative(self, parameters, given)

        if lifted and exported:  # A call of an exported program has no rule for rows.
            return lambda parameters, given: jax.lax.map(functools.partial(of_names, parameters), given)
        return jax.vmap(of_names, (None, 0)) if lifted else of_names

    def own(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the model's own inputs among those ``given`` to a derivative: all but cotangents and tangents."""
        added = self.names.cotangent, self.names.tangent
        return {name: array for name, array in given.items() if not name.startswith(added)}

    def of_floats(self, parameters: Any, given: Mapping[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
        inputs = self.own(given)

        def apply(floats: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
            made = self.apply(parameters, {**inputs, **floats})
            return chosen("", self.out, made), chosen("", [n for n in self.outputs if n not in self.out], made)

        return apply, chosen("", self.into, inputs)

    def by_parameters(self, leaves: list[str], max_rows: int) -> Apply:
        def gradient(parameters: Any, given: dict[str, Any]) -> dict[str, Any]:
            cotangents, inputs = chosen(self.names.cotangent, self.out, given), self.own(given)
            rows = (cotangents[self.out[0]].shape[0],) if max_rows else ()
            if rows and rows[0] > max_rows:
                raise InvalidArgument(f"{rows[0]} rows are given, max_batch_size of the model is {max_rows}")
            for name in inputs.keys() - {*self.inputs}:
                # What the server adds is one for the request.
                inputs[name] = jnp.broadcast_to(inputs[name], (*rows, *inputs[name].shape))
            found, structure = jax.tree_util.tree_flatten_with_path(parameters)
            places = {parameter_name(keys): number for number, (keys, _) in enumerate(found)}

            def of_leaves(leaves: dict[str, Any]) -> dict[str, Any]:
                every = [leaf for _, leaf in found]
                for name, leaf in leaves.items():
                    every[places[name]] = leaf
                return chosen("", self.out, self.apply(jax.tree.unflatten(structure, every), inputs))

            made, pull = jax.vjp(of_leaves, {name: found[places[name]][1] for name in leaves})
            return dict(_pulled(pull, made, cotangents))

        return gradient


_Kind = Callable[[_ModelFunction, Any, dict[str, Any]], dict[str, Any]]


def _pull_back(function: _ModelFunction, parameters: Any, given: dict[str, Any]) -> dict[str, Any]:
    prefix = function.names.cotangent
    apply, floats = function.of_floats(parameters, given)
    made, pull, _ = jax.vjp(apply, floats, has_aux=True)
    return named(prefix, _pulled(pull, made, chosen(prefix, function.out, given)))


def _pulled(pull: Callable[..., Any], made: Mapping[str, Any], cotangents: dict[str, Any]) -> Any:
    for name, output in made.items():
        if (given := cotangents[name].shape) != output.shape:
            raise InvalidArgument(
                f"the cotangent of output '{name}' has shape {list(given)}, the output has {list(output.shape)} for these inputs"
            )
    return pull(cotangents)[0]


def _push_forward(function: _ModelFunction, parameters: Any, given: dict[str, Any]) -> dict[str, Any]:
    prefix = function.names.tangent
    apply, floats = function.of_floats(parameters, given)
    _, made = jax.jvp(lambda floats: apply(floats)[0], (floats,), (chosen(prefix, function.into, given),))
    return named(prefix, made)


def _value_and_gradient(function: _ModelFunction, parameters: Any, given: dict[str, Any]) -> dict[str, Any]:
    apply, floats = function.of_floats(parameters, given)
    value, pull, others = jax.vjp(apply, floats, has_aux=True)
    # Rows do not depend on each other, so the gradient of their sum has that of each.
    return {**value, **others, **named(function.names.gradient, pull(jax.tree.map(jnp.ones_like, value))[0])}
