"""Large messages that look like the last one: however they are cut and whatever comes in between, nobody sees a difference."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.grpc import frames
from shm.messages import Completion, FormSubmit, Inline, Slice, Submit, Tensor
from tests.daemon.grpc.frame_client import INFER, STREAM, prefixed
from tests.daemon.grpc.requests import Infer, fields
from tests.fakes import WholeRequests, answer_formed
from tests.work.connection import KeptTransport
from tests.work.grpc_connection import GrpcBench, opened

#: Turns of the loop that are more than enough for anything here.
_TURNS = 6
#: Bytes of its tensors: messages up to 64 KiB are no large ones.
SIZES = [
    (70_001,),
    (70_000, 5),
    (5, 70_000),
    (40_000, 40_003),
    (0, 70_000),
    (70_000, 0),
    (66_000, 4100, 7),
    # As long as that one, and the same before the first tensor: only the other two say how long they are.
    (66_000, 4099, 8),
]


@dataclass(frozen=True)
class Message:
    """What is sent. Of the same ``sizes``, ``id`` and ``model`` it is of the same layout, unless its fields are turned."""

    sizes: tuple[int, ...]
    #: "xx" becomes what is no text.
    id: str
    model: str
    path: str
    #: The first byte of its tensors.
    first: int = 0
    #: By how much its fields are turned.
    turned: int = 0
    #: The last of several tensors stands in a field that nobody knows: there is none.
    bent: bool = False
    #: Where it is cut into reads, and how long its frames are.
    cuts: tuple[int, ...] = (500,)
    frame_size: int = 1 << 20

    @property
    def tensors(self) -> list[bytes]:
        return [bytes((self.first + n + number) % 251 for n in range(size)) for number, size in enumerate(self.sizes)]

    @property
    def content(self) -> bytes:
        inputs = [Infer.InferInputTensor(name=f"x{n}", datatype="UINT8", shape=[1]) for n, _ in enumerate(self.sizes)]
        asked = Infer(model_name=self.model, id=self.id, inputs=inputs, raw_input_contents=self.tensors)
        pieces = fields(asked)
        if self.bent and len(self.sizes) > 1:
            pieces[-1] = b"\x7a" + pieces[-1][1:]
        turned = self.turned % len(pieces)
        return b"".join(pieces[turned:] + pieces[:turned]).replace(b"\x1a\2xx", b"\x1a\2\xff\xff")

    def reads(self, number: int) -> Iterator[bytes]:
        content = prefixed(self.content)
        whole = opened(number, self.path)
        for at in range(0, len(content), self.frame_size):
            end = at + self.frame_size >= len(content)
            whole += frames.frame(
                frames.DATA, frames.END_STREAM if end else 0, number, content[at : at + self.frame_size]
            )
        bounds = [0, *sorted(cut % len(whole) for cut in self.cuts), len(whole)]
        return (whole[begin:end] for begin, end in itertools.pairwise(bounds))


MESSAGES = st.builds(
    Message,
    sizes=st.sampled_from(SIZES[:3]) | st.sampled_from(SIZES),
    id=st.sampled_from(["", "a", "b", "cc", "é", "xx"]),
    model=st.just("identity") | st.sampled_from(["identity", "addsub", "nobody1x"]),
    path=st.sampled_from([INFER, STREAM]),
    first=st.integers(0, 250),
    turned=st.just(0) | st.integers(0, 9),
    bent=st.just(False) | st.booleans(),
    cuts=st.just((500,)) | st.lists(st.integers(0, 300) | st.integers(0, 1 << 17), max_size=5).map(tuple),
    frame_size=st.just(1 << 20) | st.sampled_from([300, 16_384, 69_999]) | st.integers(200, 80_000),
)


class Asking:
    """A front and a connection to it, and what its worker was sent."""

    def __init__(self) -> None:
        self._bench = GrpcBench()
        self._whole = WholeRequests()
        self._transport: KeptTransport = self._bench.connect()
        self._number = -1
        #: How many of the requests came as ones of a form.
        self.formed = 0

    async def ask(self, message: Message) -> Any:
        """What the worker was asked, if it was, and all that the client was answered."""
        self._number += 2
        transport, got = self._transport, None
        for read in message.reads(self._number):
            transport.arrive(read)
            await asyncio.sleep(0)
        for _ in range(_TURNS):
            await asyncio.sleep(0)
            while (records := self._bench.worker.receive()) is not None:
                for record in records:
                    self.formed += isinstance(record, FormSubmit)
                    whole = self._whole.read(record)
                    if whole is not None:
                        got = self._answer(record, whole)
        assert self._bench.submitter.in_flight() == 0
        assert self._bench.submitter.statistics()["leases"] == 0
        assert self._bench.worker.arena.statistics()["leases"] == 0
        written = b"".join(b"".join(write) for write in transport.writes)
        transport.writes.clear()
        return got, self._own(written)

    def _answer(self, record: Any, submit: Submit) -> Any:
        worker, contents = self._bench.worker, []
        for tensor in submit.inputs:
            place = tensor.place
            assert isinstance(place, Slice | Inline)
            assert isinstance(place, Inline) or place.offset % 64 == 0
            contents.append(bytes(worker.view(place)) if isinstance(place, Slice) else place.content)
        # The first tensor in the record, the others in a lease, one behind the other.
        size = sum(map(len, contents[1:]))
        lease = worker.loan(size) if size else None
        outputs, at = [Tensor("y0", "UINT8", (4,), Inline(contents[0][:4]))], 0
        for number, content in enumerate(contents[1:] or contents):
            place = Inline(content[:9])
            if lease is not None:
                lease.view[at : at + len(content)] = content
                place = Slice(lease.place.segment, lease.place.offset + at, len(content))
                at += len(content)
            outputs.append(Tensor(f"y{number + 1}", "UINT8", (len(content),), place))
        key = None if lease is None else lease.key
        completion = Completion(submit.request_id, version=1, outputs=tuple(outputs), lease=key)
        (answer_formed if isinstance(record, FormSubmit) else type(worker).complete)(worker, completion)
        assert worker.flush()
        return submit.model, submit.client_id, contents, submit.outputs

    def _own(self, written: bytes) -> list[tuple[int, int, bytes]]:
        """Type, flags and content of the frames of the stream, but for what it was granted."""
        found, at = [], 0
        while at < len(written):
            high, low, kind, flags, number = frames.read_head(written, at)
            at += frames.HEAD_SIZE + (high << 16 | low)
            if number and kind != frames.WINDOW_UPDATE:
                assert number == self._number
                found.append((kind, flags, written[at - (high << 16 | low) : at]))
        return found

    def close(self) -> None:
        self._bench.close()


async def anew(message: Message) -> Any:
    """The same of a front that has seen nothing before."""
    asking = Asking()
    try:
        return await asking.ask(message)
    finally:
        asking.close()


def asked(test: Callable[[Asking], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        asking = Asking()
        try:
            await test(asking)
        finally:
            asking.close()

    asyncio.run(run())


@settings(max_examples=60, deadline=None)
@given(st.lists(MESSAGES, min_size=1, max_size=3), st.lists(st.integers(0, 2), max_size=8))
def test_any_sequence_however_it_is_cut(messages: list[Message], order: list[int]) -> None:
    async def test(asking: Asking) -> None:
        for turn in order:
            message = messages[turn % len(messages)]
            assert await asking.ask(message) == await anew(message)

    asked(test)


@pytest.mark.parametrize("path", [INFER, STREAM])
@pytest.mark.parametrize("client_id", ["", "a"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_third_is_one_of_a_form(sizes: tuple[int, ...], client_id: str, path: str) -> None:
    """Wherever it is cut behind its head, but in what stands before a tensor."""

    async def test(asking: Asking) -> None:
        for number, cuts in enumerate([(500,), (500,), (450,), (1, 5, 600), (999, 9000), (39_000, 39_001, 69_500)]):
            message = Message(sizes, client_id, "identity", path, first=number, cuts=cuts)
            assert await asking.ask(message) == await anew(message)
            assert asking.formed == max(0, number - 1)

    asked(test)


@pytest.mark.parametrize("path", [INFER, STREAM])
@pytest.mark.parametrize(
    "change",
    [
        {"id": "b"},
        {"id": "bb"},
        {"id": "é"},
        {"id": "xx"},
        {"model": "addsub"},
        {"model": "nobody1x"},
        {"sizes": (66_000, 4099, 8)},
        {"sizes": (66_000, 4100, 8)},
        {"bent": True},
        {"turned": 1},
        {"turned": 5},
    ],
    ids=str,
)
def test_another_one_between_two(change: dict[str, Any], path: str) -> None:
    async def test(asking: Asking) -> None:
        usual = Message((66_000, 4100, 7), "aa", "identity", path)
        for message in (usual, usual, usual, replace(usual, **change), usual, usual, usual):
            assert await asking.ask(message) == await anew(message)
        assert asking.formed >= 2

    asked(test)


@pytest.mark.parametrize("frame_size", [300, 66_300, 66_304, 66_305, 70_000])
def test_cut_within_what_stands_before_a_tensor(frame_size: int) -> None:
    """Wherever that is: such a one is read as if it were not known."""

    async def test(asking: Asking) -> None:
        usual = Message((66_000, 4100, 7), "a", "identity", INFER)
        for _ in range(2):
            await asking.ask(usual)
        for more in range(12):
            message = replace(usual, frame_size=frame_size + more, first=more)
            assert await asking.ask(message) == await anew(message)

    asked(test)
