"""An HTTP inference request as values: everything its JSON says, before its tensors have places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from daemon.http.json_array import JsonArray
from daemon.http.json_base64 import JsonBase64
from daemon.http.json_strings import JsonStrings
from shm.messages import Parameter, RegionSlice, RequestedOutput, Submit, Tensor

if TYPE_CHECKING:
    from daemon.http.message_head import InferHead


@dataclass(slots=True)
class Part:
    """Where a binary tensor lies: an offset from the first binary part, in bytes."""

    offset: int
    byte_size: int


#: Where an input's bytes come from: the body, a region, the JSON (as wire bytes), or an array in the JSON still to be converted.
Source = Part | RegionSlice | bytes | JsonArray | JsonStrings | JsonBase64


@dataclass(slots=True)
class DecodedRequest:
    """What one request asks for. Shared between requests with the same head, so nobody changes it."""

    id: str
    inputs: list[tuple[str, str, tuple[int, ...], Source]]
    outputs: tuple[RequestedOutput, ...]
    #: Names of outputs to send as binary; None: as ``all_binary`` says.
    binary: dict[str, bool]
    all_binary: bool
    parameters: dict[str, Parameter]
    priority: int = 0
    timeout_us: int = 0
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    #: The id is this request's alone, made here.
    id_is_made: bool = False

    def record(
        self, request_id: int, head: InferHead, inputs: tuple[Tensor, ...], received_ns: int, trace: int = 0
    ) -> Submit:
        """The request with that head, its tensors in place."""
        return Submit(
            request_id,
            head.model,
            head.version,
            inputs,
            self.outputs,
            {**self.parameters, **head.forwarded} if head.forwarded else self.parameters,
            self.id,
            received_ns=received_ns,
            priority=self.priority,
            timeout_us=self.timeout_us,
            sequence_id=self.sequence_id,
            sequence_start=self.sequence_start,
            sequence_end=self.sequence_end,
            trace=trace,
        )
