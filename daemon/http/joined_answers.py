"""All answers of a model to one request as one: each output is what they hold of it, joined along its first axis.

Of models that say so (``ModelState.joins``), for clients that want no stream.
"""

from __future__ import annotations

import msgspec

from tensord.daemon.submit.inference import Answer
from tensord.shm.control_records import ModelState
from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import Completion, Inline, Parameter, Tensor


class _Joined:
    """One output so far."""

    def __init__(self, datatype: str, shape: tuple[int, ...]) -> None:
        """``shape``: of one answer's."""
        self.datatype = datatype
        self.rest = shape[1:]
        self.size = 0
        self.contents: list[bytes] = []


class JoinedAnswers:
    """Of one request."""

    def __init__(self, state: ModelState, max_byte_size: int) -> None:
        """``max_byte_size``: of all outputs together."""
        self._state = state
        self._max_byte_size = max_byte_size
        self._byte_size = 0
        self._parameters: dict[str, Parameter] = {}
        outputs = msgspec.json.decode(state.metadata)["outputs"]
        self._outputs = {each["name"]: _Joined(each["datatype"], tuple(each["shape"])) for each in outputs}

    def add(self, answer: Answer) -> None:
        """The next one. Raises InvalidArgument: they are too large together, or do not go together."""
        self._parameters |= answer.completion.parameters
        for tensor in answer.completion.outputs:
            joined = self._outputs[tensor.name]
            content = bytes(answer.content(tensor))
            self._byte_size += len(content)
            if self._byte_size > self._max_byte_size:
                raise InvalidArgument(
                    f"the responses of model '{self._state.name}' have more than {self._max_byte_size} bytes, "
                    "use generate stream"
                )
            joined.size += tensor.shape[0]
            joined.contents.append(content)

    def whole(self) -> Answer:
        """What they come to; of none, outputs without elements."""
        tensors = [
            Tensor(name, each.datatype, (each.size, *each.rest), Inline(b"".join(each.contents)))
            for name, each in self._outputs.items()
        ]
        made = Completion(0, version=self._state.version, outputs=tuple(tensors), parameters=self._parameters)
        return Answer(made, None)
