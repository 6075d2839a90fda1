"""Reads sequence controls in a model's answer, by which later steps of an ensemble join a sequence."""

from __future__ import annotations

from collections.abc import Mapping

from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import Parameter
from tensord.workers.calls.asking import check_sequence
from tensord.workers.scheduling.sequence import Controls

#: Parameters of an answer that say it.
_NAMES = {"sequence_id", "sequence_start", "sequence_end"}


def controls_said(parameters: Mapping[str, Parameter], controls: Controls) -> Controls | None:
    """Returns the sequence controls that a model's answer sets for later steps, or None; flags that it leaves out are not set.

    Args:
      controls: of its own request.
    Raises: InvalidArgument: one of them is of another type, in Triton's words.
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
