"""Regions of shared memory as clients know them: objects in /dev/shm, the calls that register them, and places in them."""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tensord.protocol import grpc_service_pb2
from tests.simulation import ensembles
from tests.simulation.history import Change

if TYPE_CHECKING:
    from tests.simulation.clients import Ask
    from tests.simulation.processes import FrontProcess

#: A model with two inputs and two outputs, of which each is as the other models' is; requests run together.
MODEL = "m"
SOURCE = """
import numpy as np

host = True

def create(path, config, device):
    def apply(params, inputs):
        made = {files} * 10000 + int(params["k"])
        return {{"y": inputs["x"] * 1000000000 + made, "w": inputs["z"] * 1000000000 + made}}
    return apply, {{"k": np.int32(0)}}
"""
CONFIG = """
max_batch_size: 4
dynamic_batching { max_queue_delay_microseconds: 20000 }
input [ { name: "x" data_type: TYPE_INT64 dims: -1 }, { name: "z" data_type: TYPE_INT64 dims: -1 } ]
output [ { name: "y" data_type: TYPE_INT64 dims: -1 }, { name: "w" data_type: TYPE_INT64 dims: -1 } ]
"""
#: The models that are asked with tensors in regions.
ASKED = (MODEL, MODEL, "a", "b", ensembles.MODEL)
#: Objects whose names begin so are not mapped; and others.
SNAPSHOT, PREFIX = "simulation-object-snapshot-", "simulation-object-"
PAGE = os.sysconf("SC_PAGESIZE")
_INFER = "/inference.GRPCInferenceService/SystemSharedMemory"


class File:
    """A shared-memory object."""

    #: It has no name, and nobody can change its size.
    sealed = False

    def __init__(self, number: int, key: str, pages: int, chance: random.Random) -> None:
        self.key = key
        self.number = number
        self.full_size = pages * PAGE
        self.fd = self._open()
        #: What it holds, but for what requests may write there now.
        self.double = bytearray(chance.randbytes(self.full_size))
        os.pwrite(self.fd, self.double, 0)
        #: It has its name.
        self.linked = not self.sealed
        #: When it was last cut; and since when, and until when, it was shorter than at first. 0: it is not, it never was.
        self.cut_ns = self.short_ns = self.whole_ns = 0
        #: When it has lost its name.
        self.unlinked_ns = 0
        #: How large it has been, and since when.
        self._sizes = [(-1, self.full_size)]

    def _open(self) -> int:
        return os.open(f"/dev/shm/{self.key}", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)

    @property
    def is_short(self) -> bool:
        return len(self.double) < self.full_size

    def was_short(self, since_ns: int) -> bool:
        """Returns whether bytes of it were missing at some time since then."""
        return self.is_short or self.whole_ns >= since_ns > 0

    def has_lacked(self, end: int, since_ns: int) -> bool:
        """Returns whether the page with the byte before ``end`` was missing at all times since then."""
        before = [size for at_ns, size in self._sizes if at_ns <= since_ns]
        most = max(before[-1], *(size for at_ns, size in self._sizes if at_ns > since_ns), 0)
        return end > -(-most // PAGE) * PAGE

    def write(self, at: int, content: bytes) -> None:
        """Writes what its client writes; nothing beyond its end."""
        content = content[: max(0, len(self.double) - at)]
        os.pwrite(self.fd, content, at)
        self.double[at : at + len(content)] = content

    def read(self, at: int, size: int) -> bytes:
        return os.pread(self.fd, size, at)

    def adopt(self, at: int, size: int) -> None:
        """Takes what it holds now in a range for what it is to hold."""
        content = self.read(at, max(0, min(size, len(self.double) - at)))
        self.double[at : at + len(content)] = content

    def resize(self, size: int, now_ns: int) -> None:
        before = len(self.double)
        self._sizes.append((now_ns, size))
        os.ftruncate(self.fd, size)
        if size < before:
            self.cut_ns = now_ns
            self.short_ns = self.short_ns or now_ns
            del self.double[size:]
        else:
            # Who has mapped the last page may have written behind the end.
            self.double += self.read(before, size - before)
            if not self.is_short:
                self.short_ns, self.whole_ns = 0, now_ns

    def cannot_be(self, begin: int, byte_size: int, since_ns: int) -> bool:
        """Returns whether at no time since then a region of that range could be made of it by its name."""
        nameless = not self.sealed and 0 < self.unlinked_ns < since_ns
        return nameless or self.has_lacked(begin + byte_size, since_ns)

    def unlink(self, now_ns: int = 1) -> None:
        if self.linked:
            self.linked, self.unlinked_ns = False, now_ns
            os.unlink(f"/dev/shm/{self.key}")

    def __str__(self) -> str:
        return f"object {self.number}"


@dataclass(eq=False)
class Call(Change):
    """A client's question about regions: "register", "unregister", "status" or "end" of the region ``model``; "": of all."""

    key: str = ""
    offset: int = 0
    byte_size: int = 0
    #: The objects that the region may be of.
    files: list[File] = field(default_factory=list)
    #: What is said of regions: by name, key, offset and size.
    listed: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    #: The daemon's end, by which all its regions go.
    of_daemon: bool = False
    #: The connection over which it was asked.
    connection: Any = None
    #: What the daemon says is wrong with it; "": nothing is.
    wrong: str = ""
    #: Of "end": the registration whose client has ended. Of that: it is noted.
    of: Call | None = None
    has_end: bool = False
    #: Of "end": when a client has heard that it registered the region's name again; 0: the region was gone at ``ended_ns``.
    over_ns: int = 0

    def is_behind(self, front: FrontProcess) -> bool:
        """Returns whether it can be nothing to what a front has answered: that, or its daemon, had ended before."""
        return (self.of_daemon and self.begun_ns > front.started_ns) or 0 < front.ended_ns < self.begun_ns

    @property
    def what(self) -> tuple[str, int, int, int]:
        """Returns what is the same where a region is registered again."""
        sealed = [file.number for file in self.files if file.sealed]
        return self.key, self.offset, self.byte_size, sealed[0] if sealed else 0

    @property
    def goes(self) -> bool:
        return self.kind in ("unregister", "end")

    def was_over(self, moment_ns: int) -> bool:
        """Returns whether nothing that was asked from then on can use what went."""
        return self.ended_before(moment_ns) and self.over_ns < moment_ns

    def __str__(self) -> str:
        return f"{self.kind} {self.number} of region '{self.model}'"

    # ---------------------------------------------------------------------------------------------------- on the wire

    def as_http(self) -> bytes:
        of, body = f"/region/{self.model}" if self.model else "", b""
        if self.kind == "register":
            body = json.dumps({"key": self.key, "offset": self.offset, "byte_size": self.byte_size}).encode()
        method = "GET" if self.kind == "status" else "POST"
        head = f"{method} /v2/systemsharedmemory{of}/{self.kind} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    def read_http(self, text: bytes) -> None:
        if self.kind == "status":
            for each in json.loads(text):
                self.listed[each["name"]] = each["key"], each["offset"], each["byte_size"]

    def as_grpc(self) -> tuple[str, Any]:
        path = f"{_INFER}{self.kind.capitalize()}"
        message = getattr(grpc_service_pb2, f"SystemSharedMemory{self.kind.capitalize()}Request")(name=self.model)
        if self.kind == "register":
            message.key, message.offset, message.byte_size = self.key, self.offset, self.byte_size
        return path, message

    def read_grpc(self, content: bytes) -> None:
        if self.kind == "status":
            for name, each in grpc_service_pb2.SystemSharedMemoryStatusResponse.FromString(content).regions.items():
                self.listed[name] = each.key, each.offset, each.byte_size


@dataclass(eq=False)
class Place:
    """Where a request says that a tensor lies."""

    region: str
    offset: int
    byte_size: int
    #: What its client takes the region for; None: it has never registered it.
    call: Call | None

    @property
    def file(self) -> File | None:
        return self.call.files[-1] if self.call is not None else None

    def meets(self, file: File, at: int, size: int) -> bool:
        """Returns whether it has bytes of a range of an object."""
        if self.file is not file or self.call is None:
            return False
        begin = self.call.offset + self.offset
        return at < begin + self.byte_size and begin < at + size

    @property
    def parameters(self) -> dict[str, Any]:
        said = {"shared_memory_region": self.region, "shared_memory_byte_size": self.byte_size}
        return said if not self.offset else {**said, "shared_memory_offset": self.offset}

    def say(self, parameters: Any) -> None:
        """Adds it to the parameters of a tensor in a message of gRPC."""
        for name, value in self.parameters.items():
            if isinstance(value, str):
                parameters[name].string_param = value
            else:
                parameters[name].int64_param = value


@dataclass(eq=False)
class Use:
    """The tensors of a request that lie in regions."""

    ask: Ask
    inputs: dict[str, Place] = field(default_factory=dict)
    outputs: dict[str, Place] = field(default_factory=dict)
    #: Others write where its tensors are.
    disturbed: bool = False
    #: How many bytes of each output its client has read.
    read: dict[str, int] = field(default_factory=dict)
    #: A worker may still run it, though it has its end.
    doubtful: bool = False
    #: What the daemon says is wrong with a place.
    wrong: str = ""
    #: When it had its end, for its client; 0: it has none.
    closed_ns: int = 0

    @property
    def places(self) -> list[Place]:
        return [*self.inputs.values(), *self.outputs.values()]

    def __str__(self) -> str:
        each = (
            f"{name} in '{each.region}' at {each.offset}"
            for name, each in (*self.inputs.items(), *self.outputs.items())
        )
        return f", {', '.join(each)}{', disturbed' * self.disturbed}"


class Registrations:
    """What was asked of each name of a region, and what the name may stand for at a moment because of it."""

    def __init__(self) -> None:
        self._calls: dict[str, list[Call]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._calls

    def of(self, name: str) -> list[Call]:
        return self._calls.setdefault(name, [])

    def daemon_ended(self, now_ns: int) -> None:
        """Notes that everything ends that was registered and that is under way: once the daemon's processes are dead."""
        for name, calls in self._calls.items():
            for call in calls:
                if call.error is None and not call.of_daemon:
                    call.error, call.ended_ns = "the daemon has ended", now_ns
                call.gone_ns = call.gone_ns or now_ns
            if calls and not calls[-1].of_daemon:
                calls.append(Call("unregister", name, 0, now_ns + 1, None, of_daemon=True))

    def daemon_begins(self, now_ns: int) -> None:
        """Notes that the processes of the daemon before are dead."""
        for calls in self._calls.values():
            if calls and calls[-1].of_daemon and not calls[-1].done:
                calls[-1].error, calls[-1].ended_ns = "", max(now_ns, calls[-1].begun_ns)

    def note_end(self, name: str, registered: Call, now_ns: int) -> None:
        """Notes that the name's region goes, with whoever has registered it."""
        registered.has_end = True
        self.of(name).append(Call("end", name, registered.number, now_ns, registered.front, of=registered))

    def conclude(self, name: str, now_ns: int, since_ns: int) -> None:
        """Notes that regions of that name are not there any more whose clients had ended at ``since_ns``."""
        ends = [
            call for call in self.of(name) if call.kind == "end" and not call.ended_ns and call.begun_ns <= since_ns
        ]
        if ends and all(call.has_end for call in self.candidates(name, now_ns)):
            for end in ends:
                end.error, end.ended_ns = "", now_ns

    def renewed(self, call: Call) -> None:
        """Notes that a region is there, whoever had registered it before and has ended: that one's end is over."""
        for end in self.of(call.model):
            if end.of is not None and end.of is not call and not end.ended_ns and end.of.ended_before(call.begun_ns):
                end.error, end.ended_ns, end.over_ns = "", max(call.begun_ns - 1, end.of.ended_ns), call.ended_ns

    def candidates(self, name: str, since_ns: int) -> list[Call]:
        """Returns the registrations that the name may have stood for at some time since then."""
        calls = self.of(name)
        found = []
        for call in calls:
            if call.kind != "register" or (call.error and call.ended_ns < since_ns):
                continue
            if call.done and any(
                other.was_over(since_ns) and other.begun_ns > call.ended_ns for other in calls if other.kind != "status"
            ):
                continue
            found.append(call)
        return found

    def certain(self, name: str, since_ns: int, front: FrontProcess | None = None) -> Call | None:
        """Returns the registration that the name has stood for at any time since then; None: nobody knows.

        ``front``: as long as this front was there, and its daemon's workers, whatever has happened later.
        """
        calls = [call for call in self.of(name) if front is None or not call.is_behind(front)]
        registered = [call for call in calls if call.kind == "register" and call.ended_before(since_ns)]
        last = max(registered, key=lambda call: call.begun_ns, default=None)
        if last is None or any(
            call is not last
            and call.may_last(last.begun_ns)
            and (call.goes or (call.kind == "register" and not (call.error and call.ended_ns < since_ns)))
            for call in calls
        ):
            return None
        return last

    def is_up(self, name: str, since_ns: int) -> Call | None:
        """Returns a registration by which the name has stood for something at any time since then; None: nobody knows."""
        calls = self.of(name)
        registered = [call for call in calls if call.kind == "register" and call.ended_before(since_ns)]
        last = max(registered, key=lambda call: call.begun_ns, default=None)
        if last is None or any(call.goes and call.may_last(last.begun_ns) for call in calls):
            return None
        return last

    def is_down(self, name: str, since_ns: int) -> Call | None:
        """Returns the call by which the name has stood for nothing at any time since then; None: nobody knows."""
        calls = self.of(name)
        gone = [call for call in calls if call.goes and call.ended_before(since_ns)]
        last = max(gone, key=lambda call: call.begun_ns, default=None)
        if last is None or any(
            call.kind == "register" and call.may_last(last.begun_ns) and not (call.error and call.ended_ns < since_ns)
            for call in calls
        ):
            return None
        return last


def meet(one: Place, two: Place) -> bool:
    """Returns whether two tensors share bytes of an object."""
    if one.file is None or one.file is not two.file or one.call is None or two.call is None:
        return one.region == two.region and one.call is not two.call
    begin, other = one.call.offset + one.offset, two.call.offset + two.offset
    return begin < other + two.byte_size and other < begin + one.byte_size


def inputs_of(model: str) -> tuple[str, ...]:
    return ("x", "z") if model == MODEL else ("x",)
