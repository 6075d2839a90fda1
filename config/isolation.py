"""Reads the parameters ``isolated`` and ``isolated_memory_fraction``, which give a model workers that serve no other."""

from __future__ import annotations

from tensord.config import ensemble_checks
from tensord.config.model_config import ModelConfig, wants
from tensord.shm.errors import InvalidArgument

PARAMETER = "isolated"
MEMORY_FRACTION = "isolated_memory_fraction"
#: Models with the same value of this parameter are on one worker.
TOGETHER = "tensord_together"


def is_wanted(message: ModelConfig) -> bool:
    """Returns whether a model gets workers that serve no other model. Raises InvalidArgument: ``isolated`` is no boolean."""
    return wants(message, PARAMETER)


def memory_fraction(message: ModelConfig, default: float) -> float:
    """Returns the fraction of a GPU's memory that XLA takes in the process of an isolated model (whose worker serves no other).

    Args:
      default: the operator's value (``workers.isolated_memory_fraction``), for models that name none.
    Raises: InvalidArgument: the model's ``isolated_memory_fraction`` is not a number above 0 and up to 1.
    """
    if MEMORY_FRACTION not in message.parameters:
        return default
    said = message.parameters[MEMORY_FRACTION].string_value
    try:
        fraction = float(said)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise InvalidArgument(
            f"model '{message.name}': parameter {MEMORY_FRACTION} is {said[:100]!r}; expected a number above 0, up to 1"
        )
    return fraction


def check(message: ModelConfig) -> None:
    """Raises InvalidArgument if ``isolated`` or ``isolated_memory_fraction`` is malformed or contradicts a model's settings."""
    memory_fraction(message, 1.0)
    if not is_wanted(message):
        return
    if ensemble_checks.is_ensemble(message):
        raise InvalidArgument(
            f"ensemble '{message.name}' cannot be {PARAMETER}: it has no code of its own, and runs in the worker of its models"
        )
    if TOGETHER in message.parameters:
        raise InvalidArgument(
            f"model '{message.name}' is to have a worker to itself ({PARAMETER}), and to share one with the models of "
            f"'{message.parameters[TOGETHER].string_value}' ({TOGETHER})"
        )
