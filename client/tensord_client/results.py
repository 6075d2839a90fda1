"""What a request is answered with: outputs by name, and what the server says of the request."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Dict, Mapping, NamedTuple, Optional, Type, Union

import numpy as np

Parameter = Union[bool, int, float, str]


class Timing(NamedTuple):
    """Says what a request took in the server: nanoseconds that it waited and that its execution took, and bytes copied for it."""

    queue_ns: int
    compute_ns: int
    copied_bytes: int


class Answer(Dict[str, np.ndarray]):
    """Outputs by name. Large ones are read-only views of the server's memory, which is theirs until they are collected.

    ``with answer:`` and ``release()`` give that memory back at once; the arrays must not be looked at afterwards.
    """

    #: The version of the model that answered.
    version: int = 0
    #: The parameters of the model's answer.
    parameters: Mapping[str, Parameter] = {}
    #: None: the server did not say.
    timing: Optional[Timing] = None
    #: Has ``release()``; None where no output lies in the server's memory.
    lease: Any = None

    @property
    def copied_bytes(self) -> Optional[int]:
        """Returns how many bytes the server copied for the request; None: it did not say."""
        return None if self.timing is None else self.timing.copied_bytes

    def release(self) -> None:
        """Gives the memory of the outputs back. Idempotent."""
        if self.lease is not None:
            self.clear()
            self.lease.release()
            self.lease = None

    def __enter__(self) -> Answer:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.release()
