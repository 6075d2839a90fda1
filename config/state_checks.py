"""What can be wrong in a model's ``sequence_batching.state``, in Triton's words where it has some.

state            named once, a datatype and dims
initial_state    of the same datatype and dims, none of which varies
"""

from __future__ import annotations

from typing import Any

from tensord.config.model_config import ModelConfig, data_type_name
from tensord.shm.datatypes import MAX_RANK, from_model_config
from tensord.shm.errors import InvalidArgument, Unsupported


def check(message: ModelConfig, whole: bool) -> None:
    """``whole``: each state must say its datatype. Raises InvalidArgument, Unsupported: the first finding."""
    states = message.sequence_batching.state
    if states and message.backend == "python":
        raise Unsupported(f"model '{message.name}': sequence_batching.state: a Triton Python model keeps its own state")
    seen: dict[str, set[str]] = {"input": set(), "output": set()}
    for state in states:
        what = f"model '{message.name}': state '{state.input_name}'"
        for kind, name in (("input", state.input_name), ("output", state.output_name)):
            if not name:
                raise InvalidArgument(f"{what}: '{kind}_name' is missing")
            if name in seen[kind]:
                raise InvalidArgument(f"State {kind} name '{name}' specified more than once.")
            seen[kind].add(name)
        _check_tensor(what, state, whole)
        _check_initial(state)
        if state.use_growable_memory and not state.use_same_buffer_for_input_output:
            raise InvalidArgument(
                "In order to 'use_growable_memory', you must also enable 'use_single_buffer' for state input name "
                f"'{state.input_name}'."
            )


def _check_tensor(what: str, state: Any, whole: bool) -> None:
    if state.data_type or whole:
        try:
            from_model_config(data_type_name(state))
        except InvalidArgument:
            raise InvalidArgument(f"{what}: 'data_type' is missing or unknown") from None
    if len(state.dims) > MAX_RANK:
        raise InvalidArgument(f"{what}: {len(state.dims)} dims given, at most {MAX_RANK} are allowed")
    for dim in state.dims:
        if dim < 1 and dim != -1:
            raise InvalidArgument(f"{what}: dim {dim}; a dim is at least 1, or -1 where it varies")


def _check_initial(state: Any) -> None:
    name = state.input_name
    if len(state.initial_state) > 1:
        raise InvalidArgument(
            f"initial_state field for state input '{name}' must contain exactly one or zero element. "
            f"Found '{len(state.initial_state)}' elements."
        )
    for initial in state.initial_state:
        if not initial.name:
            raise InvalidArgument(f"Field 'name' must be set when using initial_state for state input '{name}'.")
        if initial.data_type != state.data_type:
            raise InvalidArgument(
                f"The data type used for 'initial_state' field of state '{name}' does not match the state data type."
            )
        if len(initial.dims) != len(state.dims):
            raise InvalidArgument(
                "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input "
                f"'{name}'. {len(initial.dims)} != {len(state.dims)}"
            )
        for given, declared in zip(initial.dims, state.dims, strict=True):
            if given < 1:
                raise InvalidArgument(
                    f"'initial_state' field for state input name '{name}' contains variable dimensions."
                )
            if declared not in (-1, given):
                raise InvalidArgument(
                    f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description. "
                    f"{given} != {declared}"
                )
        if initial.WhichOneof("state_data") is None:
            raise InvalidArgument(f"initial_state of state input '{name}' has neither zero_data nor data_file")
