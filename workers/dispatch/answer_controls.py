"""Reads the sequence controls (id, start, end) in a model's answer, which the later steps of an ensemble are run with."""

from __future__ import annotations

from collections.abc import Mapping

from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import Parameter
from tensord.workers.calls.asking import check_sequence
from tensord.workers.scheduling.sequence import Controls

#: The parameters of an answer that are sequence controls.
_NAMES = {"sequence_id", "sequence_start", "sequence_end"}


def controls_said(parameters: Mapping[str, Parameter], controls: Controls) -> Controls | None:
    """Returns the sequence controls that a model's answer sets for later steps of its ensemble; None: it sets none.

    A flag (START or END) that the answer does not set is False.

    Args:
      parameters: of the answer.
      controls: of the request that was answered; its sequence id is used if the answer has none.
    Raises: InvalidArgument: a parameter has the wrong type, with Triton's message.
    Source: triton-inference-server/core, src/ensemble_scheduler/ensemble_scheduler.cc, ConsumeResponse.
    """
    if not _NAMES & parameters.keys():
        return None
    start, end = (_flag(name, parameters.get(name, False)) for name in ("sequence_start", "sequence_end"))
    named = parameters.get("sequence_id", controls.correlation_id)
    if isinstance(named, bool) or not isinstance(named, int | str):
        raise InvalidArgument(
            "expected parameter 'sequence_id' to be TRITONSERVER_PARAMETER_INT or TRITONSERVER_PARAMETER_STRING"
        )
    check_sequence(named)
    return Controls(named, start, end)


def _flag(name: str, given: Parameter) -> bool:
    if isinstance(given, bool):
        return given
    raise InvalidArgument(f"expect parameter '{name}' to be TRITONSERVER_PARAMETER_BOOL")
