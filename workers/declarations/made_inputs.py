"""The inputs of a model that no client sends: what it is told of sequences, and what it asks of each request."""

from __future__ import annotations

from collections.abc import Mapping

from tensord.shm.arrays import Array
from tensord.shm.errors import InvalidArgument
from tensord.workers.declarations.control_inputs import ControlInputs
from tensord.workers.declarations.request_inputs import RequestInputs
from tensord.workers.requests.request import Request
from tensord.workers.tensors.signature import TensorSpec


class MadeInputs:
    """Those of one model version."""

    def __init__(self, controls: ControlInputs | None = None, asked: RequestInputs | None = None) -> None:
        #: What it is told of sequences.
        self.controls = controls
        #: What model.py asks for.
        self.asked = asked
        parts = [part for part in (controls, asked) if part is not None]
        #: As the model takes them, by name.
        self.specs: Mapping[str, TensorSpec] = {name: spec for part in parts for name, spec in part.specs.items()}
        #: Of a row that no request fills.
        self.nobody: Mapping[str, Array] = {name: array for part in parts for name, array in part.nobody.items()}

    def join(self, request: Request) -> None:
        """Gives them to a request. Raises InvalidArgument: the model cannot be told what it says; nothing stays leased."""
        made: dict[str, Array] = {}
        try:
            if self.controls is not None:
                made = self.controls.arrays(request.controls)
            if self.asked is not None:
                made |= self.asked.arrays(request.prepared, request.own, request.rows)
        except InvalidArgument as error:
            request.release()
            raise InvalidArgument(request.label + error.message) from None
        request.add(made)

    def __bool__(self) -> bool:
        return bool(self.specs)

    def __repr__(self) -> str:
        return f"<MadeInputs {', '.join(self.specs)}>"
