"""Reads the settings and the functions of a stepped model, which computes many requests together, step by step.

slots = 64              how many slots there are: each holds one request; a model with this setting is a stepped model
max_steps = 1024        a request ends after this many steps
inserts_per_step = 4    requests that may begin between two steps
step_slots = (4, 64)    a program is compiled for slots 0 to 3, and one for all; while slots 4 to 63 are free, the first runs
insert_rows = 8         one call of ``insert`` begins up to 8 requests; by default one, and arrays have no axis for requests
gather = "concat"       a client that wants no stream gets all responses in one, joined along the first axis
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tensord.config.model_config import ModelConfig
from tensord.shm.errors import InvalidArgument, Unsupported
from tensord.workers.declarations.created import check_arguments
from tensord.workers.declarations.request_inputs import RequestInputs
from tensord.workers.programs.lowering import is_numeric
from tensord.workers.programs.step_program import StepFunctions
from tensord.workers.scheduling.step_batcher import StepRules
from tensord.workers.tensors.buckets import Buckets, check_sizes
from tensord.workers.tensors.signature import Signature
from tensord.workers.tensors.tensor_trees import is_tree

MAX_SLOTS = 4096
_MAX_STEPS = 1 << 31
_NAMES = ("max_steps", "inserts_per_step", "step_slots", "insert_rows", "gather")


@dataclass(frozen=True, slots=True)
class StepDeclaration:
    """The settings in model.py of a stepped model, which computes many requests together, step by step."""

    rules: StepRules
    #: Numbers of slots that steps are compiled for, ascending; the last is all slots.
    step_slots: tuple[int, ...]
    #: Requests that insert takes in one call; 0: one, without an axis for them.
    insert_rows: int
    #: How several responses are joined to one; "": they are not.
    gather: str


def declare_steps(config: ModelConfig, module: ModuleType) -> StepDeclaration | None:
    """Returns the declarations of a model.py whose model runs step by step, or None if the model does not.

    Also marks the ``config`` of such a model as decoupled.
    Raises InvalidArgument if a declaration is malformed. Raises Unsupported if model.py says ``host = True``.
    """
    what = f"model '{config.name}'"
    if not hasattr(module, "slots"):
        for name in _NAMES:
            if hasattr(module, name):
                raise InvalidArgument(f"{what}: {name} of model.py is for stepped models, which also say slots = 64")
        return None
    if getattr(module, "host", False):
        raise Unsupported(f"{what}: slots are for functions that are compiled; a host model answers with a generator")
    if is_tree(module):
        raise InvalidArgument(f"{what}: inputs and outputs of a stepped model are dicts of names to declarations")
    slots = _number(what, module, "slots", MAX_SLOTS)
    max_steps = _number(what, module, "max_steps", _MAX_STEPS)
    inserts = _number(what, module, "inserts_per_step", slots, min(4, slots))
    rows = _number(what, module, "insert_rows", slots, 0)
    some = check_sizes(f"{what}: step_slots of model.py", getattr(module, "step_slots", (slots,)), slots)
    gather = getattr(module, "gather", "")
    if gather not in ("", "concat"):
        raise InvalidArgument(f"{what}: gather of model.py is {gather!r}, 'concat' is all there is")
    config.model_transaction_policy.decoupled = True
    return StepDeclaration(
        StepRules(slots, max_steps, max(inserts, rows), max(1, rows)),
        (*(size for size in some if size < slots), slots),
        rows,
        gather,
    )


def _number(what: str, module: ModuleType, name: str, most: int, default: int | None = None) -> int:
    given = getattr(module, name, default)
    if given is None:
        raise InvalidArgument(f"{what}: {name} of model.py is missing, a stepped model needs it")
    if type(given) is not int or not (1 <= given <= most or (given == default and not hasattr(module, name))):
        raise InvalidArgument(f"{what}: {name} of model.py is {given!r}, a number between 1 and {most} is expected")
    return given


def check_stepped(config: ModelConfig, described: Signature) -> None:
    """Checks the configuration and the signature of a model that runs step by step: its model.py has ``slots``.

    Raises Unsupported if the model has several instances, needs resources, or has a tensor whose datatype JAX cannot compile.
    Raises InvalidArgument if the model has a batch dimension, sequences, an optional tensor, no output, or an output whose
    shape varies or is reshaped.
    """
    what = f"model '{config.name}'"
    if config.max_batch_size:
        raise InvalidArgument(
            f"{what}: max_batch_size is {config.max_batch_size}; a stepped model has slots instead of a batch dimension"
        )
    if config.HasField("sequence_batching"):
        raise InvalidArgument(f"{what}: a stepped model has no sequences: each of its requests has a slot of its own")
    count = sum(max(1, group.count) for group in config.instance_group)
    if count > 1 or any(group.rate_limiter.resources for group in config.instance_group):
        raise Unsupported(f"{what}: a stepped model has one instance and needs no resources; it has more slots instead")
    if not described.outputs:
        raise InvalidArgument(f"{what}: a stepped model needs an output")
    for kind, specs in (("input", described.inputs), ("output", described.outputs)):
        for spec in specs.values():
            if not is_numeric(spec):
                raise Unsupported(f"{what}: {spec.datatype} of '{spec.name}' cannot be jitted")
            if spec.optional:
                raise InvalidArgument(
                    f"{what}: {kind} '{spec.name}' is optional; a parameter with a default may be left out"
                )
    for spec in described.outputs.values():
        if -1 in spec.dims or spec.reshaped:
            raise InvalidArgument(
                f"{what}: output '{spec.name}' has dims {list(spec.dims)}; a stepped model's are fixed and as it makes them"
            )


def check_buckets(buckets: Buckets) -> None:
    """Raises InvalidArgument if an axis of varying size has no buckets, or if an axis and an input have the same name."""
    what, axes = f"model '{buckets.signature.model}'", set(buckets.named)
    for spec in buckets.signature.inputs.values():
        for axis, dim in zip(spec.axes, spec.model_dims, strict=True):
            if dim == -1 and axis not in axes:
                named = f"axis '{axis}'" if axis else "an axis without a name"
                raise InvalidArgument(
                    f"{what}: input '{spec.name}' has {named} and no buckets for it; a stepped model is compiled in advance: "
                    "buckets = {'" + (axis or "name") + "': (16, 64, 256)}"
                )
        if spec.name in axes:
            raise InvalidArgument(f"{what}: '{spec.name}' names an input and an axis, whose size is told by that name")


def created_steps(model: str, returned: object, asked: RequestInputs | None) -> tuple[StepFunctions, Any]:
    """Checks the result of a model's ``create``. Returns the functions init, insert and step, and the model's parameters.

    ``returned``: the result of ``create``. ``asked``: the request properties, such as the priority, that ``insert`` gets as
    its last argument; None if it gets none.
    Raises InvalidArgument if ``returned`` is anything else than ((init, insert, step), parameters).
    """
    functions = returned[0] if isinstance(returned, tuple) and len(returned) == 2 else None
    if not isinstance(functions, tuple) or len(functions) != 3 or not all(map(callable, functions)):
        raise InvalidArgument(
            f"model '{model}': it declares slots, so create() must return ((init, insert, step), params): "
            "three functions and their parameters"
        )
    made = StepFunctions(*functions)
    further = ["request"] if asked is not None else []
    check_arguments(model, "init of create()", made.init, ["params", "slots"])
    check_arguments(model, "insert of create()", made.insert, ["params", "carry", "slot", "inputs", *further])
    check_arguments(model, "step of create()", made.step, ["params", "carry", "active"])
    if asked is not None:
        insert, part = made.insert, asked.parted

        def telling(parameters: Any, carry: Any, slot: Any, inputs: dict[str, Any]) -> Any:
            return insert(parameters, carry, slot, *part(inputs))

        made = made._replace(insert=telling)
    assert isinstance(returned, tuple)
    return made, returned[1]
