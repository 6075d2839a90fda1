"""Defines the fields of a push of parameters, as clients write them in JSON: over HTTP, on the clients' socket, in tensorctl.

{"file": "params-17.safetensors", "number": 17}
{"region": "params", "offset": 0, "byte_size": 4096}
{"leaves": {"dense.kernel": {"region": "r", "offset": 0, "byte_size": 64, "datatype": "FP32", "shape": [4, 4]}}, "partial": true}
{"number": 17}      the parameters themselves follow the JSON, or a file descriptor of memory with them is sent along
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tensord.shm.errors import InvalidArgument
from tensord.shm.operations import (
    MAIN_SET,
    FileSource,
    LeafPlace,
    LeavesSource,
    MemorySource,
    ParameterSource,
    PushParameters,
    RegionSource,
)

#: A number that fits into 64 bits with a sign, and is not negative.
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
#: The most leaves that a push may name one by one.
_MAX_LEAVES = 10_000


class LeafFields(msgspec.Struct, forbid_unknown_fields=True):
    """Says where in a region an array of parameters lies, and which datatype and shape the array has."""

    region: str
    byte_size: Number
    datatype: str
    shape: tuple[Number, ...]
    offset: Number = 0


class PushFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of a push in JSON: where the parameters lie and how they are applied."""

    #: 0: one more than the last.
    number: Number = 0
    file: str = ""
    region: str = ""
    offset: Number = 0
    byte_size: Number = 0
    leaves: dict[str, LeafFields] = msgspec.field(default_factory=dict)
    partial: bool = False
    check_finite: bool = False
    checksum: str = ""
    move_sequences: bool = False

    def source(self, memory_byte_size: int) -> ParameterSource:
        """Returns the source of the parameters: a file, a region, arrays in regions, or memory.

        ``memory_byte_size``: the size of the memory that came with the push. It is negative if none came.
        Raises InvalidArgument if the push names no source, several sources or too many arrays.
        """
        named = [name for name in ("file", "region", "leaves") if getattr(self, name)]
        if len(named) + (memory_byte_size >= 0) != 1:
            given = ", ".join([*named, *(["memory"] if memory_byte_size >= 0 else [])]) or "none"
            raise InvalidArgument(
                f"the parameters of a push are in one of 'file', 'region', 'leaves' or memory that comes along; given: {given}"
            )
        if not self.region and (self.offset or self.byte_size):
            raise InvalidArgument("'offset' and 'byte_size' are of a 'region'")
        if self.file:
            return FileSource(self.file)
        if self.region:
            return RegionSource(self.region, self.offset, self.byte_size)
        if not self.leaves:
            return MemorySource(memory_byte_size)
        if len(self.leaves) > _MAX_LEAVES:
            raise InvalidArgument(f"{len(self.leaves)} leaves are pushed one by one, at most {_MAX_LEAVES} are allowed")
        return LeavesSource(
            {
                name: LeafPlace(leaf.region, leaf.offset, leaf.byte_size, leaf.datatype, leaf.shape)
                for name, leaf in self.leaves.items()
            }
        )

    def operation(self, model: str, version: int, name: str, memory_byte_size: int = -1) -> PushParameters:
        """Builds the operation that pushes parameters into a parameter set of a model version.

        Args:
          version: the version, or 0 for the newest.
          name: the name of the parameter set, or "" for ``main``.
          memory_byte_size: the size of the memory that came with the push. It is negative if none came.
        Raises InvalidArgument if the push names no source, several sources or too many arrays.
        """
        return PushParameters(
            model,
            version,
            name or MAIN_SET,
            self.source(memory_byte_size),
            self.number,
            self.partial,
            self.checksum,
            self.check_finite,
            self.move_sequences,
        )


def read(text: bytes) -> PushFields:
    """Parses the JSON of a push. An empty text gives the defaults. Raises InvalidArgument if the JSON is malformed."""
    try:
        return msgspec.json.decode(text, type=PushFields) if text else PushFields()
    except msgspec.MsgspecError as error:
        raise InvalidArgument(f"malformed push of parameters: {error}") from None
