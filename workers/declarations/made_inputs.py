"""Inputs of a model that no client sends: control inputs, and properties of requests that model.py asks for."""

from __future__ import annotations

from collections.abc import Mapping

from tensord.shm.arrays import Array
from tensord.shm.messages import RequestRecord
from tensord.workers.declarations.control_inputs import ControlInputs
from tensord.workers.declarations.request_inputs import RequestInputs
from tensord.workers.tensors.request_tensors import RequestTensors
from tensord.workers.tensors.signature import TensorSpec


class MadeInputs:
    """The inputs of one model version that the worker adds to each request: control inputs, and properties of the request."""

    def __init__(self, controls: ControlInputs | None = None, asked: RequestInputs | None = None) -> None:
        #: Control inputs, of a model with sequences.
        self.controls = controls
        #: Properties of requests that model.py asks for.
        self.asked = asked
        parts = [part for part in (controls, asked) if part is not None]
        #: Such inputs by name.
        self.specs: Mapping[str, TensorSpec] = {name: spec for part in parts for name, spec in part.specs.items()}
        #: Arrays for a row that no request fills.
        self.nobody: Mapping[str, Array] = {name: array for part in parts for name, array in part.nobody.items()}

    def arrays(self, request: RequestTensors, own: RequestRecord) -> dict[str, Array]:
        """Returns the inputs that the worker adds to a request. ``own``: what the request says of itself, such as its priority.

        Raises InvalidArgument: an input's datatype cannot hold the request's value.
        """
        made: dict[str, Array] = {}
        if self.controls is not None:
            made = self.controls.arrays(request.controls)
        if self.asked is not None:
            made |= self.asked.arrays(request.prepared, own, request.rows)
        return made

    def __bool__(self) -> bool:
        return bool(self.specs)

    def __repr__(self) -> str:
        return f"<MadeInputs {', '.join(self.specs)}>"
