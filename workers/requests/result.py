"""What a model makes of one request: its outputs, or why there are none."""

from __future__ import annotations

from tensord.shm.arrays import Array
from tensord.shm.errors import ServingError
from tensord.shm.messages import Parameter


class Response(dict[str, Array]):
    """Outputs with parameters, of a model that gives its answers some."""

    __slots__ = ("parameters",)

    def __init__(self, outputs: dict[str, Array], parameters: dict[str, Parameter]) -> None:
        super().__init__(outputs)
        self.parameters = parameters


#: Output name -> array of the client's shape, in the order the model made them.
Result = dict[str, Array] | ServingError
#: What stands for a request that its model answers by its sender, now or later.
STREAMED = Response({}, {})
