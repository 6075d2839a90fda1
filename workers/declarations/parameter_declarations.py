"""Reads whether a model's parameters may leave the device, and whether a batch has requests of several parameter sets.

memory_policy = "on_demand"     in model.py: they may leave the device while there are no requests for the model
batch_sets = True               apply(stacked, inputs, index)
batch_sets = ("adapter",)       only leaves of these names, or below them, differ between sets; the others are main's
resident_sets = 64              how many sets lie side by side on the device; without it as many as max_batch_size
parameters { key: "batch_sets" value { string_value: "true" } }      in config.pbtxt, or "adapter,head"; the others likewise
"""

from __future__ import annotations

from types import ModuleType

from tensord.config.model_config import ModelConfig
from tensord.shm.errors import InvalidArgument, Unsupported
from tensord.workers.parameters.set_stack import SetDeclaration

RESIDENT, ON_DEMAND = "resident", "on_demand"
_MOST = 1 << 16


def is_on_demand(message: ModelConfig, module: ModuleType) -> bool:
    """Returns whether a model's parameters may leave the device for other parameters, and come back with the next request.

    Raises: InvalidArgument: ``memory_policy`` is neither "resident" nor "on_demand".
      Unsupported: a model of this kind has no parameters on the device.
    """
    given, where = getattr(module, "memory_policy", RESIDENT), "memory_policy of model.py"
    if "memory_policy" in message.parameters:
        given, where = message.parameters["memory_policy"].string_value, "parameter 'memory_policy'"
    if given not in (RESIDENT, ON_DEMAND):
        raise InvalidArgument(
            f"model '{message.name}': {where} is {given!r}, '{RESIDENT}' or '{ON_DEMAND}' is expected"
        )
    if given == ON_DEMAND and (message.backend != "jax" or getattr(module, "host", False)):
        raise Unsupported(
            f"model '{message.name}': {where} is '{ON_DEMAND}', which is for models that are compiled: others have no "
            "parameters on the device that the server knows"
        )
    return bool(given == ON_DEMAND)


def declare_sets(message: ModelConfig, module: ModuleType) -> SetDeclaration | None:
    """Returns which parameters differ between parameter sets, and how many sets the device holds; None: batches do not mix sets.

    Raises: InvalidArgument: a declaration is malformed.  Unsupported: a model of this kind cannot mix sets in a batch.
    """
    model = message.name
    names = _names(message, module)
    resident, where = _resident(message, module)
    if names is None:
        if resident is not None:
            raise InvalidArgument(f"model '{model}': {where} is given, but batch_sets is not")
        return None
    why = _unsupported(message, module)
    if why:
        raise Unsupported(f"model '{model}': batch_sets is for jitted functions of one call a request; {why}")
    least = message.max_batch_size
    if not least:
        raise InvalidArgument(
            f"model '{model}': batch_sets is given, but max_batch_size is 0: it has no batch dimension"
        )
    if resident is not None and not least <= resident <= _MOST:
        raise InvalidArgument(
            f"model '{model}': {where} is {resident}, between {least} (max_batch_size) and {_MOST} are possible"
        )
    return SetDeclaration(names, resident or least)


def _names(message: ModelConfig, module: ModuleType) -> tuple[str, ...] | None:
    """Returns the parameters that differ between sets (``batch_sets``); empty: all may differ; None: batches do not mix sets."""
    given, where = getattr(module, "batch_sets", False), "batch_sets of model.py"
    if "batch_sets" in message.parameters:
        text, where = message.parameters["batch_sets"].string_value, "parameter 'batch_sets'"
        given = {"true": True, "false": False}.get(text.lower(), tuple(name.strip() for name in text.split(",")))
    if given is True:
        return ()
    if given is False:
        return None
    if isinstance(given, (tuple, list)) and given and all(isinstance(name, str) and name for name in given):
        return tuple(given)
    raise InvalidArgument(
        f"model '{message.name}': {where} is {given!r}; True, False, or names of parameters are expected, as in ('adapter',)"
    )


def _resident(message: ModelConfig, module: ModuleType) -> tuple[int | None, str]:
    """Returns ``resident_sets`` (how many sets the device has; None: not given), and the words by which errors name its place."""
    given, where = getattr(module, "resident_sets", None), "resident_sets of model.py"
    if "resident_sets" in message.parameters:
        text, where = message.parameters["resident_sets"].string_value, "parameter 'resident_sets'"
        given = int(text) if text.isascii() and text.isdigit() and len(text) < 11 else text
    if given is not None and type(given) is not int:
        raise InvalidArgument(f"model '{message.name}': {where} is {given!r}, a number of sets is expected")
    return given, where


def _unsupported(message: ModelConfig, module: ModuleType) -> str:
    """Returns why a model of this kind cannot mix parameter sets in a batch; "": it can."""
    if message.backend != "jax":
        return "a Triton Python model has no parameters that the server knows"
    if hasattr(module, "source"):
        return f"{module.source} takes parameters and inputs alone"
    if getattr(module, "host", False):
        return "a host model is none"
    if hasattr(module, "slots"):
        return "a stepped model is none"
    if message.HasField("sequence_batching"):
        return "a sequence keeps the set that it began with"
    return ""
