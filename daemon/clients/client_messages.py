"""Defines the messages on the Unix socket for clients: JSON objects. The daemon answers each one with one message, in order.

    {"hello": {}}                                        ─▶  HelloAnswer
    {"open": {"model": "m", "version": 0}}               ─▶  OpenAnswer, with a file descriptor for each new lane
    {"register": {"name": "x", "byte_size": 4096}}       ─▶  {}       the client sends a memfd with this message
    {"unregister": {"name": "x"}}                        ─▶  {}       the name "" means all regions of the client's user
    {"push": {"model": "m", "number": 17}}               ─▶  the parameter set now: model, version, set, number, byte_size
                                                             a memfd in safetensors' layout may come with this message
    {"parameters": {"model": "m"}}                       ─▶  {"parameters": [...]}
    {"drop": {"model": "m", "set": "customer-7"}}        ─▶  {}
    {"revert": {"model": "m"}}                           ─▶  the parameter set now, with the same fields as for push
    any message that fails                               ─▶  {"error": "the sentence", "code": "NOT_FOUND"}

The daemon does not check who owns a memfd. docs/clients-socket.md describes the client's side.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tensord.daemon.control.push_fields import Number, PushFields
from tensord.shm.control_records import LaneLimits
from tensord.shm.errors import ServingError
from tensord.shm.operations import MAIN_SET

#: The most bytes of a question, and of an answer.
MAX_QUESTION = 4096
MAX_ANSWER = 128 << 10


class Hello(msgspec.Struct, forbid_unknown_fields=True):
    """A client's message that asks for the daemon's name and version, its HTTP addresses, and whether clients get lanes."""


class OpenLanes(msgspec.Struct, forbid_unknown_fields=True):
    """A client's message that asks for the description of a model, and for a lane to each worker that serves the model."""

    model: str
    #: 0: the newest that serves.
    version: Number = 0
    #: Lanes of this client that have ended: it may know before the daemon does.
    ended: tuple[Number, ...] = ()
    #: Seconds to wait for a model that is being loaded or has no worker now; at most ``requests.worker_wait``.
    wait: Annotated[float, Meta(ge=0, le=1e8)] = 0.0


class Register(msgspec.Struct, forbid_unknown_fields=True):
    """A client's message that asks to register a part of a memfd, which is sent with the message, as a region.

    ``byte_size``: the part's size in bytes. ``offset``: the part's offset in the memfd in bytes, a multiple of the page size.
    """

    name: str
    byte_size: int
    offset: int = 0


class Unregister(msgspec.Struct, forbid_unknown_fields=True):
    """A client's message that asks to unregister a region, or all regions of the client's user if ``name`` is ""."""

    name: str


class Push(PushFields, forbid_unknown_fields=True, kw_only=True):
    """A client's message that asks to push values into a parameter set. ``version`` 0 means the newest version that serves."""

    model: str
    version: Number = 0
    set: str = MAIN_SET


class ParameterSetName(msgspec.Struct, forbid_unknown_fields=True):
    """Names the parameter set that a client asks to drop, or of which it asks to undo the last push.

    ``version`` 0 means the newest version that serves.
    """

    model: str
    version: Number = 0
    set: str = MAIN_SET


class ParameterSetNames(ParameterSetName, forbid_unknown_fields=True):
    """Names the parameter sets that a client asks to list. ``version`` 0 means all versions, and ``set`` "" all sets."""

    set: str = ""


class ClientQuestion(msgspec.Struct, forbid_unknown_fields=True):
    """A message from a client to the daemon. The client sets exactly one field, which says what it asks for."""

    hello: Hello | None = None
    open: OpenLanes | None = None
    register: Register | None = None
    unregister: Unregister | None = None
    push: Push | None = None
    parameters: ParameterSetNames | None = None
    drop: ParameterSetName | None = None
    revert: ParameterSetName | None = None


class HelloAnswer(msgspec.Struct):
    """The answer to a ``Hello`` message: which server this is, and how clients can reach it."""

    server: str
    version: str
    #: The edition of a lane's records (``tensord.shm.messages.WIRE_VERSION``).
    wire: int
    #: True if clients get lanes here.
    lanes: bool
    #: Where HTTP is served: "HOST:PORT" and "unix:PATH".
    http: list[str]


class LaneEntry(msgspec.Struct):
    """Describes a lane between a client and a worker, in the daemon's answer to a client that has asked for lanes."""

    lane: int
    #: The worker's device, "cpu:0", "cuda:1".
    device: str
    #: True if its descriptor comes with this answer.
    new: bool


class OpenAnswer(msgspec.Struct):
    """The answer to an ``OpenLanes`` message: a model version's description, and the client's lanes to its workers."""

    model: str
    version: int
    #: The description that HTTP answers: name, versions, platform, inputs, outputs.
    metadata: msgspec.Raw
    max_batch_size: int
    #: True if a request gets any number of responses; and if requests belong to sequences.
    streams: bool
    sequences: bool
    #: True if running a request twice harms nobody.
    pure: bool
    lanes: list[LaneEntry]
    limits: LaneLimits
    #: Workers that are to have the model and do not yet: asking again later brings lanes to them.
    coming: int
    #: How long the client's end of a lane polls before it sleeps, at most, in microseconds; as the worker's end does.
    spin_us: int


class ClientError(msgspec.Struct):
    """The daemon's answer if it cannot do what a client's message asks. ``error``: why. ``code``: such as "NOT_FOUND"."""

    error: str
    code: str

    @classmethod
    def of(cls, error: ServingError) -> ClientError:
        """Returns the message that tells a client of this error."""
        return cls(error.message, error.code)
