"""Reads whether a model's parameters may leave the device while there are no requests for the model.

memory_policy = "on_demand"                                                     in model.py
parameters { key: "memory_policy" value { string_value: "on_demand" } }       in config.pbtxt
"""

from __future__ import annotations

from types import ModuleType

from tensord.config.model_config import ModelConfig
from tensord.shm.errors import InvalidArgument, Unsupported

RESIDENT, ON_DEMAND = "resident", "on_demand"


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
