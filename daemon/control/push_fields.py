"""Defines the JSON fields of a push of parameters, for HTTP, for the Unix socket for clients and for tensorctl.

{"file": "params-17.safetensors", "number": 17}         a file in the model's folder
{"region": "params", "offset": 0, "byte_size": 4096}    a part of a region, in safetensors' layout
{"leaves": {"dense.kernel": {...}}}                     arrays by name, each in a part of a region, see ``LeafFields``
{"number": 17}                                          parameters after the JSON over HTTP, or in a memfd on the socket
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

    def _source(self, memory_byte_size: int) -> ParameterSource:
        """Returns the source of the parameters: a file, a region, arrays in regions, or memory."""
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

        ``version``: 0 means the newest version. ``name``: the name of the parameter set. "" means ``main``.
        ``memory_byte_size``: the size of the memory that the client sent with the push, or -1 if the client sent no memory.
        Raises InvalidArgument if the fields are no valid push, for example if both ``file`` and ``region`` are set.
        """
        return PushParameters(
            model,
            version,
            name or MAIN_SET,
            self._source(memory_byte_size),
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
