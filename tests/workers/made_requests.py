"""Makes requests for tests of what comes after validation."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from tensord.shm.arena import Arena, Lease
from tensord.shm.arrays import Array
from tensord.shm.messages import RequestedOutput
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.requests.request import Request
from tensord.workers.requests.submitter_link import SubmitterLink
from tests.records import WholeRequest


@dataclass
class ALane:
    """The parts of a submitter that ``complete`` uses."""

    arena: Arena
    owner: object = None

    @property
    def lane(self) -> ALane:
        return self

    def loan(self, byte_size: int) -> Lease | None:
        return self.arena.loan(byte_size)

    def announce(self, segment: int) -> None:
        """Does nothing, because nobody maps it."""


#: Who stands for a submitter that nothing is sent to.
NOBODY = SimpleNamespace(protocol=0, context=None, owner=None)


def request_of(
    arrays: dict[str, Array],
    rows: int = 1,
    key: Hashable = None,
    outputs: dict[str, RequestedOutput] | None = None,
    version: object = None,
    submitter: object = None,
    **fields: Any,
) -> Request:
    """Returns a request with these arrays; fields that it does not need are missing."""
    own = WholeRequest(fields.pop("request_id", 1), "m", 0, (), **fields)
    return Request(
        cast(ModelVersion, version),
        cast(SubmitterLink, submitter or NOBODY),
        own.prepared,
        own.record,
        key,
        rows,
        arrays,
        outputs or {},
        [],
        1,
    )
