"""An HTTP inference request as values: everything its JSON says, before its tensors have places."""

from __future__ import annotations

from dataclasses import dataclass

from daemon.http.json_array import JsonArray
from daemon.http.json_strings import JsonStrings
from shm.messages import Parameter, RegionSlice, RequestedOutput


@dataclass(slots=True)
class Part:
    """Where a binary tensor lies: an offset from the first binary part, in bytes."""

    offset: int
    byte_size: int


#: Where an input's bytes come from: the body, a region, the JSON (as wire bytes), or an array in the JSON still to be converted.
Source = Part | RegionSlice | bytes | JsonArray | JsonStrings


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
