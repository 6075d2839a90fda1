"""Types for a decoded HTTP inference request: everything that its JSON says, before memory is reserved for its tensors."""

from __future__ import annotations

from dataclasses import dataclass

from tensord.daemon.http.json_steps import JsonArray, JsonBase64, JsonStrings
from tensord.shm.common.scheduling import UNSCHEDULED, Scheduling
from tensord.shm.messages import Parameter, RegionSlice, RequestedOutput


@dataclass(slots=True)
class BinaryPart:
    """Locates a binary tensor in the body of a request.

    ``offset`` and ``byte_size`` are in bytes. ``offset`` counts from the first binary tensor.
    """

    offset: int
    byte_size: int


#: Tensors in the JSON: as wire bytes, or still to be converted.
Values = bytes | JsonArray | JsonStrings | JsonBase64
#: Where an input's bytes come from: the body, a region, the JSON.
Source = BinaryPart | RegionSlice | Values


@dataclass(slots=True)
class DecodedRequest:
    """Holds what the JSON of one inference request says."""

    id: str
    inputs: list[tuple[str, str, tuple[int, ...], Source]]
    outputs: tuple[RequestedOutput, ...]
    #: Output name -> whether it is to be sent as binary; ``all_binary`` applies to outputs not in it.
    binary: dict[str, bool]
    all_binary: bool
    parameters: dict[str, Parameter]
    scheduling: Scheduling = UNSCHEDULED
