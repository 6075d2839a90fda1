"""Sends large requests over a front's connection in this process (``tests.work.connection``) to a worker that echoes them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from tensord.daemon.http.connection import Http1Connection
from tensord.shm.messages import Cancel, RegionSlice, RequestRecord
from tests.fakes import WholeRequests, complete_numbered
from tests.records import Tensor, WholeAnswer, WholeRequest
from tests.work.connection import Bench, KeptTransport

#: More than is read with a head, and 64 KiB.
SIZE = 96 << 10
REGION = {"shared_memory_region": "region", "shared_memory_byte_size": 4}
#: As many as any answer here takes.
_STEPS = 100
Sizes = Sequence[int | None]


def request(content: bytes, *headers: str, sizes: Sizes = (), model: str = "identity", **fields: Any) -> bytes:
    """Builds a request with inputs ``x0``, ``x1``, ... of those sizes in bytes; None: in a region. Outputs are binary.

    Without ``sizes`` one input has all of the content.
    """
    inputs = [
        {
            "name": f"x{number}",
            "datatype": "UINT8",
            "shape": [size or 4],
            "parameters": REGION if size is None else {"binary_data_size": size},
        }
        for number, size in enumerate(sizes or (len(content),))
    ]
    text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}, **fields}).encode()
    lines = [
        *(f"POST /v2/models/{model}/infer HTTP/1.1", "Host: x", f"Inference-Header-Content-Length: {len(text)}"),
        *(f"Content-Length: {len(text) + len(content)}", *headers),
    ]
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + text + content


def head_size(content: bytes) -> int:
    """Returns the size of a request's head in bytes."""
    return content.index(b"\r\n\r\n") + 4


class TakenTransport(KeptTransport):
    """Copies what is written, because leased memory is soon used for another answer."""

    closing = False

    def writelines(self, list_of_data: Any) -> None:
        super().writelines([bytes(piece) for piece in list_of_data])

    def close(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing

    def can_write_eof(self) -> bool:
        return False


class LargeBench(Bench):
    """A front whose clients read all that is written at once."""

    transport = TakenTransport


class EchoingWorker:
    """Answers each request with its inputs, as outputs ``x0``, ``x1``, ..."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._requests = WholeRequests()
        #: What came: as it came, and what it said without what is its alone and with the bytes of its tensors.
        self.records: list[RequestRecord] = []
        self.said: list[tuple[Any, ...]] = []
        #: Taken and not yet answered.
        self.waiting: list[tuple[WholeRequest, bool]] = []
        self.cancelled: list[int] = []

    def take(self) -> None:
        """Reads the records that have come."""
        lane = self._bench.worker
        while (records := lane.receive()) is not None:
            for record in records:
                if isinstance(record, Cancel):
                    self.cancelled.append(record.request_id)
                elif (whole := self._requests.read(record)) is not None:
                    assert isinstance(record, RequestRecord)
                    self.records.append(record)
                    self.waiting.append((whole, isinstance(record.prepared, int)))
                    self.said.append(
                        (whole.model, whole.outputs, whole.parameters, whole.client_id, self.contents(whole))
                    )

    def contents(self, whole: WholeRequest) -> list[Any]:
        """Returns for each input its name, its shape, and its bytes or its region.

        For an input in the arena the last entry is its offset modulo 64.
        """
        found: list[Any] = []
        for tensor in whole.inputs:
            place = tensor.place
            if isinstance(place, RegionSlice | bytes):
                found.append((tensor.name, tensor.shape, place))
            else:
                found.append((tensor.name, tensor.shape, bytes(self._bench.worker.view(place)), place.offset % 64))
        return found

    def echo(self, whole: WholeRequest) -> WholeAnswer:
        """Makes an answer with each input as an output: large ones in one lease, others in the record."""
        lane = self._bench.worker
        large = [tensor.place.byte_size for tensor in whole.inputs if self._large(tensor)]
        lease = lane.loan(sum(large)) if large else None
        outputs: list[Tensor] = []
        used = 0
        for tensor in whole.inputs:
            place = tensor.place
            if self._large(tensor):
                assert lease is not None
                size = place.byte_size  # type: ignore[union-attr]
                lease.view[used : used + size] = lane.view(place)  # type: ignore[arg-type]
                at = type(lease.place)(lease.place.segment, lease.place.offset + used, size)
                outputs.append(Tensor(tensor.name, "UINT8", tensor.shape, at))
                used += size
            else:
                outputs.append(tensor)
        return WholeAnswer(
            whole.request_id, version=1, outputs=tuple(outputs), lease=None if lease is None else lease.key
        )

    @staticmethod
    def _large(tensor: Tensor) -> bool:
        return not isinstance(tensor.place, RegionSlice | bytes)

    def answer(self, complete: Callable[[WholeRequest], WholeAnswer] | None = None) -> None:
        """Answers all requests that wait.

        A good answer to a request that came as a number is sent as a number, too.
        """
        waiting, self.waiting = self.waiting, []
        for whole, numbered in waiting:
            completion = (complete or self.echo)(whole)
            if numbered and not completion.code:
                complete_numbered(self._bench.worker, completion)
            else:
                self._bench.worker.complete(completion.record)
        assert self._bench.worker.flush()

    @property
    def leases(self) -> int:
        """Returns how many answers were not given back."""
        self.take()
        return self._bench.worker.arena.statistics()["leases"]


def connection_of(transport: KeptTransport) -> Http1Connection:
    """Returns the HTTP connection behind a transport, also while another protocol reads for it."""
    protocol = transport._protocol
    connection: Http1Connection = getattr(protocol, "_connection", protocol)
    return connection


async def turns(count: int = 6) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def exchange(
    worker: EchoingWorker,
    transport: KeptTransport,
    pieces: Sequence[bytes],
    complete: Callable[[WholeRequest], WholeAnswer] | None = None,
) -> bytes:
    """Sends the pieces, has every request in them answered, and returns all that the client got."""
    for piece in pieces:
        transport.arrive(piece)
        await turns(1)
    connection = connection_of(transport)
    # Values become text in steps, a turn of the loop each.
    for _ in range(_STEPS):
        await turns()
        worker.take()
        if worker.waiting:
            worker.answer(complete)
        elif not connection.order.requests or connection.order.receiving is not None:
            break
    got = b"".join(bytes(piece) for write in transport.writes for piece in write)
    transport.writes.clear()
    return got
