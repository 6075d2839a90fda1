"""The result of a model for one request: its outputs, or an error."""

from __future__ import annotations

from tensord.shm.arrays import Array
from tensord.shm.errors import ServingError
from tensord.shm.messages import Parameter


class Response(dict[str, Array]):
    """The outputs of one response, with its response parameters."""

    __slots__ = ("parameters",)

    def __init__(self, outputs: dict[str, Array], parameters: dict[str, Parameter]) -> None:
        super().__init__(outputs)
        self.parameters = parameters


#: Output name -> array of the client's shape, in the order the model made them.
Result = dict[str, Array] | ServingError
#: Stands for the result of a request that its model answers by its sender, now or later.
STREAMED = Response({}, {})
